"""A plan as text and as JSON. TensorFlow-free."""

import dataclasses
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from tfbig import presets
from tfbig.config import count_parameters
from tfbig.planner.cluster import Cluster
from tfbig.planner.flops import conventions, tokens_per_step
from tfbig.planner.layout import Plan, Request
from tfbig.planner.memory import RankMemory, first_middle_last
from trainers.mesh import AXES, placement_order

PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "logits": "head and loss",
    "buffers": "buffers",
    "workspace": "workspace",
    "context": "process",
}
TIMES = {
    "compute": "passes",
    "recompute": "recomputation",
    "tensor": "tensor axis",
    "pipeline": "hidden states on their way",
    "bubble": "pipeline bubble",
    "data_exposed": "data axis, exposed",
    "transfers": "host memory, exposed",
    "optimizer": "optimizer",
    "input": "waiting for input",
}


def describe(plan: Plan) -> str:
    """Returns a plan as text: layout, memory, time, run."""
    request, step = plan.request, plan.step
    config, cluster = request.config, request.cluster
    lines = [
        f"{config.run.preset}: {count_parameters(config.model):,} parameters,"
        f" {config.data.sequence_length} tokens a sample, {config.parallel.precision}",
        f"{cluster.name}: {cluster.num_devices:,} x {cluster.device.name} in"
        f" {cluster.num_nodes:,} nodes",
        layout_line(request),
        "",
        *_memory_lines(plan),
        "",
        f"step {step.total:,.3f} s",
    ]
    for name, seconds in step.parts().items():
        if seconds > 0:
            lines.append(f"  {TIMES[name]:<28}{seconds:>12,.4f} s {seconds / step.total:>6.1%}")
    if step.data_hidden > 0:
        lines.append(f"  {'data axis, hidden':<28}{step.data_hidden:>12,.4f} s")
    return "\n".join([*lines, *_flops_lines(plan), "", *_run_lines(plan)])


def layout_line(request: Request) -> str:
    """Returns a layout in a line."""
    parallel, options = request.config.parallel, request.options
    parts = [
        f"data {request.data_size} x pipeline {parallel.pipeline_parallel_degree} x tensor"
        f" {parallel.tensor_parallel_degree}",
        f"global batch {request.config.run.global_batch} = {request.data_size} replicas x"
        f" {parallel.microbatches} microbatches x {request.microbatch_size} samples",
    ]
    if parallel.pipeline_parallel_degree > 1:
        chunks = f" {parallel.num_chunks}" if parallel.pipeline == "interleaved" else ""
        parts.append(f"{parallel.pipeline}{chunks}")
    if parallel.sequence_parallel:
        parts.append("sequence parallel")
    if options.sharding_level:
        parts.append(f"ZeRO {options.sharding_level}")
    if options.activation_checkpointing != "none":
        parts.append(f"recomputes {options.activation_checkpointing}")
    if parallel.active_microbatches:
        count = parallel.active_microbatches
        parts.append(f"at most {count} microbatch{'es' if count > 1 else ''} in flight")
    if request.cluster.num_nodes > 1 and parallel.placement_strategy != "cluster":
        parts.append(f"ranks placed {placement_order(parallel.placement_strategy)}")
    if options.offload_activations:
        parts.append("activations wait on the host")
    if options.offload_optimizer_state:
        parts.append("optimizer state on the host")
    return "; ".join(parts)


def _memory_lines(plan: Plan) -> list[str]:
    named = first_middle_last(plan.memory)
    if len(plan.memory) == 1:
        named = {"each rank": plan.memory[0]}
    capacity = plan.request.cluster.device.memory_bytes
    lines = [f"{'memory, GB':<18}" + "".join(f"{name:>12}" for name in named)]
    for part, label in PARTS.items():
        values = [getattr(rank, part) for rank in named.values()]
        if any(values):
            lines.append(_row(label, values))
    lines.append(_row("total", [rank.total for rank in named.values()]))
    fits = "fits" if plan.fits else "DOES NOT FIT"
    if any(rank.host for rank in named.values()):
        lines.append(_row("host memory", [rank.host for rank in named.values()]))
    if plan.host_bytes:
        there = plan.request.cluster.host_memory_bytes
        fullest = f"{plan.host_bytes / 1e9:,.2f} of {there / 1e9:,.1f} GB of host memory"
        lines.append(f"  offloaded into the fullest node: {fullest}")
    lines.append(f"  fullest rank {plan.peak_bytes / 1e9:,.2f} of {capacity / 1e9:,.1f} GB: {fits}")
    return lines


def _row(label: str, values: Sequence[float]) -> str:
    return f"  {label:<16}" + "".join(f"{value / 1e9:>12,.2f}" for value in values)


def _flops_lines(plan: Plan) -> list[str]:
    request = plan.request
    model = conventions(request.config)["palm"]
    hardware = plan.step.hardware_flops * request.cluster.num_devices
    return [
        f"  {plan.tokens_per_second:,.0f} tokens/s;"
        f" {model:.3g} model FLOPs a step (PaLM's convention), MFU {plan.mfu:.1%};"
        f" {hardware:.3g} hardware FLOPs, HFU {plan.hfu:.1%};"
        f" {hardware / plan.step.total / request.cluster.num_devices / 1e12:,.1f} TFLOP/s a device"
    ]


def _run_lines(plan: Plan) -> list[str]:
    money, cluster = plan.economics, plan.request.cluster
    constants = plan.request.constants["carbon"]
    price = f"at {cluster.dollars_per_node_hour:,.2f} $/h a node ({cluster.price_date})"
    return [
        f"run of {money.tokens:.3g} tokens, {money.steps:,.0f} steps: {money.days:,.2f} days"
        f" ({money.ideal_days:,.2f} without failures; goodput {money.goodput:.1%},"
        f" {money.failures:,.1f} failures expected)",
        f"  checkpoint {money.checkpoint_bytes / 1e9:,.1f} GB, {money.checkpoint_seconds:,.1f} s;"
        f" best every {money.checkpoint_every:,} steps",
        f"  {money.dollars:,.0f} $ {price}; {money.megawatt_hours:,.1f} MWh;"
        f" {money.tonnes_co2e:,.1f} t CO2e at {constants['kg_co2e_per_kwh']} kg/kWh",
    ]


def launch_command(plan: Plan) -> str:
    """Returns the command that trains the layout."""
    request = plan.request
    config, start = request.config, presets.preset(request.config.run.preset)
    # What differs from the preset, and what a reader wants to see in any case.
    shown: dict[str, Any] = {
        "strategy": config.parallel.strategy,
        "global_batch": config.run.global_batch,
    }
    shown["microbatches"] = config.parallel.microbatches
    for section in dataclasses.fields(config):
        values, before = getattr(config, section.name), getattr(start, section.name)
        for field in dataclasses.fields(values):
            value = getattr(values, field.name)
            if value != getattr(before, field.name):
                shown[field.name] = value
    flags = {"preset": config.run.preset} | shown
    words = [word for name, value in flags.items() for word in _words(name, value)]
    command = " ".join(["python -m tfbig.train", *words])
    return _LAUNCHERS.get(config.parallel.strategy, _horovodrun)(request.cluster) + command


def _words(name: str, value: object) -> list[str]:
    """Returns a field as it is typed in a shell; a tuple is a flag for each of its values."""
    if isinstance(value, tuple):
        return [word for one in value for word in _words(name, one)]
    return [shlex.quote(f"--{name}={str(value).lower() if isinstance(value, bool) else value}")]


_HOSTS_NAMED = 8  # in a command; of more a file is named


def _horovodrun(cluster: Cluster) -> str:
    node = min(cluster.devices_per_node, cluster.num_devices)
    if cluster.num_devices == 1:
        return ""
    if cluster.num_nodes == 1:
        return f"horovodrun -np {cluster.num_devices} "
    if cluster.num_nodes > _HOSTS_NAMED:  # a file of lines "HOST slots=8"
        return f"horovodrun -np {cluster.num_devices} --hostfile=HOSTS "
    slots = [node] * (cluster.num_nodes - 1)
    slots.append(cluster.num_devices - sum(slots))
    hosts = ",".join(f"HOST{number}:{count}" for number, count in enumerate(slots, start=1))
    return f"horovodrun -np {cluster.num_devices} -H {hosts} "


def _srun(cluster: Cluster) -> str:
    return f"srun --nodes={cluster.num_nodes} --ntasks-per-node=1 "


# What starts a strategy's processes; the others' is horovodrun.
_LAUNCHERS: dict[str, Callable[[Cluster], str]] = {
    "single": lambda cluster: "",
    "mirrored": lambda cluster: "",
    "multi_worker": _srun,
}


def to_dict(plan: Plan) -> dict[str, Any]:
    """Returns a plan ready for JSON."""
    request = plan.request
    parallel = request.config.parallel
    return {
        "layout": {
            "data": request.data_size,
            "pipeline": parallel.pipeline_parallel_degree,
            "tensor": parallel.tensor_parallel_degree,
            "microbatches": parallel.microbatches,
            "microbatch_size": request.microbatch_size,
            "schedule": parallel.pipeline,
            "num_chunks": parallel.num_chunks,
            "sequence_parallel": parallel.sequence_parallel,
            "placement_strategy": parallel.placement_strategy,
            **{
                name: value
                for name, value in dataclasses.asdict(request.options).items()
                if name not in ("state", "kernels", "layers_loaded")
            },
        },
        "cluster": {
            "name": request.cluster.name,
            "device": request.cluster.device.name,
            "devices": request.cluster.num_devices,
            "memory_bytes": request.cluster.device.memory_bytes,
        },
        "parameters": count_parameters(request.config.model),
        "fits": plan.fits,
        "peak_bytes": plan.peak_bytes,
        "host_bytes": plan.host_bytes,
        "memory": [memory_dict(rank) for rank in plan.memory],
        "step_seconds": plan.step.total,
        "step_parts": plan.step.parts(),
        "data_hidden": plan.step.data_hidden,
        "tokens_per_step": tokens_per_step(request.config),
        "tokens_per_second": plan.tokens_per_second,
        "model_flops": conventions(request.config),
        "hardware_flops": plan.step.hardware_flops * request.cluster.num_devices,
        "mfu": plan.mfu,
        "hfu": plan.hfu,
        "run": dataclasses.asdict(plan.economics),
        "command": launch_command(plan),
    }


def memory_dict(rank: RankMemory) -> dict[str, float]:
    """Returns a rank's parts and their total."""
    return dataclasses.asdict(rank) | {"total": rank.total}


def ranking(plans: Sequence[Plan], looked_at: int) -> str:
    """Returns the best layouts as a table, why the first one wins, and what limits it."""
    lines = [
        f"{looked_at:,} meshes with sizes of microbatches weighed; the best layouts, simulated:",
        "    data pipe tensor  micro     schedule   seq  ZeRO  recompute     s/step    MFU     GB",
    ]
    for number, plan in enumerate(plans, start=1):
        request = plan.request
        parallel, options = request.config.parallel, request.options
        schedule = "-"
        if parallel.pipeline_parallel_degree > 1:
            schedule = parallel.pipeline
            schedule += f" {parallel.num_chunks}" if schedule == "interleaved" else ""
        lines.append(
            f"{number:2d} {request.data_size:5d} {parallel.pipeline_parallel_degree:4d}"
            f" {parallel.tensor_parallel_degree:6d}"
            f"  {parallel.microbatches:4d}x{request.microbatch_size:<3d} {schedule:>13}"
            f"  {'yes' if parallel.sequence_parallel else 'no':>4}  {options.sharding_level:4d}"
            f"  {options.activation_checkpointing:>9} {plan.step.total:10,.3f} {plan.mfu:6.1%}"
            f" {plan.peak_bytes / 1e9:6,.1f}{_besides(request)}"
        )
    return "\n".join([*lines, "", why(plans), limit(plans[0])])


def _besides(request: Request) -> str:
    """Returns, in a row's last column, what only some layouts do."""
    parallel, options = request.config.parallel, request.options
    words = []
    if request.cluster.num_nodes > 1 and parallel.placement_strategy != "cluster":
        words.append(placement_order(parallel.placement_strategy))
    words += ["offloads activations"] if options.offload_activations else []
    words += ["offloads state"] if options.offload_optimizer_state else []
    words += [f"active {parallel.active_microbatches}"] if parallel.active_microbatches else []
    return f"  {', '.join(words)}" if words else ""


def why(plans: Sequence[Plan]) -> str:
    """Returns how the best layout differs in time from the next one of other degrees."""
    best = plans[0]

    def degrees(plan: Plan) -> tuple[int, int]:
        parallel = plan.request.config.parallel
        return parallel.pipeline_parallel_degree, parallel.tensor_parallel_degree

    others = [plan for plan in plans[1:] if degrees(plan) != degrees(best)] or list(plans[1:2])
    if not others:
        return "It is the only layout that fits."
    other = others[0]
    ours, theirs = best.step.parts(), other.step.parts()
    gains = sorted(((theirs[name] - ours[name], name) for name in ours), reverse=True)
    saved = [f"{TIMES[name]} {gain:,.3f} s" for gain, name in gains if gain > 0][:3]
    lost = [f"{TIMES[name]} {-gain:,.3f} s" for gain, name in reversed(gains) if gain < 0][:2]
    pipeline, tensor = degrees(other)
    text = (
        f"It wins over pipeline {pipeline} x tensor {tensor} by"
        f" {other.step.total - best.step.total:,.3f} s a step: it saves {', '.join(saved)}"
    )
    return text + (f" and spends {', '.join(lost)} more." if lost else ".")


def limit(plan: Plan) -> str:
    """Returns what takes most of the step beside products at their best, and the memory left."""
    parts = plan.step.parts()
    overhead = {name: value for name, value in parts.items() if name != "compute"}
    largest = max(overhead, key=lambda name: overhead[name])
    capacity = plan.request.cluster.device.memory_bytes
    return (
        f"{parts['compute'] / plan.step.total:.0%} of the step are passes; of the rest the largest"
        f" part is {TIMES[largest]}, {overhead[largest] / plan.step.total:.0%}."
        f" Memory: {plan.peak_bytes / capacity:.0%} of {capacity / 1e9:,.0f} GB."
    )


def choices(request: Request) -> str:
    """Returns what a layout does for speed and memory, each with the flag's value."""
    parallel, options = request.config.parallel, request.options
    moved = [
        name
        for name, is_moved in (
            ("activations", options.offload_activations),
            ("optimizer state", options.offload_optimizer_state),
        )
        if is_moved
    ]
    active = parallel.active_microbatches
    limit = f"{active} microbatch{'es' if active > 1 else ''}" if active else "the schedule's"
    order = placement_order(parallel.placement_strategy)
    return "; ".join(
        [
            f"ranks placed {order}, of which those along {AXES[order[-1]]} are neighbours",
            f"recomputation {options.activation_checkpointing}",
            f"ZeRO level {options.sharding_level}",
            f"to the host: {' and '.join(moved) or 'nothing'}",
            f"microbatches in flight: {limit}",
        ]
    )


def explanation(plan: Plan) -> str:
    """Returns where each number of a plan comes from."""
    request = plan.request
    device, cluster = request.cluster.device, request.cluster
    precision = request.config.parallel.precision
    constants = request.constants
    row = constants["devices"][device.name]
    flops = conventions(request.config)
    return "\n".join(
        [
            f"what was chosen: {choices(request)}",
            "where the numbers come from",
            f"  device: {device.peak_flops(precision) / 1e12:,.1f} TFLOP/s {precision},"
            f" {device.memory_bandwidth / 1e9:,.0f} GB/s, {device.memory_bytes / 1e9:,.1f} GB"
            f" ({row['source']})",
            f"  products reach {device.matmul:.0%} of the peak, streaming operations"
            f" {device.bandwidth:.0%} of the bandwidth"
            f" ({constants['efficiencies'][row['efficiency']]['source']})",
            f"  links {device.link_bandwidth * cluster.link_fraction / 1e9:,.0f} GB/s a device,"
            f" network {cluster.network_bandwidth * cluster.network_fraction / 1e9:,.1f} GB/s a"
            f" node ({constants['network']['source']})",
            "  memory: parameters, partition and microbatches in flight by the code that trains;"
            f" state {_state_text(request)} bytes a parameter (weight, gradient, optimizer,"
            " passing)",
            f"  process: {cluster.overhead['context_bytes'] / 1e9:.2f} GB,"
            f" {cluster.overhead['communicator_bytes'] / 1e9:.2f} GB a communicator,"
            f" {cluster.overhead['allocator_fraction']:.0%} of allocator slack"
            f" ({constants['overhead']['source']})",
            "  FLOPs of a step: "
            + "; ".join(f"{name} {value:.4g}" for name, value in flops.items()),
            f"  bubble: the schedule's operations on a clock, {plan.step.bubble_share:.1%} of the"
            " pipeline's time on the busiest rank",
            f"  failures: {constants['reliability']['source']}",
            f"  storage: {constants['storage']['source']}",
            f"  prices: {constants['prices']['source']}",
            f"  carbon: {constants['carbon']['source']}",
        ]
    )


def _state_text(request: Request) -> str:
    state = request.software.state(request.config, request.options.sharding_level)
    values = (state.weight, state.gradient, state.optimizer, state.passing)
    return " + ".join(f"{value:g}" for value in values)
