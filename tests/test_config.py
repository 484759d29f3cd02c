"""Configuration: exact counts, rules with their arithmetic, flags with near matches."""

import dataclasses
import subprocess
import sys

import pytest

from tfbig import presets
from tfbig.config import (
    Config,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    count_parameters,
    flops_per_token,
    from_dict,
    replace_fields,
    to_dict,
)
from tfbig.errors import UserError
from tfbig.flags import Flags, field_help
from tfbig.schedule import learning_rate
from tfbig.train import config_from, main
from tfbig.validation import problems, validate
from tfbig.variables import VARIABLE_RULES, variable_rule, variable_specs

# Published sizes; the GPT-3 rows are the formula's at width 5120 for 13B and 16 heads for 1.3B.
COUNTS = {
    "gpt2_124m": 124_439_808,
    "gpt2_355m": 354_823_168,
    "gpt2_774m": 774_030_080,
    "gpt2_1558m": 1_557_611_200,
    "gpt3_125m": 125_226_240,
    "gpt3_350m": 355_871_744,
    "gpt3_760m": 760_300_032,
    "gpt3_1_3b": 1_315_723_264,
    "gpt3_2_7b": 2_651_553_280,
    "gpt3_6_7b": 6_658_404_352,
    "gpt3_13b": 12_853_386_240,
    "gpt3_175b": 174_604_259_328,
    "pythia_14m": 14_067_712,
    "pythia_31m": 30_494_720,
    "pythia_70m": 70_426_624,
    "pythia_160m": 162_322_944,
    "pythia_410m": 405_334_016,
    "pythia_1b": 1_011_781_632,
    "pythia_1_4b": 1_414_647_808,
    "pythia_2_8b": 2_775_208_960,
    "pythia_6_9b": 6_857_302_016,
    "pythia_12b": 11_846_072_320,
    "neox_20b": 20_554_567_680,
}


@pytest.mark.parametrize("name", COUNTS)
def test_published_counts(name):
    assert count_parameters(presets.preset(name).model) == COUNTS[name]


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_is_valid_and_its_table_of_variables_complete(name):
    config = config_from({"preset": name})
    validate(config)
    assert config.run.preset == name
    specs = variable_specs(config.model)
    assert sum(spec.num_elements for spec in specs) == count_parameters(config.model)
    assert len({spec.path for spec in specs}) == len(specs)


def test_every_variable_matches_exactly_one_rule():
    paths = [
        spec.path
        for name in ("blog", "gpt_tiny")
        for spec in variable_specs(dataclasses.replace(presets.preset(name).model, lora_rank=2))
    ]
    assert {id(variable_rule(path)) for path in paths}
    used = {rule for path in paths for rule in [variable_rule(path)]}
    assert used == set(VARIABLE_RULES.values())
    with pytest.raises(AssertionError, match="matches 0 rows"):
        variable_rule("transformer_blocks/0/att/qkv/gate")


def test_published_batches_in_tokens():
    tokens = {"gpt3_125m": 1 << 19, "gpt3_1_3b": 1 << 20, "gpt3_6_7b": 1 << 21}
    tokens |= {"pythia_160m": 2_097_152, "neox_20b": 1536 * 2048}
    tokens |= {"gpt3_175b": 1552 * 2048}  # at most the paper's 3.2M, in sixteenths
    assert 0.99 < 1552 * 2048 / 3_200_000 < 1 and 1552 % 16 == 0
    for name, batch in tokens.items():
        config = presets.preset(name)
        assert config.run.global_batch * config.data.sequence_length == batch
    pythia = presets.preset("pythia_1b")
    assert pythia.run.steps * 2_097_152 == 299_892_736_000


def test_the_list_of_presets_has_them_all(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--list_presets"])
    assert stop.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == presets.names()
    assert "20,554,567,680" in lines[-1] and len({len(line) for line in lines}) == 1


def test_flops_of_gpt2_124m():
    model = presets.preset("gpt2_124m").model
    assert flops_per_token(model, 1024) == 854_438_400
    assert flops_per_token(model, 1024, causal=True) == 797_815_296


def test_config_survives_json():
    config = config_from({"preset": "blog", "steps": 7, "strategy": "horovod"})
    assert from_dict(to_dict(config)) == config
    with pytest.raises(UserError, match="no such option: stepz"):
        replace_fields(config, {"stepz": 1})


def test_configs_are_frozen_and_names_unique():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().run.steps = 3  # type: ignore[misc]
    names = [
        item.name
        for section in dataclasses.fields(Config)
        for item in dataclasses.fields(getattr(Config(), section.name))
    ]
    assert len(set(names)) == len(names)


def test_every_field_has_its_line_of_help():
    for section in (getattr(Config(), f.name) for f in dataclasses.fields(Config)):
        for item in dataclasses.fields(section):
            line = field_help(type(section))[item.name]
            assert line.endswith(".") and "\n" not in line, item.name


@pytest.mark.parametrize(
    "values, words",
    [
        ({"num_heads": 3}, "--num_heads=3 does not divide --embed_dim=128 (128 = 3 x 42 + 2)"),
        ({"embed_dim": 0}, "--embed_dim=0 must be at least 1"),
        ({"dropout": 1.0}, "--dropout=1.0 must be at least 0 and below 1"),
        ({"sequence_length": 512}, "longer than the model's 256 positions"),
        ({"learning_rate": -1.0}, "--learning_rate=-1.0 must be at least 0"),
        ({"learning_rate": float("nan")}, "--learning_rate=nan"),
        ({"beta2": 1.0}, "--beta2=1.0"),
        ({"warmup_steps": 500}, "--decay_steps=300 ends before --warmup_steps=500"),
        ({"learning_rate_floor": 2.0}, "--learning_rate_floor=2.0"),
        ({"steps": 0}, "--steps=0 must be at least 1"),
        ({"seed": -1}, "--seed=-1 must lie between"),
        ({"microbatches": 0}, "--microbatches=0 must be at least 1"),
        ({"z_loss": -1e-4}, "--z_loss=-0.0001 must be at least 0"),
        ({"z_loss": float("nan")}, "--z_loss=nan"),
        ({"z_loss": 1e-60}, "--z_loss=1e-60 is 0 in float32"),
        ({"label_smoothing": 1.0}, "--label_smoothing=1.0 must be at least 0 and below 1"),
        ({"head_bias": True}, "--head_bias needs an untied head"),
    ],
)
def test_rules(values, words):
    found = list(problems(config_from(values)))
    assert len(found) == 1 and words in found[0], found
    with pytest.raises(UserError):
        validate(config_from(values))


def test_learning_rate():
    config = OptimizerConfig(
        learning_rate=2.0, warmup_steps=4, decay_steps=14, learning_rate_floor=0.1
    )
    rates = [learning_rate(config, step) for step in range(30)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4] == 2.0 and rates[9] == pytest.approx(1.1) and rates[14] == pytest.approx(0.2)
    assert set(rates[15:]) == {rates[14]}
    linear = dataclasses.replace(config, schedule="linear")
    assert learning_rate(linear, 9) == pytest.approx(1.1)
    constant = dataclasses.replace(config, schedule="constant", scale_learning_rate=True)
    assert learning_rate(constant, 1000, num_replicas=3) == 6.0


def parse(*arguments: str):
    return Flags("train", (RunConfig, ModelConfig, OptimizerConfig), "trains.", ["steps"]).parse(
        arguments
    )


def test_flags(tmp_path):
    assert parse("--steps=3", "--num_heads", "2", "--nofinal_norm") == {
        "steps": 3,
        "num_heads": 2,
        "final_norm": False,
    }
    file = tmp_path / "flags"
    file.write_text("--steps=9\n--tied_head=false\n")
    assert parse(f"--flagfile={file}") == {"steps": 9, "tied_head": False}
    for arguments, words in {
        ("--stepz=3",): "unknown flag --stepz. Did you mean steps?",
        ("--steps=three",): "--steps=three",
        ("--optimizer=adamx",): "--optimizer=adamx is not one of adamw, sgd. Did you mean adamw?",
        ("steps=3",): "unexpected argument 'steps=3'",
        (f"--flagfile={tmp_path / 'missing'}",): "missing",
    }.items():
        with pytest.raises(UserError) as error:
            parse(*arguments)
        assert words in str(error.value) and "\n" not in str(error.value)


def test_help_is_short_and_helpfull_complete(capsys):
    for flag, shown in {"--help": False, "--helpfull": True}.items():
        with pytest.raises(SystemExit) as stop:
            parse(flag)
        assert stop.value.code == 0
        text = capsys.readouterr().out
        assert "--steps" in text and ("--init_std" in text) is shown


def test_help_names_the_defaults_of_the_default_preset(capsys):
    run = config_from({}).run
    assert run.steps != RunConfig().steps, "else nothing is seen here"
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"from the start of the run. (default: {run.steps})" in text
    assert f"over all ranks. (default: {run.global_batch})" in text


def test_unknown_preset_names_the_near_ones():
    with pytest.raises(UserError, match="Did you mean gpt3_13b"):
        presets.preset("gpt3_13")


FREE = (
    "tfbig.config tfbig.presets tfbig.variables tfbig.validation tfbig.schedule tfbig.flags"
    " tfbig.command tfbig.errors tfbig.metrics tfbig.checkpoint tfbig.checkpoint_reader"
    " tfbig.checkpoint_writer tfbig.run_folder tfbig.saved_run tfbig.generation.sampling"
    " tfbig.generation.text_stream trainers trainers.cluster trainers.options trainers.slurm"
    " trainers.validate trainers.mesh trainers.partition trainers.pipeline_schedule"
    " trainers.pipeline_program trainers.tensor_table tfbig.train tfbig.evaluate tfbig.generate"
    " tfbig.prepare tfbig.together"
)


def test_modules_without_tensorflow():
    code = (
        "import sys\n"
        "for name in ('tensorflow', 'keras', 'horovod'): sys.modules[name] = None\n"
        "import importlib\n"
        f"for name in {FREE.split()!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
