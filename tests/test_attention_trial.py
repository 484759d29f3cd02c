"""The trial at a run's start takes the fastest form that fits, tells all ranks, and is recorded."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tests.conftest import SMALL_VOCABULARY
from tfbig import hardware, train
from tfbig.attention_trial import (
    MAX_SCORES_BYTES,
    Shape,
    candidates,
    choose_attention,
    recorded,
    time_forms,
    tried,
)
from tfbig.config import Config, ModelConfig, replace_fields
from tfbig.model.attention import causal_attention
from tfbig.model.attention_form import FORMS
from tfbig.run_folder import RunFolder, read_events, read_metrics
from trainers.activations import is_blockwise
from trainers.single import SingleTrainer

GPU_BYTES = 1 << 40
SMALL = Shape(rows=2, length=64, heads=2, head_dim=16, dtype="float32")


def small_config(**fields: Any) -> Config:
    model = {"vocab_size": SMALL_VOCABULARY, "max_length": 64, "embed_dim": 32, "num_heads": 2}
    config = Config(model=ModelConfig(**model))
    return replace_fields(config, {"sequence_length": 64, "global_batch": 4, **fields})


def slowed(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """The plain form, made a dozen times over."""
    outputs = [causal_attention(query * (1 + 1e-6 * i), key, value) for i in range(12)]
    return tf.add_n(outputs) / 12


def impossible(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Nothing that XLA can compile."""
    compiled = tf.function(lambda x: x + tf.strings.to_number(tf.strings.as_string(x)))
    return compiled(query) + key + value


class TwoRanks:
    """Two ranks of a run as threads of this process."""

    def __init__(self) -> None:
        self._barrier, self._values = threading.Barrier(2, timeout=120), [0, 0]

    def agree(self, rank: int, value: int, op: str) -> int:
        self._values[rank] = value
        self._barrier.wait()
        result = {"min": min, "max": max}[op](self._values)
        self._barrier.wait()
        return result

    def run(self, action: Callable[["Rank"], Any]) -> list[Any]:
        results: list[Any] = [None, None]

        def on(rank: int) -> None:
            results[rank] = action(Rank(self, rank))

        threads = [threading.Thread(target=on, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


class Rank:
    """What the trial needs of a trainer."""

    size = data_size = num_replicas = 2

    def __init__(self, ranks: TwoRanks, rank: int) -> None:
        self._ranks, self.rank, self.form = ranks, rank, "auto"

    def agree(self, value: int, op: str) -> int:
        return self._ranks.agree(self.rank, value, op)

    def set_attention(self, form: str) -> None:
        self.form = form


@pytest.mark.parametrize("is_reversed", [False, True])
def test_the_faster_form_has_the_shorter_time(is_reversed):
    forms = {"plain": causal_attention, "slowed": slowed}
    if is_reversed:
        forms = dict(reversed(forms.items()))
    seconds, failures = time_forms(forms, dataclasses.replace(SMALL, length=512))
    assert not failures and 2 * seconds["plain"] < seconds["slowed"]


def test_a_form_that_fails_is_left_out_and_named():
    forms = {"impossible": impossible, "plain": causal_attention}
    seconds, failures = time_forms(forms, SMALL, jit_compile=True, repeats=1)
    assert list(seconds) == ["plain"] and list(failures) == ["impossible"]
    assert "Error: " in failures["impossible"] and "\n" not in failures["impossible"]


def test_the_fastest_form_that_fits_is_taken():
    config = small_config()
    for allowed in (set(FORMS), {"blockwise", "plain_xla"}):
        choice = tried(config, SMALL, allowed.__contains__)
        assert set(choice.seconds) == set(FORMS) and min(choice.seconds.values()) > 0
        fastest = min(allowed, key=lambda form: choice.seconds[form])
        assert choice.config.parallel.attention == fastest
        assert choice.reason.startswith(f"{fastest}, by a trial of 2 x 64 positions, 2 heads of 16")
    assert "too large" in choice.reason  # the two others


def test_a_trial_takes_little_memory():
    trainer = SingleTrainer(small_config(global_batch=1 << 20))
    shape = Shape.of(trainer.config, trainer)
    assert shape.rows > 1 and shape.scores_bytes <= MAX_SCORES_BYTES
    assert Shape.of(small_config(microbatches=2), trainer).rows == 2
    long = Shape.of(small_config(sequence_length=65536), trainer)
    assert long.rows == 1
    assert list(candidates(small_config(), long)) == ["blockwise", "blockwise_xla"]
    assert list(candidates(small_config(), SMALL)) == list(FORMS)
    assert list(candidates(small_config(jit_compile=True), SMALL)) == ["plain", "blockwise"]


def test_a_trainer_told_to_try_takes_what_was_chosen():
    trainer = SingleTrainer(small_config(attention_dropout=0.1))
    choice = choose_attention(trainer.config, trainer, GPU_BYTES)
    form = choice.config.parallel.attention
    assert form in FORMS and choice.notes[0].startswith(f"attention: {form}, by a trial of 4 x 64")
    assert trainer.config == choice.config
    assert is_blockwise(choice.config) == form.startswith("blockwise")
    trainer.build()
    attention = trainer.model.transformer_blocks[0].att.form
    assert attention.is_blockwise(64) == is_blockwise(choice.config)


@pytest.mark.parametrize(
    "device_bytes,fields",
    [(0, {}), (GPU_BYTES, {"attention": "plain"}), (GPU_BYTES, {"deterministic": True})],
)
def test_nothing_is_tried_without_need(device_bytes, fields):
    config = small_config(**fields)
    ranks = TwoRanks()
    for choice in ranks.run(lambda rank: choose_attention(config, rank, device_bytes)):
        assert choice.config == config and not choice.notes


def test_all_ranks_take_what_rank_0_found():
    config = small_config(strategy="horovod")
    ranks: list[Rank] = []

    def choose(rank: Rank) -> Any:
        ranks.append(rank)
        return choose_attention(config, rank, GPU_BYTES)

    first, second = TwoRanks().run(choose)
    assert first.config == second.config and first.config != config
    assert {rank.form for rank in ranks} == {first.config.parallel.attention}
    assert first.seconds and not second.notes
    on_one = TwoRanks().run(lambda rank: choose_attention(config, rank, GPU_BYTES * rank.rank))
    assert [choice.config for choice in on_one] == [config, config]


def test_a_run_tells_and_records_the_choice(small_flags, tmp_path, monkeypatch, capsys):
    flags = [*small_flags, f"--run_dir={tmp_path / 'run'}", "--checkpoint_every=2"]
    with monkeypatch.context() as patched:
        patched.setattr(hardware, "gpu_memory_bytes", lambda: GPU_BYTES)
        assert train._body([*flags, "--steps=2"]) == 0
    folder = RunFolder(tmp_path / "run")
    form = folder.read_config()["config"]["parallel"]["attention"]
    assert form in FORMS
    assert f"attention: {form}, by a trial of 6 x 32 positions" in capsys.readouterr().out
    [event] = [event for event in read_events(folder.path) if event["event"] == "attention"]
    assert event["form"] == form and set(event["seconds"]) == set(FORMS)
    config = small_config(run_dir=str(folder.path))
    assert recorded(config).config.parallel.attention == form
    # It goes on where nothing is tried.
    assert train._body([*flags, "--steps=3"]) == 0
    assert [record["step"] for record in read_metrics(folder.path)] == [1, 2, 3]
    assert folder.read_config()["config"]["parallel"]["attention"] == "auto"
