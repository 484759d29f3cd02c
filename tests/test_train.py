"""The commands as a user runs them: a run's files, resuming, stopping, evaluating, writing."""

import json
import math
import shutil
import sys

import numpy as np
import pytest

from tests.conftest import SMALL_VOCABULARY
from tests.distributed.launch import run
from tfbig import evaluate, generate, train
from tfbig.checkpoint import list_checkpoints
from tfbig.checkpoint_reader import CheckpointReader
from tfbig.command_config import EvaluateConfig, GenerateConfig
from tfbig.data import main as data_main
from tfbig.errors import UserError
from tfbig.run_folder import RunFolder, read_events, read_metrics
from tfbig.run_lock import RunLock
from tfbig.variables import variable_specs

FIELDS = (
    "kind step time consumed_samples loss learning_rate grad_norm loss_scale applied"
    " tokens_per_second step_seconds data_wait_seconds compute_seconds communication_seconds"
    " slowest_rank mfu hfu peak_flops peak_memory_bytes"
).split()


def train_here(*flags: str) -> int:
    return train._body(flags)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, small_flags) -> str:
    folder = str(tmp_path_factory.mktemp("runs") / "first")
    flags = ["--steps=8", "--eval_every=4", "--checkpoint_every=2", "--keep_last=2"]
    assert train_here(*small_flags, f"--run_dir={folder}", *flags) == 0
    return folder


def test_a_run_leaves_what_it_promises(run_dir, small_flags):
    folder = RunFolder(run_dir)
    records = read_metrics(run_dir)
    assert [record["step"] for record in records] == list(range(1, 9))
    for record in records:
        assert set(FIELDS) <= set(record)
        assert record["consumed_samples"] == 6 * record["step"]
        assert record["applied"] and record["step_seconds"] > 0
        assert sum(record["source_num_tokens"]) == record["num_tokens"] == 6 * 32
        assert record["sources"] == ["even", "odd"]
        weighted = np.dot(record["source_loss"], record["source_num_tokens"])
        assert weighted / record["num_tokens"] == pytest.approx(record["loss"], rel=1e-5)
    assert abs(records[0]["loss"] - math.log(SMALL_VOCABULARY)) < 0.1
    assert records[-1]["loss"] < records[0]["loss"] - 0.05
    evaluations = read_metrics(run_dir, "eval")
    assert [record["step"] for record in evaluations] == [4, 8]
    for record in evaluations:
        assert record["perplexity"] == pytest.approx(math.exp(record["loss"]))
        assert 0 <= record["accuracy"] <= 1 and 0 < record["bits_per_byte"] < 9
    events = [event["event"] for event in read_events(run_dir)]
    events = [event for event in events if event != "attention"]  # of a trial, on a GPU
    assert events[:3] == ["start", "compile", "first_step"] and events[-1] == "stop"
    assert {"checkpoint", "evaluation"} <= set(events)
    saved = folder.read_config()
    assert saved["config"]["run"]["steps"] == 8 and "tensorflow-cpu" in saved["versions"]
    assert any(folder.tensorboard_dir.iterdir())
    steps = [info.step for info in list_checkpoints(folder.checkpoints_dir)]
    assert set(steps) >= {6, 8} and len(steps) <= 3  # the last two, and the best


def test_tensorboard_has_every_source_by_name(run_dir):
    import tensorflow as tf

    found = {}
    for path in sorted(RunFolder(run_dir).tensorboard_dir.iterdir()):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                if value.tensor.dtype == tf.float32.as_datatype_enum:  # the others are texts
                    found[value.tag, event.step] = float(tf.make_ndarray(value.tensor))
    for record in read_metrics(run_dir):
        assert found["train/loss", record["step"]] == pytest.approx(record["loss"])
        for number, name in enumerate(record["sources"]):
            loss, tokens = record["source_loss"][number], record["source_num_tokens"][number]
            place = f"source_loss/{name}", record["step"]
            assert found[place] == pytest.approx(loss) if tokens else place not in found
            if tokens:
                assert found[f"source_num_tokens/{name}", record["step"]] == tokens
    assert {"source_loss/even", "source_loss/odd"} <= {tag for tag, _ in found}


def test_a_checkpoint_holds_the_models_variables(run_dir):
    reader = CheckpointReader(list_checkpoints(RunFolder(run_dir).checkpoints_dir)[-1].path)
    reader.verify()
    config = train.config_from({})
    saved = RunFolder(run_dir).read_config()["config"]
    config = train.config_from({**saved["model"]})
    for spec in variable_specs(config.model):
        assert reader.shape(spec.path) == spec.shape and reader.dtype(spec.path) == np.float32
        for slot in ("m", "v"):
            assert reader.shape(f"optimizer/{slot}/{spec.path}") == spec.shape
    assert int(reader.read("optimizer/iterations")) == 8
    assert reader.manifest["consumed_samples"] == 48


# Batches of 2, 2 and 4 samples, then of 6.
BATCH_WARMUP = ["--batch_warmup_start=2", "--batch_warmup_samples=12"]
GROWING = [2, 4, 8, 14, 20, 26, 32]


@pytest.mark.parametrize("more, consumed", [([], range(6, 43, 6)), (BATCH_WARMUP, GROWING)])
def test_stopping_and_going_on_changes_nothing(tmp_path, small_flags, more, consumed):
    """With --deterministic a run resumed twice equals, bit by bit, one that never stopped."""
    flags = [*small_flags, *more, "--deterministic", "--eval_every=0"]
    straight, stopped = str(tmp_path / "straight"), str(tmp_path / "stopped")
    assert train_here(*flags, f"--run_dir={straight}", "--steps=7") == 0
    for steps in (2, 5, 7):
        assert train_here(*flags, f"--run_dir={stopped}", f"--steps={steps}") == 0
    for name in ("loss", "grad_norm", "learning_rate", "consumed_samples"):
        assert [r[name] for r in read_metrics(straight)] == [r[name] for r in read_metrics(stopped)]
    assert [r["consumed_samples"] for r in read_metrics(stopped)] == list(consumed)
    ends = [
        CheckpointReader(list_checkpoints(RunFolder(folder).checkpoints_dir)[-1].path)
        for folder in (straight, stopped)
    ]
    for path in ends[0].paths():
        np.testing.assert_array_equal(ends[0].read(path), ends[1].read(path))
    assert train_here(*flags, f"--run_dir={stopped}", "--steps=7") == 0  # nothing left to do
    assert [r["step"] for r in read_metrics(stopped)] == list(range(1, 8))


def test_what_must_match_on_resume(run_dir, small_flags):
    for flag, words in {
        "--seed=5": "run.seed: the checkpoint has 0, this run 5",
        "--global_batch=12": "run.global_batch: the checkpoint has 6, this run 12",
        "--learning_rate=0.5": "optimizer.learning_rate",
        "--embed_dim=64": "model.embed_dim: the checkpoint has 32, this run 64",
        "--decay_steps=21": "optimizer.decay_steps",
        "--precision=bfloat16": "parallel.precision",
    }.items():
        with pytest.raises(UserError) as error:
            train_here(*small_flags, f"--run_dir={run_dir}", "--steps=9", flag)
        assert words in str(error.value) and "--restart" in str(error.value)
    assert [r["step"] for r in read_metrics(run_dir)] == list(range(1, 9)), "nothing was lost"


def data_command(*arguments):
    with pytest.raises(SystemExit) as ended:
        data_main(arguments)
    return ended.value.code


def test_a_mixture_changes_with_the_runs_next_sample(tmp_path, small_data, small_flags, capsys):
    data = shutil.copytree(small_data, tmp_path / "data")
    run_dir = tmp_path / "run"
    flags = [*small_flags, f"--data={data}", f"--run_dir={run_dir}", "--eval_every=0"]
    assert train_here(*flags, "--steps=2") == 0  # 12 samples
    change = ["mixture", f"--run={run_dir}", "--weights=even=0"]
    before = (data / "manifest.json").read_bytes()
    assert data_command(*change, "--first_sample=11") == 2
    assert "lies in the past: the run has consumed 12 samples" in capsys.readouterr().err
    with RunLock(run_dir):
        assert data_command(*change) == 2
    assert "belongs to another job" in capsys.readouterr().err
    assert (data / "manifest.json").read_bytes() == before
    assert data_command(*change) == 0
    assert "from sample 12:" in capsys.readouterr().out
    assert train_here(*flags, "--steps=4") == 0
    tokens = [record["source_num_tokens"] for record in read_metrics(run_dir)]
    assert all(even > 0 for even, _ in tokens[:2])
    assert tokens[2:] == [[0.0, 6 * 32.0]] * 2
    assert data_command("inspect", f"--run={run_dir}", "--step=3", "--samples=0") == 0
    assert capsys.readouterr().out.count(", odd, 32 labels") == 6


def test_the_data_must_be_the_same_up_to_where_the_run_is(tmp_path, small_data, small_flags):
    data = shutil.copytree(small_data, tmp_path / "data")
    flags = [*small_flags, f"--data={data}", f"--run_dir={tmp_path / 'run'}", "--eval_every=0"]
    assert train_here(*flags, "--steps=2") == 0  # 12 samples
    manifest = json.loads((data / "manifest.json").read_text())
    weights = dict.fromkeys(manifest["sources"], 2.0)

    def rewrite(**changes):
        (data / "manifest.json").write_text(json.dumps({**manifest, **changes}))

    later = {"first_sample": 100, "weights": weights}
    rewrite(mixture=[*manifest["mixture"], later])
    assert train_here(*flags, "--steps=3") == 0  # what begins later is no other data
    for changes, name in (
        ({"mixture": [*manifest["mixture"], {**later, "first_sample": 6}]}, "mixture_sha256"),
        ({"seed": 77}, "manifest_sha256"),
    ):
        rewrite(**changes)
        with pytest.raises(UserError, match=f"data.{name}: the checkpoint has") as error:
            train_here(*flags, "--steps=4")
        assert "\n" not in str(error.value)


def test_restart_renames_and_deletes_nothing(tmp_path, small_flags):
    folder = tmp_path / "run"
    flags = [*small_flags, f"--run_dir={folder}", "--eval_every=0"]
    assert train_here(*flags, "--steps=2") == 0
    assert train_here(*flags, "--steps=1", "--restart", "--seed=9") == 0
    assert len(read_metrics(folder)) == 1 and len(read_metrics(f"{folder}.1")) == 2


def test_init_from_takes_the_weights_alone(tmp_path, run_dir, small_flags):
    checkpoint = list_checkpoints(RunFolder(run_dir).checkpoints_dir)[-1].path
    folder = tmp_path / "run"
    flags = [*small_flags, f"--run_dir={folder}", f"--init_from={checkpoint}", "--learning_rate=0"]
    assert train_here(*flags, "--steps=1", "--weight_decay=0", "--eval_every=0") == 0
    new = CheckpointReader(list_checkpoints(RunFolder(folder).checkpoints_dir)[-1].path)
    old = CheckpointReader(checkpoint)
    path = "transformer_blocks/0/att/qkv/kernel"
    np.testing.assert_array_equal(new.read(path), old.read(path))
    assert int(new.read("optimizer/iterations")) == 1


def test_a_damaged_checkpoint_is_passed_over(tmp_path, small_flags, capsys):
    folder = tmp_path / "run"
    flags = [*small_flags, f"--run_dir={folder}", "--eval_every=0", "--checkpoint_every=2"]
    assert train_here(*flags, "--steps=4") == 0
    newest = list_checkpoints(folder / "checkpoints")[-1].path
    (part,) = newest.glob("*.safetensors")
    data = bytearray(part.read_bytes())
    data[-5] ^= 1
    part.write_bytes(data)
    assert train_here(*flags, "--steps=5") == 0
    shown = capsys.readouterr().out
    assert "step 4 is damaged" in shown and "step      2  going on from its checkpoint" in shown
    assert "step      3/5" in shown and "s with tracing" in shown  # no rate of a first step
    assert read_events(folder)[-1]["event"] == "stop"
    starts = [e["step"] for e in read_events(folder) if e["event"] == "start"]
    assert starts == [0, 2]


def test_a_signal_saves_and_leaves_with_143(tmp_path, small_flags):
    folder = tmp_path / "run"
    # The process sends itself SIGTERM when its third step is on record.
    code = (
        "import os, signal, sys\n"
        "from tfbig import train\n"
        "from tfbig.hooks import RecordHook\n"
        "plain = RecordHook.on_step\n"
        "def on_step(self, record):\n"
        "    plain(self, record)\n"
        "    if record['step'] == 3: os.kill(os.getpid(), signal.SIGTERM)\n"
        "RecordHook.on_step = on_step\n"
        "train.main(sys.argv[1:])\n"
    )
    flags = [*small_flags, f"--run_dir={folder}", "--steps=500", "--checkpoint_every=400"]
    done = run([sys.executable, "-c", code, *flags], timeout=120)
    assert done.returncode == 143, done.stdout
    assert "Traceback" not in done.stdout
    assert "the same command goes on from here" in done.stdout
    (info,) = list_checkpoints(folder / "checkpoints")
    assert 4 <= info.step <= 6
    reasons = [(e["event"], e["reason"]) for e in read_events(folder)]
    assert reasons[-1] == ("stop", "signal")
    assert train_here(*flags[:-2], f"--steps={info.step + 1}", "--eval_every=0") == 0


def test_evaluate_equals_the_runs_own_evaluation(run_dir, capsys):
    measures = evaluate.run(EvaluateConfig(run=run_dir, eval_batch=5), {})
    recorded = read_metrics(run_dir, "eval")[-1]
    for name in ("loss", "accuracy", "bits_per_byte", "num_tokens"):
        assert measures[name] == pytest.approx(recorded[name], rel=1e-5)
    assert "bits_per_byte" in capsys.readouterr().out
    with pytest.raises(UserError, match="no samples in a split 'test'"):
        evaluate.run(EvaluateConfig(run=run_dir, split="test"), {})
    with pytest.raises(UserError, match="no checkpoint of step 3"):
        evaluate.run(EvaluateConfig(run=run_dir, checkpoint=3), {})


def test_generate(run_dir):
    def text(**options) -> str:
        return generate.run(GenerateConfig(run=run_dir, max_tokens=40, **options), {})

    greedy = text(prompt="import ", temperature=0.0)
    assert greedy and text(prompt="import ", temperature=0.0) == greedy
    sampled = text(prompt="def ", sampling_seed=1)
    assert text(prompt="def ", sampling_seed=1) == sampled
    assert text(prompt="def ", sampling_seed=2) != sampled
    stop = sampled[5:8]
    stopped = text(prompt="def ", sampling_seed=1, stop=(stop,))
    assert stopped == sampled[: sampled.index(stop)]
    pieces: list[str] = []
    whole = generate.run(
        GenerateConfig(run=run_dir, prompt="é", max_tokens=30), {}, write=pieces.append
    )
    assert "".join(pieces) == "é" + whole
    assert text()  # no prompt: the start of a document
    beams = {"prompt": "import ", "num_beams": 3, "no_repeat_ngram_size": 3}
    found = generate.run(GenerateConfig(run=run_dir, max_tokens=8, **beams), {})
    assert found and found != greedy[: len(found)]
    assert text(prompt="import ", temperature=0.0, repetition_penalty=5.0) != greedy
    with pytest.raises(UserError, match="beam search forgets nothing"):
        text(num_beams=2)
    with pytest.raises(UserError, match="--num_beams=-1"):
        text(num_beams=-1)
    with pytest.raises(UserError, match="--top_p=0"):
        text(top_p=0.0)


BAD = {
    # name: (flags, words of the one line)
    "unknown flag": (["--stepz=3"], "unknown flag --stepz. Did you mean steps?"),
    "unknown preset": (["--preset=gpt2_124"], "Did you mean gpt2_124m"),
    "unknown strategy": (["--strategy=horovd"], "Did you mean horovod?"),
    "heads": (["--num_heads=3"], "does not divide --embed_dim=32"),
    "no data": (["--data=nowhere"], "nowhere"),
    "ids beyond the vocabulary": (["--vocab_size=100"], "beyond --vocab_size=100"),
    "length": (["--sequence_length=16"], "holds samples of 32 tokens, not --sequence_length=16"),
    "microbatches": (["--microbatches=4"], "--global_batch=6 is no multiple of 1 replicas x 4"),
    "degrees": (["--tensor_parallel_degree=2"], "use --strategy=pipeline"),
    "remote run_dir": (["--run_dir=gs://bucket/run"], "not a folder on this machine"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(name, tmp_path, small_flags, capsys):
    flags, words = BAD[name]
    folder = tmp_path / "run"
    with pytest.raises(SystemExit) as stop:
        train.main([*small_flags, f"--run_dir={folder}", "--steps=1", *flags])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and error.startswith("tfbig train: error: ")
    assert not folder.exists()


def test_foreign_and_changed_data(tmp_path, small_data, small_flags):
    import shutil

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "manifest.json").write_text(json.dumps({"name": "something else"}))
    changed = tmp_path / "changed"
    shutil.copytree(small_data, changed)
    tokenizer = json.loads((changed / "tokenizer.json").read_text())
    (changed / "tokenizer.json").write_text(json.dumps(tokenizer))
    for folder, words in {foreign: "foreign", changed: "tokenizer.json has changed"}.items():
        with pytest.raises(UserError) as error:
            train_here(*small_flags, f"--data={folder}", f"--run_dir={tmp_path / 'run'}")
        assert words in str(error.value)


@pytest.mark.parametrize("calls_before", [0, 1], ids=["at the start", "when it is saved"])
def test_no_room_for_a_checkpoint(calls_before, tmp_path, small_flags, monkeypatch):
    import os

    real = os.statvfs
    calls: list[object] = []

    def full(path):
        values = list(real(path))
        calls.append(path)
        if len(calls) > calls_before:
            values[4] = 100  # f_bavail: free blocks
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", full)
    with pytest.raises(UserError, match="no room for a checkpoint"):
        train_here(*small_flags, f"--run_dir={tmp_path / 'run'}", "--steps=1", "--eval_every=0")
    assert len(calls) == calls_before + 1
    # Before a step is made nothing is left behind; after, the run's records are.
    assert (tmp_path / "run").exists() is bool(calls_before)


def test_the_room_that_is_asked_for_is_what_a_checkpoint_takes(run_dir, small_flags):
    from tfbig.config import from_dict
    from tfbig.variables import checkpoint_bytes

    config = from_dict(RunFolder(run_dir).read_config()["config"])
    reader = CheckpointReader(list_checkpoints(RunFolder(run_dir).checkpoints_dir)[-1].path)
    saved = sum(reader.read(path).nbytes for path in reader.paths())
    assert 0 <= saved - checkpoint_bytes(config) <= 64  # the scalars


@pytest.mark.parametrize("flag", ["--init_from=nowhere", "--run_dir=gs://bucket/run"])
def test_no_data_is_prepared_for_a_run_that_cannot_be(flag, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # no --data: the default folder would be made here
    with pytest.raises(UserError):
        train_here(flag)
    assert not list(tmp_path.iterdir())


def test_fewer_gpus_than_local_ranks(monkeypatch):
    import tensorflow as tf

    from tfbig.parallel_config import ParallelConfig
    from trainers.devices import prepare_devices

    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["gpu0"])
    monkeypatch.setattr(tf.config.threading, "set_intra_op_parallelism_threads", lambda n: None)
    monkeypatch.setattr(tf.config.threading, "set_inter_op_parallelism_threads", lambda n: None)
    with pytest.raises(UserError, match="runs 2 processes but has 1 GPUs"):
        prepare_devices(ParallelConfig(), local_rank=1, local_size=2)
