"""Wrong inputs: each gives one line that names what is wrong and a way out, exit 2, no traceback.

TensorFlow is in the process already, so that a case costs milliseconds; what can't be wrong twice
in one process (engines, devices) is tested where these are.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.error_line import WAY_OUT, line_of
from tfbig import evaluate, generate, prepare, presets, train
from tfbig.checkpoint import list_checkpoints
from tfbig.config import (
    Config,
    count_parameters,
    flops_per_token,
    replace_fields,
)
from tfbig.errors import UserError
from tfbig.parallel_config import ParallelConfig
from tfbig.run_folder import RunFolder
from tfbig.schedule import batch_segments, learning_rate
from tfbig.validation import problems, validate
from tfbig.variables import variable_specs
from trainers import STRATEGIES, check_strategy
from trainers.validate import check_data_parallel_only, check_mesh_fits, derive_microbatch_size

# name: (flags beside a good run's, words of the line)
TRAIN = {
    "flag": (["--stepz=3"], "unknown flag --stepz. Did you mean steps?"),
    "flag of another command": (["--top_p=1"], "unknown flag --top_p"),
    "no number": (["--steps=three"], "--steps=three is no whole number: give e.g. --steps=400."),
    "no whole number": (["--steps=2.5"], "--steps=2.5 is no whole number: give"),
    "no truth value": (
        ["--deterministic=maybe"],
        "--deterministic=maybe is neither true nor false: give --deterministic or --nodetermin",
    ),
    "word without dashes": (["steps=3"], "unexpected argument 'steps=3'"),
    "flag file": (["--flagfile=nowhere.flags"], "Unable to open flagfile: [Errno 2] No such file"),
    "number": (["--dropout=half"], "--dropout=half is no number: give e.g. --dropout=0.0."),
    "flag without a value": (["--steps"], "Missing value for flag"),
    "preset": (["--preset=gpt2_124"], "Did you mean gpt2_124m"),
    "preset in capitals": (["--preset=GPT2_124M"], "Did you mean gpt2_124m"),
    "strategy": (["--strategy=horovd"], "Did you mean horovod?"),
    "optimizer": (["--optimizer=adam"], "--optimizer=adam is not one of adamw, sgd"),
    "schedule": (["--schedule=cosin"], "Did you mean cosine?"),
    "precision": (["--precision=fp16"], "--precision=fp16 is not one of float32, bfloat16"),
    "activation": (["--activation=swish"], "--activation=swish is not one of"),
    "norm order": (["--norm_order=before"], "--norm_order=before is not one of pre, post"),
    "reduction": (["--gradient_reduction=tap"], "Did you mean tape?"),
    "pipeline": (["--pipeline=gpipe"], "--pipeline=gpipe is not one of 1f1b, simple"),
    "heads": (["--num_heads=3"], "--num_heads=3 does not divide --embed_dim=32 (32 = 3 x 10 + 2)"),
    "no heads": (["--num_heads=0"], "--num_heads=0 must be at least 1"),
    "no layers": (["--num_layers=0"], "--num_layers=0 must be at least 1"),
    "no width": (["--embed_dim=-8"], "--embed_dim=-8 must be at least 1"),
    "no vocabulary": (["--vocab_size=0"], "--vocab_size=0 must be at least 1"),
    "dropout": (["--dropout=1"], "--dropout=1.0 must be at least 0 and below 1, in fl"),
    "attention dropout": (["--attention_dropout=-0.1"], "--attention_dropout=-0.1"),
    "norm epsilon": (["--norm_epsilon=0"], "--norm_epsilon=0.0 must be above 0"),
    "initial spread": (["--init_std=-1"], "--init_std=-1.0 must be at least 0"),
    "rotary share": (["--rotary_fraction=1.5"], "--rotary_fraction=1.5 must be above 0"),
    "rotary of nothing": (
        ["--position_embedding=rotary", "--rotary_fraction=0.05"],
        "--rotary_fraction=0.05 turns 0 of the 16 dims of a head",
    ),
    "parallel after norm": (["--parallel_residual", "--norm_order=post"], "--norm_order=pre"),
    "bias of a tied head": (["--head_bias"], "--head_bias needs an untied head: add --notied_head"),
    "rate below 0": (["--learning_rate=-1"], "--learning_rate=-1.0 must be at least 0"),
    "rate is no number": (["--learning_rate=nan"], "--learning_rate=nan must be at least 0"),
    "rate without end": (["--learning_rate=inf"], "--learning_rate=inf must be at least 0 and fin"),
    "beta": (["--beta1=1"], "--beta1=1.0 must be at least 0 and below 1"),
    "average's decay": (["--ema_decay=1"], "--ema_decay=1.0 must be at least 0 and below 1"),
    "epsilon": (["--epsilon=0"], "--epsilon=0.0 must be above 0"),
    "decay": (["--weight_decay=-0.1"], "--weight_decay=-0.1 must be at least 0"),
    "clipping": (["--clip_norm=-1"], "--clip_norm=-1.0 must be at least 0"),
    "floor": (["--learning_rate_floor=1.5"], "--learning_rate_floor=1.5 is a fraction of the peak"),
    "warm-up": (["--warmup_steps=90"], "--decay_steps=20 ends before --warmup_steps=90"),
    "loss scale": (["--initial_loss_scale=0"], "--initial_loss_scale=0.0 must lie between"),
    "steps": (["--steps=0"], "--steps=0 must be at least 1"),
    "batch": (["--global_batch=0"], "--global_batch=0 must be at least 1"),
    "growing batch": (
        ["--batch_warmup_start=4", "--batch_warmup_samples=9"],
        "--batch_warmup_start=4 does not divide --global_batch=6 (6 = 4 x 1 + 2)",
    ),
    "half of a growing batch": (["--batch_warmup_start=3"], "--batch_warmup_samples go together"),
    "growing batch of microbatches": (
        ["--batch_warmup_start=1", "--batch_warmup_samples=9", "--microbatches=2"],
        "--global_batch=1 is no multiple of 1 replicas x 2 microbatches",
    ),
    "seed": (["--seed=-1"], "--seed=-1 must lie between"),
    "kept checkpoints": (["--keep_last=0"], "--keep_last=0 must be at least 1"),
    "microbatches": (["--microbatches=4"], "--global_batch=6 is no multiple of 1 replicas x 4"),
    "microbatches of a verified run": (
        ["--verify", "--microbatches=4"],
        "--global_batch=6 is no multiple of 1 replicas x 4",
    ),
    "data of a verified run": (["--verify", "--data=nowhere"], "there is no data folder nowhere"),
    "heads of a verified run": (
        "--verify --strategy=pipeline --tensor_parallel_degree=2 --num_heads=1".split(),
        "--tensor_parallel_degree=2 does not divide --num_heads=1",
    ),
    "no microbatches": (["--microbatches=0"], "--microbatches=0 must be at least 1"),
    "tensor degree": (["--tensor_parallel_degree=2"], "use --strategy=pipeline"),
    "pipeline degree": (["--pipeline_parallel_degree=2"], "use --strategy=pipeline"),
    "devices of one": (["--num_devices=2"], "--num_devices=2: a process of --strategy=single"),
    "threads": (["--num_threads=-1"], "--num_threads=-1 must be at least 0"),
    "length": (["--sequence_length=16"], "holds samples of 32 tokens, not --sequence_length=16"),
    "length beyond positions": (["--max_length=16"], "--sequence_length=32 is longer than the"),
    "no length": (["--sequence_length=0"], "--sequence_length=0: a sample feeds at least 1 token"),
    "vocabulary of the data": (["--vocab_size=100"], "beyond --vocab_size=100"),
    "no data": (["--data=nowhere"], "there is no data folder nowhere"),
    "remote run folder": (["--run_dir=gs://bucket/run"], "not a folder on this machine"),
    "no initial weights": (["--init_from=nowhere"], "nowhere"),
    "several devices of a worker": (
        ["--strategy=multi_worker", "--num_devices=2"],
        "gives each process of --strategy=multi_worker one device",
    ),
}

_WORKERS = {"worker": ["127.0.0.1:2222", "127.0.0.1:2223"]}
CLUSTERS = {
    "no JSON": ("{worker", "is no JSON"),
    "no cluster": ("{}", "has no 'cluster'"),
    "no task": ({"cluster": _WORKERS}, "has no 'task'"),
    "index": ({"cluster": _WORKERS, "task": {"type": "worker", "index": 2}}, "index 2, but 2 of"),
    "address": (
        {"cluster": {"worker": ["here"]}, "task": {"type": "worker", "index": 0}},
        "names 'here', which is no host:port",
    ),
    "repeated address": (
        {"cluster": {"worker": ["a:1", "a:1"]}, "task": {"type": "worker", "index": 0}},
        "names a:1 twice",
    ),
    "parameter server": (
        {"cluster": {**_WORKERS, "ps": ["c:1"]}, "task": {"type": "ps", "index": 0}},
        "names 'ps': only 'chief' and 'worker' train",
    ),
}


@pytest.mark.parametrize("name", TRAIN)
def test_wrong_flags_of_train(name, tmp_path, small_flags, capsys, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    flags, words = TRAIN[name]
    folder = tmp_path / "run"
    arguments = [*small_flags, f"--run_dir={folder}", "--steps=1", *flags]
    assert words in line_of(train.main, arguments, capsys, "train")
    assert not list(tmp_path.glob("run*")), "a half-made run folder"


def test_more_devices_than_this_process_has():
    import tensorflow as tf

    from trainers.devices import local_devices

    count = len(tf.config.list_logical_devices("GPU")) or len(tf.config.list_logical_devices("CPU"))
    with pytest.raises(UserError, match=f"--num_devices=500: .* pass --num_devices={count}"):
        local_devices(ParallelConfig(num_devices=500))
    assert len(local_devices(ParallelConfig(num_devices=count))) == count


@pytest.mark.parametrize("name", CLUSTERS)
def test_wrong_clusters(name, tmp_path, small_flags, capsys, monkeypatch):
    value, words = CLUSTERS[name]
    monkeypatch.setenv("TF_CONFIG", value if isinstance(value, str) else json.dumps(value))
    folder = tmp_path / "run"
    arguments = [*small_flags, f"--run_dir={folder}", "--strategy=multi_worker"]
    monkeypatch.setattr("tfbig.command._OTHER_RANK_PATIENCE", 0.0)
    line = line_of(train.main, arguments, capsys, "train")
    assert "TF_CONFIG" in line and words in line and "It should look like" in line
    assert not folder.exists()


@pytest.fixture(scope="module")
def good_run(tmp_path_factory, small_flags) -> str:
    folder = str(tmp_path_factory.mktemp("errors") / "run")
    flags = [*small_flags, f"--run_dir={folder}", "--steps=2", "--eval_every=0"]
    assert train._body(flags) == 0
    return folder


def _cut_shard(data: Path) -> None:
    shard = next(path for path in sorted(data.rglob("*tfrecord*")) if path.stat().st_size > 9)
    shard.write_bytes(shard.read_bytes()[:-8])


def _change_manifest(**values: object) -> Callable[[Path], None]:
    def change(data: Path) -> None:
        path = data / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


DATA = {
    "no manifest": (lambda data: (data / "manifest.json").unlink(), "has no manifest.json"),
    "manifest cut": (
        lambda data: (data / "manifest.json").write_text("{"),
        "manifest.json cannot be read",
    ),
    "foreign manifest": (_change_manifest(format="other"), "is not a data folder"),
    "newer format": (_change_manifest(format_version=99), "is of data format 99"),
    "shard cut": (_cut_shard, "it is cut or changed"),
    "no tokenizer": (lambda data: (data / "tokenizer.json").unlink(), "has no tokenizer.json"),
    "other tokenizer": (
        lambda data: (data / "tokenizer.json").write_text("{}"),
        "tokenizer.json has changed",
    ),
}


@pytest.mark.parametrize("name", DATA)
def test_damaged_data(name, tmp_path, small_data, small_flags, capsys):
    damage, words = DATA[name]
    data, folder = tmp_path / "data", tmp_path / "run"
    shutil.copytree(small_data, data)
    damage(data)
    arguments = [*small_flags, f"--data={data}", f"--run_dir={folder}"]
    line = line_of(train.main, arguments, capsys, "train")
    assert words in line and str(data) in line
    assert not folder.exists()


def test_run_folders_that_cannot_be(tmp_path, small_flags, capsys):
    file = tmp_path / "file"
    file.write_text("in the way")
    for folder in (file, file / "run"):
        line = line_of(train.main, [*small_flags, f"--run_dir={folder}"], capsys, "train")
        assert "choose another run_dir" in line
    assert file.read_text() == "in the way"


def test_initial_weights_of_another_model(tmp_path, good_run, small_flags, capsys):
    checkpoint = list_checkpoints(RunFolder(good_run).checkpoints_dir)[-1].path
    folder = tmp_path / "run"
    arguments = [*small_flags, f"--run_dir={folder}", f"--init_from={checkpoint}"]
    line = line_of(train.main, [*arguments, "--embed_dim=64"], capsys, "train")
    assert "of shape (384, 32), this model (384, 64)" in line
    assert not folder.exists()


def test_a_flipped_bit_of_the_weights(tmp_path, good_run, small_flags, capsys):
    broken = str(shutil.copytree(good_run, tmp_path / "broken"))
    checkpoint = list_checkpoints(RunFolder(broken).checkpoints_dir)[-1].path
    (part,) = checkpoint.glob("*.safetensors")
    part.write_bytes((data := part.read_bytes())[:-1] + bytes([data[-1] ^ 1]))
    start = [*small_flags, f"--run_dir={tmp_path / 'run'}", f"--init_from={checkpoint}"]
    for command, flags in ((evaluate, [f"--run={broken}"]), (train, start)):
        line = line_of(command.main, flags, capsys, command.__name__.rpartition(".")[2])
        assert f"{part.name} is damaged: its sha256" in line and str(checkpoint) in line


EVALUATE = {
    "no run": ([], "--run is missing"),
    "run is nowhere": (["--run=nowhere"], "--run=nowhere is not a folder"),
    "step": (["--run=RUN", "--checkpoint=7"], "has no checkpoint of step 7: take one of 2"),
    "split": (["--run=RUN", "--split=tests"], "no samples in a split 'tests'"),
    "batch": (["--run=RUN", "--eval_batch=0"], "--eval_batch=0 does not divide"),
    "weights": (["--run=RUN", "--weights=ema"], "keeps no moving average"),
    "kind of weights": (["--run=RUN", "--weights=mean"], "--weights=mean is not one of model, ema"),
    "data": (["--run=RUN", "--data=nowhere"], "there is no data folder nowhere"),
}
GENERATE = {
    "no run": ([], "--run is missing"),
    "temperature": (["--run=RUN", "--temperature=-1"], "--temperature=-1.0 must be at least 0"),
    "top_k": (["--run=RUN", "--top_k=-1"], "--top_k=-1 must be at least 0"),
    "top_p": (["--run=RUN", "--top_p=0"], "--top_p=0.0 must be above 0"),
    "tokens": (["--run=RUN", "--max_tokens=0"], "--max_tokens=0 must be at least 1"),
    "seed": (["--run=RUN", "--sampling_seed=-1"], "--sampling_seed=-1 must be at least 0"),
}
PREPARE = {
    "source": (["--source=nowhere/*.jsonl"], "nowhere"),
    "length": (["--sequence_length=0"], "--sequence_length=0"),
    "vocabulary": (["--vocab_size=5"], "--vocab_size=5"),
    "held-out share": (["--validation_fraction=1.5"], "--validation_fraction=1.5"),
    "tokenizer": (["--tokenizer=nowhere.json"], "nowhere.json"),
    "flag": (["--sequence_lenght=8"], "Did you mean sequence_length?"),
}


@pytest.mark.parametrize("name", EVALUATE)
def test_wrong_flags_of_evaluate(name, good_run, capsys):
    flags, words = EVALUATE[name]
    arguments = [flag.replace("RUN", good_run) for flag in flags]
    assert words in line_of(evaluate.main, arguments, capsys, "evaluate")


@pytest.mark.parametrize("name", GENERATE)
def test_wrong_flags_of_generate(name, good_run, capsys):
    flags, words = GENERATE[name]
    arguments = [flag.replace("RUN", good_run) for flag in flags]
    assert words in line_of(generate.main, arguments, capsys, "generate")


@pytest.mark.parametrize("name", PREPARE)
def test_wrong_flags_of_prepare(name, tmp_path, capsys):
    flags, words = PREPARE[name]
    arguments = [f"--data={tmp_path / 'data'}", *flags]
    assert words in line_of(prepare.main, arguments, capsys, "prepare")
    assert not (tmp_path / "data").exists(), "a half-made data folder"


def test_damaged_run_folders(tmp_path, good_run, capsys):
    run = tmp_path / "run"
    shutil.copytree(good_run, run)
    (run / "config.json").write_text("{")
    line = line_of(evaluate.main, [f"--run={run}"], capsys, "evaluate")
    assert "config.json cannot be read" in line
    shutil.copy(Path(good_run) / "config.json", run / "config.json")
    shutil.rmtree(run / "checkpoints")
    line = line_of(generate.main, [f"--run={run}"], capsys, "generate")
    assert "has no complete checkpoint yet" in line


def test_there_are_at_least_sixty():
    tables = (TRAIN, CLUSTERS, DATA, EVALUATE, GENERATE, PREPARE)
    assert sum(map(len, tables)) >= 60


# Any combination of values is either refused in words or works.

EDGES = [-(2**63) - 1, -(2**63), -(2**40), 2**31, 2**62, 2**63 - 1, 2**63, 10**30]
INTEGERS = st.one_of(st.integers(-3, 40), st.sampled_from(EDGES))
FLOATS = st.one_of(st.floats(), st.sampled_from([0.0, 0.5, 1.0, -1.0]))


def sections_of(section: type) -> st.SearchStrategy:
    """Returns values for some fields of a section, of the fields' types, sensible or not."""
    from tfbig.flags import _choices

    kinds = {bool: st.booleans(), int: INTEGERS, float: FLOATS, str: st.text(max_size=4)}
    words = st.one_of(st.text(max_size=4), st.sampled_from(["*", "embedding_layer", "dense/"]))
    kinds[tuple] = st.lists(words, max_size=2).map(tuple)
    values = {}
    for name, default in section().__dict__.items():
        choices = _choices(section, name)
        values[name] = st.sampled_from(choices) if choices else kinds[type(default)]
        if name == "strategy":
            values[name] = st.one_of(st.sampled_from(list(STRATEGIES)), st.text(max_size=4))
    return st.fixed_dictionaries({}, optional=values)


CONFIGS = st.builds(
    lambda preset, *parts: replace_fields(
        preset, {k: v for part in parts for k, v in part.items()}
    ),
    st.sampled_from([Config(), presets.blog(), presets.preset("pythia_14m")]),
    *(sections_of(type(getattr(Config(), item.name))) for item in dataclasses.fields(Config)),
)


@settings(max_examples=300, deadline=None)
@given(CONFIGS)
def test_validation_never_fails_otherwise_than_in_words(config):
    found = list(problems(config))
    for line in found:
        assert line.endswith(".") and "--" in line and len(line) < 300, line
        assert WAY_OUT.search(line), f"no way out: {line}"
    if found:
        with pytest.raises(UserError):
            validate(config)
    for check in (
        check_strategy,
        check_data_parallel_only,
        check_mesh_fits,
        lambda c: derive_microbatch_size(c.run.global_batch, 2, c.parallel.microbatches),
    ):
        if not found:
            try:
                check(config)
            except UserError as error:
                assert "--" in str(error)


@settings(max_examples=150, deadline=None)
@given(CONFIGS, st.integers(0, 10**9))
def test_what_validation_lets_through_can_be_computed(config, step):
    if list(problems(config)):
        return
    assert count_parameters(config.model) > 0 < flops_per_token(config.model, 16)
    if config.model.num_layers < 100:
        specs = variable_specs(config.model)
        assert sum(spec.num_elements for spec in specs) == count_parameters(config.model)
    assert 0 <= learning_rate(config.optimizer, step) < float("inf")
    if config.run.batch_warmup_samples < 1000 and config.run.steps < 10**6:
        segments = batch_segments(config.run, 0, 0)
        assert sum(segment.num_steps for segment in segments) == config.run.steps
        sizes = [segment.global_batch for segment in segments]
        assert sizes == sorted(set(sizes)) and sizes[-1] <= config.run.global_batch


def test_a_model_that_cannot_fit_is_refused_before_anything_is_made(tmp_path):
    values = {"preset": "gpt3_175b", "strategy": "single", "run_dir": str(tmp_path / "run")}
    with pytest.raises(UserError, match="on its fullest rank, where"):
        train.run(train.config_from(values))
    assert not (tmp_path / "run").exists()
