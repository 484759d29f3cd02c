"""Makes the folder of a run that never was, of any length: for tests of rules and reports."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from tfbig.config import Config, replace_fields, to_dict
from tfbig.profiler import layout
from tfbig.profiler.host_metrics import Metric
from tfbig.profiler.step_table import COLUMNS, ROW
from tfbig.profiler.system_writer import STATISTICS, SystemWriter
from tfbig.run_folder import RunFolder

START = 1_800_000_000.0  # seconds since 1970


@dataclass
class SyntheticRun:
    """A healthy run; a test spoils what it likes before `write`.

    Args:
      num_steps: optimizer updates.
      num_ranks: processes.
      ranks_per_host: of them on one host.
      num_cores: of a host.
      num_gpus: of a host.
      step_seconds: usual time of a step.
      interval: seconds between two samples of a host.
      same_hosts: whether all hosts share one host's samples.
    """

    num_steps: int = 300
    num_ranks: int = 1
    ranks_per_host: int = 8
    num_cores: int = 4
    num_gpus: int = 0
    step_seconds: float = 2.0
    interval: float = 0.5
    same_hosts: bool = False
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)
        count, ranks = self.num_steps, self.num_ranks
        self.seconds = self.step_seconds * (1 + 0.02 * rng.standard_normal(count))
        self.seconds[0] += 3.0  # compilation
        self.data_wait = np.full([ranks, count], 0.002 * self.step_seconds)
        self.communication = 0.1 * self.seconds * (1 + 0.05 * rng.standard_normal([ranks, count]))
        self.resident = 2000 + 2 * rng.standard_normal([ranks, count])
        self.bubble = np.full([ranks, count], np.nan)
        progress = np.arange(count) / max(1, count - 1)
        self.loss = 4 * np.exp(-3 * progress) + 3 + 0.02 * rng.standard_normal(count)
        self.grad_norm = 1 + 0.1 * rng.standard_normal(count)
        self.layer_norms = np.zeros([count, 0])  # embedding, blocks, head
        self.evaluations: list[tuple[int, float, float]] = []  # step, loss, seconds
        self.tensors: list[dict[str, Any]] = []
        self.captures: list[dict[str, Any]] = []
        self.compilations: list[dict[str, Any]] = []
        self.num_hosts = -(-ranks // self.ranks_per_host)
        self.num_samples = int(self.seconds.sum() / self.interval)
        made = 1 if self.same_hosts else self.num_hosts
        self.system = [self._host_samples(rng) for _ in range(made)]
        self.system += [self.system[0]] * (self.num_hosts - made)
        self.padding = 0.0  # share of positions without a label

    def _host_samples(self, rng: np.random.Generator) -> dict[tuple[str, str, str], np.ndarray]:
        def noisy(mean: float, deviation: float) -> np.ndarray:
            return np.clip(mean + deviation * rng.standard_normal(self.num_samples), 0, 100)

        samples: dict[tuple[str, str, str], np.ndarray] = {}
        for core in range(self.num_cores):
            samples["cpu", "CPUUtilization", f"cpu{core}"] = noisy(80, 5)
            samples["cpu", "I/OWaitPercentage", f"cpu{core}"] = noisy(1, 1)
        for gpu in range(self.num_gpus):
            samples["gpu", "GPUUtilization", f"gpu{gpu}"] = noisy(92, 3)
            samples["gpu", "GPUMemoryUtilization", f"gpu{gpu}"] = noisy(80, 0.2)
            samples["gpu", "PowerWatts", f"gpu{gpu}"] = 3 * noisy(90, 5)
        samples["memory", "", "MemoryUsedPercent"] = noisy(40, 0.2)
        samples["pressure", "PressurePercent", "io_some"] = noisy(1, 1)
        return samples

    def write(self, path: Path, samples: bool = True) -> Path:
        """Writes the run's folder.

        Args:
          path: of the folder.
          samples: whether each sample is written, and not only the minutes' quantiles.
        """
        folder = RunFolder(path)
        folder.create()
        values = {"steps": self.num_steps, **self.config}
        folder.write_config(to_dict(replace_fields(Config(), values)), ["synthetic"])
        self._write_metrics(folder)
        self._write_steps(folder.profiler_dir)
        for index, host in enumerate(self.system):
            node_id = f"algo-{index + 1}"
            self._describe_host(folder.profiler_dir, node_id)
            if samples:
                self._write_samples(folder.profiler_dir, node_id, host)
            elif index and self.same_hosts:
                self._copy_minutes(folder.profiler_dir, node_id)
            else:
                self._write_minutes(folder.profiler_dir, node_id, host)
        for kind in ("tensors", "captures", "compilations"):
            file = layout.rank_path(folder.profiler_dir, kind, 0, ".jsonl")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"".join(orjson.dumps(r) + b"\n" for r in getattr(self, kind)))
        return path

    def _write_metrics(self, folder: RunFolder) -> None:
        times = START + np.cumsum(self.seconds)
        with folder.open_metrics() as writer:
            evaluations = {step: (loss, seconds) for step, loss, seconds in self.evaluations}
            for index in range(self.num_steps):
                writer.write(self._record(index, float(times[index])))
                if index + 1 in evaluations:
                    loss, seconds = evaluations[index + 1]
                    record = {"kind": "eval", "step": index + 1, "loss": loss, "seconds": seconds}
                    writer.write({**record, "time": float(times[index])})
        with folder.open_events() as events:
            start = {"time": START, "process_start": START - 5}
            events.write_event("start", "new run", step=0, **start)
            first = float(self.seconds[0])
            events.write_event("compile", "first", seconds=first, time=START + first)
            events.write_event("first_step", "its result is read", step=1, time=float(times[0]))
            events.write_event("stop", "done", step=self.num_steps, time=float(times[-1]) + 1)

    def _record(self, index: int, time: float) -> dict[str, Any]:
        seconds, tokens = float(self.seconds[index]), 32 * 256
        norms: dict[str, Any] = {}
        if self.layer_norms.shape[1]:
            first, *blocks, last = self.layer_norms[index].tolist()
            layers = {"embedding": first, "transformer_blocks": blocks, "head": last}
            norms = {"layer_grad_norms": layers}
        return {
            **norms,
            "kind": "train",
            "step": index + 1,
            "time": time,
            "consumed_samples": 32 * (index + 1),
            "loss": float(self.loss[index]),
            "num_tokens": tokens * (1 - self.padding),
            "source_loss": [float(self.loss[index])] * 2,
            "source_num_tokens": [tokens / 2] * 2,
            "learning_rate": 1e-3,
            "grad_norm": float(self.grad_norm[index]),
            "loss_scale": 1.0,
            "applied": True,
            "tokens_per_second": tokens / seconds,
            "step_seconds": seconds,
            "data_wait_seconds": float(self.data_wait[0, index]),
            "compute_seconds": seconds,
            "communication_seconds": {"data": float(self.communication[0, index])},
            "slowest_rank": None,
            "mfu": 0.4,
            "hfu": 0.4,
            "peak_flops": 1e12,
            "peak_memory_bytes": 1 << 31,
        }

    def _write_steps(self, output: Path) -> None:
        starts = START + np.concatenate([[0.0], np.cumsum(self.seconds)[:-1]])
        for rank in range(self.num_ranks):
            rows = np.zeros(self.num_steps, ROW)
            rows["start"], rows["step"] = starts, np.arange(1, self.num_steps + 1)
            rows["seconds"], rows["data_wait"] = self.seconds, self.data_wait[rank]
            rows["data"], rows["bubble"] = self.communication[rank], self.bubble[rank]
            rows["resident_megabytes"] = self.resident[rank]
            path = layout.rank_path(output, "steps", rank, ".bin")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(rows.tobytes())
            host = rank // self.ranks_per_host
            record = {"rank": rank, "columns": COLUMNS, "hostname": f"host-{host + 1}"}
            path.with_suffix(".json").write_bytes(orjson.dumps(record))

    def _describe_host(self, output: Path, node_id: str) -> None:
        path = layout.host_path(output, node_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "node_id": node_id,
            "hostname": f"host-{node_id.removeprefix('algo-')}",
            "interval": self.interval,
            "gpus": ["NVIDIA H100"] * self.num_gpus,
            "cores": list(range(self.num_cores)),
            "cpu_quota": self.num_cores,
            "memory_bytes": 64 << 30,
        }
        path.write_bytes(orjson.dumps(record))

    def _write_samples(self, output: Path, node_id: str, host: dict[Any, np.ndarray]) -> None:
        writer = SystemWriter(output, node_id)
        for index in range(self.num_samples):
            metrics = [Metric(*key, float(values[index])) for key, values in host.items()]
            writer.write(START + index * self.interval, metrics)
        writer.close()

    def _write_minutes(self, output: Path, node_id: str, host: dict[Any, np.ndarray]) -> None:
        per_minute = int(60 / self.interval)
        minutes = self.num_samples // per_minute
        columns = list(host)
        table = np.stack([host[key][: minutes * per_minute] for key in columns])
        table = table.reshape(len(columns), minutes, per_minute)  # (columns, minutes, samples)
        quantiles = np.percentile(table, [0, 5, 50, 95, 100], axis=2)
        quantiles = np.concatenate([quantiles, table.mean(axis=2)[None]])  # (6, columns, minutes)
        lines = [orjson.dumps({"columns": columns, "statistics": STATISTICS})]
        for minute in range(minutes):
            values = np.round(quantiles[:, :, minute], 2).tolist()
            record = {"time": START + 60 * minute + 30, "samples": per_minute, "values": values}
            lines.append(orjson.dumps(record))
        # The samples themselves, of an hour's size a file and empty: a long run's are not read.
        for hour in range(-(-minutes // 60)):
            path = layout.system_path(output, node_id, int(START // 60) * 60 + 3600 * hour)
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as file:
                file.truncate(140 * len(columns) * per_minute * 60)
        path = layout.minutes_path(output, node_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\n".join(lines) + b"\n")

    def _copy_minutes(self, output: Path, node_id: str) -> None:
        for path in list(output.glob("system/incremental/*/*.algo-1.json")):
            minute = path.name.partition(".")[0]
            with open(path.with_name(f"{minute}.{node_id}.json"), "wb") as file:
                file.truncate(path.stat().st_size)
        first = layout.minutes_path(output, "algo-1")
        layout.minutes_path(output, node_id).write_bytes(first.read_bytes())
