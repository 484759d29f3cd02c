"""Everything a run can be told, as frozen dataclasses. TensorFlow-free.

Each field is followed by one docstring line, which is also the help of the command-line flag of
the same name (tfbig/flags.py makes the flags). Field names are unique over all sections.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tfbig.errors import UserError
from tfbig.loss_config import LossConfig
from tfbig.parallel_config import ParallelConfig
from tfbig.profile_config import ProfileConfig
from tfbig.robustness_config import RobustnessConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model: one description that spans the original's blocks, GPT-2/GPT-3 and GPT-NeoX."""

    vocab_size: int = 4096
    """Rows of the token embedding; ids of the data must be below it."""
    max_length: int = 256
    """Positions the model can attend over; at least the data's sequence length."""
    embed_dim: int = 128
    """Width D of the hidden state."""
    num_layers: int = 4
    """Transformer blocks L."""
    num_heads: int = 4
    """Attention heads H of a block."""
    head_dim: int = 0
    """Width of one head; 0 means embed_dim / num_heads."""
    feed_forward_dim: int = 0
    """Width of the feed-forward layer; 0 means 4 x embed_dim."""
    norm_order: Literal["pre", "post"] = "pre"
    """Layer norm before each sublayer (GPT-2) or after its residual sum (the original blog)."""
    norm_epsilon: float = 1e-5
    """Added to the variance in layer norm."""
    final_norm: bool = True
    """Whether a layer norm stands before the head."""
    parallel_residual: bool = False
    """Whether attention and feed-forward layer read the same input and are added together."""
    position_embedding: Literal["learned", "rotary"] = "learned"
    """A learned vector a position (GPT-2), or queries and keys turned by it (arXiv 2104.09864)."""
    rotary_fraction: float = 1.0
    """Share of each head's dims that rotary embedding turns; GPT-NeoX turns a quarter."""
    rotary_base: float = 10000.0
    """Base of the rotary angles."""
    activation: Literal["gelu_tanh", "gelu", "relu"] = "gelu_tanh"
    """Nonlinearity of the feed-forward layer; gelu is the exact one, with erf."""
    tied_head: bool = True
    """Whether the head uses the token embedding's weights."""
    head_bias: bool = False
    """Whether the head adds a bias."""
    dropout: float = 0.0
    """Dropout rate behind attention and feed-forward layer (residual dropout)."""
    attention_dropout: float = 0.0
    """Dropout rate of the attention weights."""
    embedding_dropout: float = 0.0
    """Dropout rate of the summed embeddings."""
    init_std: float = 0.02
    """Standard deviation of the normal distribution that kernels and embeddings start from."""
    scale_residual_init: bool = True
    """Whether projections into the residual stream start smaller by 1/sqrt(2 x num_layers)."""
    residual_init_std: float = 0.0
    """Standard deviation that these projections start from instead; 0 means the rule above."""
    lora_rank: int = 0
    """Rank of the adapters beside each block's projections; only they are trained. 0 is none."""
    lora_alpha: float = 16.0
    """The adapters' products are multiplied by lora_alpha / lora_rank (arXiv 2106.09685)."""

    @property
    def attention_head_dim(self) -> int:
        """Width of one attention head, with the default resolved."""
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def rotary_dim(self) -> int:
        """Dims of a head that rotary embedding turns, an even number; 0 without it."""
        if self.position_embedding != "rotary":
            return 0
        return int(self.attention_head_dim * self.rotary_fraction) // 2 * 2

    @property
    def hidden_dim(self) -> int:
        """Width of the feed-forward layer, with the default resolved."""
        return self.feed_forward_dim or 4 * self.embed_dim


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The update rule and its learning rate as a function of the step."""

    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Update rule; adamw decays weights apart from the gradient (arXiv 1711.05101)."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    beta1: float = 0.9
    """Decay of AdamW's mean of gradients."""
    beta2: float = 0.95
    """Decay of AdamW's mean of squared gradients."""
    epsilon: float = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices; biases, norms and positions are not decayed."""
    clip_norm: float = 1.0
    """Largest global norm of the gradient; 0 turns clipping off."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after warm-up."""
    warmup_steps: int = 50
    """Steps over which the learning rate rises linearly from near 0 to its peak."""
    decay_steps: int = 1000
    """Step at which the learning rate reaches its floor; independent of --steps."""
    learning_rate_floor: float = 0.1
    """Final learning rate as a fraction of the peak."""
    ema_decay: float = 0.0
    """Decay of an exponential moving average of the weights, saved and evaluated; 0 is none."""
    initial_loss_scale: float = 65536.0
    """What float16's gradients are first multiplied by; it halves when they overflow."""
    loss_scale_growth_steps: int = 2000
    """Steps without overflow after which float16's loss scale doubles."""
    scale_learning_rate: bool = False
    """Whether the rate is multiplied by the number of replicas, which no resume may change then."""
    freeze: tuple[str, ...] = ()
    """Variables that are not trained: a path, its beginning or a pattern. Repeat for more."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is trained on."""

    data: str = ""
    """Prepared data folder; empty means the one --source is prepared into on first use."""
    source: str = "stdlib"
    """What to prepare when the data folder does not exist yet."""
    sequence_length: int = 256
    """Tokens a sample feeds to the model (S); a data folder is made for one length."""
    data_workers: int = 1
    """Threads that read batches ahead; more help where the file system is far away."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How long, how often, and where to."""

    preset: str = "gpt_tiny"
    """Named starting point; every other flag overrides one of its fields."""
    run_dir: str = ""
    """Folder of checkpoints, metrics and reports; empty means runs/<preset>."""
    steps: int = 400
    """Optimizer updates in all, counted from the start of the run."""
    global_batch: int = 32
    """Sequences per update over all ranks."""
    batch_warmup_start: int = 0
    """Sequences of the first updates; the batch grows by as many up to global_batch. 0 is off."""
    batch_warmup_samples: int = 0
    """Samples over which the batch grows."""
    seed: int = 0
    """Seed of weights, data order and dropout."""
    eval_every: int = 100
    """Steps between evaluations of the whole validation split; 0 means only at the end."""
    checkpoint_every: int = 100
    """Steps between checkpoints; 0 means only at the end."""
    keep_last: int = 2
    """Newest checkpoints that are kept."""
    keep_best: bool = True
    """Whether the checkpoint with the lowest validation loss is kept too."""
    log_every: int = 10
    """Steps between progress lines."""
    layer_grad_norms: bool = False
    """Whether each step records the gradient's norm by layer."""
    tensorboard: bool = True
    """Whether TensorBoard event files are written."""
    max_loss: float = 0.0
    """An update whose mean loss exceeds this is skipped; 0 means no limit."""
    verify: bool = False
    """First proves on a shrunken model that this layout trains what one device trains."""
    restart: bool = False
    """Starts at step 0; an existing run folder is renamed to <run_dir>.1, not deleted."""
    init_from: str = ""
    """Checkpoint or Hugging Face folder whose weights a new run starts from, and nothing else."""


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Raw text to a data folder."""

    data: str = ""
    """Output folder; empty means data/<source>_<vocab_size>_<sequence_length>."""
    source: str = "stdlib"
    """stdlib, or [preset:]path[,...]; paths are files, folders, globs or URLs (docs/data.md)."""
    sequence_length: int = 256
    """Tokens a sample feeds to the model (S)."""
    vocab_size: int = 4096
    """Entries of the byte-level BPE that is trained when no --tokenizer is given."""
    tokenizer: str = ""
    """A tokenizer.json, its folder, or vocab.json,merges.txt; empty trains one on train text."""
    encoder: Literal["auto", "gigatoken", "tiktoken", "tokenizers"] = "auto"
    """What encodes; auto is the fastest installed one that gives the tokenizers library's ids."""
    text_field: str = ""
    """Field of a record that holds its text, with dots inside objects; empty means the preset's."""
    source_field: str = ""
    """Field of a record that names its source; empty means the preset's."""
    source_name: str = ""
    """Source of all records; empty means the field's, or the preset's."""
    prompt_field: str = ""
    """Field of text that is read but not learned (prompt/completion records)."""
    completion_field: str = ""
    """Field of the text that is learned after the prompt."""
    chat_field: str = ""
    """Field of a conversation's list of messages; the assistant's replies are learned."""
    min_characters: int = 0
    """Shorter documents are left out, and counted."""
    max_characters: int = 0
    """Longer documents are left out, and counted; 0 means no limit."""
    exclude_source: tuple[str, ...] = ()
    """Source whose documents are left out, and counted. Repeat the flag for more."""
    remove_duplicates: bool = False
    """Whether of equal documents only one is kept: held-out ones first, then the first read."""
    near_duplicates: float = 0.0
    """Removes documents whose MinHash similarity to a kept one reaches this; 0 removes none."""
    max_bad_fraction: float = 0.0
    """Share of unfit records that is borne (left out and listed); at 0 the first one stops it."""
    packing: Literal["join", "best_fit", "single"] = "join"
    """Documents in a row of text, whole ones in padded rows, or one a row."""
    tail: Literal["drop", "pad"] = "drop"
    """Whether the last tokens of joined documents, fewer than a row, are left out or padded."""
    document_mask: bool = False
    """Whether document_ids are stored, at which attention and positions begin anew."""
    seed: int = 0
    """Seed of the document shuffle."""
    validation_fraction: float = 0.05
    """Share of documents, chosen by hash, that is held out."""
    test_fraction: float = 0.0
    """Share of documents, chosen by hash, for a test split."""
    shard_bytes: int = 1 << 30
    """Largest size of one shard file."""
    chunk_bytes: int = 1 << 30
    """Text that one worker tokenizes at a time."""
    order_block_bytes: int = 1 << 20
    """Neighbouring rows that training reads together (for network file systems); 0 means one."""
    workers: int = 0
    """Processes on this machine; 0 means one a core. The same command on more hosts helps too."""
    keep_tokens: bool = False
    """Whether the token store is kept, so that another length needs no new tokenizing."""
    dry_run: bool = False
    """Only estimates documents, tokens, disk and time from a sample."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    run: RunConfig = field(default_factory=RunConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    robustness: RobustnessConfig = field(default_factory=RobustnessConfig)
    loss: LossConfig = field(default_factory=LossConfig)


def replace_fields(config: Config, values: Mapping[str, object]) -> Config:
    """Returns `config` with fields of any section replaced.

    Args:
      config: the starting point.
      values: new values by field name, whatever their section.

    Raises:
      UserError: a name that no section has.

    >>> replace_fields(Config(), {"steps": 5, "num_heads": 2}).run.steps
    5
    """
    remaining = dict(values)
    sections = {}
    for section_field in dataclasses.fields(config):
        section = getattr(config, section_field.name)
        names = {f.name for f in dataclasses.fields(section)} & remaining.keys()
        sections[section_field.name] = dataclasses.replace(
            section, **{name: remaining.pop(name) for name in names}
        )
    if remaining:
        raise UserError(f"no such option: {', '.join(sorted(remaining))}")
    return Config(**sections)


def section_values(section: type, values: dict[str, Any]) -> dict[str, Any]:
    """Returns those of `values` that are fields of one config dataclass.

    >>> section_values(GenerateConfig, {"run": "runs/a", "strategy": "single"})
    {'run': 'runs/a'}
    """
    names = {item.name for item in dataclasses.fields(section)}
    return {name: value for name, value in values.items() if name in names}


def to_dict(config: object) -> dict[str, dict[str, object]]:
    """Returns {section: {field: value}} of a Config, ready for JSON."""
    return dataclasses.asdict(config)  # type: ignore[call-overload]


def from_dict(sections: dict[str, dict[str, object]]) -> Config:
    """Returns the Config that `to_dict` described; fields it lacks take their defaults.

    Raises:
      UserError: a section or field that this version does not know.
    """
    values: dict[str, object] = {}
    for name, section in sections.items():
        if name not in {f.name for f in dataclasses.fields(Config)}:
            raise UserError(f"config has a section {name!r} that this version does not know")
        values.update(section)
    return replace_fields(Config(), values)


def count_parameters(config: ModelConfig) -> int:
    """Returns the exact number of trainable parameters of the model that `config` describes.

    >>> count_parameters(ModelConfig(vocab_size=50257, max_length=1024, embed_dim=768,
    ...                              num_layers=12, num_heads=12))
    124439808
    """
    width, hidden = config.embed_dim, config.hidden_dim
    attention_width = config.num_heads * config.attention_head_dim
    norm = 2 * width
    attention = (width + 1) * 3 * attention_width + (attention_width + 1) * width
    feed_forward = (width + 1) * hidden + (hidden + 1) * width
    positions = config.max_length if config.position_embedding == "learned" else 0
    embeddings = (config.vocab_size + positions) * width
    head = 0 if config.tied_head else config.vocab_size * width
    head += config.vocab_size if config.head_bias else 0
    adapters = config.lora_rank * (4 * width + 2 * hidden + 4 * attention_width)  # in + out of each
    blocks = config.num_layers * (attention + feed_forward + 2 * norm + adapters)
    return embeddings + blocks + (norm if config.final_norm else 0) + head


def flops_per_token(config: ModelConfig, sequence_length: int, causal: bool = False) -> float:
    """Returns model FLOPs per trained token: forward and backward matrix products.

    Args:
      config: the model.
      sequence_length: S of the samples.
      causal: whether attention counts only the unmasked half. MFU in the literature (PaLM,
        arXiv 2204.02311, appendix B) counts the whole square, and so do we by default.
    """
    width, attention_width = config.embed_dim, config.num_heads * config.attention_head_dim
    weights = config.num_layers * (4 * width * attention_width + 2 * width * config.hidden_dim)
    weights += config.vocab_size * width
    scores = config.num_layers * 2 * sequence_length * attention_width
    # Each multiply-add is 2 FLOPs, and the backward pass costs twice the forward.
    return 6.0 * (weights + scores * (0.5 if causal else 1.0))
