"""AdamW and SGD over named variables; clipping and the decision whether an update is applied.

Ours, and not Keras', because a skipped update must leave every slot untouched without a branch
(no collective or replica code may sit in a tf.cond), slots are named by canonical path, and the
same code must update a whole variable, a shard, or a flat slice of many.
"""

from collections.abc import Mapping
from typing import NamedTuple

import tensorflow as tf

from tfbig.config import OptimizerConfig


class Decision(NamedTuple):
    """What happens to one update; equal on every rank because its inputs are."""

    grad_norm: tf.Tensor  # global norm of the mean gradient, before clipping
    scale: tf.Tensor  # what summed gradients are multiplied by; 0 when skipped
    applied: tf.Tensor  # bool
    finite: tf.Tensor  # bool: whether the reduced gradients are


def squared_norms_by_layer(gradients: Mapping[str, tf.Tensor], num_layers: int) -> tf.Tensor:
    """Returns sums of squares, float32 (2 + num_layers,): of the embedding, each block, the head.

    Args:
      gradients: by canonical path; layers that have none here count 0.
      num_layers: blocks of the whole model.
    """
    layers: list[list[tf.Tensor]] = [[] for _ in range(num_layers + 2)]
    for path, gradient in gradients.items():
        part, _, rest = path.partition("/")
        place = {"embedding_layer": 0, "transformer_blocks": 1}.get(part, -1)
        if part == "transformer_blocks":
            place += int(rest.partition("/")[0])
        layers[place].append(2.0 * tf.nn.l2_loss(tf.cast(gradient, tf.float32)))
    return tf.stack([tf.add_n(squares) if squares else tf.constant(0.0) for squares in layers])


def mean_norms(
    squares: tf.Tensor, num_tokens: tf.Tensor, loss_scale: tf.Tensor | None
) -> tf.Tensor:
    """Returns norms of mean gradients from sums of squares of summed ones.

    Args:
      squares: (layers,) float32, of `squared_norms_by_layer`.
      num_tokens: scalar, tokens the loss is summed over.
      loss_scale: what the summed loss was multiplied by; None means 1.
    """
    norms = tf.math.divide_no_nan(tf.sqrt(squares), tf.cast(num_tokens, tf.float32))
    return norms if loss_scale is None else norms / loss_scale


def squared_norm(gradients: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Returns the sum of squares over all gradients, float32."""
    return tf.add_n([2.0 * tf.nn.l2_loss(tf.cast(g, tf.float32)) for g in gradients.values()])


def decide(
    config: OptimizerConfig,
    sum_of_squares: tf.Tensor,
    loss_sum: tf.Tensor,
    num_tokens: tf.Tensor,
    max_loss: tf.Tensor,
    loss_scale: tf.Tensor | None = None,
) -> Decision:
    """Returns the clipping scale and whether the update is applied.

    Args:
      config: `clip_norm`.
      sum_of_squares: of the gradient of loss_sum, over the whole model and batch.
      loss_sum: summed loss of the global batch.
      num_tokens: tokens it is summed over.
      max_loss: scalar; an update whose mean loss exceeds it is skipped, 0 means no limit.
      loss_scale: what the gradient of loss_sum was multiplied by; None means 1.
    """
    num_tokens = tf.cast(num_tokens, tf.float32)
    mean_loss = tf.math.divide_no_nan(tf.cast(loss_sum, tf.float32), num_tokens)
    grad_norm = tf.math.divide_no_nan(tf.sqrt(sum_of_squares), num_tokens)
    if loss_scale is not None:
        grad_norm /= loss_scale
    finite = tf.math.is_finite(grad_norm)
    within = tf.logical_or(max_loss <= 0.0, mean_loss <= max_loss)
    applied = finite & tf.math.is_finite(mean_loss) & within
    applied &= num_tokens > 0
    scale = tf.math.divide_no_nan(1.0, num_tokens)
    if loss_scale is not None:
        scale /= loss_scale
    if config.clip_norm > 0:
        scale *= config.clip_norm / tf.maximum(grad_norm, config.clip_norm)
    return Decision(grad_norm, tf.where(applied, scale, 0.0), applied, finite)


class Optimizer:
    """One update rule and its slots.

    Args:
      config: rule and its constants.
      variables: float32 variables by canonical path.
      decayed: whether weight decay applies, by path.
      with_slots: False makes no slots (evaluation, generation).
    """

    def __init__(
        self,
        config: OptimizerConfig,
        variables: Mapping[str, tf.Variable],
        decayed: Mapping[str, bool],
        with_slots: bool = True,
    ) -> None:
        self._config, self._variables, self._decayed = config, dict(variables), dict(decayed)
        self.iterations = tf.Variable(0, dtype=tf.int64, trainable=False, name="iterations")
        self._slots: dict[str, dict[str, tf.Variable]] = {}
        if with_slots and config.optimizer == "adamw":
            self._slots = {
                slot: {
                    path: tf.Variable(tf.zeros_like(variable), trainable=False, name=slot)
                    for path, variable in self._variables.items()
                }
                for slot in ("m", "v")
            }
        self._averages: dict[str, tf.Variable] = {}
        if with_slots and config.ema_decay > 0:
            self._averages = {
                path: tf.Variable(tf.identity(variable), trainable=False, name="ema")
                for path, variable in self._variables.items()
            }

    def state(self) -> dict[str, tf.Variable]:
        """Returns the slots and the count of applied updates, by checkpoint path."""
        state = {"optimizer/iterations": self.iterations}
        for slot, variables in self._slots.items():
            state |= {f"optimizer/{slot}/{path}": value for path, value in variables.items()}
        return state | {f"ema/{path}": value for path, value in self._averages.items()}

    def averages(self) -> dict[str, tf.Variable]:
        """Returns the moving average of each weight, by path; nothing where none is kept."""
        return self._averages

    def restart_averages(self) -> None:
        """Sets the averages to the weights, which were just replaced."""
        for path, average in self._averages.items():
            average.assign(self._variables[path])

    def apply(
        self, gradients: Mapping[str, tf.Tensor], learning_rate: tf.Tensor, decision: Decision
    ) -> None:
        """Updates the variables in place, or leaves everything as it is.

        Args:
          gradients: summed over the global batch, by path.
          learning_rate: scalar float32.
          decision: of `decide`.
        """
        rate = tf.where(decision.applied, learning_rate, 0.0)
        for path, variable in self._variables.items():
            # multiply_no_nan: a scale of 0 turns even NaN and infinity into 0.
            gradient = tf.cast(gradients[path], tf.float32)
            gradient = tf.math.multiply_no_nan(gradient, decision.scale)
            if self._decayed[path] and self._config.weight_decay > 0:
                variable.assign_sub(variable * (rate * self._config.weight_decay))
            if self._config.optimizer == "adamw":
                self._adam(path, variable, gradient, rate, decision.applied)
            else:
                variable.assign_sub(gradient * rate)
            if path in self._averages:
                average = self._averages[path]
                share = tf.where(decision.applied, 1.0 - self._config.ema_decay, 0.0)
                average.assign_add((variable - average) * share)
        self.iterations.assign_add(tf.cast(decision.applied, tf.int64))

    def _adam(
        self,
        path: str,
        variable: tf.Variable,
        gradient: tf.Tensor,
        rate: tf.Tensor,
        applied: tf.Tensor,
    ) -> None:
        """Adam as its paper writes it (arXiv 1412.6980, algorithm 1), by TF's fused kernel.

        The kernel adds epsilon to sqrt(v), the paper to sqrt(v / (1 - beta2^t)); handing it
        epsilon * sqrt(1 - beta2^t) gives the paper's. A skipped update passes betas of 1, which
        leave both slots as they are.
        """
        config = self._config
        count = tf.cast(self.iterations + 1, tf.float32)
        power1, power2 = tf.pow(config.beta1, count), tf.pow(config.beta2, count)
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=self._slots["m"][path].handle,
            v=self._slots["v"][path].handle,
            beta1_power=power1,
            beta2_power=power2,
            lr=rate,
            beta1=tf.where(applied, config.beta1, 1.0),
            beta2=tf.where(applied, config.beta2, 1.0),
            epsilon=config.epsilon * tf.sqrt(1.0 - power2),
            grad=gradient,
        )
