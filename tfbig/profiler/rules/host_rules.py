"""Rules of hosts' samples: SageMaker Debugger's, at its documented defaults, and ours beside."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfbig.profiler.robust import jensen_shannon_distance, moving_mean, with_hysteresis
from tfbig.profiler.rules.rule import Finding, Rule, num_samples
from tfbig.profiler.run_data import RunData
from tfbig.profiler.system_table import SystemTable

_NO_GPU = "no GPU was sampled"
_LEAVE = 5.0  # percent points by which a value must fall back to count as normal again


def core_use(table: SystemTable) -> np.ndarray:
    """Returns each core's use (n, cores)."""
    return table.of("cpu", "CPUUtilization")


def gpu_use(table: SystemTable) -> np.ndarray:
    """Returns each GPU's use (n, GPUs)."""
    return table.of("gpu", "GPUUtilization")


def mean_core_use(table: SystemTable) -> np.ndarray:
    """Returns the mean use over cores (n,)."""
    use = core_use(table)
    return use.mean(axis=1) if use.shape[1] else np.zeros(0)


@dataclass(frozen=True)
class BatchSize(Rule):
    """Cores, GPUs and GPU memory are all little used: a larger batch would cost little time."""

    cpu_threshold_p95: float = 70
    gpu_threshold_p95: float = 70
    gpu_memory_threshold_p95: float = 70
    patience: float = 1000
    window: float = 500

    def look(self, run: RunData) -> Finding:
        total, low, evidence = 0, 0, "some device is well used on every host"
        for table in run.system:
            count = num_samples(table)
            total += count
            if count < self.patience or not core_use(table).shape[1]:
                continue
            last = slice(-int(self.window), None)
            parts = {
                "cores": (mean_core_use(table)[last], self.cpu_threshold_p95),
                "GPUs": (gpu_use(table)[last], self.gpu_threshold_p95),
                "GPU memory": (
                    table.of("gpu", "GPUMemoryUtilization")[last],
                    self.gpu_memory_threshold_p95,
                ),
            }
            p95 = {
                name: (float(np.nanpercentile(values, 95)), limit)
                for name, (values, limit) in parts.items()
                if values.size
            }
            if all(value < limit for value, limit in p95.values()):
                low += 1
                said = ", ".join(f"{name} {value:.0f}%" for name, (value, _) in p95.items())
                evidence = f"95% of {table.node_id}'s samples are below: {said}"
        batch = run.config["run"]["global_batch"]
        change = f"--global_batch={2 * batch}, with the learning rate looked at again"
        return self.found(low > 0, total, low, evidence, change)


@dataclass(frozen=True)
class CPUBottleneck(Rule):
    """GPUs are idle while some core is fully used: the cores do not feed them."""

    threshold: float = 50
    gpu_threshold: float = 10
    cpu_threshold: float = 90
    patience: float = 1000

    def look(self, run: RunData) -> Finding:
        return _while_gpus_idle(
            self,
            run,
            lambda t: with_hysteresis(
                core_use(t).max(axis=1), self.cpu_threshold, self.cpu_threshold - _LEAVE
            ),
            "a core was fully used",
            f"--data_workers={2 * run.config['data']['data_workers']}",
        )


@dataclass(frozen=True)
class IOBottleneck(Rule):
    """Cores wait for input or output, while GPUs, where there are any, are idle."""

    threshold: float = 50
    gpu_threshold: float = 10
    io_threshold: float = 50
    patience: float = 1000

    def look(self, run: RunData) -> Finding:
        return _while_gpus_idle(
            self,
            run,
            self._waiting,
            "a core or the host waited for the disk",
            f"a faster or nearer disk for --data, or --data_workers="
            f"{4 * run.config['data']['data_workers']}",
            needs_gpu=False,
        )

    def _waiting(self, table: SystemTable) -> np.ndarray:
        iowait = table.of("cpu", "I/OWaitPercentage")
        if not iowait.shape[1]:
            return np.zeros(len(table.times), bool)
        # Busy cores hide I/O wait; the kernel's pressure does not (docs.kernel.org, PSI).
        pressure = np.nan_to_num(table.one("pressure", "PressurePercent", "io_some"))
        waited = np.maximum(iowait.max(axis=1), pressure)
        return with_hysteresis(waited, self.io_threshold, self.io_threshold - _LEAVE)


def _while_gpus_idle(
    rule: Any,
    run: RunData,
    is_high: Callable[[SystemTable], np.ndarray],
    what: str,
    change: str,
    needs_gpu: bool = True,
) -> Finding:
    """Returns the finding of a rule that counts the samples of a state while a GPU is idle."""
    total = violations = 0
    fired, share = "", 0.0
    for table in run.system:
        use = gpu_use(table)
        if not len(table.times) or (needs_gpu and not use.shape[1]):
            continue
        idle = use.min(axis=1) < rule.gpu_threshold if use.shape[1] else True
        bad = is_high(table) & idle
        scale = num_samples(table) // len(table.times)
        total, violations = total + num_samples(table), violations + scale * int(bad.sum())
        if num_samples(table) >= rule.patience and 100 * bad.mean() > rule.threshold:
            fired, share = table.node_id, max(share, float(bad.mean()))
    if not total:
        return rule.nothing(_NO_GPU if needs_gpu else "no host was sampled")
    percent = 100 * violations / total
    idle_text = f" while a GPU was used below {rule.gpu_threshold:.0f}%" if needs_gpu else ""
    evidence = f"in {percent:.0f}% of the samples {what}{idle_text}"
    if fired:
        evidence += f"; most on {fired} ({100 * share:.0f}%)"
    return rule.found(bool(fired), total, violations, evidence, change, run.data_wait_share)


@dataclass(frozen=True)
class LowGPUUtilization(Rule):
    """A GPU is little used, or its use goes up and down."""

    threshold_p95: float = 70
    threshold_p5: float = 10
    window: float = 500
    patience: float = 1000

    def look(self, run: RunData) -> Finding:
        total, low = 0, []
        for table in run.system:
            use = gpu_use(table)
            total += num_samples(table) * bool(use.shape[1])
            if not use.shape[1] or num_samples(table) < self.patience:
                continue
            for name, values in zip(table.names("gpu", "GPUUtilization"), use.T, strict=True):
                p5, p95 = np.nanpercentile(values[-int(self.window) :], [5, 95])
                if p95 < self.threshold_p95:
                    low.append(f"{table.node_id} {name} is low (p95 {p95:.0f}%)")
                elif p5 < self.threshold_p5:
                    low.append(f"{table.node_id} {name} swings from {p5:.0f}% to {p95:.0f}%")
        if not total:
            return self.nothing(_NO_GPU)
        evidence = "; ".join(low[:4]) or "all GPUs are well and evenly used"
        change = "see what the steps wait for; a larger --global_batch, or fewer GPUs"
        return self.found(bool(low), total, len(low), evidence, change)


@dataclass(frozen=True)
class GPUMemoryIncrease(Rule):
    """The memory in use on a GPU grows: between two windows that do not overlap, or by and by."""

    increase: float = 5
    patience: float = 1000
    window: float = 10

    def look(self, run: RunData) -> Finding:
        total, grown = 0, []
        for table in run.system:
            memory = table.of("gpu", "GPUMemoryUtilization")
            total += num_samples(table) * bool(memory.shape[1])
            if num_samples(table) < self.patience:
                continue
            names = table.names("gpu", "GPUMemoryUtilization")
            for name, values in zip(names, memory.T, strict=True):
                means = moving_mean(values, int(self.window))
                # Slow leaks show only over the whole run; the first tenth is the start-up.
                means = means[len(means) // 10 :]
                if len(means) and means[-1] - means[0] > self.increase:
                    grown.append(f"{table.node_id} {name} from {means[0]:.0f}% to {means[-1]:.0f}%")
        if not total:
            return self.nothing(_NO_GPU)
        evidence = "; ".join(grown[:4]) or "memory in use is steady on all GPUs"
        change = "look for tensors that are kept from step to step"
        return self.found(bool(grown), total, len(grown), evidence, change)


@dataclass(frozen=True)
class LoadBalancing(Rule):
    """GPUs are used unequally: the histograms of their use differ."""

    threshold: float = 0.5
    patience: float = 1000

    def look(self, run: RunData) -> Finding:
        histograms, total = {}, 0
        for table in run.system:
            use = gpu_use(table)
            if num_samples(table) < self.patience or not use.shape[1]:
                continue
            total += num_samples(table)
            for name, values in zip(table.names("gpu", "GPUUtilization"), use.T, strict=True):
                counts, _ = np.histogram(np.nan_to_num(values), bins=50, range=(0, 100.001))
                histograms[f"{table.node_id} {name}"] = counts
        if len(histograms) < 2:
            return self.nothing("fewer than two GPUs were sampled for long enough")
        typical = np.median(list(histograms.values()), axis=0)
        apart = {n: jensen_shannon_distance(h, typical) for n, h in histograms.items()}
        odd = {name: distance for name, distance in apart.items() if distance > self.threshold}
        worst = max(apart, key=lambda name: apart[name])
        evidence = f"{worst} differs most from the others: distance {apart[worst]:.2f}"
        change = f"look at that GPU and its rank ({', '.join(odd)}); an equal --partition"
        return self.found(bool(odd), total, len(odd), evidence, change)


@dataclass(frozen=True)
class PinnedCore(Rule):
    """One core is full while the others rest: what runs on one thread could run on more."""

    core_threshold: float = 90
    others_threshold: float = 50
    share: float = 50
    patience: float = 60

    def look(self, run: RunData) -> Finding:
        total, found = 0, []
        for table in run.system:
            use = core_use(table)
            total += num_samples(table) * (use.shape[1] > 1)
            if use.shape[1] < 2 or num_samples(table) < self.patience:
                continue
            full = with_hysteresis(
                use.max(axis=1), self.core_threshold, self.core_threshold - _LEAVE
            )
            others = (use.sum(axis=1) - use.max(axis=1)) / (use.shape[1] - 1)
            bad = full & (others < self.others_threshold)
            if 100 * bad.mean() > self.share:
                names = table.names("cpu", "CPUUtilization")
                core = names[int(np.nanargmax(use[bad].mean(axis=0)))]
                found.append(
                    f"{core} of {table.node_id} was full in {100 * bad.mean():.0f}% of the samples "
                    f"while the other cores' mean was {others[bad].mean():.0f}%"
                )
        if not total:
            return self.nothing("no host with several cores was sampled")
        evidence = "; ".join(found) or "no core is full while the others rest"
        change = (
            "--num_threads=0 (all cores); where data are waited for,"
            f" --data_workers={2 * run.config['data']['data_workers']}"
        )
        return self.found(bool(found), total, len(found), evidence, change)


@dataclass(frozen=True)
class OverallSystemUsage(Rule):
    """Distribution of what each host did; never fires."""

    def look(self, run: RunData) -> Finding:
        details = {}
        for table in run.system:
            for index, (kind, dimension, name) in enumerate(table.columns):
                values = table.values[:, index]
                values = values[~np.isnan(values)]
                if len(values):
                    p50, p95, p99 = np.percentile(values, [50, 95, 99])
                    key = f"{table.node_id} {dimension or kind} {name}"
                    details[key] = {
                        "max": float(values.max()),
                        "p99": float(p99),
                        "p95": float(p95),
                        "p50": float(p50),
                        "min": float(values.min()),
                    }
        count = sum(num_samples(table) for table in run.system)
        evidence = f"{len(details)} metrics of {len(run.system)} hosts"
        return self.found(False, count, 0, evidence, metrics=details)
