"""A step's function as one stage sees it: traced once, with the rest of the model left out.

On every rank the script's function runs as it stands; what differs is its model. Blocks of other
stages pass on what they get, the hidden state that the stage before sends is an input of the
graph, and where the model goes on in a later stage, so are the model's outputs. Marks at these
places note the gradients that come back to them. So the graph holds exactly this stage's forward
and backward half, whatever the script does around its model.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfbig.errors import UserError
from trainers.smp_cut import ModelCut

Spec = tuple[list[int], str]  # shape and dtype


class Left(BaseException):
    """The model has come to a block of a later stage; no Exception, which Keras would wrap."""

    def __init__(self, hidden: tf.Tensor) -> None:
        self.hidden = hidden


class Built(BaseException):
    """The model's layers of this stage have run once; the rest of the step needn't."""


class Interface(NamedTuple):
    """What passes between stages, equal on all of them."""

    hidden: Spec | None  # None where there is one stage
    outputs: Any  # the structure of the model's outputs, of numbers
    output_specs: list[Spec]


class StageTrace:
    """Notes the tensors at the ends of a stage while a step's function is traced.

    Args:
      interface: None in the first trace, which only builds layers.
      hidden: what the stage before sends, None on the first stage.
      upstream: gradient of what this stage hands on; None on the last stage.
      outputs: stand for the model's on all stages but the last.
    """

    def __init__(
        self,
        interface: Interface | None,
        hidden: tf.Tensor | None,
        upstream: tf.Tensor | None = None,
        outputs: Sequence[tf.Tensor] = (),
    ) -> None:
        self._interface = interface
        self.cut: ModelCut | None = None  # of the model that the function calls
        self._hidden, self._upstream, self._given = hidden, upstream, outputs
        self._entered = False
        self.error: UserError | None = None
        self.handed_on: tf.Tensor | None = None  # the hidden state, None on the last stage
        self.model_outputs: Any = None  # of the last stage
        self.hidden_gradients: list[tf.Tensor] = []
        self.output_gradients: list[tf.Tensor] = [] if upstream is None else [upstream]

    def run_model(self, model: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Returns what `_run_model` does, and takes down a mistake that AutoGraph would rename."""
        try:
            return self._run_model(model, args, kwargs)
        except UserError as error:
            self.error = error
            raise

    def _run_model(self, model: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Returns what the script gets of its model.

        Args:
          model: a DistributedModel.
          args: of its call.
          kwargs: of its call.

        Raises:
          UserError: the model is called twice, or doesn't run all of its blocks.
        """
        if self.cut is not None:
            raise UserError("smp.step calls its model twice: a stage can run it once a microbatch.")
        self.cut = self._cut = model.smp_cut
        self.model = model
        if not self._cut.example:
            self._cut.example = [
                tf.zeros(arg.shape, arg.dtype) for arg in args if tf.is_tensor(arg)
            ]
        self._seed("embedding")
        try:
            with self._cut.layers(model, self):
                outputs = keras.Model.__call__(model, *args, **kwargs)
        except Left as left:
            self.handed_on = tf.identity(left.hidden)
        if self.handed_on is None and not self._cut.is_last:
            raise UserError(
                f"the model's call ended before the blocks of stage {self._cut.stage + 1}: it must"
                f" run each of its {self._cut.num_blocks} blocks in order."
            )
        if self._interface is None:
            self.model_outputs = None if self.handed_on is not None else outputs
            raise Built
        return self._end(outputs) if self._cut.is_last else self._end_elsewhere()

    def embed(self, run: Callable[[], Any]) -> Any:
        """Returns the embedding's output, or what stands for it."""
        return run() if self._hidden is None else self._hidden

    def block(self, index: int, hidden: Any, run: Callable[[Any], Any]) -> Any:
        """Returns a block's output, or what stands for it.

        Raises:
          Left: the block belongs to a later stage.
        """
        stage = self._cut.stage_of(index)
        if stage > self._cut.stage:
            raise Left(hidden)
        if stage < self._cut.stage:
            return hidden
        if not self._entered and self._hidden is not None:
            hidden = self._enter(self._hidden)
        self._entered = True
        self._seed(f"block {index}")
        hidden = run(hidden)
        if index == self._cut.num_blocks - 1:
            self._seed("head")
        return hidden

    def _seed(self, part: str) -> None:
        """Makes the initial values of a part's variables the same whatever else is built here.

        Keras draws each initializer's seed from Python's generator.
        """
        if self._interface is None:
            random.seed(f"{self._cut.seed} {part}")

    def _enter(self, hidden: tf.Tensor) -> tf.Tensor:
        """Marks where the hidden state enters, so that its gradient is known."""
        if self._interface is None:
            return hidden
        noted = self.hidden_gradients

        @tf.custom_gradient
        def enter(x: tf.Tensor, anchor: tf.Tensor):
            def gradient(upstream: tf.Tensor):
                noted.append(upstream)
                return upstream, None

            return tf.identity(x), gradient

        # Gradients are made on the way to a variable only: here is one on the way.
        return enter(hidden, tf.convert_to_tensor(self._cut.anchor.value))

    def _end(self, outputs: Any) -> Any:
        """Marks the model's outputs, so that what depends on their gradients is known as such."""
        noted = self.output_gradients

        @tf.custom_gradient
        def end(*tensors: tf.Tensor):
            def gradient(*upstream: tf.Tensor):
                noted.extend(upstream)
                return upstream

            return [tf.identity(tensor) for tensor in tensors], gradient

        flat = [tf.convert_to_tensor(tensor) for tensor in tf.nest.flatten(outputs)]
        return tf.nest.pack_sequence_as(outputs, tf.nest.flatten(end(*flat)))

    def _end_elsewhere(self) -> Any:
        """Returns what stands for the model's outputs, as functions of what is handed on."""
        upstream, given = self._upstream, self._given

        @tf.custom_gradient
        def end(hidden: tf.Tensor, *tensors: tf.Tensor):
            def gradient(*_: tf.Tensor):
                return upstream, *[None] * len(tensors)

            return [tf.identity(tensor) for tensor in tensors], gradient

        assert self._interface is not None
        made = tf.nest.flatten(end(self.handed_on, *given))
        return tf.nest.pack_sequence_as(self._interface.outputs, made)


def spec_of(tensor: tf.Tensor) -> Spec:
    """Returns a tensor's shape and dtype, ready to be sent.

    Raises:
      UserError: a part of the shape isn't known.
    """
    if not tensor.shape.is_fully_defined():
        raise UserError(
            f"a tensor between stages has the shape {tensor.shape}: batch the data with"
            " drop_remainder=True, so that shapes are known."
        )
    return list(tensor.shape), tensor.dtype.name


def tensor_spec(spec: Spec) -> tf.TensorSpec:
    """Returns TensorFlow's form of a spec."""
    return tf.TensorSpec(*spec)
