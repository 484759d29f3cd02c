"""What would make a layout fit, cheapest first; `tfbig plan` and train's start ask it. TF-free."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfbig.errors import UserError
from tfbig.planner.closed_form import RoughTimes
from tfbig.planner.layout import Plan, Request, check_layout, make_plan, sharding_flags
from tfbig.planner.rough_memory import RoughMemory
from trainers import check_strategy

Fields = Mapping[str, Any]  # of a config
_TRIED = 24  # of those that fit by the closed formula, so many of the fastest are planned in full


@dataclass(frozen=True)
class Change:
    """A way to need less memory, and the plan that follows from it.

    Args:
      text: flags of train that differ.
      plan: of the changed layout.
    """

    text: str
    plan: Plan


def edits(request: Request) -> Iterator[Fields]:
    """Yields single changes of a layout that need less memory."""
    parallel = request.config.parallel
    levels = [level for level in (1, 2, 3) if level > parallel.sharding_level]
    if request.data_size > 1:
        yield from map(sharding_flags, levels)
    if parallel.activation_checkpointing == "none":
        yield from ({"activation_checkpointing": kind} for kind in ("attention", "block"))
    can_move = parallel.sharding_level and request.cluster.device.host_bandwidth
    if can_move and not parallel.offload_optimizer_state:
        yield {"offload_optimizer_state": True}
    if parallel.attention.startswith("plain") and request.software.attention == "own":
        yield {"attention": "blockwise"}
    if parallel.precision == "float32" and "bfloat16" in request.cluster.device.peak:
        yield {"precision": "bfloat16"}
    if not parallel.sequence_parallel and parallel.tensor_parallel_degree > 1:
        yield {"sequence_parallel": True}
    for factor in (2, 4, 8, 16, 32, 64):
        if request.microbatch_size % factor == 0:
            yield {"microbatches": parallel.microbatches * factor}
    yield from _degree_edits(request)


def _degree_edits(request: Request) -> Iterator[Fields]:
    """Yields larger tensor and pipeline degrees; microbatches keep their size."""
    parallel, rows = request.config.parallel, request.microbatch_size
    for factor, axis in itertools.product((2, 4, 8, 16), ("tensor", "pipeline")):
        degree = getattr(parallel, f"{axis}_parallel_degree") * factor
        too_wide = axis == "tensor" and degree > request.cluster.devices_per_node
        data = request.data_size // factor
        if too_wide or data < 1 or request.config.run.global_batch % (data * rows):
            continue
        yield {
            "strategy": "pipeline",
            f"{axis}_parallel_degree": degree,
            "microbatches": request.config.run.global_batch // data // rows,
            "partition": "",
        }


def cheapest_changes(request: Request, count: int = 3) -> list[Change]:
    """Returns the changes after which the layout fits, by step time.

    Pairs of changes are tried where too few do alone, and then triples.

    Args:
      request: a layout that doesn't fit.
      count: how many to return at most.
    """
    single, rough = list(edits(request)), RoughTimes(request)
    found: list[tuple[frozenset[int], Change]] = []
    for size in (1, 2, 3):
        known = [chosen for chosen, _ in found]
        ranked = sorted(_fitting(request, single, size, known, rough), key=lambda row: row[0])
        for _, chosen, changed in ranked[:_TRIED]:
            plan = make_plan(changed, check=False)
            if plan.fits:
                found.append((chosen, Change(difference(request, changed), plan)))
        if len(found) >= count:
            break
    return sorted((change for _, change in found), key=lambda c: c.plan.step.total)[:count]


def _fitting(
    request: Request,
    single: Sequence[Fields],
    size: int,
    known: Sequence[frozenset[int]],
    rough: RoughTimes,
) -> Iterator[tuple[float, frozenset[int], Request]]:
    """Yields (rough seconds, which changes, the layout) of so many changes that roughly fit."""
    capacity, memory = request.cluster.device.memory_bytes, RoughMemory()
    for chosen in map(frozenset, itertools.combinations(range(len(single)), size)):
        if any(fewer <= chosen for fewer in known):
            continue  # what fits with fewer changes is no news with more
        changed = _apply(request, [single[index] for index in sorted(chosen)])
        if changed is not None and memory.need(changed).device <= 1.1 * capacity:
            yield rough.seconds(changed), chosen, changed


def _apply(request: Request, chosen: Sequence[Fields]) -> Request | None:
    """Returns the changed request; None where two changes meet or train would refuse it."""
    names = [name for fields in chosen for name in fields]
    if len(names) > len(set(names)):
        return None
    changed = request.with_parallel(**{k: v for fields in chosen for k, v in fields.items()})
    try:
        check_strategy(changed.config)
        check_layout(changed)
    except UserError:
        return None
    return changed


def difference(before: Request, after: Request) -> str:
    """Returns the flags in which two layouts differ; flags that others imply are left out."""
    old, new = before.config.parallel, after.config.parallel
    flags = []
    for item in dataclasses.fields(new):
        value = getattr(new, item.name)
        if value != getattr(old, item.name):
            flags.append(f"--{item.name}" if value is True else f"--{item.name}={value}")
    implied = sharding_flags(new.sharding_level - 1)
    return " ".join(flag for flag in flags if not implied.get(flag.removeprefix("--")))


def advice(request: Request, with_seconds: bool = True) -> str:
    """Returns, in a sentence, what would make a layout fit that doesn't.

    Args:
      request: the layout.
      with_seconds: whether the step times are told.
    """
    changes = cheapest_changes(request)
    if not changes:
        return (
            "No three changes of flags make it fit: take more devices, or a smaller model"
            " (`tfbig plan --best` searches all layouts)."
        )
    texts = [
        f"{c.text} ({c.plan.step.total:,.2f} s a step)" if with_seconds else c.text for c in changes
    ]
    return f"What would make it fit, cheapest first: {'; '.join(texts)}."


def shortfall(plan: Plan) -> str:
    """Returns one line: what a layout needs, what there is, and what would make it fit."""
    cluster = plan.request.cluster
    device, missing = cluster.device, plan.peak_bytes - cluster.device.memory_bytes
    if missing <= 0:  # so it is the host's that is short
        return (
            f"it offloads {plan.host_bytes / 1e9:,.1f} GB into one node's memory, and a node of"
            f" {cluster.name} has {cluster.host_memory_bytes / 1e9:,.1f} GB:"
            f" {(plan.host_bytes - cluster.host_memory_bytes) / 1e9:,.1f} GB short."
            f" {advice(plan.request)}"
        )
    return (
        f"it needs {plan.peak_bytes / 1e9:,.1f} GB on its fullest rank, and {device.name} has"
        f" {device.memory_bytes / 1e9:,.1f} GB: {missing / 1e9:,.1f} GB short."
        f" {advice(plan.request)}"
    )
