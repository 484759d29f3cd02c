"""Dynamic loss scaling for float16: gradients are made larger, so that small ones survive."""

import math

import tensorflow as tf

from tfbig.config import Config

SMALLEST, LARGEST = 2.0**-24, 2.0**24


def multiplier_of_sum(config: Config, scale: float) -> float:
    """Returns what multiplies the summed loss where the mean loss is multiplied by `scale`.

    It is smaller by the next power of two of a full global batch's tokens; 1 without scaling.

    Args:
      config: its `precision` decides whether there is anything to scale.
      scale: of the mean loss.
    """
    if config.parallel.precision != "float16":
        return 1.0
    tokens = config.run.global_batch * config.data.sequence_length
    return scale * 2.0 ** -math.ceil(math.log2(tokens))


class LossScale:
    """A scale that halves when gradients overflow and doubles after a while without overflow.

    The scale counts for the mean loss over a full global batch; what multiplies the summed loss is
    smaller by the next power of two of its tokens. So it is the same on every layout.

    Args:
      config: its `precision` decides whether there is anything to scale.

    Source: Micikevicius et al., Mixed Precision Training (arXiv 1710.03740, section 3.2).
    """

    def __init__(self, config: Config) -> None:
        self.enabled = config.parallel.precision == "float16"
        self._growth_steps = config.optimizer.loss_scale_growth_steps
        self._per_token = multiplier_of_sum(config, 1.0)
        if self.enabled:
            initial = config.optimizer.initial_loss_scale
            self._scale = tf.Variable(initial, dtype=tf.float32, trainable=False, name="scale")
            self._good = tf.Variable(0, dtype=tf.int64, trainable=False, name="good_steps")

    def state(self) -> dict[str, tf.Variable]:
        """Returns scale and counter by checkpoint path; nothing where there is no scaling."""
        if not self.enabled:
            return {}
        return {"optimizer/loss_scale": self._scale, "optimizer/loss_scale_steps": self._good}

    def value(self) -> tf.Tensor:
        """Returns the scale, float32; 1 without scaling."""
        return self._scale.read_value() if self.enabled else tf.constant(1.0)

    def of_the_sum(self) -> tf.Tensor | None:
        """Returns what multiplies the gradient of the summed loss; None without scaling."""
        return self._scale * self._per_token if self.enabled else None

    def update(self, finite: tf.Tensor) -> None:
        """Adapts the scale after a step.

        Args:
          finite: scalar bool, whether the reduced gradients were; equal on every rank.
        """
        if not self.enabled:
            return
        good = tf.where(finite, self._good + 1, 0)
        grows = good >= self._growth_steps
        factor = tf.where(finite, tf.where(grows, 2.0, 1.0), 0.5)
        self._scale.assign(tf.clip_by_value(self._scale * factor, SMALLEST, LARGEST))
        self._good.assign(tf.where(grows, tf.zeros_like(good), good))
