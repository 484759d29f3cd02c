"""FLOPs of a step by each convention in use. TensorFlow-free."""

import itertools
import math

from tfbig.config import Config, count_parameters, flops_per_token

# Training-optimal tokens by parameters: Hoffmann et al., arXiv 2203.15556, table 3.
_CHINCHILLA = (
    (400e6, 8.0e9),
    (1e9, 20.2e9),
    (10e9, 205.1e9),
    (67e9, 1.5e12),
    (175e9, 3.7e12),
    (280e9, 5.9e12),
    (520e9, 11.0e12),
    (1e12, 21.2e12),
)


def tokens_per_step(config: Config) -> int:
    """Returns the tokens of a global batch."""
    return config.run.global_batch * config.data.sequence_length


def conventions(config: Config) -> dict[str, float]:
    """Returns model FLOPs of a step by convention.

    "palm": products of every weight and the whole attention square (arXiv 2204.02311, appendix B),
    which MFU is printed by; "causal": only the visible half of the square; "six_n": 6 x parameters
    x tokens (arXiv 2001.08361); "megatron": 72 B s L h^2 (1 + s/6h + V/12Lh), which needs F = 4 h,
    and "megatron_recompute" its 96 B s L h^2 (1 + s/6h + V/16Lh), hardware FLOPs under full
    recomputation (arXiv 2104.04473, appendix).
    """
    tokens, length = tokens_per_step(config), config.data.sequence_length
    model = config.model
    width, layers = model.embed_dim, model.num_layers
    base = tokens * layers * width**2
    square = length / (6 * width)
    return {
        "palm": tokens * flops_per_token(model, length),
        "causal": tokens * flops_per_token(model, length, causal=True),
        "six_n": 6.0 * tokens * count_parameters(model),
        "megatron": 72.0 * base * (1 + square + model.vocab_size / (12 * layers * width)),
        "megatron_recompute": 96.0 * base * (1 + square + model.vocab_size / (16 * layers * width)),
    }


def chinchilla_tokens(parameters: float) -> float:
    """Returns the tokens that a model of so many parameters should be trained on.

    Between the table's rows tokens follow a power of the parameters; beyond them 20 a parameter.

    >>> round(chinchilla_tokens(67e9) / 1e9)
    1500
    """
    if not _CHINCHILLA[0][0] <= parameters <= _CHINCHILLA[-1][0]:
        return 20.2 * parameters
    for (low, low_tokens), (high, high_tokens) in itertools.pairwise(_CHINCHILLA):
        if parameters <= high:
            share = math.log(parameters / low) / math.log(high / low)
            return low_tokens * (high_tokens / low_tokens) ** share
    raise AssertionError(parameters)
