"""Evaluation by source and with overlapping windows, against sums over single labels."""

import math

import numpy as np
import pytest

from data_pipeline.dataset import TokenData
from data_pipeline.sliding import SlidingWindows
from tests.conftest import SMALL_LENGTH
from tfbig import evaluate, train
from tfbig.command_config import EvaluateConfig
from tfbig.errors import UserError
from tfbig.saved_run import SavedRun


@pytest.fixture(scope="module")
def trained(tmp_path_factory, small_flags) -> str:
    folder = str(tmp_path_factory.mktemp("evaluated") / "run")
    flags = ["--steps=3", "--eval_every=0", "--tensorboard=false", f"--run_dir={folder}"]
    assert train._body([*small_flags, *flags, "--max_length=48"]) == 0
    return folder


def streams(data: TokenData) -> list[tuple[str, np.ndarray]]:
    """Returns (source, joined tokens) of each validation shard."""
    found, first = [], 0
    for shard in data.contents["splits"]["validation"]["shards"]:
        tokens = data.rows_in_order("validation", first + np.arange(shard["rows"]))["tokens"]
        found.append((shard["source"], np.concatenate([tokens[:, :-1].ravel(), tokens[-1, -1:]])))
        first += shard["rows"]
    return found


@pytest.mark.parametrize("window, stride", [(32, 8), (48, 5), (32, 32), (7, 1)])
def test_every_label_counts_once_after_what_precedes_it(small_data, window, stride):
    data = TokenData.open(small_data)
    windows = SlidingWindows(data, "validation", window, stride)
    seen = {source: [] for source, _ in streams(data)}
    sources = list(windows.sources(6))
    parts = [list(windows.batches(6, rank, 2)) for rank in (0, 1)]
    for number, halves in enumerate(zip(*parts, strict=True)):
        batch = {name: np.concatenate([half[name] for half in halves]) for name in halves[0]}
        assert batch["tokens"].shape == (6, window + 1)
        for tokens, mask, source, index in zip(
            batch["tokens"], batch["loss_mask"], sources[number], batch["sample_index"], strict=True
        ):
            name = data.sources[source]
            counted = np.flatnonzero(mask)
            if len(counted) and seen[name]:
                assert counted[0] >= window - stride, "too little precedes it"
            seen[name] += tokens[1:][counted].tolist()
            assert index < len(windows) or not len(counted)
    for source, stream in streams(data):
        assert seen[source] == stream[1:].tolist()


def test_sources_add_up_and_windows_equal_single_predictions(trained, small_data):
    from tfbig.model.gpt import GPT

    saved, data = SavedRun.open(trained), TokenData.open(small_data)
    model = GPT.from_config(saved.config.model, initial_values=False)
    for path, variable in model.canonical_variables().items():
        variable.assign(saved.reader.read(path))

    def loss_of(window: int, stride: int) -> dict[str, float]:
        """Bits per byte by source, of windows cut here."""
        found = {}
        for source, stream in streams(data):
            cut, counted = [], 0
            while counted < len(stream) - 1:
                stop = min(window if not counted else counted + stride, len(stream) - 1)
                cut.append((max(0, stop - window), counted, stop))
                counted = stop
            inputs = np.zeros((len(cut), window), np.int32)
            for row, (start, _, stop) in enumerate(cut):
                inputs[row, : stop - start] = stream[start:stop]
            logits = model(inputs).numpy().astype(np.float64)
            logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
            total = 0.0
            for row, (start, counted, stop) in enumerate(cut):
                for place in range(counted, stop):
                    total -= logits[row, place - start, stream[place + 1]]
            found[source] = total / math.log(2) / data.num_bytes("validation", source)
        return found

    stored = evaluate.run(EvaluateConfig(run=trained, eval_batch=64), {})
    sliding = evaluate.run(EvaluateConfig(run=trained, eval_batch=64, window=48, stride=40), {})
    for measures, expected in (
        (stored, loss_of(SMALL_LENGTH, SMALL_LENGTH)),
        (sliding, loss_of(48, 40)),
    ):
        by_source = measures["sources"]
        assert by_source.keys() == expected.keys() == {"even", "odd"}
        for source, bits in expected.items():
            assert by_source[source]["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
        assert measures["num_tokens"] == sum(m["num_tokens"] for m in by_source.values())
    assert stored["num_tokens"] == sliding["num_tokens"]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"stride": 40}, "--stride=40 must lie between 1 and the window of 32"),
        ({"stride": 2, "window": 99}, "longer than the model's 48 positions"),
        ({"window": 16}, "--window needs --stride"),
    ],
)
def test_windows_that_cannot_be(trained, options, words):
    with pytest.raises(UserError) as error:
        evaluate.run(EvaluateConfig(run=trained, **options), {})
    assert words in str(error.value)
