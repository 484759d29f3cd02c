"""A step's function on one stage: its forward and backward half, and a step's run of them."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from tensorflow.python.framework.auto_control_deps import AutomaticControlDependencies

from tfbig.errors import UserError
from tfbig.together import Outcome, SharedError
from trainers.collectives import Group
from trainers.object_messages import gather_objects
from trainers.passes import ancestors, backward_half, descendants, tensors_kept
from trainers.pipeline_link import Link
from trainers.pipeline_program import Program, plan_programs
from trainers.pipeline_schedule import compute_order, forward_order
from trainers.pipeline_stepper import Stepper
from trainers.script_session import session, unwrapped
from trainers.smp_chunk import Halves, OrderedLink, ScriptChunk, message_shape
from trainers.smp_inputs import StepInputs
from trainers.smp_trace import Built, Interface, Spec, StageTrace, spec_of, tensor_spec

# Operations with an effect beyond their results, by the beginnings of their names.
EFFECTS = ("Assign", "ResourceApply", "ResourceScatter", "Print", "StatefulPartitionedCall")


class Found(NamedTuple):
    """What a stage's first trace has found."""

    hidden: Spec | None  # what it hands on
    outputs: Any
    output_specs: list[Spec]
    own: list[str]  # paths of its variables


class StageStep:
    """A step's function, traced and cut for this rank's stage.

    Args:
      function: the script's.
      inputs: of one call; any call with the same key is served.

    Raises:
      UserError: on every rank of the replica, when one of them cannot be cut so.
    """

    def __init__(self, function: Callable, inputs: StepInputs) -> None:
        self._function, self._inputs = function, inputs
        self._group: Group = session().line("pipeline")
        self._stage, self._num_stages = self._group.rank, self._group.size
        self._name = session().name("outputs")
        with tf.init_scope():
            self._interface = self._find_interface()
            for hook in session().hooks:
                hook()
            session().hooks.clear()
        # Not in init_scope, where tapes record nothing.
        agreed(self._group, Outcome(self._cut_in_halves), lambda _: None)
        self._links = self._make_links()
        self._program = self._make_program()

    # What is between the stages.

    def _find_interface(self) -> Interface:
        """Builds this stage's layers and returns what it and the others hand on."""
        hidden: Spec | None = None
        nothing: Found | None = None
        first = Outcome(lambda: self._build(None) if self._stage == 0 else nothing)
        if self._num_stages > 1:
            hidden = agreed(self._group, first, lambda found: found and found.hidden)[0]
        whole = first if self._stage == 0 else Outcome(lambda: self._build(hidden))
        stages = [Found(*found) for found in agreed(self._group, whole, lambda f: tuple(f or ()))]
        owners: dict[str, int] = {}
        for stage, found in enumerate(stages):
            if found.hidden is not None and found.hidden != hidden:
                raise SharedError(
                    f"stage {stage} hands on a hidden state of {found.hidden}, stage 0 one of"
                    f" {hidden}: all blocks must take and return the same shape and dtype."
                )
            for path in found.own:
                if owners.setdefault(path, stage) != stage:
                    raise SharedError(
                        f"the variable {path} is used on the stages {owners[path]} and {stage}:"
                        " what is shared between parts of the model cannot be cut."
                    )
        return Interface(hidden, stages[-1].outputs, stages[-1].output_specs)

    def _build(self, hidden: Spec | None) -> Found:
        """Traces the function up to the end of its model, for its layers' variables and shapes."""
        # Not a tf.function or wrapped function: these have ideas of their own about new variables.
        graph = tf.__internal__.FuncGraph("build")
        with graph.as_default():
            # It inherits those of the tf.function that the script's step stands in, which leaves
            # new variables without a value until that function's own first call.
            graph._variable_creator_stack = []
            tensors = [tf.compat.v1.placeholder(s.dtype, s.shape) for s in self._inputs.specs]
            entering = tensor_spec(hidden) if hidden else None
            trace = StageTrace(
                None, entering and tf.compat.v1.placeholder(entering.dtype, entering.shape)
            )
            ends = self._model_ends(trace, tensors)
        cut = trace.cut
        assert cut is not None
        if not cut.own:
            operations = ancestors(end.op for end in ends)
            read = {id(outer) for outer, inner in graph.captures if inner.op in operations}
            everything = keras.Model.variables.fget(trace.model)
            cut.own = [v for v in everything if id(v.value.handle) in read]
        own = [variable.path for variable in cut.own]
        if not cut.is_last:
            return Found(spec_of(ends[0]), None, [], own)
        outputs = trace.model_outputs
        numbers = tf.nest.pack_sequence_as(outputs, list(range(len(ends))))
        return Found(None, numbers, [spec_of(end) for end in ends], own)

    def _model_ends(self, trace: StageTrace, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns what this stage's part of the model makes of a function's arguments."""
        state = random.getstate()
        try:
            with traced(trace):
                self._inputs.call(self._function, tensors)
        except Built:
            random.setstate(state)
            if trace.handed_on is not None:
                return [trace.handed_on]
            return [tf.identity(output) for output in tf.nest.flatten(trace.model_outputs)]
        raise UserError("smp.step's function must call a DistributedModel.")

    # The two halves.

    def _cut_in_halves(self) -> None:
        """Traces the whole function and prunes it to this stage's forward and backward half."""
        interface, num_inputs = self._interface, len(self._inputs.specs)
        hidden = [tensor_spec(interface.hidden)] if interface.hidden and self._stage else []
        after: list[tf.TensorSpec] = []
        if self._stage < self._num_stages - 1:
            assert interface.hidden is not None
            after = list(map(tensor_spec, [interface.hidden, *interface.output_specs]))
        self._leaves: list[Any] = []
        controls = AutomaticControlDependencies()
        traces: list[StageTrace] = []

        def run(*tensors: tf.Tensor) -> list[tf.Tensor]:
            rest = list(tensors[num_inputs:])
            entering = rest.pop(0) if hidden else None
            upstream = rest.pop(0) if after else None
            traces.append(StageTrace(interface, entering, upstream, rest))
            with traced(traces[0]), controls:
                result = self._inputs.call(self._function, tensors[:num_inputs])
                self.structure = result
                self._leaves = [
                    tf.identity(unwrapped(leaf)) if is_tensor(leaf) else leaf
                    for leaf in tf.nest.flatten(result)
                ]
            return [leaf for leaf in self._leaves if tf.is_tensor(leaf)]

        wrapped = tf.compat.v1.wrap_function(run, [*self._inputs.specs, *hidden, *after])
        inputs = list(wrapped.graph.inputs[: num_inputs + len(hidden)])
        given = list(wrapped.graph.inputs[len(inputs) : len(inputs) + len(after)])
        self._prune(wrapped, traces[0], inputs, given, controls.ops_which_must_run)

    def _prune(
        self,
        wrapped: Any,
        trace: StageTrace,
        inputs: list[tf.Tensor],
        given: list[tf.Tensor],
        stateful: Iterable[tf.Operation],
    ) -> None:
        graph = wrapped.graph
        backward = descendants(graph, trace.output_gradients)
        elsewhere = descendants(graph, given[1:])
        leaves = dict(enumerate(self._leaves))
        tensors = {index: leaf for index, leaf in leaves.items() if tf.is_tensor(leaf)}
        self._gradients = [index for index, t in tensors.items() if t.op in backward]
        self._outputs = [index for index in tensors if index not in self._gradients]
        effects = [one for one in stateful if one.type.startswith(EFFECTS)]
        early = [one for one in effects if one not in backward and one not in elsewhere]
        ends = [tensors[i] for i in self._outputs] if trace.handed_on is None else [trace.handed_on]
        forward = ancestors([*(end.op for end in ends), *early])
        gradients = [tensors[index] for index in self._gradients]
        if self._gradients and self._stage:
            gradients.append(self._gradient_of_hidden(trace))
        late = [one for one in effects if one in backward and one not in elsewhere]
        later = ancestors([*(end.op for end in gradients), *late]) - forward
        if any(tensor.op in later for tensor in given[1:]):
            raise UserError(
                "smp.step returns gradients that depend on the model's outputs otherwise than by"
                " backpropagation: scale or clip them outside of the step."
            )
        for one in later:  # the forward half will have run
            waits = [other for other in one.control_inputs if other in later]
            if len(waits) < len(one.control_inputs):
                one._remove_all_control_inputs()
                one._add_control_inputs(waits)
        upstream = given[:1]
        kept = tensors_kept(graph, forward, later, [*inputs, *upstream])
        self._halves = Halves(
            wrapped.prune(inputs, [*ends, *kept, *early]),
            backward_half(wrapped, [*inputs, *kept, *upstream], [*gradients, *late]),
            self._interface.hidden[0] if self._interface.hidden else [],
            len(ends),
            len(kept),
            len(self._gradients),
            is_first=self._stage == 0,
            is_last=trace.handed_on is None,
        )

    def _gradient_of_hidden(self, trace: StageTrace) -> tf.Tensor:
        if len(trace.hidden_gradients) != 1:
            times = len(trace.hidden_gradients) or "no"
            raise UserError(
                f"smp.step makes {times} gradients of what stage {self._stage} got: take the"
                " gradient of one loss by model.trainable_variables, once."
            )
        return tf.convert_to_tensor(trace.hidden_gradients[0])

    # A step.

    def _make_links(self) -> dict[int, OrderedLink]:
        links: dict[int, OrderedLink] = {}
        for place in (self._stage - 1, self._stage + 1):
            if 0 <= place < self._num_stages:
                assert self._interface.hidden is not None
                pair = [self._group.ranks[self._stage], self._group.ranks[place]]
                dtype = tf.as_dtype(self._interface.hidden[1])
                link = Link(session().group("pipeline", pair), dtype)
                links[place] = OrderedLink(link, session().order)
        return links

    def _make_program(self) -> Program:
        parameters, num = session().parameters, len(self._inputs.parts)
        if not self._gradients:
            orders = [forward_order(self._num_stages, num)] * self._num_stages
        else:
            schedule = parameters.schedule
            limit = parameters.active_microbatches
            orders = [
                compute_order(schedule, self._num_stages, place, num, 1, limit)
                for place in range(self._num_stages)
            ]
        return plan_programs(orders)[self._stage]

    def run(self, parts: Sequence[Sequence[tf.Tensor]]) -> list[list[tf.Tensor]]:
        """Returns what the function returned, in the order of its leaves, each by microbatch.

        Args:
          parts: tensors of each microbatch.
        """
        hidden = self._interface.hidden
        chunk = ScriptChunk(self._halves, parts, session().order)
        Stepper([chunk], self._links).run(  # type: ignore[list-item, arg-type]
            self._program, {}, tf.constant(0), message_shape(hidden), training=True
        )
        by_leaf: dict[int, list[tf.Tensor]] = {}
        for place, index in enumerate(self._gradients):
            by_leaf[index] = [chunk.gradients[k][place] for k in range(len(parts))]
        for place, index in enumerate(self._outputs):
            made = [chunk.outputs[k][place] for k in sorted(chunk.outputs)]
            by_leaf[index] = self._shared(place, index, made, len(parts))
        return [by_leaf[index] for index in sorted(by_leaf)]

    def _shared(
        self, place: int, index: int, made: Sequence[tf.Tensor], num: int
    ) -> list[tf.Tensor]:
        """Returns on every stage what the last one made."""
        if self._num_stages == 1:
            return list(made)
        spec, order = self._leaves[index], session().order
        with order.after():
            own = tf.stack(made) if made else tf.zeros([num, *spec.shape], spec.dtype)
        whole = self._group.broadcast(own, self._num_stages - 1, f"{self._name}_{place}")
        order.note([whole])
        return tf.unstack(whole, num)

    def packed(self, flat: Sequence[Any], wrap: Callable[[Any], Any]) -> Any:
        """Returns the structure that the function returned, of `wrap`'s results.

        Args:
          flat: as `run` returns it.
          wrap: makes what the script gets of a tensor's microbatches.
        """
        rest = iter(flat)
        leaves = [wrap(next(rest)) if tf.is_tensor(leaf) else leaf for leaf in self._leaves]
        return tf.nest.pack_sequence_as(self.structure, leaves)


def is_tensor(leaf: Any) -> bool:
    """Returns whether what a function returned becomes a StepOutput."""
    return tf.is_tensor(leaf) or isinstance(leaf, (tf.IndexedSlices, tf.Variable, keras.Variable))


@contextmanager
def traced(trace: StageTrace) -> Iterator[None]:
    """Has the script's models ask `trace` what to do."""
    shared = session()
    assert shared.trace is None, "a step inside a step"
    shared.trace = trace
    try:
        yield
    except Exception:
        if trace.error is not None:
            raise trace.error from None
        raise
    finally:
        shared.trace = None


def agreed(group: Group, outcome: Outcome, value_of: Callable[[Any], Any]) -> list[Any]:
    """Returns what each rank of a group has found; all of them call it.

    Args:
      group: of ranks.
      outcome: this rank's.
      value_of: makes something that can be sent of its result.

    Raises:
      SharedError: on every rank, with the words of the first one that failed.
    """
    if group.size == 1 or outcome.error is None:
        own: tuple[str | None, Any] = (None, value_of(outcome.alone()))
    else:
        own = (str(outcome.error), None)
    everyone = gather_objects(group, own)
    for rank, (error, _) in zip(group.ranks, everyone, strict=True):
        if error is not None:
            raise SharedError(f"rank {rank}: {error}") from outcome.error
    return [value for _, value in everyone]
