"""`smp.step`: a function of one microbatch becomes one of the whole batch, over all stages."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core.ag_ctx import ControlStatusCtx, Status

from tfbig.errors import UserError
from trainers.script_session import session
from trainers.smp_inputs import StepInputs
from trainers.smp_output import StepOutput
from trainers.smp_stage import StageStep

# Options of tf.function that a step takes; shapes are followed without a signature.
WITHOUT_EFFECT = ("input_signature", "reduce_retracing", "experimental_relax_shapes", "name")


def step(
    function: Callable | None = None,
    *,
    non_split_inputs: Sequence[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    autograph: bool = True,
    **options: Any,
) -> Callable:
    """Returns a function that runs `function` on each microbatch, stage after stage.

    Args:
      function: computes a model's outputs, a loss and, by optimizer.get_gradients or a
        tf.GradientTape, gradients by model.trainable_variables, of one microbatch.
      non_split_inputs: names of arguments that every microbatch gets whole.
      input_split_axes: axes along which named arguments are cut; the others along 0.
      autograph: whether Python's if and while of tensors are converted, as by tf.function.
      **options: of tf.function.

    Returns:
      Takes the arguments of the whole batch; returns what `function` does with a StepOutput in
      the place of each tensor. Gradients are of this rank's variables, other results are the same
      on all ranks of a replica.

    Raises:
      UserError: an option that isn't served.
    """
    for name, value in options.items():
        if name not in WITHOUT_EFFECT and value is not None:
            raise UserError(f"smp.step({name}={value!r}) isn't served: leave it out.")
    if function is None:
        return functools.partial(
            step,
            non_split_inputs=non_split_inputs,
            input_split_axes=input_split_axes,
            autograph=autograph,
        )
    return _stepped(function, tuple(non_split_inputs), dict(input_split_axes or {}), autograph)


def _stepped(
    function: Callable, non_split: tuple[str, ...], axes: dict[str, int], autograph: bool
) -> Callable:
    steps: dict[Any, StageStep] = {}
    compiled: dict[Any, Callable] = {}
    converted = function
    if autograph:
        scope = ControlStatusCtx(status=Status.ENABLED)
        converted = tf.__internal__.autograph.tf_convert(function, scope)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        parameters = session().parameters
        if parameters is None:
            raise UserError("call smp.init() before a function of smp.step.")
        inputs = StepInputs(function, args, kwargs, parameters.microbatches, non_split, axes)
        if inputs.key not in steps:
            steps[inputs.key] = StageStep(converted, inputs)
        stage = steps[inputs.key]
        if not tf.executing_eagerly():
            return stage.packed(stage.run(inputs.parts), StepOutput)
        if inputs.key not in compiled:  # collectives stand inside of functions only
            compiled[inputs.key] = tf.function(stage.run, autograph=False)
        return stage.packed(compiled[inputs.key](inputs.parts), StepOutput)

    run.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return tf.autograph.experimental.do_not_convert(run)
