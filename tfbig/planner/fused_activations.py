"""What Megatron-LM's fused kernels keep of a microbatch, for plans of runs that were not ours.

Source: Korthikanti et al. (arXiv 2205.05198), section 4, table 2, with the feed-forward width F
and the heads' width A freed: its 34 is 10 outside the shared sublayers and 24 inside, of which
8 A/D belong to attention and 16 F/(4 D) to the feed-forward layer.

B = rows, T = positions, D = width, A = all heads' width, F = feed-forward width, H = heads,
V = vocabulary, t = tensor parallel degree; elements have 2 bytes, masks 1.
"""

from tfbig.config import Config
from trainers.activations import group_size, is_blockwise

_MASK = 1  # bytes of an element of a dropout mask


def fused_block_bytes(config: Config, rows: int, recompute: str = "none") -> float:
    """Returns the bytes a block keeps of a microbatch between forward and backward.

    Args:
      config: of the run.
      rows: sequences of a microbatch.
      recompute: as in trainers/activations.py.
    """
    parallel, model = config.parallel, config.model
    tensor = parallel.tensor_parallel_degree
    element = 4 if parallel.precision == "float32" else 2
    hidden = rows * config.data.sequence_length * model.embed_dim
    shared = tensor if parallel.sequence_parallel else 1
    group = group_size(recompute)
    if group:
        return element * hidden / shared / group
    attention = model.num_heads * model.attention_head_dim / model.embed_dim
    feed_forward = model.hidden_dim / model.embed_dim
    masks = 2 * _MASK if model.dropout > 0 else 0
    outside = 4 * element + masks
    inside = 4 * element * attention + 2 * element * feed_forward
    weights = 0.0
    if recompute == "none" and not is_blockwise(config):
        per_weight = element + (_MASK + element if model.attention_dropout > 0 else 0)
        weights = per_weight * model.num_heads * config.data.sequence_length / model.embed_dim
    return hidden * (outside / shared + (inside + weights) / tensor)


def fused_embedding_bytes(config: Config, rows: int) -> float:
    """Returns what the embedding keeps of a microbatch: token ids and a dropout mask."""
    tokens = rows * config.data.sequence_length
    parallel = config.parallel
    shared = parallel.tensor_parallel_degree if parallel.sequence_parallel else 1
    mask = _MASK if config.model.embedding_dropout > 0 else 0
    return tokens * (8 + mask * config.model.embed_dim) / shared


def fused_head_bytes(config: Config, rows: int) -> float:
    """Returns what final norm, head and loss keep: 4 T B D (1 + V/D), as the paper counts it."""
    parallel = config.parallel
    tensor, tokens = parallel.tensor_parallel_degree, rows * config.data.sequence_length
    shared = tensor if parallel.sequence_parallel else 1
    return 4.0 * tokens * (config.model.embed_dim / shared + config.model.vocab_size / tensor)
