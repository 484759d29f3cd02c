"""Bytes that a microbatch's forward pass keeps for its backward pass. TensorFlow-free.

B = rows, T = positions, D = width, A = all heads' width, F = feed-forward width, H = heads,
V = vocabulary, t = tensor parallel degree.
"""

from tfbig.config import Config
from tfbig.recomputation_mode import group_size
from tfbig.token_chunks import chunk_tokens
from tfbig.variables import part_of

COMPUTE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# From this length on --attention=auto takes the blockwise form where no trial chooses one
# (tfbig/model/blockwise_attention.py measures it; a test holds the two numbers equal).
BLOCKWISE_FROM = 1024


def is_blockwise(config: Config) -> bool:
    """Returns whether attention keeps nothing of size T x T."""
    attention = config.parallel.attention
    if attention == "auto":
        return config.data.sequence_length >= BLOCKWISE_FROM
    return attention.startswith("blockwise")


def block_bytes(config: Config, rows: int, recompute: str = "none") -> float:
    """Returns the bytes a block keeps of a microbatch between forward and backward.

    Args:
      config: of the run.
      rows: sequences of a microbatch.
      recompute: "none"; "attention": the attention weights are made again; "block": the block is,
        from its input; "group_N": N blocks are, from the first one's input.
    """
    group = group_size(recompute)
    if group:
        return input_bytes(config, rows) / group
    return whole_block_bytes(config, rows, keeps_weights=recompute == "none")


def input_bytes(config: Config, rows: int) -> float:
    """Returns the bytes of a hidden state as it enters a block on one rank."""
    element = COMPUTE_BYTES[config.parallel.precision]
    shared = config.parallel.tensor_parallel_degree if config.parallel.sequence_parallel else 1
    return rows * config.data.sequence_length * config.model.embed_dim * element / shared


def whole_block_bytes(config: Config, rows: int, keeps_weights: bool = True) -> float:
    """Returns the bytes a block keeps of a microbatch where only attention may be recomputed.

    Counted in the graph that TensorFlow makes of our block, dropout off. Outside the shared
    sublayers: 2 D for each position in float32 by the two layer norms. Inside: their outputs 2 D;
    queries, keys, values and attention's output 5 A; F for the activation's output and, but for
    relu, its input; and of attention, where it isn't blockwise, the weights H T in float32, and
    once more where they are multiplied in a narrower dtype; blockwise attention keeps a float32
    number a position and head.

    Args:
      config: of the run.
      rows: sequences of a microbatch.
      keeps_weights: whether attention's weights are kept.
    """
    model, length = config.model, config.data.sequence_length
    element = COMPUTE_BYTES[config.parallel.precision]
    tensor = config.parallel.tensor_parallel_degree
    attention = model.num_heads * model.attention_head_dim
    outside = 4.0 * model.embed_dim * 2
    if config.parallel.sequence_parallel:
        outside /= tensor
    wide = 1 if model.activation == "relu" else 2
    inside = 2 * model.embed_dim + (5 * attention + wide * model.hidden_dim) / tensor
    weights = model.num_heads * 4.0
    if keeps_weights and not is_blockwise(config):
        weights = model.num_heads * length * (4 + (element if element < 4 else 0))
    return rows * length * (outside + inside * element + weights / tensor)


def head_bytes(config: Config, rows: int) -> float:
    """Returns the bytes that head and loss keep of a microbatch in flight.

    These are logits in the compute dtype where they are one chunk, else five numbers a token, of
    which logits are made again (tfbig/model/shared_loss.py).
    """
    tokens = rows * config.data.sequence_length
    own = own_vocabulary(config)
    if tokens > chunk_tokens(own):
        return 4.0 * 5 * tokens
    return COMPUTE_BYTES[config.parallel.precision] * float(tokens) * own


def own_vocabulary(config: Config) -> int:
    """Returns the entries of the vocabulary that one rank of a tensor group has."""
    return part_of(config.model.vocab_size, config.parallel.tensor_parallel_degree, 0)[1]
