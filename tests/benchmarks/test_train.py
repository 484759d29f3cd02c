"""The bars of benchmarks/train.py, from made-up measurements, and what a side answers."""

import sys

from benchmarks.train import QUICK_ROWS, ROWS, Result, Side, bar, model_of, row_bars
from tfbig.config import flops_per_token

ROW = ROWS[2]  # the one whose memory counts
TOKENS = ROW.shape.rows * ROW.shape.length


def bars(**rates: float) -> list[list[str]]:
    """Returns the bars, cut up, of sides that train so many tokens a second."""
    results = {}
    for name, rate in rates.items():
        peak = 2 * 10**9 if name.startswith("tfbig") else 4 * 10**9
        results[name] = Result(name, [TOKENS / rate] * 3, [1.0], peak=peak)
    per_token = flops_per_token(model_of(ROW.shape), ROW.shape.length)
    results["matmul"] = Result("matmul", flops=[200.0 * per_token] * 3)
    results["blog"] = Result("blog", skipped="no answer in 300 s")
    return [line.split(" | ") for line in row_bars(ROW, "fp32", results)]


def test_the_better_of_ours_meets_the_best_peer():
    speed, share, memory = bars(tfbig=90, tfbig_compiled=190, keras_hub=100, hugging_face=160)
    assert speed[0].endswith("best peer, hugging_face")
    assert speed[1:] == [">= 1.1", "1.19", "yes"]
    assert share[1:] == [">= 0.92", "0.95", "yes"]
    assert memory[1:] == ["<= 0.6", "0.50", "yes"]


def test_a_bar_that_is_not_reached_says_no():
    speed, share, _ = bars(tfbig=90, keras_hub=100)
    assert speed[-2:] == ["0.90", "no"] and share[-2:] == ["0.45", "no"]


def test_without_peers_bars_are_skipped():
    speed, share, memory = bars(tfbig=190)
    assert speed[-1] == memory[-1] == "skipped" and share[-1] == "yes"


def test_lines_have_four_fields():
    assert len(bar("name", ">=", 1.0, None, "why").split("|")) == 4
    assert len({row.name for row in (*ROWS, *QUICK_ROWS)}) == len(ROWS) + 1


def test_our_side_names_its_device_and_peak():
    shape = QUICK_ROWS[0].shape._replace(num_layers=1, length=32, dtype="float32")
    side = Side(sys.executable, "tfbig", shape)
    try:
        built = side.answer(120)
        assert not isinstance(built, str), built
        assert built["device"]["name"] and built["device"]["peak_source"]
        assert built["device"]["peak_flops"] > 1e9
    finally:
        side.close()
