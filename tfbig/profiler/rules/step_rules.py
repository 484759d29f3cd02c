"""Rules of steps: how long they took, what held them up, and what they left behind."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tfbig.profiler.robust import outliers, slope
from tfbig.profiler.rules.rule import Finding, Rule
from tfbig.profiler.run_data import RunData


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
        wanted = ",".join(map(str, steps[:3]))
        change = f"--profile_steps={wanted} in a run of the same flags captures such steps"
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
            else "look at that rank's host (python -m tfbig.doctor; other load, clocks, disk), or"
            " leave it out of horovodrun's -H"
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

    benefit: ClassVar[str] = "no time; the run does not end for want of memory"
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
        every = max(1, run.config["run"]["checkpoint_every"] // 2)
        change = (
            f"--checkpoint_every={every} loses less until it is mended: something keeps tensors or"
            " arrays of earlier steps"
        )
        return self.found(bool(found), total, len(found), evidence, change)


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
        change = "keep the shapes of batches the same from step to step"
        if run.config["run"]["batch_warmup_start"]:
            change = "--batch_warmup_start=0: each size of the batch is compiled once"
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
        parallel = run.config["parallel"]
        change = f"--bucket_megabytes={2 * parallel['bucket_megabytes']}"
        if parallel["microbatches"] > 1 and parallel["pipeline_parallel_degree"] == 1:
            change += f", --microbatches={parallel['microbatches'] // 2} (larger ones)"
        change += f", --global_batch={2 * run.config['run']['global_batch']}, or a faster network"
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
