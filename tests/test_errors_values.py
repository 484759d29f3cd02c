"""Numbers out of range, beyond 64 bits or lost in float32, and options that have no effect."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_pipeline.preparation import _check_options
from tests.error_line import line_of
from tests.test_errors import EDGES, INTEGERS, sections_of
from tfbig import train
from tfbig.batch_memory import check_batch_memory, host_memory_bytes
from tfbig.command_config import EvaluateConfig, GenerateConfig
from tfbig.config import Config, DataConfig, OptimizerConfig, PrepareConfig, RunConfig
from tfbig.errors import UserError
from tfbig.export_config import ExportConfig
from tfbig.flags import Flags
from tfbig.generation.sampling import SamplingOptions
from tfbig.number_rules import LARGEST_FLOAT32, SMALLEST_FLOAT32, as_float32
from tfbig.parallel_config import ParallelConfig
from tfbig.validation import problems
from trainers.options import STRATEGIES_OF

BEYOND = "is beyond 64 bits: a whole number lies between -2^63 and 2^63 - 1"
# name: (flags beside a good run's, words of the line)
TRAIN = {
    **{
        f"{name} beyond 64 bits": ([f"--{name}={10**30}"], f"--{name}={10**30} {BEYOND}")
        for name in (
            "steps warmup_steps checkpoint_every loss_scale_growth_steps bucket_megabytes"
            " batch_warmup_samples seed num_layers data_workers tensor_stats_every"
        ).split()
    },
    "negative beyond 64 bits": (["--steps=-9223372036854775809"], BEYOND),
    "samples beyond 64 bits": (
        [f"--steps={2**62}"],
        f"--steps={2**62} x --global_batch=6 are 2.77e+19 samples, beyond 64 bits",
    ),
    "batch of no machine": (
        ["--global_batch=600000000000"],
        "--global_batch=600000000000 does not fit: each of 1 processes reads 600000000000",
    ),
    "no readers": (["--data_workers=0"], "--data_workers=0 must be at least 1 and at most 4096"),
    "readers below none": (["--data_workers=-1"], "--data_workers=-1 must be at least 1"),
    "too many threads": (["--num_threads=2147483648"], "must be at least 0 and at most 4096"),
    "too many devices": (["--num_devices=2147483648"], "must be at least 0 and at most 4096"),
    "chunks": (["--strategy=pipeline", "--num_chunks=-1"], "--num_chunks=-1 must be at least 1"),
    "memory weight": (["--memory_weight=7"], "--memory_weight=7.0 must lie between 0 (balance"),
    "active microbatches": (["--active_microbatches=-3"], "--active_microbatches=-3 must be at l"),
    "epsilon of float32": (
        ["--epsilon=1e-60"],
        "--epsilon=1e-60 is 0 in float32, in which it is used: give 0, or at least 1.2e-38.",
    ),
    "clipping of float32": (["--clip_norm=1e-50"], "--clip_norm=1e-50 is 0 in float32"),
    "rate of float32": (["--learning_rate=1e39"], "--learning_rate=1e+39 is infinite in float32"),
    "spread of float32": (["--init_std=1e-45"], "--init_std=1e-45 is 0 in float32"),
    "beta of float32": (["--beta1=0.99999999999"], "and below 1, in float32 too"),
    "dropout of float32": (["--dropout=0.99999999999"], "and below 1, in float32 too"),
}
NO_EFFECT = {
    "placement": ("single", "--placement_strategy=XYZ", "pipeline"),
    "partition": ("single", "--partition=a,b", "pipeline"),
    "chunks": ("mirrored", "--num_chunks=3", "pipeline"),
    "memory weight": ("multi_worker", "--memory_weight=0.25", "pipeline"),
    "active microbatches": ("single", "--active_microbatches=2", "pipeline"),
    "sequence": ("single", "--sequence_parallel", "pipeline"),
    "schedule": ("single", "--pipeline=interleaved", "pipeline"),
    "tape": ("mirrored", "--gradient_reduction=tape", "horovod"),
    "buckets": ("single", "--bucket_megabytes=8", "horovod and --strategy=pipeline"),
}


@pytest.mark.parametrize("name", TRAIN)
def test_numbers_that_cannot_be(name, tmp_path, small_flags, capsys):
    flags, words = TRAIN[name]
    folder = tmp_path / "run"
    line = line_of(train.main, [*small_flags, f"--run_dir={folder}", *flags], capsys, "train")
    assert words in line
    assert not folder.exists()


@pytest.mark.parametrize("name", NO_EFFECT)
def test_options_that_have_no_effect(name, tmp_path, small_flags, capsys, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    strategy, flag, others = NO_EFFECT[name]
    folder = tmp_path / "run"
    flags = [*small_flags, f"--run_dir={folder}", f"--strategy={strategy}", flag]
    line = line_of(train.main, flags, capsys, "train")
    expected = f"{flag} has no effect with --strategy={strategy}: it is for --strategy={others};"
    assert expected in line and "leave it out" in line
    assert not folder.exists()


def test_every_option_with_an_effect_somewhere_is_one():
    assert STRATEGIES_OF.keys() <= vars(ParallelConfig()).keys()


def test_a_batch_that_just_fits_passes(monkeypatch):
    monkeypatch.setattr("tfbig.batch_memory.host_memory_bytes", lambda: 18 * 33 * 1000)
    check_batch_memory("global_batch", 1000, 1, 32)
    check_batch_memory("global_batch", 2000, 2, 32)
    with pytest.raises(UserError, match=r"Take at most 500, or start more"):
        check_batch_memory("global_batch", 1001, 1, 32)


def test_the_memory_of_this_machine_is_that_of_its_kernel():
    with open("/proc/meminfo", encoding="utf-8") as file:
        assert host_memory_bytes() == int(file.readline().split()[1]) * 1024


@given(st.floats(width=64))
def test_float32_is_that_of_numpy(value):
    with np.errstate(over="ignore", under="ignore"):
        expected = float(np.float32(value))
    if abs(value) < SMALLEST_FLOAT32:
        expected = 0.0
    assert as_float32(value) == expected or (math.isnan(value) and math.isnan(as_float32(value)))
    assert as_float32(LARGEST_FLOAT32) == LARGEST_FLOAT32


def test_nothing_is_refused_at_the_edge():
    run = RunConfig(steps=2**63 - 1, global_batch=1)
    optimizer = OptimizerConfig(epsilon=SMALLEST_FLOAT32, clip_norm=0.0, weight_decay=0.0)
    assert list(problems(Config(run=run, optimizer=optimizer))) == []
    assert len(list(problems(Config(data=DataConfig(data_workers=4096))))) == 0


# Any values of a command's flags are either refused in words or come back in 64 bits.

COMMANDS = (EvaluateConfig, GenerateConfig, ExportConfig, PrepareConfig)
MODERATE = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@MODERATE
@given(st.sampled_from(COMMANDS), st.data())
def test_flags_are_refused_in_words_or_fit_64_bits(section, data):
    values = {
        name: value
        for name, value in section().__dict__.items()
        if type(value) in (int, float, bool)
    }
    chosen = data.draw(st.lists(st.sampled_from(sorted(values)), unique=True))
    texts = st.one_of(INTEGERS.map(str), st.floats().map(str), st.text(max_size=3))
    arguments = [f"--{name}={data.draw(texts)}" for name in chosen]
    try:
        given_values = Flags("command", (section,), "does something.").parse(arguments)
    except UserError as error:
        assert "--" in str(error) and "\n" not in str(error)
        return
    numbers = [value for value in given_values.values() if isinstance(value, int)]
    assert all(-(2**63) <= number < 2**63 for number in numbers)


@MODERATE
@given(sections_of(PrepareConfig))
def test_prepare_refuses_in_words(values):
    values.pop("exclude_source", None)
    try:
        _check_options(PrepareConfig(**values))
    except UserError as error:
        assert "--" in str(error) and "\n" not in str(error)


@MODERATE
@given(sections_of(GenerateConfig))
def test_sampling_refuses_in_words(values):
    names = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p"}
    options = {name: values[name] for name in names if name in values}
    try:
        SamplingOptions(**options, seed=values.get("sampling_seed", 0))
    except UserError as error:
        assert "--" in str(error) and "\n" not in str(error)


def test_the_edges_are_beyond_64_bits_too():
    assert min(EDGES) < -(2**63) and max(EDGES) > 2**63
