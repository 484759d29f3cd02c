"""What `tfbig launch` can be told. TensorFlow-free."""

from dataclasses import dataclass
from typing import Literal

SAGEMAKER_ROOT = "/opt/ml"


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How a command is started, and started again; it stands behind `--`, as it would alone."""

    restarts: int = 3
    """Restarts after failures, in all."""
    restart_wait: float = 10.0
    """Seconds before a restart, in which nodes may come back and ports are let go."""
    shrunk: str = ""
    """Command, as one word, that takes over from one that gets nowhere; e.g. with fewer ranks."""
    shrink_after: int = 2
    """Failures in a row without a new checkpoint after which --shrunk takes over."""
    cluster: Literal["none", "slurm", "mpi", "sagemaker", "hosts"] = "none"
    """Who tells of the other launchers: none runs the command alone, hosts looks at --hosts."""
    hosts: str = ""
    """Hosts of --cluster=hosts, e.g. a,b, which all run this command; the first one for mpi."""
    host_index: int = -1
    """Which of --hosts this one is, from 0; -1 finds it by name and address."""
    processes_per_host: int = 0
    """Ranks that this launcher starts; 0 means one a GPU, or one (slurm, mpi: one a task)."""
    num_processes: int = 0
    """Ranks in all that there must be; 0 asks for none."""
    port: int = 0
    """Port of the first host at which all meet; 0 takes a fixed one, under Slurm one of the job."""
    network_interface: str = ""
    """Network card for the ranks' traffic; empty takes the one that leads to the first host."""
    start_timeout: float = 600.0
    """Seconds in which all hosts must have met."""
    sagemaker_root: str = SAGEMAKER_ROOT
    """Folder of --cluster=sagemaker's inputs and outputs."""
