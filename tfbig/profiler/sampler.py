"""The thread that samples a host while a run trains on it."""

import sys
import threading
import time
from pathlib import Path

import orjson
import psutil

from tfbig.durable_file import write_atomic
from tfbig.profiler import layout
from tfbig.profiler.cgroup_limits import find_limits
from tfbig.profiler.gpu_metrics import open_gpu_metrics
from tfbig.profiler.host_metrics import HostMetrics, Metric
from tfbig.profiler.place import HostPlace
from tfbig.profiler.system_writer import SystemWriter


class Sampler:
    """Samples this host every interval, from `start` to `stop`, in a thread of its own.

    A disk that refuses the samples ends the sampling, with one line, and never the run.

    Args:
      profiler_dir: of the run; this host's files are made in it.
      place: of this process; one sampler a host is enough.
      interval: seconds.
      clock_offset: seconds that this host's clock is ahead of rank 0's.
    """

    def __init__(
        self, profiler_dir: Path, place: HostPlace, interval: float, clock_offset: float = 0.0
    ) -> None:
        self._profiler_dir, self._place, self._interval = profiler_dir, place, interval
        self._clock_offset = clock_offset
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tfbig-sampler", daemon=True)

    def start(self) -> None:
        """Begins to sample."""
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Ends sampling and closes the files.

        Args:
          timeout: seconds to wait for a sample that hangs, on a dead disk for instance.
        """
        self._stopping.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            self._sample_until_stopped()
        except OSError as error:
            print(
                f"warning: {self._place.node_id} is sampled no longer: {error}",
                file=sys.stderr,
                flush=True,
            )

    def _sample_until_stopped(self) -> None:
        limits = find_limits()
        host, gpus = HostMetrics(limits), open_gpu_metrics(self._place.local_size)
        self._describe(limits._asdict(), gpus.names() if gpus else [])
        writer = SystemWriter(self._profiler_dir, self._place.node_id)
        used = time.thread_time()
        following = time.monotonic() + self._interval
        try:
            while not self._stopping.wait(max(0.0, following - time.monotonic())):
                # A sample that is late shifts no other, but the next one keeps its distance: rates
                # over next to no time say nothing.
                following = max(following + self._interval, time.monotonic() + self._interval / 2)
                metrics = host.sample() + (gpus.sample() if gpus else [])
                before, used = used, time.thread_time()
                cost = 100 * (used - before) / self._interval
                metrics.append(Metric("profiler", "SamplerPercent", "sampler", cost))
                writer.write(time.time() - self._clock_offset, metrics)
        finally:
            writer.close()
            if gpus:
                gpus.close()

    def _describe(self, limits: dict[str, object], gpus: list[str]) -> None:
        path = layout.host_path(self._profiler_dir, self._place.node_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "node_id": self._place.node_id,
            "hostname": self._place.hostname,
            "interval": self._interval,
            "boot_time": psutil.boot_time(),
            "gpus": gpus,
            **limits,
        }
        write_atomic(path, orjson.dumps(record, option=orjson.OPT_INDENT_2) + b"\n")
