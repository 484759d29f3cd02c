"""Rules of the data: what steps waited for them, and how much of them is padding."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tfbig.profiler.rules.host_rules import mean_core_use
from tfbig.profiler.rules.rule import Finding, Rule
from tfbig.profiler.run_data import RunData


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
        spare = f"no time that was measured; {workers - wanted} threads a rank less on the cores"
        bad = too_few or too_many
        return self.found(bad, 1, bad, evidence, change, gain, spare if too_many else "")


@dataclass(frozen=True)
class DataWorkers(Rule):
    """Steps wait for data, and the cores have room for more reading threads."""

    cpu_threshold: float = 70
    wait_threshold: float = 5

    def look(self, run: RunData) -> Finding:
        if not len(run.step_seconds):
            return self.nothing("no step is recorded")
        used = [mean_core_use(table, "p95") for table in run.system]
        most = [use.max() for use in used if len(use)]
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
class NLPSequenceRatio(Rule):
    """Much of each sequence is padding (or masked), which is computed and not learned."""

    kind: ClassVar[str] = "tensor"
    threshold: float = 50  # percent

    def look(self, run: RunData) -> Finding:
        tokens = run.train.of("num_tokens")
        samples = np.diff(np.concatenate([[0.0], run.train.of("consumed_samples")]))
        if not len(tokens):
            return self.nothing("no step is recorded")
        positions = np.maximum(samples[1:], 1) * run.config["data"]["sequence_length"]
        share = 100 * (1 - tokens[1:] / positions) if len(tokens) > 1 else np.zeros(1)
        mean = float(share.mean())
        fired = mean > self.threshold
        length = run.config["data"]["sequence_length"]
        change = (
            f"python -m tfbig.prepare --packing=join, or --sequence_length={max(1, length // 2)}"
        )
        evidence = f"{mean:.1f}% of the positions are not learned from"
        return self.found(
            fired, len(tokens), int((share > self.threshold).sum()), evidence, change, mean / 100
        )
