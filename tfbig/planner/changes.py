"""What would make a layout fit, cheapest first. TensorFlow-free."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tfbig.errors import UserError
from tfbig.planner.layout import Plan, Request, make_plan, trains


@dataclass(frozen=True)
class Change:
    """A way to need less memory, and the plan that follows from it."""

    text: str
    plan: Plan


@dataclass(frozen=True)
class Edit:
    """One change of a layout.

    Args:
      text: as flags of train.
      fields: of the config.
      options: of memory.
    """

    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def apply(self, request: Request) -> Request:
        """Returns the changed request."""
        return request.with_fields(**self.fields).with_options(**self.options)


def edits(request: Request) -> Iterator[Edit]:
    """Yields single changes of a layout that need less memory."""
    parallel = request.config.parallel
    yield from _option_edits(request)
    if parallel.attention == "plain" and request.software.attention == "own":
        yield Edit("--attention=blockwise", {"attention": "blockwise"})
    if parallel.precision == "float32":
        yield Edit("--precision=bfloat16", {"precision": "bfloat16"})
    if not parallel.sequence_parallel and parallel.tensor_parallel_degree > 1:
        yield Edit("--sequence_parallel", {"sequence_parallel": True})
    for factor in (2, 4, 8, 16, 32, 64):
        if request.microbatch_size % factor == 0:
            count = parallel.microbatches * factor
            yield Edit(f"--microbatches={count}", {"microbatches": count})
    yield from _degree_edits(request)


def _option_edits(request: Request) -> Iterator[Edit]:
    options = request.options

    def allowed(option: str) -> bool:
        return request.software.name != "tfbig" or trains(option)

    levels = ("shard_optimizer_state", "shard_gradients", "shard_parameters")
    for level, flag in enumerate(levels, start=1):
        fits_pipeline = level == 1 or request.config.parallel.pipeline_parallel_degree == 1
        if level > options.sharding_level and fits_pipeline and allowed(flag):
            yield Edit(f"--{flag}", options={"sharding_level": level})
    if options.activation_checkpointing == "none" and allowed("activation_checkpointing"):
        for kind in ("attention", "block"):
            yield Edit(
                f"--activation_checkpointing={kind}", options={"activation_checkpointing": kind}
            )
    if not options.offload_optimizer_state and allowed("offload_optimizer_state"):
        yield Edit("--offload_optimizer_state", options={"offload_optimizer_state": True})


def _degree_edits(request: Request) -> Iterator[Edit]:
    """Yields larger tensor and pipeline degrees; microbatches keep their size."""
    parallel, rows = request.config.parallel, request.microbatch_size
    for factor, axis in itertools.product((2, 4, 8, 16), ("tensor", "pipeline")):
        degree = getattr(parallel, f"{axis}_parallel_degree") * factor
        too_wide = axis == "tensor" and degree > request.cluster.devices_per_node
        data = request.data_size // factor
        if too_wide or data < 1 or request.config.run.global_batch % (data * rows):
            continue
        values = {
            "strategy": "pipeline",
            f"{axis}_parallel_degree": degree,
            "microbatches": request.config.run.global_batch // data // rows,
            "partition": "",
        }
        yield Edit(f"--{axis}_parallel_degree={degree}", values)


def cheapest_changes(request: Request, count: int = 3) -> list[Change]:
    """Returns the changes after which the layout fits, by step time; pairs where none does alone.

    Args:
      request: a layout that doesn't fit.
      count: how many to return at most.
    """
    single = list(edits(request))
    found = _fitting((edit.text, edit.apply(request)) for edit in single)
    if len(found) < count:
        pairs = itertools.combinations(single, 2)
        found += _fitting(
            (f"{one.text} {two.text}", two.apply(one.apply(request))) for one, two in pairs
        )
    # A pair is no news beside a change that does alone.
    alone = {change.text for change in found if " " not in change.text}
    found = [c for c in found if " " not in c.text or not alone & set(c.text.split())]
    return sorted(found, key=lambda change: change.plan.step.total)[:count]


def _fitting(candidates: Iterable[tuple[str, Request]]) -> list[Change]:
    changes = []
    for text, request in candidates:
        try:
            plan = make_plan(request)
        except UserError:
            continue  # train would refuse it
        if plan.fits:
            changes.append(Change(text, plan))
    return changes


def shortfall(plan: Plan) -> str:
    """Returns one line: what a layout needs, what there is, and what would make it fit."""
    device = plan.request.cluster.device
    missing = plan.peak_bytes - device.memory_bytes
    line = (
        f"it needs {plan.peak_bytes / 1e9:,.1f} GB on its fullest rank, and {device.name} has"
        f" {device.memory_bytes / 1e9:,.1f} GB: {missing / 1e9:,.1f} GB short."
    )
    changes = cheapest_changes(plan.request)
    if not changes:
        return f"{line} No single change or pair of changes makes it fit; --best searches all."
    texts = [f"{c.text} ({c.plan.step.total:,.2f} s a step)" for c in changes]
    return f"{line} What would make it fit, cheapest first: {'; '.join(texts)}."
