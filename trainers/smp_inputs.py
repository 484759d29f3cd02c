"""The arguments of a step, cut into microbatches."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfbig.errors import UserError


class StepInputs:
    """One call's arguments: tensors that are cut or whole, and constants.

    Args:
      function: the step's.
      args: of the call.
      kwargs: of the call.
      num_microbatches: m.
      non_split: names of arguments that every microbatch gets whole.
      axes: along which named arguments are cut; the others along 0.

    Attributes:
      parts: (m microbatches) x (tensors).
      specs: of a microbatch's tensors.
      key: equal for calls that one trace serves.

    Raises:
      UserError: a tensor doesn't divide into microbatches.
    """

    def __init__(
        self,
        function: Callable,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        num_microbatches: int,
        non_split: Sequence[str] = (),
        axes: Mapping[str, int] | None = None,
    ) -> None:
        self._bound = inspect.signature(function).bind(*args, **kwargs)
        self._num = num_microbatches
        for name in [*non_split, *(axes or {})]:
            if name not in inspect.signature(function).parameters:
                raise UserError(f"smp.step: {function.__name__} has no argument {name}.")
        by_tensor: list[list[tf.Tensor]] = []
        self._leaves: list[tuple[str, int, Any]] = []  # (kind, number of tensors, template)
        for name, value in self._bound.arguments.items():
            axis = None if name in non_split else (axes or {}).get(name, 0)
            for leaf in tf.nest.flatten(value):
                kind, tensors, template = self._cut(name, leaf, axis)
                self._leaves.append((kind, len(tensors), template))
                by_tensor += tensors
        self.parts = [[tensor[k] for tensor in by_tensor] for k in range(num_microbatches)]
        self.specs = [tf.TensorSpec(t.shape, t.dtype) for t in self.parts[0]]
        for spec in self.specs:
            if not spec.shape.is_fully_defined():
                raise UserError(
                    f"smp.step got a tensor of shape {spec.shape}: batch the data with"
                    " drop_remainder=True, so that shapes are known."
                )
        self.key = (
            tuple((tuple(s.shape), s.dtype.name) for s in self.specs),
            tuple(
                (kind, count, _key(template) if kind == "constant" else None)
                for kind, count, template in self._leaves
            ),
            str({name: _structure(v) for name, v in self._bound.arguments.items()}),
        )

    def call(self, function: Callable, tensors: Sequence[tf.Tensor]) -> Any:
        """Returns function(...) of one microbatch.

        Args:
          function: the step's, or what it was converted to.
          tensors: as one of `parts`.
        """
        rest, leaves = list(tensors), list(self._leaves)
        bound = copy.copy(self._bound)
        bound.arguments = type(bound.arguments)(bound.arguments)
        for name, value in self._bound.arguments.items():
            made = []
            for _ in tf.nest.flatten(value):
                kind, count, template = leaves.pop(0)
                own, rest = rest[:count], rest[count:]
                made.append({"constant": template}.get(kind, own[0] if own else None))
                if kind == "object":
                    made[-1] = _filled(template, own)
            bound.arguments[name] = tf.nest.pack_sequence_as(value, made)
        return function(*bound.args, **bound.kwargs)

    def _cut(
        self, name: str, leaf: Any, axis: int | None
    ) -> tuple[str, list[list[tf.Tensor]], Any]:
        """Returns an argument's kind, its tensors by microbatch, and what else it consists of."""
        if hasattr(leaf, "smp_slice"):
            slices = [
                leaf if axis is None else leaf.smp_slice(self._num, k, axis)
                for k in range(self._num)
            ]
            columns = zip(*(_tensors_of(part) for part in slices), strict=True)
            return "object", [list(column) for column in columns], slices[0]
        if isinstance(leaf, np.ndarray):
            leaf = tf.convert_to_tensor(leaf)
        if not isinstance(leaf, tf.Tensor):
            return "constant", [], leaf
        if axis is None:
            return "tensor", [[leaf] * self._num], None
        if leaf.shape.rank is None or leaf.shape.rank <= axis:
            raise UserError(
                f"smp.step: argument {name} of shape {leaf.shape} has no axis {axis} to cut into"
                " microbatches: name it in non_split_inputs or input_split_axes."
            )
        length = leaf.shape[axis]
        if length is None:
            raise UserError(
                f"smp.step: argument {name} has the shape {leaf.shape}: batch the data with"
                " drop_remainder=True, so that it divides into microbatches."
            )
        if length % self._num:
            raise UserError(
                f"smp.step: argument {name} has {length} rows, which microbatches={self._num} do"
                f" not divide ({length} = {self._num} x {length // self._num} +"
                f" {length % self._num}): change the batch or the smp parameter microbatches."
            )
        return "tensor", [tf.split(leaf, self._num, axis)], None


def _tensors_of(obj: Any) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(v) for _, v in sorted(vars(obj).items()) if tf.is_tensor(v)]


def _filled(template: Any, tensors: Sequence[tf.Tensor]) -> Any:
    """Returns a copy of an object that `smp_slice` made, with other tensors."""
    made, rest = copy.copy(template), list(tensors)
    for name, value in sorted(vars(template).items()):
        if tf.is_tensor(value):
            setattr(made, name, rest.pop(0))
    return made


def _key(constant: Any) -> Any:
    plain = constant is None or isinstance(constant, (bool, int, float, str, bytes))
    return (type(constant).__name__, constant) if plain else id(constant)


def _structure(value: Any) -> Any:
    count = len(tf.nest.flatten(value))
    return tf.nest.pack_sequence_as(value, list(range(count)))
