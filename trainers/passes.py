"""A computation cut into a forward and a backward function, with what is kept between them.

A tape over a tf.function would do, but it takes Python a millisecond for every block to note what
it keeps, and what that is cannot be chosen. Here one graph holds both halves; what the second
reads of the first is known when the graph is made.
"""

import functools
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import tensorflow as tf

# Operations that are made again in the backward function rather than kept: they cost nothing, or
# give a second view of a tensor that is kept.
REPEATED = {
    "Const",
    "ExpandDims",
    "Fill",
    "Identity",
    "Pack",
    "Prod",
    "Range",
    "Reshape",
    "Shape",
    "Squeeze",
}


class Passes:
    """The forward and backward pass of one function.

    Args:
      function: takes tensors and returns a list of tensors, the first of which is differentiated.
      specs: of the function's arguments.
      num_sources: as many of the first arguments it is differentiated by.
      upstream_spec: of the gradient of the first result, and so of that.
      jit_compile: whether XLA compiles both passes.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[tf.Tensor]],
        specs: Sequence[tf.TensorSpec],
        num_sources: int,
        upstream_spec: tf.TensorSpec,
        jit_compile: bool = False,
    ) -> None:
        both = _Both(function, num_sources)
        wrapped = tf.compat.v1.wrap_function(both.build, [*specs, upstream_spec])
        *inputs, upstream = wrapped.graph.inputs[: len(specs) + 1]
        kept = both.kept([*inputs, upstream])
        self._num_outputs = len(both.outputs)
        forward = wrapped.prune(inputs, [*both.outputs, *kept])
        backward = backward_half(wrapped, [*inputs, *kept, upstream], both.gradients)
        self.graphs = (forward.graph, backward.graph)  # to look into
        self._forward = flat_function(forward, _specs(inputs), jit_compile)
        self._backward = flat_function(backward, _specs([*inputs, *kept, upstream]), jit_compile)

    def forward(
        self, arguments: Sequence[tf.Tensor]
    ) -> tuple[Sequence[tf.Tensor], Sequence[tf.Tensor]]:
        """Returns (the function's results, what `backward` needs besides the arguments)."""
        results = self._forward(*arguments)
        return results[: self._num_outputs], results[self._num_outputs :]

    def backward(
        self, arguments: Sequence[tf.Tensor], kept: Sequence[tf.Tensor], upstream: tf.Tensor
    ) -> Sequence[tf.Tensor]:
        """Returns the gradients by the first arguments.

        Args:
          arguments: as `forward` got them.
          kept: as `forward` returned it.
          upstream: gradient of the function's first result.
        """
        return self._backward(*arguments, *kept, upstream)


class _Both:
    """Builds both halves in one graph and knows which operation belongs to which."""

    def __init__(self, function: Callable[..., Sequence[tf.Tensor]], num_sources: int) -> None:
        self._function, self._num_sources = function, num_sources
        self.outputs: list[tf.Tensor] = []
        self.gradients: list[tf.Tensor] = []
        self._forward_operations: set[tf.Operation] = set()

    def build(self, *inputs: tf.Tensor) -> list[tf.Tensor]:
        *arguments, upstream = inputs
        self.outputs = [tf.identity(output) for output in self._function(*arguments)]
        self._graph = upstream.graph
        self._forward_operations = set(self._graph.get_operations())
        sources = arguments[: self._num_sources]
        gradients = tf.gradients(self.outputs[0], sources, grad_ys=upstream)
        self.gradients = [
            tf.zeros_like(source) if gradient is None else tf.identity(gradient)
            for source, gradient in zip(sources, gradients, strict=True)
        ]
        return self.gradients

    def kept(self, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the tensors of the forward half that the backward half reads.

        Args:
          inputs: of the graph, which the backward half has anyway.
        """
        operations = self._graph.get_operations()
        look_through(operations, self._forward_operations)
        # Not all that `tf.gradients` made is reached: zeros for unused results read whole tensors.
        reached = ancestors(gradient.op for gradient in self.gradients) - self._forward_operations
        later = [one for one in operations if one in reached]
        return tensors_kept(self._graph, self._forward_operations, later, inputs)


def look_through(operations: Iterable[tf.Operation], forward: Container[tf.Operation]) -> None:
    """Has operations read what the forward half's IdentityN get, not what they hand on.

    Each function with a gradient of its own ends in one, over its results and all its arguments; to
    keep one of these would keep all.
    """
    for one in operations:
        for index, tensor in enumerate(one.inputs):
            source = tensor
            while source.op.type == "IdentityN" and source.op in forward:
                source = source.op.inputs[source.value_index]
            if source is not tensor:
                one._update_input(index, source)


def tensors_kept(
    graph: tf.Graph,
    forward: Container[tf.Operation],
    later: Iterable[tf.Operation],
    inputs: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Returns the tensors of the forward half that the backward half reads.

    Args:
      graph: a function's, holding both.
      forward: operations of the forward half.
      later: those of the backward half.
      inputs: which the backward half has anyway.
    """
    known = {tensor.ref() for tensor in inputs}
    known |= {tensor.ref() for tensor in graph.internal_captures}
    needed: dict[object, tf.Tensor] = {}
    pending = [tensor for one in later for tensor in one.inputs if tensor.op in forward]
    while pending:
        tensor = pending.pop()
        if tensor.ref() in known:
            continue
        # What an operation waits for would be made again with it: then it is kept.
        if tensor.op.type in REPEATED and not tensor.op.control_inputs:
            pending += tensor.op.inputs
        else:
            # All of an operation's results: pruning stops at operations, not at tensors.
            needed |= {output.ref(): output for output in tensor.op.outputs}
            known |= {output.ref() for output in tensor.op.outputs}
        known.add(tensor.ref())
    return list(needed.values())


def backward_half(wrapped: Any, inputs: Sequence[tf.Tensor], ends: Sequence[Any]) -> Any:
    """Returns a function of a graph's backward half alone.

    Args:
      wrapped: a wrapped function whose graph holds both halves.
      inputs: tensors, of the forward half those of `tensors_kept`; none of them captured.
      ends: its results, tensors first, then operations that must have run.
    """
    both = wrapped.prune(inputs, ends)
    # TensorFlow copies what leads to an input, too; of that, collectives would run once more.
    ends = [*both.outputs, *both.graph.control_outputs]
    return both.prune(both.inputs[: len(inputs)], ends)


def ancestors(ends: Iterable[tf.Operation]) -> set[tf.Operation]:
    """Returns operations and all that they need, control inputs included."""
    found: set[tf.Operation] = set()
    pending = list(ends)
    while pending:
        one = pending.pop()
        if one not in found:
            found.add(one)
            pending += [tensor.op for tensor in one.inputs] + list(one.control_inputs)
    return found


def descendants(graph: tf.Graph, roots: Iterable[Any]) -> set[tf.Operation]:
    """Returns the operations that make the roots and all that compute with their results."""
    found = {tensor.op for tensor in roots if tensor is not None}
    for one in graph.get_operations():
        if any(tensor.op in found for tensor in one.inputs):
            found.add(one)
    return found


def flat_function(
    function: Callable, specs: Sequence[tf.TensorSpec], jit_compile: bool = False
) -> Callable[..., Sequence[tf.Tensor]]:
    """Returns a tf.function of many tensors that is cheap to call.

    TensorFlow's usual ways in check each argument's type, at the cost of a millisecond a block.

    Args:
      function: takes and returns tensors.
      specs: of its arguments.
      jit_compile: whether XLA compiles it.
    """

    @functools.partial(tf.function, autograph=False, jit_compile=jit_compile or None)
    def run(*arguments: tf.Tensor) -> Sequence[tf.Tensor]:
        return function(*arguments)

    concrete = run.get_concrete_function(*specs)

    def call(*arguments: tf.Tensor) -> Sequence[tf.Tensor]:
        return concrete.inference_fn.call_flat(*arguments, *concrete.captured_inputs)

    return call


def _specs(tensors: Sequence[tf.Tensor]) -> list[tf.TensorSpec]:
    return [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
