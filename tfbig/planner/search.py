"""All layouts that train can run, by closed formulas, the best simulated. TensorFlow-free.

A shape (mesh, places, size of microbatches) has hundreds of layouts. Its plainest one takes no
longer than any of them, so a shape is looked into only when the search has come to that time, and
memory is asked for only of layouts whose turn it is. What needs less memory and takes longer is so
tried where the faster forms do not fit, and nowhere else.
"""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tfbig.errors import UserError
from tfbig.planner.closed_form import Key, Passes, RoughStep, RoughTimes
from tfbig.planner.cluster import Cluster
from tfbig.planner.layout import Plan, Request, check_layout, plan_if_it_fits
from tfbig.planner.rough_memory import Need, RoughMemory, together
from tfbig.planner.search_space import (
    GROUP,
    Shape,
    State,
    chunk_counts,
    fields_of,
    larger_groups,
    limited,
    limits,
    meshes,
    savings,
    shapes,
    sharing,
    states,
)
from trainers import check_strategy

SIMULATED = 20
_SHOWN = 10  # so many are simulated where fewer would do to find the best
_MOST = 3  # times so many, where the closed formulas of more say that they may be faster
_ROUGHLY = 1.02  # what the closed formula finds this much too large may fit all the same


@dataclass(frozen=True)
class Candidate:
    """A layout that roughly fits.

    Args:
      request: the layout.
      seconds: its rough step time.
      family: number of its shape and chunks; of a family, what comes later needs less memory.
    """

    request: Request
    seconds: float
    family: tuple[int, int]


@dataclass(frozen=True)
class _Shape:
    number: int
    shape: Shape
    step: RoughStep

    @property
    def request(self) -> Request:
        return self.shape.request


class _Choice(NamedTuple):
    """A layout of a shape whose turn comes at a time; `limits` are still to be chosen from."""

    shape: _Shape
    state: State
    how: Passes
    limits: Sequence[int] = ()

    def request(self, **fields: object) -> Request:
        return self.shape.request.with_parallel(**fields_of(self.state, self.how) | fields)


class Search:
    """The layouts of a model on a cluster that roughly fit, from the fastest on.

    Args:
      request: model and cluster; its layout does not matter.
    """

    def __init__(self, request: Request) -> None:
        self._request, self._memory = request, RoughMemory()
        self._left: set[tuple[int, int]] = set()
        self._states: dict[Key, list[Need]] = {}
        self._passes: dict[Key, list[Need]] = {}
        self._count = itertools.count()
        self._queue: list[tuple[float, int, _Shape | _Choice | Candidate]] = []
        times = RoughTimes(request)
        where: dict[tuple[int, ...], set[tuple[int, bool]]] = {}
        for number, shape in enumerate(shapes(request)):
            size = shape.microbatches, shape.shared
            made = _Shape(number, shape, times.step(shape.mesh, size, shape.lines))
            passes = made.step.least(max(chunk_counts(shape), default=1))
            mesh = _degrees(shape.mesh)
            if mesh not in where:
                where[mesh] = {(state.level, state.offloads) for state in states(shape.mesh)}
            self._push(passes + min(made.step.state(*one, passes) for one in where[mesh]), made)
        self.num_shapes = len(self._queue)

    def leave(self, family: tuple[int, int]) -> None:
        """Leaves out what is still to come of a family."""
        self._left.add(family)

    def __iter__(self) -> Iterator[Candidate]:
        while self._queue:
            seconds, _, item = heapq.heappop(self._queue)
            if isinstance(item, Candidate):
                if item.family not in self._left:
                    yield item
            elif isinstance(item, _Shape):
                self._open(item)
            else:
                self._weigh(item, seconds)

    def _push(self, seconds: float, item: _Shape | _Choice | Candidate) -> None:
        heapq.heappush(self._queue, (seconds, next(self._count), item))

    def _open(self, shape: _Shape) -> None:
        """Puts all layouts of a shape into the queue."""
        # What a strategy refuses of the plainest passes it refuses of others, too.
        step, plainest = shape.step, Passes()
        where = [
            state
            for state in states(shape.request)
            if is_taken(_Choice(shape, state, plainest).request())
        ]
        if not where:
            return
        levels = {(state.level, state.offloads) for state in where}
        for plain in _worthwhile(shape):
            for how in self._ways(shape, plain):
                named = how if how.recompute != GROUP else how._replace(recompute="block")
                passes = step.passes(named)
                forms: list[tuple[float, Sequence[int]]] = [(passes, ())]
                if most := limits(shape.request, how):
                    # The largest limit takes least, or as long as others.
                    short = min(step.passes(one) for one in limited(named, most[-1]))
                    forms.append((short, most))
                for seconds, within in forms:
                    after = {key: step.state(*key, seconds) for key in levels}
                    for state in where:
                        whole = seconds + after[state.level, state.offloads]
                        self._push(whole, _Choice(shape, state, how, within))

    def _ways(self, shape: _Shape, plain: Passes) -> Iterator[Passes]:
        """Yields an order of passes with each saving of activations."""
        seconds: dict[bool, float] = {}
        for recompute, offloads in savings(shape.request):
            how = plain._replace(recompute=recompute, offloads=offloads)
            yield how
            if recompute == "block":
                seconds[offloads] = shape.step.passes(how)
        for recompute in larger_groups(shape.request):
            if seconds.get(True, 0.0) <= seconds[False]:
                return  # passes hide the way to the host
            how = plain._replace(recompute=recompute, offloads=True)
            seconds[True] = shape.step.passes(how)
            yield how

    def _weigh(self, choice: _Choice, seconds: float) -> None:
        """Puts a layout whose turn it is back as a candidate, if it roughly fits."""
        family = (choice.shape.number, choice.how.chunks)
        if family in self._left:
            return
        if choice.how.recompute == GROUP:
            choice = self._with_group(choice)
        if not choice.limits:
            if self._fits(choice) and is_taken(request := choice.request()):
                self._push(seconds, Candidate(request, seconds, family))
            return
        for how in limited(choice.how, choice.limits[-1]):
            self._limit(choice._replace(how=how), family)

    def _with_group(self, choice: _Choice) -> _Choice:
        """Returns a layout with the group of blocks that needs least: all take as long."""
        parallel = choice.shape.request.config.parallel
        layers = choice.shape.request.config.model.num_layers
        active = choice.limits[0] if choice.limits else 0
        best, least = "block", math.inf
        for size in range(2, layers // parallel.pipeline_parallel_degree + 1):
            how = choice.how._replace(recompute=f"group_{size}", active=active)
            need = self._need(choice._replace(how=how)).device
            if need >= least:
                break  # inputs are fewer, blocks made again more
            best, least = f"group_{size}", need
        return choice._replace(how=choice.how._replace(recompute=best))

    def _limit(self, choice: _Choice, family: tuple[int, int]) -> None:
        """Puts a layout with the largest limit on microbatches in flight that fits back."""
        most, low, high = choice.limits, 1, len(choice.limits)
        if not self._fits(choice._replace(how=choice.how._replace(active=most[0]))):
            return
        while low < high:
            middle = (low + high) // 2
            how = choice.how._replace(active=most[middle])
            if self._fits(choice._replace(how=how)):
                low = middle + 1
            else:
                high = middle
        how, step = choice.how, choice.shape.step
        count = choice.shape.request.config.parallel.microbatches
        active = most[low - 1]
        if how.schedule != "1f1b":  # as many waves, as even as can be
            active = math.ceil(count / math.ceil(count / active))
        how = how._replace(active=active)
        request = choice._replace(how=how).request()
        if is_taken(request):
            passes = step.passes(how)
            seconds = passes + step.state(choice.state.level, choice.state.offloads, passes)
            self._push(seconds, Candidate(request, seconds, family))

    def _fits(self, choice: _Choice) -> bool:
        cluster, need = self._request.cluster, self._need(choice)
        if need.device > _ROUGHLY * cluster.device.memory_bytes:
            return False
        return _fits_hosts(cluster, need)

    def _need(self, choice: _Choice) -> Need:
        """Returns what a layout needs, by parts that many layouts share."""
        shape, state, how = choice.shape, choice.state, choice.how
        parallel = shape.request.config.parallel
        mesh = _degrees(shape.request)
        unit = how.recompute if state.level > 1 else ""
        here: Key = (*mesh, parallel.microbatches > 1, parallel.sequence_parallel, state, unit)
        there: Key = (
            *mesh,
            parallel.microbatches,
            parallel.sequence_parallel,
            state.strategy,
            how,
        )
        if here not in self._states:
            self._states[here] = self._memory.state(choice.request())
        if there not in self._passes:
            self._passes[there] = self._memory.passes(choice.request())
        return together(self._states[here], self._passes[there])


def _fits_hosts(cluster: Cluster, need: Need) -> bool:
    """Returns whether hosts roughly hold what their ranks, taken as equal, offload to them."""
    ranks = min(cluster.devices_per_node, cluster.num_devices)
    return need.host * ranks <= _ROUGHLY * cluster.host_memory_bytes


def _degrees(request: Request) -> tuple[int, int]:
    parallel = request.config.parallel
    return parallel.pipeline_parallel_degree, parallel.tensor_parallel_degree


def _orders(shape: Shape) -> Iterator[Passes]:
    """Yields the orders of a shape's passes, nothing made again."""
    yield Passes()
    for chunks in chunk_counts(shape):
        yield Passes(schedule="interleaved", chunks=chunks)


def _worthwhile(shape: _Shape) -> list[Passes]:
    """Returns the orders of passes of which no other is faster and needs less memory.

    Between two and more chunks fewer microbatches are in flight the more chunks there are; 1f1b has
    the fewest.
    """
    plain, *others = _orders(shape.shape)
    found, fastest = [], math.inf
    for how in reversed(others):
        seconds = shape.step.passes(how)
        if seconds < fastest:
            found.append(how)
            fastest = seconds
    return [plain, *found]


def is_taken(request: Request) -> bool:
    """Returns whether the strategy takes the layout."""
    try:
        check_strategy(request.config)
    except UserError:
        return False
    return True


def layouts(request: Request) -> Iterator[Request]:
    """Yields every shape with every number of chunks, memory options left out."""
    for shape in shapes(request):
        for how in _orders(shape):
            yield shape.request.with_parallel(
                pipeline=how.schedule, num_chunks=max(2, how.chunks), active_microbatches=0
            )


def least_bytes(request: Request) -> float:
    """Returns what a device needs at least, in the leanest layout; infinity where there is none."""
    memory, least = RoughMemory(), math.inf
    for mesh, samples in meshes(request):
        for state, saving, shared in itertools.product(states(mesh), savings(mesh), sharing(mesh)):
            if GROUP in saving:
                continue  # of one microbatch, what is made again is most
            one = mesh.with_parallel(
                **fields_of(state, Passes(*saving, active=1)) | {"sequence_parallel": shared},
                microbatches=samples,
            )
            need = memory.need(one)
            if _fits_hosts(request.cluster, need):
                least = min(least, need.device)
    return least


def best_plans(
    request: Request, show: int = SIMULATED, simulated: int = SIMULATED
) -> tuple[list[Plan], int]:
    """Returns (the fastest layouts that fit, how many shapes were weighed).

    Args:
      request: model and cluster.
      show: layouts to return at most.
      simulated: layouts that are planned in full.

    Raises:
      UserError: no layout fits, or none divides the devices and the batch.
    """
    search = Search(request)
    plans: list[Plan] = []
    tried = 0
    best = math.inf
    for candidate in search:
        # The closed formulas leave out what stages differ in, and say less than the simulation.
        if plans and candidate.seconds > best and (tried >= simulated or len(plans) >= _SHOWN):
            break
        if plans and tried >= _MOST * simulated:
            break
        tried += 1
        try:
            check_layout(candidate.request)
        except UserError:
            continue  # what train refuses
        plan = plan_if_it_fits(candidate.request)
        if plan:
            plans.append(plan)
            best = min(best, plan.step.total)
            search.leave(candidate.family)
    if not plans:
        raise UserError(_nothing_fits(request))
    return sorted(plans, key=lambda plan: plan.step.total)[:show], search.num_shapes


def _refusal(request: Request) -> str:
    """Returns why train refuses one layout, or what else may be wrong."""
    try:
        check_layout(request)
    except UserError as error:
        return f"Of one it says: {error}"
    return "Give fewer flags of the layout, or another global batch."


def _nothing_fits(request: Request) -> str:
    cluster, config = request.cluster, request.config
    possible = list(itertools.islice(layouts(request), 1))
    if not possible:
        return (
            f"no layout divides {cluster.num_devices} devices, {config.model.num_layers} blocks,"
            f" {config.model.num_heads} heads and --global_batch={config.run.global_batch}: take a"
            f" global batch that is a multiple of {cluster.num_devices}."
        )
    least = least_bytes(request)
    if least <= cluster.device.memory_bytes:
        return f"train takes no layout that fits {cluster.name}. {_refusal(possible[0])}"
    return (
        f"no layout of {cluster.name} fits: the leanest needs {least / 1e9:,.1f} GB a device, which"
        f" has {cluster.device.memory_bytes / 1e9:,.1f} GB. More devices, or larger ones, are"
        " needed."
    )
