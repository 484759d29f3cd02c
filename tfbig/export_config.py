"""What `tfbig export` can be told. TensorFlow-free."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Which checkpoint to write, as what, and where to."""

    run: str = ""
    """Run folder to read."""
    checkpoint: int = -1
    """Step of the checkpoint; -1 means the newest."""
    weights: Literal["model", "ema"] = "model"
    """The weights themselves, or their moving average where the run kept one."""
    format: Literal["hf", "keras", "saved_model"] = "hf"
    """A Hugging Face folder (GPT-2 or GPT-NeoX), a .keras file, or a model for TF Serving."""
    output: str = ""
    """What to write, which must not exist; empty means <run>/export/<format>."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """How --format=hf stores the weights."""
    max_shard_megabytes: int = 5000
    """Largest weights file of --format=hf, in MB."""
    trim_vocabulary: bool = False
    """Whether rows of the vocabulary that are no token are left out."""
