"""Gradients of a script, reduced over its data ranks: a tape and an optimizer that do so."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from trainers.bucket_plan import plan_buckets
from trainers.buckets import flatten, unflatten
from trainers.script_session import session, unwrapped

BUCKET_BYTES = 32 << 20


def reduce_gradients(
    gradients: Sequence[Any],
    average: bool = True,
    wire_dtype: tf.DType | None = None,
) -> list[tf.Tensor | None]:
    """Returns gradients summed or averaged over the data ranks; None stays None.

    Args:
      gradients: tensors, IndexedSlices (which become dense: a sum of rows is needed before any
        optimizer squares them) or None, in the same order on every rank.
      average: whether the sum is divided by the number of data ranks.
      wire_dtype: to which they are rounded before they are sent; None sends them as they are.
    """
    group = session().line("data")
    dense = {str(i): unwrapped(g) for i, g in enumerate(gradients) if g is not None}
    if group.size == 1:
        return [dense.get(str(i)) for i in range(len(gradients))]
    reduced: dict[str, tf.Tensor] = {}
    for dtype in sorted({g.dtype.name for g in dense.values()}):
        sizes = {k: g.shape.num_elements() for k, g in dense.items() if g.dtype.name == dtype}
        shapes = {key: dense[key].shape for key in sizes}
        for keys in plan_buckets(sizes, BUCKET_BYTES // tf.as_dtype(dtype).size):
            flat = flatten(dense, keys)
            sent = tf.cast(flat, wire_dtype) if wire_dtype and flat.dtype.is_floating else flat
            sent = group.all_reduce(sent, session().name("gradients"))
            sent = tf.cast(sent, flat.dtype)
            reduced |= unflatten(sent / group.size if average else sent, shapes, keys)
    return [reduced.get(str(i)) for i in range(len(gradients))]


class DistributedGradientTape(tf.GradientTape):
    """A tape whose `gradient` is that of all data ranks.

    Args:
      tape: recorded.
      average: whether gradients are averaged rather than summed.
      wire_dtype: see `reduce_gradients`.
    """

    def __init__(self, tape: tf.GradientTape, average: bool, wire_dtype: tf.DType | None) -> None:
        self._recorded, self._average, self._wire_dtype = tape, average, wire_dtype

    def __enter__(self) -> "DistributedGradientTape":
        self._recorded.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._recorded.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recorded, name)

    def watch(self, tensor: Any) -> None:
        self._recorded.watch(tensor)

    def gradient(self, target: Any, sources: Any, output_gradients: Any = None, **options: Any):
        """Returns what the tape returns, reduced over the data ranks."""
        gradients = self._recorded.gradient(target, sources, output_gradients, **options)
        flat = reduce_inside_graph(tf.nest.flatten(gradients), self._average, self._wire_dtype)
        return tf.nest.pack_sequence_as(sources, flat)


def reduce_inside_graph(
    gradients: Sequence[Any], average: bool, wire_dtype: tf.DType | None
) -> list[tf.Tensor | None]:
    """Returns `reduce_gradients`, from eager code too."""
    if not tf.executing_eagerly():
        return reduce_gradients(gradients, average, wire_dtype)
    there = [index for index, gradient in enumerate(gradients) if gradient is not None]
    dense = [unwrapped(gradients[index]) for index in there]
    reduced = _eager_reduction(tuple((g.dtype, g.shape) for g in dense), average, wire_dtype)(dense)
    result: list[tf.Tensor | None] = [None] * len(gradients)
    for index, gradient in zip(there, reduced, strict=True):
        result[index] = gradient
    return result


def _eager_reduction(specs: Any, average: bool, wire_dtype: tf.DType | None) -> Callable:
    functions = session()._functions
    key = ("reduce", specs, average, wire_dtype)
    if key not in functions:
        functions[key] = tf.function(
            lambda dense: reduce_gradients(dense, average, wire_dtype), autograph=False
        )
    return functions[key]


def distributed_optimizer(
    optimizer: keras.optimizers.Optimizer, average: bool, wire_dtype: tf.DType | None
) -> keras.optimizers.Optimizer:
    """Returns an optimizer of the same kind and settings that reduces gradients first.

    Args:
      optimizer: not used yet.
      average: whether gradients are averaged rather than summed.
      wire_dtype: see `reduce_gradients`.
    """
    kind = type(optimizer)

    class Distributed(kind):  # type: ignore[misc, valid-type]
        def apply(self, grads: Iterable[Any], trainable_variables: Any = None) -> Any:
            reduced = reduce_inside_graph(list(grads), average, wire_dtype)
            return super().apply(reduced, trainable_variables)

    Distributed.__name__ = f"Distributed{kind.__name__}"
    return Distributed.from_config(optimizer.get_config())
