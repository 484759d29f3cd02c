"""MFU counts the model's products, HFU what --activation_checkpointing makes again besides."""

import pytest

from tfbig.config import Config, replace_fields
from tfbig.metrics import Throughput


def throughput(mode: str, peak: float = 1e12) -> Throughput:
    shape = {"embed_dim": 64, "num_heads": 4, "num_layers": 3, "vocab_size": 1000}
    fields = {"sequence_length": 32, "global_batch": 8, "activation_checkpointing": mode}
    return Throughput.of(replace_fields(Config(), shape | fields), peak)


@pytest.mark.parametrize(
    ("mode", "again"),
    [
        ("none", 0),
        # Two products of T x head_dim a head make scores and outputs; the scores are the first.
        ("attention", 3 * 2 * 32 * 64),
        # Queries, keys, values and output, both products of the square, both feed-forward ones.
        ("block", 3 * 2 * (4 * 64**2 + 2 * 32 * 64 + 8 * 64**2)),
        ("group_2", 3 * 2 * (4 * 64**2 + 2 * 32 * 64 + 8 * 64**2)),
    ],
)
def test_hfu_counts_recomputation(mode, again):
    rates = throughput(mode)
    assert rates.model_flops_utilisation(0.5) == throughput("none").model_flops_utilisation(0.5)
    more = rates.hardware_flops_utilisation(0.5) - rates.model_flops_utilisation(0.5)
    assert more == pytest.approx(8 * 32 * again / 0.5 / 1e12)


def test_without_a_known_peak_there_is_neither():
    rates = throughput("block", peak=0.0)
    assert rates.model_flops_utilisation(0.5) is None
    assert rates.hardware_flops_utilisation(0.5) is None
