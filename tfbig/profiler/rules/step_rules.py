"""Rules of steps: how long they took, what they waited for, and what they left behind."""

from dataclasses import dataclass

import numpy as np

from tfbig.profiler.robust import outliers, slope, spread, spread_of_rows
from tfbig.profiler.rules.host_rules import mean_core_use
from tfbig.profiler.rules.rule import Finding, Rule
from tfbig.profiler.run_data import RunData

_FIRST_SPIKE = 10  # steps before which nothing is expected of the loss
_CHUNK = 8192


@dataclass(frozen=True)
class StepOutlier(Rule):
    """Some steps take far longer than most."""

    stddev: float = 3
    n_outliers: float = 10
    min_steps: float = 100

    def look(self, run: RunData) -> Finding:
        seconds = run.step_seconds
        if len(seconds) < self.min_steps:
            return self.found(False, len(seconds), 0, f"{len(seconds)} steps are too few to tell")
        found = outliers(seconds, self.stddev)
        median = float(np.median(seconds))
        lost = float((seconds[found] - median).sum() / seconds.sum())
        steps = run.train.of("step")[1:][found].astype(int)
        evidence = (
            f"{len(found)} of {len(seconds)} steps are far above the median of {median:.4g} s"
        )
        if len(found):
            worst = found[int(np.argmax(seconds[found]))]
            evidence += (
                f"; the longest, step {int(run.train.of('step')[1:][worst])}, took "
                f"{seconds[worst]:.3g} s; together they cost {100 * lost:.1f}% of the time"
            )
        change = f"--profile_steps={steps[0] if len(steps) else 1}-... to capture such a step"
        return self.found(
            len(found) > self.n_outliers,
            len(seconds),
            len(found),
            evidence,
            change,
            lost,
            steps=steps[:50].tolist(),
        )


@dataclass(frozen=True)
class MaxInitializationTime(Rule):
    """The first step is long in coming."""

    threshold: float = 20  # minutes

    def look(self, run: RunData) -> Finding:
        worst, count = 0.0, 0
        begun = run.record["time"]
        for event in run.events:
            if event["event"] == "start":
                begun, count = event.get("process_start", event["time"]), count + 1
            elif event["event"] == "first_step":
                worst = max(worst, event["time"] - begun)
        evidence = f"the longest of {count} starts took {worst:.1f} s to the first step"
        change = "prepare the data before (python -m tfbig.prepare); see the ledger for the parts"
        return self.found(
            worst > 60 * self.threshold, count, worst > 60 * self.threshold, evidence, change
        )


@dataclass(frozen=True)
class Dataloader(Rule):
    """Reading threads are fewer or more than the cores can serve."""

    min_threshold: float = 70
    max_threshold: float = 200

    def look(self, run: RunData) -> Finding:
        if not run.hosts:
            return self.nothing("no host was described")
        workers = run.config["data"]["data_workers"]
        ranks = max(1, len(run.matrix.ranks)) / len(run.hosts)
        cores = min(host["cpu_quota"] for host in run.hosts)
        percent = 100 * workers * ranks / cores
        # Batches are gathered ahead by one thread at 1.6 GB/s: few threads are a fault only where
        # they are waited for.
        too_few = percent < self.min_threshold and run.data_wait_share > 0.05
        too_many = percent > self.max_threshold
        evidence = (
            f"{workers} reading threads a rank on {cores:g} cores a host ({percent:.0f}%); "
            f"{100 * run.data_wait_share:.1f}% of the steps' time is wait for data"
        )
        wanted = max(1, int(cores / ranks))
        change = f"--data_workers={wanted}"
        gain = run.data_wait_share if too_few else 0.0
        return self.found(too_few or too_many, 1, too_few or too_many, evidence, change, gain)


@dataclass(frozen=True)
class DataWorkers(Rule):
    """Steps wait for data, and the cores have room for more reading threads."""

    cpu_threshold: float = 70
    wait_threshold: float = 5

    def look(self, run: RunData) -> Finding:
        if not len(run.step_seconds):
            return self.nothing("no step is recorded")
        most = [mean_core_use(table).max() for table in run.system if len(mean_core_use(table))]
        busiest = float(max(most)) if most else 0.0
        share = 100 * run.data_wait_share
        evidence = (
            f"{share:.1f}% of the steps' time is wait for data, and the cores were never used above"
            f" {busiest:.0f}%"
        )
        workers = run.config["data"]["data_workers"]
        change = f"--data_workers={max(2, 4 * workers)}"
        bad = share > self.wait_threshold and busiest < self.cpu_threshold
        return self.found(bad, len(run.step_seconds), bad, evidence, change, run.data_wait_share)


@dataclass(frozen=True)
class DataWait(Rule):
    """Steps wait for data (5% is much, 20% very much, as XProf has it)."""

    wait_threshold: float = 5

    def look(self, run: RunData) -> Finding:
        if not len(run.step_seconds):
            return self.nothing("no step is recorded")
        share = 100 * run.data_wait_share
        waits = run.train.of("data_wait_seconds")[1:]
        many = int((waits > 0.05 * np.maximum(run.step_seconds, 1e-9)).sum())
        evidence = f"{share:.1f}% of the steps' time is wait for data: reading is too slow for them"
        iowait = [np.nanmean(t.of("cpu", "I/OWaitPercentage")) for t in run.system if len(t.times)]
        pressure = [np.nanmean(t.of("pressure")) for t in run.system if t.of("pressure").size]
        if iowait:
            evidence += f"; cores waited for disks {max(iowait):.0f}% of the time"
        change = (
            f"--data_workers={4 * run.config['data']['data_workers']}, or the data folder on a"
            " faster or nearer disk"
        )
        return self.found(
            share > self.wait_threshold,
            len(waits),
            many,
            evidence,
            change,
            run.data_wait_share,
            iowait=[float(x) for x in iowait],
            pressure=[float(x) for x in pressure],
        )


@dataclass(frozen=True)
class Straggler(Rule):
    """One rank does in a step what takes the others less time; they wait for it."""

    excess: float = 15  # percent above the median rank
    min_steps: float = 10

    def look(self, run: RunData) -> Finding:
        matrix = run.matrix
        if len(matrix.ranks) < 2:
            return self.nothing("there is one rank")
        if not np.nansum(matrix.communication):
            return self.nothing("collectives were not timed (--deterministic forbids it)")
        own = matrix.own_seconds[:, 1:]
        if own.shape[1] < self.min_steps:
            return self.nothing(f"{own.shape[1]} steps are too few to tell")
        medians = np.nanmedian(own, axis=1)
        typical = float(np.median(np.sort(medians)[: max(1, len(medians) - 1)]))
        excess = 100 * (medians / max(typical, 1e-9) - 1)
        slow = np.flatnonzero(excess > self.excess)
        worst = int(np.argmax(excess))
        names = run.rank_names()
        evidence = (
            f"{names[worst]} works {1000 * medians[worst]:.1f} ms of each step itself, the others"
            f" {1000 * typical:.1f} ms"
        )
        seconds = float(np.nanmedian(matrix.seconds[:, 1:]))
        gain = min(1.0, (medians[worst] - typical) / max(seconds, 1e-9))
        stages = run.config["parallel"]["pipeline_parallel_degree"] > 1
        change = (
            "--partition to give its stage fewer blocks; or look at that host"
            if stages
            else "look at that rank's host (other load, clocks, disk), or leave it out"
        )
        return self.found(
            bool(len(slow)),
            own.size,
            len(slow),
            evidence,
            change,
            gain,
            excess_percent={names[i]: float(excess[i]) for i in range(len(names))},
        )


@dataclass(frozen=True)
class MemoryLeak(Rule):
    """A rank's memory grows steadily from step to step."""

    min_growth: float = 5  # percent of what the rank holds
    min_megabytes: float = 32
    rising: float = 0.85  # share of pairs of steps of which the later holds more

    def look(self, run: RunData) -> Finding:
        matrix = run.matrix
        limit = min((host["memory_bytes"] for host in run.hosts), default=0) / 2**20
        found, total = [], 0
        for index, values in enumerate(matrix.resident_megabytes):
            known = np.flatnonzero(~np.isnan(values))
            known = known[len(known) // 4 :]  # start-up, compilation and first evaluation grow
            if len(known) < 10:
                continue
            total += len(known)
            rise, share = slope(known.astype(float), values[known].astype(float))
            growth = rise * (known[-1] - known[0])
            floor = max(self.min_megabytes, self.min_growth / 100 * float(values[known[0]]))
            if growth > floor and share > self.rising:
                text = f"{run.rank_names()[index]} grows by {1000 * rise:.0f} MB each 1,000 steps"
                if limit:
                    left = max(0.0, limit - float(values[known[-1]])) / rise
                    text += f"; its host's memory is full in {left:,.0f} steps"
                found.append(text)
        if not total:
            return self.nothing("too few readings of the memory")
        evidence = "; ".join(found[:4]) or "the ranks' memory is steady"
        change = "look for what keeps tensors or arrays of earlier steps"
        return self.found(bool(found), total, len(found), evidence, change)


def expectations(loss: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns what each step's loss (n,) should be by those before it, and their noise (n,).

    Early the loss falls quickly: the median of the last five is expected. Its noise is the spread
    of the changes from step to step within the window.
    """
    count = len(loss)
    expected, noise = np.full(count, np.inf), np.full(count, np.inf)
    places = np.maximum.accumulate(np.where(np.isfinite(loss), np.arange(count), 0))
    known = loss[places] if count else loss
    for index in range(_FIRST_SPIKE, min(window, count)):
        expected[index] = np.median(known[index - 5 : index])
        noise[index] = spread(np.diff(known[:index]))
    if count > window:
        windows = np.lib.stride_tricks.sliding_window_view(known[:-1], window)
        for start in range(0, len(windows), _CHUNK):
            part = windows[start : start + _CHUNK]  # (steps, window), each before its step
            target = slice(window + start, window + start + len(part))
            expected[target] = np.median(part[:, -5:], axis=1)
            changes = np.diff(part, axis=1)
            noise[target] = spread_of_rows(changes)
    return expected, np.maximum(noise, 1e-9)


@dataclass(frozen=True)
class LossSpike(Rule):
    """The loss jumps up within a step."""

    deviations: float = 8
    min_rise: float = 5  # percent
    window: float = 50

    def look(self, run: RunData) -> Finding:
        loss, steps = run.train.of("loss"), run.train.of("step").astype(int)
        expected, noise = expectations(loss, int(self.window))
        with np.errstate(invalid="ignore"):
            jump = loss - expected
            is_spike = (jump > self.deviations * noise) & (
                jump > self.min_rise / 100 * np.abs(expected)
            )
        is_spike |= ~np.isfinite(loss)
        spikes = [int(index) for index in np.flatnonzero(is_spike) if index >= _FIRST_SPIKE]
        evidence = "the loss has no jumps"
        if spikes:
            worst = max(spikes, key=lambda i: loss[i] if np.isfinite(loss[i]) else np.inf)
            evidence = (
                f"the loss jumps at {len(spikes)} steps, first at step {steps[spikes[0]]}, most at"
                f" step {steps[worst]}, to {loss[worst]:.3f}"
            )
        where = steps[spikes[0]] if spikes else 0
        change = (
            f"python -m tfbig.data inspect --step={where} shows what was learned there;"
            " --max_loss skips such updates; a lower --learning_rate or longer --warmup_steps"
        )
        return self.found(
            bool(spikes),
            len(loss),
            len(spikes),
            evidence,
            change,
            steps=steps[spikes][:50].tolist(),
        )


@dataclass(frozen=True)
class Recompilation(Rule):
    """The step is traced and compiled again in the middle of the run."""

    min_seconds: float = 0.2

    def look(self, run: RunData) -> Finding:
        found = [one for one in run.compilations if one["seconds"] >= self.min_seconds]
        steps = sorted({one["step"] for one in found})
        rank = min((one["rank"] for one in found), default=0)
        lost = sum(one["seconds"] for one in found if one["rank"] == rank)
        total = float(run.train.of("step_seconds").sum()) or 1.0
        evidence = "nothing was compiled after the first step"
        if found:
            evidence = (
                f"a compile in the middle: step {', '.join(map(str, steps[:8]))} traced new"
                f" functions, {lost:.1f} s in all"
            )
        change = (
            "keep shapes the same from step to step; --batch_warmup_start compiles once a batch"
            " size: fewer sizes cost fewer compilations"
        )
        return self.found(
            bool(found),
            run.train.num_steps,
            len(steps),
            evidence,
            change,
            lost / total,
            steps=steps,
        )


@dataclass(frozen=True)
class PipelineBubble(Rule):
    """Pipeline ranks are idle between their passes."""

    threshold: float = 20

    def look(self, run: RunData) -> Finding:
        bubble = run.matrix.bubble
        if not len(run.matrix.ranks) or np.isnan(bubble).all():
            return self.nothing("no pipeline")
        share = float(np.nansum(bubble[:, 1:]) / max(np.nansum(run.matrix.seconds[:, 1:]), 1e-9))
        parallel = run.config["parallel"]
        stages, microbatches = parallel["pipeline_parallel_degree"], parallel["microbatches"]
        best = (stages - 1) / (microbatches + stages - 1)
        evidence = (
            f"ranks are idle between passes {100 * share:.0f}% of the steps' time; {stages} stages"
            f" and {microbatches} microbatches leave {100 * best:.0f}% even when balanced"
        )
        change = f"--microbatches={2 * microbatches}, or --pipeline=interleaved"
        gain = best - (stages - 1) / (2 * microbatches + stages - 1)
        return self.found(
            100 * share > self.threshold, bubble.size, share > 0, evidence, change, gain
        )


@dataclass(frozen=True)
class ExposedCommunication(Rule):
    """Collectives that no computation hides take much of the step (3% is much, 15% very much)."""

    threshold: float = 15

    def look(self, run: RunData) -> Finding:
        if not run.captures:
            return self.nothing("no step was captured (--profile_steps)")
        wall = sum(capture["wall_seconds"] for capture in run.captures)
        exposed = sum(c["split"].get("exposed communication", 0.0) for c in run.captures)
        share = exposed / max(wall, 1e-9)
        evidence = f"{100 * share:.1f}% of the captured steps is communication that nothing hides"
        change = "larger microbatches, a larger --bucket_megabytes, or a faster network"
        fired = 100 * share > self.threshold
        return self.found(fired, len(run.captures), fired, evidence, change, share)


@dataclass(frozen=True)
class OverallFrameworkMetrics(Rule):
    """What captured steps were made of, and their costliest operations; never fires."""

    def look(self, run: RunData) -> Finding:
        if not run.captures:
            return self.nothing("no step was captured (--profile_steps)")
        wall = sum(capture["wall_seconds"] for capture in run.captures)
        shares: dict[str, float] = {}
        for capture in run.captures:
            for part, seconds in capture["split"].items():
                shares[part] = shares.get(part, 0.0) + seconds / wall
        largest = max(shares, key=lambda part: shares[part])
        evidence = (
            f"the largest part of the captured steps is {largest}: {100 * shares[largest]:.0f}%"
        )
        return self.found(False, len(run.captures), 0, evidence, shares=shares)
