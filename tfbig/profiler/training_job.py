"""A run as smdebug's notebooks know a training job."""

import time
from pathlib import Path
from typing import Any

from tfbig.errors import UserError
from tfbig.profiler.metrics_readers import LocalAlgorithmMetricsReader, LocalSystemMetricsReader
from tfbig.run_folder import RunFolder, read_events

_PATIENCE = 600.0
_STATES = {"done": "Completed", "signal": "Stopped"}


class TrainingJob:
    """A run, finished or in training.

    Args:
      training_job_name: the run's folder.
      region: taken for smdebug's sake; a run is a folder here.

    Raises:
      UserError: it is no folder of a run.

    Example:
      job = TrainingJob("runs/gpt_tiny")
      job.wait_for_sys_profiling_data_to_be_available()
      reader = job.get_systems_metrics_reader()
    """

    def __init__(self, training_job_name: str | Path, region: str | None = None) -> None:
        self.name = str(training_job_name)
        self._folder = RunFolder(training_job_name)
        self._config = self._folder.read_config()
        self.profiler_s3_output_path = str(self._folder.profiler_dir)
        self.system_metrics_reader: LocalSystemMetricsReader | None = None
        self.framework_metrics_reader: LocalAlgorithmMetricsReader | None = None

    def get_systems_metrics_reader(self) -> LocalSystemMetricsReader:
        """Returns the reader of the hosts' samples."""
        if self.system_metrics_reader is None:
            self.system_metrics_reader = LocalSystemMetricsReader(self.profiler_s3_output_path)
        return self.system_metrics_reader

    def get_framework_metrics_reader(self) -> LocalAlgorithmMetricsReader:
        """Returns the reader of the ranks' events."""
        if self.framework_metrics_reader is None:
            self.framework_metrics_reader = LocalAlgorithmMetricsReader(
                self.profiler_s3_output_path
            )
        return self.framework_metrics_reader

    def get_config_and_profiler_s3_output_path(self) -> tuple[dict[str, Any], str]:
        """Returns the run's profiling options, and the folder of its measurements."""
        return self._config["config"].get("profile", {}), self.profiler_s3_output_path

    def wait_for_sys_profiling_data_to_be_available(self, timeout: float = _PATIENCE) -> None:
        """Waits for the first samples.

        Args:
          timeout: seconds.

        Raises:
          UserError: there are none, and none will come.
        """
        self._wait(self.get_systems_metrics_reader(), "samples of hosts", timeout)

    def wait_for_framework_profiling_data_to_be_available(self, timeout: float = _PATIENCE) -> None:
        """Waits for the first events; arguments and errors as above."""
        self._wait(self.get_framework_metrics_reader(), "events of ranks", timeout)

    def describe_training_job(self) -> dict[str, Any]:
        """Returns name, status, times and configuration, under SageMaker's names."""
        events = read_events(self._folder.path)
        stops = [event for event in events if event["event"] == "stop"]
        last = events[-1] if events else None
        ended = bool(last and last["event"] == "stop")
        return {
            "TrainingJobName": self.name,
            "TrainingJobStatus": _STATES.get(stops[-1]["reason"], "Failed")
            if ended
            else "InProgress",
            "CreationTime": self._config["time"],
            "TrainingStartTime": events[0]["time"] if events else None,
            "TrainingEndTime": stops[-1]["time"] if ended else None,
            "HyperParameters": self._config["config"],
            "ProfilerConfig": self._config["config"].get("profile", {}),
            "OutputDataConfig": {"S3OutputPath": str(self._folder.path)},
        }

    def _wait(self, reader: Any, what: str, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            reader.refresh_event_file_list()
            if reader.get_timestamp_of_latest_available_file():
                print(f"{what} of {self.name} are there")
                return
            if self.describe_training_job()["TrainingJobStatus"] != "InProgress":
                raise UserError(
                    f"{self.name} has ended and left no {what}: it ran with --noprofile"
                )
            if time.monotonic() > deadline:
                raise UserError(f"{self.name} wrote no {what} within {timeout:g} s")
            time.sleep(0.5)
