"""What `tfbig plan` can be told beside a run's own flags. TensorFlow-free."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Which machines, which question."""

    cluster: str = "a100-80:8"
    """instance:nodes, such as p4d.24xlarge:240, or device:devices, such as a100-80:1024."""
    best: bool = False
    """Searches all layouts that train can run, instead of answering for the given one."""
    explain: bool = False
    """Says where each number comes from."""
    json: bool = False
    """Prints one JSON object instead of text."""
    chart: str = ""
    """HTML file to write: step time against devices, with the memory wall."""
    check: str = ""
    """Run folder whose measurements are compared with their prediction."""
    measure: bool = False
    """Measures this machine in about a minute; --cluster=here:N then means N processes of it."""
    constants: str = ""
    """JSON file of constants that replace the packaged ones; --measure and --check write it."""
    microbatch_size: int = 0
    """Sequences of one forward pass; sets --microbatches. 0 leaves that as it is."""
    tokens: str = "run"
    """Tokens to train on: a number such as 300e9, run (--steps x batch), or chinchilla."""
    software: str = "tfbig"
    """Whose kernels and memory: tfbig, or another program, to compare with published runs."""
    devices_per_node: int = 0
    """Devices that share a node; 0 means the instance's, and 8 for a device."""
    network_gbps: float = 0.0
    """Gigabits a second out of a node, one way; 0 means the instance's or the device's usual."""
    network_fraction: float = 0.0
    """Share of the network's bandwidth that collectives reach; 0 means the measured default."""
    dollars_per_node_hour: float = 0.0
    """Price; 0 means the dated one of the packaged constants."""
    kg_co2e_per_kwh: float = 0.0
    """Carbon intensity of the grid; 0 means the packaged one."""
    show: int = 10
    """Layouts that --best prints."""
