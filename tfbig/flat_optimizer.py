"""The optimizer's rule over flat slices of many variables, as values rather than in place.

For weights that lie elsewhere: in full variables of which a rank updates a slice, in a narrower
dtype, or on another device than the slots.
"""

import contextlib
from collections.abc import Sequence

import tensorflow as tf

from tfbig.config import OptimizerConfig
from tfbig.optimizer import Decision

HOST = "/device:CPU:0"


class FlatOptimizer:
    """One update rule and its slots, by number of slice.

    Args:
      config: rule and its constants.
      sizes: elements of each slice.
      num_decayed: how many of its first elements weight decay applies to.
      with_slots: False makes no slots.
      on_host: whether slots lie in host memory, where the update is then made.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        sizes: Sequence[int],
        num_decayed: Sequence[int],
        with_slots: bool = True,
        on_host: bool = False,
    ) -> None:
        self._config, self._num_decayed, self._on_host = config, list(num_decayed), on_host
        self.iterations = tf.Variable(0, dtype=tf.int64, trainable=False, name="iterations")
        prefixes = ["optimizer/m/", "optimizer/v/"] if config.optimizer == "adamw" else []
        prefixes += ["ema/"] if config.ema_decay > 0 else []
        with self.device():
            self.slots: dict[str, list[tf.Variable]] = {
                prefix: [tf.Variable(tf.zeros([size]), trainable=False) for size in sizes]
                for prefix in prefixes
                if with_slots
            }

    def device(self) -> contextlib.AbstractContextManager:
        """Returns the scope in which slots, and what they are computed with, belong."""
        return tf.device(HOST) if self._on_host else contextlib.nullcontext()

    def updated(
        self,
        index: int,
        weights: tf.Tensor,
        gradient: tf.Tensor,
        learning_rate: tf.Tensor,
        decision: Decision,
    ) -> tf.Tensor:
        """Returns a slice's new weights (size,) float32 and updates its slots.

        The arithmetic is that of tfbig.optimizer and of TF's fused kernel there, term by term.

        Args:
          index: of the slice.
          weights: (size,) float32.
          gradient: (size,) float32, summed over the global batch.
          learning_rate: scalar float32.
          decision: of `decide`; a skipped update changes nothing.
        """
        config = self._config
        with self.device():
            rate = tf.where(decision.applied, learning_rate, 0.0)
            gradient = tf.math.multiply_no_nan(gradient, decision.scale)
            if config.weight_decay > 0:
                weights = self._decay(index, weights, rate * config.weight_decay)
            if config.optimizer == "adamw":
                weights -= self._adam_step(index, gradient, rate, decision.applied)
            else:
                weights -= gradient * rate
            if "ema/" in self.slots:
                average = self.slots["ema/"][index]
                share = tf.where(decision.applied, 1.0 - config.ema_decay, 0.0)
                average.assign_add((weights - average) * share)
            return weights

    def count(self, decision: Decision) -> None:
        """Counts an update; after all slices were updated."""
        self.iterations.assign_add(tf.cast(decision.applied, tf.int64))

    def _decay(self, index: int, weights: tf.Tensor, amount: tf.Tensor) -> tf.Tensor:
        count = self._num_decayed[index]
        head, tail = weights[:count], weights[count:]
        return tf.concat([head - head * amount, tail], 0)

    def _adam_step(
        self, index: int, gradient: tf.Tensor, rate: tf.Tensor, applied: tf.Tensor
    ) -> tf.Tensor:
        """Returns what Adam subtracts (arXiv 1412.6980, algorithm 1)."""
        config = self._config
        m, v = (self.slots[f"optimizer/{name}/"][index] for name in ("m", "v"))
        count = tf.cast(self.iterations + 1, tf.float32)
        power1, power2 = tf.pow(config.beta1, count), tf.pow(config.beta2, count)
        m.assign_add((gradient - m) * (1.0 - tf.where(applied, config.beta1, 1.0)))
        squared = tf.square(gradient)
        v.assign_add((squared - v) * (1.0 - tf.where(applied, config.beta2, 1.0)))
        correction = tf.sqrt(1.0 - power2)
        alpha = rate * correction / (1.0 - power1)
        return m * alpha / (tf.sqrt(v) + config.epsilon * correction)
