"""Rules of hosts' samples: SageMaker Debugger's, at its documented defaults, and ours beside."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tfbig.profiler.robust import jensen_shannon_distance, moving_mean, with_hysteresis
from tfbig.profiler.rules.rule import Finding, Rule
from tfbig.profiler.run_data import RunData
from tfbig.profiler.system_table import SystemTable

_NO_GPU = "no GPU was sampled"
_HISTOGRAM_LEVELS = tuple(range(1, 100))
_LEAVE = 5.0  # percent points by which a value must fall back to count as normal again


def core_use(table: SystemTable) -> np.ndarray:
    """Returns each core's use (n, cores)."""
    return table.of("cpu", "CPUUtilization")


def gpu_use(table: SystemTable) -> np.ndarray:
    """Returns each GPU's use (n, GPUs)."""
    return table.of("gpu", "GPUUtilization")


def mean_core_use(table: SystemTable, statistic: str | None = None) -> np.ndarray:
    """Returns the use (n,) of the cores' time that the host, or the container, has.

    Where a quota leaves a container less time than its cores have, they are never all busy.

    Args:
      table: of a host.
      statistic: of each minute; see SystemTable.of. Its mean over cores is taken as if they rose
        and fell together, which is never less than a percentile above 50 truly is.
    """
    quota = table.of("cpu", "CPUQuotaUtilization", statistic)
    use = quota if quota.shape[1] else table.of("cpu", "CPUUtilization", statistic)
    return use.mean(axis=1) if use.shape[1] else np.zeros(0)


def _p95(table: SystemTable, type: str, dimension: str) -> float:
    """Returns the mean over names of a metric's 95th percentile, NaN without one."""
    found = table.percentiles(type, dimension, [95])
    return float(np.nanmean(found)) if found.size and not np.isnan(found).all() else float("nan")


def _cores_p95(table: SystemTable) -> float:
    """Returns the 95th percentile of the cores' use."""
    if table.statistics is None:
        return float(np.nanpercentile(mean_core_use(table), 95))
    quota = table.of("cpu", "CPUQuotaUtilization").shape[1]
    return _p95(table, "cpu", "CPUQuotaUtilization" if quota else "CPUUtilization")


def _pooled_p95(table: SystemTable, dimension: str) -> float:
    """Returns the largest of the GPUs' 95th percentiles, NaN without a GPU."""
    found = table.percentiles("gpu", dimension, [95])
    return float(np.nanmax(found)) if found.size and not np.isnan(found).all() else float("nan")


@dataclass(frozen=True)
class BatchSize(Rule):
    """Cores, GPUs and GPU memory are all little used: a larger batch would cost little time."""

    cpu_threshold_p95: float = 70
    gpu_threshold_p95: float = 70
    gpu_memory_threshold_p95: float = 70
    patience: float = 1000
    window: float = 500

    def look(self, run: RunData) -> Finding:
        total, low, gain = 0, 0, 0.0
        evidence = "some device is well used on every host"
        for table in run.system:
            count = table.num_samples
            total += count
            if count < self.patience or not core_use(table).shape[1]:
                continue
            last = table.last(self.window)
            parts = {
                "cores": (_cores_p95(last), self.cpu_threshold_p95),
                "GPUs": (_pooled_p95(last, "GPUUtilization"), self.gpu_threshold_p95),
                "GPU memory": (
                    _pooled_p95(last, "GPUMemoryUtilization"),
                    self.gpu_memory_threshold_p95,
                ),
            }
            p95 = {name: part for name, part in parts.items() if not np.isnan(part[0])}
            if p95 and all(value < limit for value, limit in p95.values()):
                low += 1
                said = ", ".join(f"{name} {value:.0f}%" for name, (value, _) in p95.items())
                evidence = f"95% of {table.node_id}'s samples are below: {said}"
                # The device that does most decides how much room there is; memory is no time.
                busiest = max(value for name, (value, _) in p95.items() if name != "GPU memory")
                gain = max(gain, 1 - busiest / 100)
        batch = run.config["run"]["global_batch"]
        change = f"--global_batch={2 * batch}, with the learning rate looked at again"
        return self.found(low > 0, total, low, evidence, change, gain)


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
        count = bad.sum() if table.counts is None else table.counts[bad].sum()
        total, violations = total + table.num_samples, violations + int(count)
        here = float(count / table.num_samples)
        if table.num_samples >= rule.patience and 100 * here > rule.threshold and here > share:
            fired, share = table.node_id, here
    if not total:
        return rule.nothing(_NO_GPU if needs_gpu else "no host was sampled")
    percent = 100 * violations / total
    idle_text = f" while a GPU was used below {rule.gpu_threshold:.0f}%" if needs_gpu else ""
    evidence = f"in {percent:.0f}% of the samples {what}{idle_text}"
    if fired:
        evidence += f"; most on {fired} ({100 * share:.0f}%)"
    gain = max(run.data_wait_share, share)  # no more of the time than was like this
    return rule.found(bool(fired), total, violations, evidence, change, gain)


@dataclass(frozen=True)
class LowGPUUtilization(Rule):
    """A GPU is little used, or its use goes up and down."""

    threshold_p95: float = 70
    threshold_p5: float = 10
    window: float = 500
    patience: float = 1000

    def look(self, run: RunData) -> Finding:
        total, low, busiest = 0, [], 0.0
        for table in run.system:
            use = gpu_use(table)
            total += table.num_samples * bool(use.shape[1])
            if not use.shape[1] or table.num_samples < self.patience:
                continue
            last = table.last(self.window)
            busiest = max(busiest, float(_mean_use(last).max()))
            quantiles = last.percentiles("gpu", "GPUUtilization", [5, 95]).T
            for name, (p5, p95) in zip(
                table.names("gpu", "GPUUtilization"), quantiles, strict=True
            ):
                if p95 < self.threshold_p95:
                    low.append(f"{table.node_id} {name} is low (p95 {p95:.0f}%)")
                elif p5 < self.threshold_p5:
                    low.append(f"{table.node_id} {name} swings from {p5:.0f}% to {p95:.0f}%")
        if not total:
            return self.nothing(_NO_GPU)
        evidence = "; ".join(low[:4]) or "all GPUs are well and evenly used"
        if run.data_wait_share > 0.05:
            change = f"--data_workers={4 * run.config['data']['data_workers']}"
        else:
            change = f"--global_batch={2 * run.config['run']['global_batch']}, or fewer GPUs"
        change += "; what the steps wait for stands under A step's time"
        # Steps are synchronous: the GPU that does most is idle this much of each.
        return self.found(bool(low), total, len(low), evidence, change, 1 - busiest / 100)


def _mean_use(table: SystemTable) -> np.ndarray:
    """Returns each GPU's mean use (names,), 0 where it is unknown."""
    use = table.of("gpu", "GPUUtilization", "mean")
    return np.nan_to_num(np.nanmean(use, axis=0)) if len(use) else np.zeros(use.shape[1])


@dataclass(frozen=True)
class GPUMemoryIncrease(Rule):
    """The memory in use on a GPU grows: between two windows that do not overlap, or by and by."""

    benefit: ClassVar[str] = "no time; the run does not end for want of GPU memory"
    increase: float = 5
    patience: float = 1000
    window: float = 10

    def look(self, run: RunData) -> Finding:
        total, grown = 0, []
        for table in run.system:
            memory = table.of("gpu", "GPUMemoryUtilization")
            total += table.num_samples * bool(memory.shape[1])
            if table.num_samples < self.patience:
                continue
            names = table.names("gpu", "GPUMemoryUtilization")
            window = max(1, round(self.window / table.samples_a_row))
            for name, values in zip(names, memory.T, strict=True):
                means = moving_mean(values, window)
                # Slow leaks show only over the whole run; the first tenth is the start-up.
                means = means[len(means) // 10 :]
                if len(means) and means[-1] - means[0] > self.increase:
                    grown.append(f"{table.node_id} {name} from {means[0]:.0f}% to {means[-1]:.0f}%")
        if not total:
            return self.nothing(_NO_GPU)
        evidence = "; ".join(grown[:4]) or "memory in use is steady on all GPUs"
        every = max(1, run.config["run"]["checkpoint_every"] // 2)
        change = (
            f"--checkpoint_every={every} loses less until it is mended: something keeps tensors"
            " from step to step"
        )
        return self.found(bool(grown), total, len(grown), evidence, change)


@dataclass(frozen=True)
class LoadBalancing(Rule):
    """GPUs are used unequally: the histograms of their use differ."""

    threshold: float = 0.5
    patience: float = 1000

    def look(self, run: RunData) -> Finding:
        histograms, total, means = {}, 0, []
        for table in run.system:
            use = gpu_use(table)
            if table.num_samples < self.patience or not use.shape[1]:
                continue
            total += table.num_samples
            quantiles = table.percentiles("gpu", "GPUUtilization", _HISTOGRAM_LEVELS)
            for name, values in zip(table.names("gpu", "GPUUtilization"), quantiles.T, strict=True):
                counts, _ = np.histogram(np.nan_to_num(values), bins=50, range=(0, 100.001))
                histograms[f"{table.node_id} {name}"] = counts
            means += list(_mean_use(table))
        if len(histograms) < 2:
            return self.nothing("fewer than two GPUs were sampled for long enough")
        typical = np.median(list(histograms.values()), axis=0)
        apart = {n: jensen_shannon_distance(h, typical) for n, h in histograms.items()}
        odd = {name: distance for name, distance in apart.items() if distance > self.threshold}
        worst = max(apart, key=lambda name: apart[name])
        evidence = f"{worst} differs most from the others: distance {apart[worst]:.2f}"
        change = f"look at that GPU and its rank ({', '.join(odd)})"
        if run.config["parallel"]["partition"]:
            change = f"--partition= (the balanced one); {change}"
        # With equal shares the busiest GPU would do the mean of all.
        gain = (max(means) - sum(means) / len(means)) / max(*means, 1e-9)
        return self.found(bool(odd), total, len(odd), evidence, change, gain)


@dataclass(frozen=True)
class PinnedCore(Rule):
    """One core is full while the others rest: what runs on one thread could run on more."""

    core_threshold: float = 90
    others_threshold: float = 50
    share: float = 50
    patience: float = 60

    def look(self, run: RunData) -> Finding:
        total, found, gain = 0, [], 0.0
        for table in run.system:
            use = core_use(table)
            total += table.num_samples * (use.shape[1] > 1)
            if use.shape[1] < 2 or table.num_samples < self.patience:
                continue
            full = with_hysteresis(
                use.max(axis=1), self.core_threshold, self.core_threshold - _LEAVE
            )
            others = (use.sum(axis=1) - use.max(axis=1)) / (use.shape[1] - 1)
            bad = full & (others < self.others_threshold)
            if 100 * bad.mean() > self.share:
                names = table.names("cpu", "CPUUtilization")
                core = names[int(np.nanargmax(use[bad].mean(axis=0)))]
                # What one core does alone, spread over all of them.
                gain = max(gain, float(bad.mean()) * (1 - 1 / use.shape[1]))
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
        return self.found(bool(found), total, len(found), evidence, change, gain)


@dataclass(frozen=True)
class OverallSystemUsage(Rule):
    """Distribution of what each host did; never fires."""

    def look(self, run: RunData) -> Finding:
        details = {}
        for table in run.system:
            for kind, dimension in dict.fromkeys(column[:2] for column in table.columns):
                highest = table.of(kind, dimension, "max")
                lowest = table.of(kind, dimension, "min")
                quantiles = table.percentiles(kind, dimension, [99, 95, 50]).T
                for index, name in enumerate(table.names(kind, dimension)):
                    if np.isnan(highest[:, index]).all():
                        continue
                    p99, p95, p50 = map(float, quantiles[index])
                    details[f"{table.node_id} {dimension or kind} {name}"] = {
                        "max": float(np.nanmax(highest[:, index])),
                        "p99": p99,
                        "p95": p95,
                        "p50": p50,
                        "min": float(np.nanmin(lowest[:, index])),
                    }
        count = sum(table.num_samples for table in run.system)
        evidence = f"{len(details)} metrics of {len(run.system)} hosts"
        return self.found(False, count, 0, evidence, metrics=details)
