"""What `tfbig doctor` can be told. TensorFlow-free."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """What to look at; give what the run will be given."""

    data: str = ""
    """Data folder of the run: its manifest, tokenizer and shards are looked at."""
    verify_data: bool = False
    """Whether every shard is read and hashed, which takes a while."""
    run_dir: str = ""
    """Run folder: room, speed and, on several hosts, whether all of them see it."""
    preset: str = ""
    """Model whose checkpoints must find room; empty asks for 1 GiB."""
    hosts: str = ""
    """Other hosts to reach, e.g. a,b:2222; the port is ssh's 22 where none is given."""
    pipeline_parallel_degree: int = 1
    """Pipeline stages, so that this axis of the mesh is measured."""
    tensor_parallel_degree: int = 1
    """Tensor shards, so that this axis of the mesh is measured."""
    placement_strategy: str = "cluster"
    """How ranks are laid out: cluster (DPT), spread (TPD) or a permutation of D, P, T."""
    megabytes: int = 32
    """Size of the tensor that is all-reduced, and of the file that is written."""
    min_bandwidth: float = 0.0
    """Megabytes per second below which a group's all-reduce is a problem; 0 asks for none."""
    json: bool = False
    """Whether one JSON object is printed instead of the page."""
