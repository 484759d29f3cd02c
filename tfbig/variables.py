"""The model's variables as one table: path, shape, initial value, decay, sharded dim. TF-free.

A canonical path names a variable by what it is and the global index of its block, whatever stage,
process or Keras build holds it: `transformer_blocks/17/att/qkv/kernel`.
"""

import fnmatch
import functools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from tfbig.config import Config, ModelConfig, count_parameters

_FLOAT32_BYTES = 4
InitialValue = Literal["normal", "residual", "zeros", "ones"]


class VariableRule(NamedTuple):
    """What holds for all variables whose path matches a pattern."""

    initial_value: InitialValue
    decayed: bool
    shard_dim: int | None  # the dim that tensor parallelism splits; None: replicated
    # Replicated, but each device of a tensor group sees only its own share of the gradient.
    partial_gradient: bool = False


class VariableSpec(NamedTuple):
    """One variable of the full model; shapes are the model's, never a layout's."""

    path: str
    shape: tuple[int, ...]
    rule: VariableRule

    @property
    def num_elements(self) -> int:
        """Elements of the full variable."""
        return math.prod(self.shape)


# Pattern -> rule. Every variable matches exactly one row (variable_rule asserts it). Heads, the
# feed-forward width and the vocabulary are what Megatron-LM splits (arXiv 1909.08053, section 3).
VARIABLE_RULES: dict[str, VariableRule] = {
    "embedding_layer/token_emb/embeddings": VariableRule("normal", True, 0),
    "embedding_layer/pos_emb/embeddings": VariableRule("normal", False, None),
    "transformer_blocks/*/att/qkv/kernel": VariableRule("normal", True, 2),
    "transformer_blocks/*/att/qkv/bias": VariableRule("zeros", False, 1),
    "transformer_blocks/*/att/out/kernel": VariableRule("residual", True, 0),
    "transformer_blocks/*/att/out/bias": VariableRule("zeros", False, None),
    "transformer_blocks/*/ffn/up/kernel": VariableRule("normal", True, 1),
    "transformer_blocks/*/ffn/up/bias": VariableRule("zeros", False, 0),
    "transformer_blocks/*/ffn/down/kernel": VariableRule("residual", True, 0),
    "transformer_blocks/*/ffn/down/bias": VariableRule("zeros", False, None),
    "transformer_blocks/*/layernorm?/gamma": VariableRule("ones", False, None),
    "transformer_blocks/*/layernorm?/beta": VariableRule("zeros", False, None),
    "transformer_blocks/*/att/qkv/lora_a": VariableRule("normal", True, None, True),
    "transformer_blocks/*/att/qkv/lora_b": VariableRule("zeros", True, 2),
    "transformer_blocks/*/att/out/lora_a": VariableRule("normal", True, 0),
    "transformer_blocks/*/att/out/lora_b": VariableRule("zeros", True, None, True),
    "transformer_blocks/*/ffn/up/lora_a": VariableRule("normal", True, None, True),
    "transformer_blocks/*/ffn/up/lora_b": VariableRule("zeros", True, 1),
    "transformer_blocks/*/ffn/down/lora_a": VariableRule("normal", True, 0),
    "transformer_blocks/*/ffn/down/lora_b": VariableRule("zeros", True, None, True),
    "final_norm/gamma": VariableRule("ones", False, None),
    "final_norm/beta": VariableRule("zeros", False, None),
    "dense/kernel": VariableRule("normal", True, 1),
    "dense/bias": VariableRule("zeros", False, 0),
}


@functools.lru_cache(maxsize=1 << 16)
def variable_rule(path: str) -> VariableRule:
    """Returns the one rule that `path` matches.

    >>> variable_rule("transformer_blocks/3/att/qkv/kernel").shard_dim
    2
    """
    rows = [rule for pattern, rule in VARIABLE_RULES.items() if fnmatch.fnmatchcase(path, pattern)]
    assert len(rows) == 1, f"{path} matches {len(rows)} rows of VARIABLE_RULES"
    return rows[0]


def is_adapter(path: str) -> bool:
    """Returns whether a variable is one of a LoRA adapter's two."""
    return path.endswith(("/lora_a", "/lora_b"))


def is_trained(path: str, config: ModelConfig, freeze: Sequence[str]) -> bool:
    """Returns whether a run changes a variable; others have no gradient and no slots.

    Args:
      path: canonical.
      config: the model; with adapters only they are trained.
      freeze: paths, beginnings of paths or patterns of what is not trained.

    >>> is_trained("transformer_blocks/0/ffn/up/bias", ModelConfig(), ["transformer_blocks/0"])
    False
    """
    if config.lora_rank and not is_adapter(path):
        return False
    return not any(
        fnmatch.fnmatchcase(path, pattern) or path.startswith(pattern.rstrip("/") + "/")
        for pattern in freeze
    )


def is_narrow(path: str) -> bool:
    """Returns whether layers compute with a weight in the compute dtype.

    Kernels, biases and adapters; embedding tables and norms are float32 in any case.

    >>> is_narrow("transformer_blocks/3/ffn/up/kernel"), is_narrow("final_norm/gamma")
    (True, False)
    """
    return path.endswith(("/kernel", "/bias")) or is_adapter(path)


# Where the devices don't divide the vocabulary, each one's part is a multiple of this.
VOCABULARY_MULTIPLE = 128


def part_of(length: int, num_parts: int, index: int) -> tuple[int, int]:
    """Returns (start, length) of one part of a sharded dim, padding included.

    Args:
      length: of the whole dim; only a vocabulary may be indivisible.
      num_parts: devices that share it.
      index: of the part.

    >>> part_of(64, 2, 1), part_of(200, 2, 1)
    ((32, 32), (128, 128))
    """
    own = length // num_parts
    if length % num_parts:
        own = -(-length // (num_parts * VOCABULARY_MULTIPLE)) * VOCABULARY_MULTIPLE
    return index * own, own


def valid_part_of(length: int, num_parts: int, index: int) -> tuple[int, int]:
    """Returns (start, length) of one part of a sharded dim without padding.

    >>> valid_part_of(200, 2, 1), valid_part_of(61, 2, 1)
    ((128, 72), (61, 0))
    """
    start, own = part_of(length, num_parts, index)
    return min(start, length), max(0, min(own, length - start))


def num_trained_parameters(config: ModelConfig, freeze: Sequence[str] = ()) -> int:
    """Returns how many of the model's parameters a run changes.

    Args:
      config: the model.
      freeze: as for `is_trained`.
    """
    return sum(
        spec.num_elements
        for spec in variable_specs(config)
        if is_trained(spec.path, config, freeze)
    )


def checkpoint_bytes(config: Config) -> int:
    """Returns the bytes of a run's checkpoint: weights, AdamW's two slots, moving averages.

    >>> checkpoint_bytes(Config()) == 3 * 4 * count_parameters(Config().model)
    True
    """
    optimizer = config.optimizer
    copies = 2 * (optimizer.optimizer == "adamw") + (optimizer.ema_decay > 0)
    weights = trained = count_parameters(config.model)
    if config.model.lora_rank or optimizer.freeze:
        trained = num_trained_parameters(config.model, optimizer.freeze)
    return _FLOAT32_BYTES * (weights + copies * trained)


def _block_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    width, hidden = config.embed_dim, config.hidden_dim
    heads, head_dim = config.num_heads, config.attention_head_dim
    rank = config.lora_rank
    adapters = {
        "att/qkv/lora_a": (width, rank),
        "att/qkv/lora_b": (rank, 3, heads, head_dim),
        "att/out/lora_a": (heads, head_dim, rank),
        "att/out/lora_b": (rank, width),
        "ffn/up/lora_a": (width, rank),
        "ffn/up/lora_b": (rank, hidden),
        "ffn/down/lora_a": (hidden, rank),
        "ffn/down/lora_b": (rank, width),
    }
    return {
        **(adapters if rank else {}),
        "layernorm1/gamma": (width,),
        "layernorm1/beta": (width,),
        "att/qkv/kernel": (width, 3, heads, head_dim),
        "att/qkv/bias": (3, heads, head_dim),
        "att/out/kernel": (heads, head_dim, width),
        "att/out/bias": (width,),
        "layernorm2/gamma": (width,),
        "layernorm2/beta": (width,),
        "ffn/up/kernel": (width, hidden),
        "ffn/up/bias": (hidden,),
        "ffn/down/kernel": (hidden, width),
        "ffn/down/bias": (width,),
    }


def variable_specs(config: ModelConfig) -> list[VariableSpec]:
    """Returns the full model's trainable variables, in order of the forward pass.

    >>> sum(spec.num_elements for spec in variable_specs(ModelConfig(vocab_size=50257,
    ...     max_length=1024, embed_dim=768, num_layers=12, num_heads=12)))
    124439808
    """
    width = config.embed_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embedding_layer/token_emb/embeddings": (config.vocab_size, width),
    }
    if config.position_embedding == "learned":
        shapes["embedding_layer/pos_emb/embeddings"] = (config.max_length, width)
    for index in range(config.num_layers):
        for suffix, shape in _block_shapes(config).items():
            shapes[f"transformer_blocks/{index}/{suffix}"] = shape
    if config.final_norm:
        shapes |= {"final_norm/gamma": (width,), "final_norm/beta": (width,)}
    if not config.tied_head:
        shapes["dense/kernel"] = (width, config.vocab_size)
    if config.head_bias:
        shapes["dense/bias"] = (config.vocab_size,)
    return [VariableSpec(path, shape, variable_rule(path)) for path, shape in shapes.items()]
