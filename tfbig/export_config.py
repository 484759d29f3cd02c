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
    license: str = ""
    """Licence for the model card's metadata, as the Hub names it, e.g. apache-2.0."""
    language: tuple[str, ...] = ()
    """Language for the model card, e.g. en. Repeat the flag for more."""
    base_model: str = ""
    """Model on the Hub that the run started from, for the model card."""
    watts: float = 0.0
    """Power all devices drew together, for the card; 0 takes what the hosts' samples say."""
    push: str = ""
    """Repository on the Hub, NAME/MODEL, to upload the folder to (see --dry_run)."""
    dry_run: bool = True
    """Whether --push only lists what it would upload; --nodry_run uploads."""
    private: bool = True
    """Whether a repository that --push makes is private."""
