"""--run_dir names a folder of the user's that is no run: one line, and every byte stays."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.error_line import line_of
from tfbig import evaluate, generate, train
from tfbig.config import Config, replace_fields
from tfbig.errors import UserError
from tfbig.flags import expand_home
from tfbig.run_folder import RunFolder
from tfbig.run_folder_check import check_run_folder


def everything(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def make_letters(folder: Path) -> Path:
    (folder / "letters").mkdir()
    (folder / "letters" / "letter.txt").write_text("the user's")
    return folder / "letters"


def make_model(folder: Path) -> Path:
    """A folder of another program's that has a config.json too."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (folder / "model" / "checkpoints").mkdir()
    return folder / "model"


def make_file(folder: Path) -> Path:
    (folder / "letter.txt").write_text("the user's")
    return folder / "letter.txt"


def make_data(folder: Path) -> Path:
    (folder / "data").mkdir()
    (folder / "data" / "manifest.json").write_text("{}")
    return folder / "data"


FOREIGN = {
    "letters": (make_letters, "is not empty and not the folder of a run (it has 'letter.txt'"),
    "another program's": (make_model, "it has 'config.json', but no run's config.json"),
    "file": (make_file, "is a file and no folder"),
    "data": (make_data, "is a data folder or a checkpoint"),
}


@pytest.mark.parametrize("restart", [[], ["--restart"]])
@pytest.mark.parametrize("name", FOREIGN)
def test_a_folder_that_is_no_run_stays_as_it_is(name, restart, tmp_path, small_flags, capsys):
    make, words = FOREIGN[name]
    path = make(tmp_path)
    before = everything(tmp_path)
    flags = [*small_flags, f"--run_dir={path}", "--steps=1", *restart]
    line = line_of(train.main, flags, capsys, "train")
    assert words in line and f"--run_dir={path}" in line and "choose another run_dir" in line
    assert everything(tmp_path) == before


@pytest.mark.parametrize("restart", [[], ["--restart"]])
def test_the_data_folder_is_no_run_folder(restart, tmp_path, small_data, small_flags, capsys):
    data = tmp_path / "data"
    shutil.copytree(small_data, data)
    (tmp_path / "link").symlink_to(data)
    before = everything(tmp_path)
    for folder in (data, tmp_path / "link"):
        flags = [*small_flags, f"--data={data}", f"--run_dir={folder}", *restart]
        line = line_of(train.main, flags, capsys, "train")
        assert "is the data folder" in line and "choose another run_dir" in line
    assert everything(tmp_path) == before


def test_data_that_is_not_prepared_yet_is_no_run_folder_either(tmp_path):
    config = replace_fields(
        Config(), {"data": str(tmp_path / "x"), "run_dir": f"{tmp_path}/y/../x"}
    )
    with pytest.raises(UserError, match="is the data folder"):
        check_run_folder(config)


def begun_run(folder: Path) -> Path:
    RunFolder(folder / "run").create()
    (folder / "run" / "run.lock").touch()
    return folder / "run"


def test_a_restart_from_within_the_folder_is_refused(tmp_path, small_flags, capsys, monkeypatch):
    run = begun_run(tmp_path)
    monkeypatch.chdir(run / "checkpoints")
    before = everything(tmp_path)
    for name in ("..", str(run), "../../run"):
        flags = [*small_flags, f"--run_dir={name}", "--restart"]
        line = line_of(train.main, flags, capsys, "train")
        assert "the working directory is in it" in line
    assert everything(tmp_path) == before


@pytest.mark.parametrize("field", ["data", "init_from"])
def test_a_restart_does_not_rename_what_it_reads(field, tmp_path):
    run = begun_run(tmp_path)
    fields = {"run_dir": str(run), "restart": True, field: str(run / "checkpoints" / "x")}
    with pytest.raises(UserError, match=rf"--restart renames .* but --{field}=.* lies in it"):
        check_run_folder(replace_fields(Config(), fields))
    check_run_folder(replace_fields(Config(), fields | {"restart": False}))


def test_what_a_run_has_begun_is_its_own(tmp_path):
    run = begun_run(tmp_path)
    config = replace_fields(Config(), {"run_dir": str(run), "restart": True})
    for name in (".shared-77", "heartbeats", "config.json.tmp-12", "metrics.jsonl.torn"):
        (run / name).touch()
        check_run_folder(config)
    (run / "letter.txt").touch()
    with pytest.raises(UserError, match=r"letter\.txt"):
        check_run_folder(config)
    RunFolder(run).write_config({}, [])
    check_run_folder(config)  # a run may hold the user's notes
    (run / "config.json").unlink()
    (run / "checkpoints" / "step_00000001").mkdir()
    check_run_folder(config)
    check_run_folder(replace_fields(Config(), {"run_dir": str(tmp_path / "new")}))


def test_verify_removes_only_its_own_folder(tmp_path, small_flags, capsys):
    (tmp_path / "run.verify").mkdir()
    (tmp_path / "run.verify" / "letter.txt").write_text("the user's")
    before = everything(tmp_path)
    flags = [*small_flags, f"--run_dir={tmp_path / 'run'}", "--verify"]
    line = line_of(train.main, flags, capsys, "train")
    assert "letter.txt" in line and "choose another run_dir" in line
    assert everything(tmp_path) == before
    assert RunFolder(".").verify_dir == Path(f"{os.getcwd()}.verify")


def test_a_tilde_is_the_home_folder(tmp_path, capsys, monkeypatch, small_flags):
    home = tmp_path / "home"
    (home / "notes").mkdir(parents=True)
    (home / "notes" / "letter.txt").touch()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    for main, command, flag in (
        (train.main, "train", "--run_dir=~/notes"),
        (train.main, "train", "--data=~/notes"),
        (evaluate.main, "evaluate", "--run=~/notes"),
        (generate.main, "generate", "--run=~/notes"),
    ):
        given = [*small_flags, "--run_dir=x"] if main is train.main else []
        assert str(home / "notes") in line_of(main, [*given, flag], capsys, command)
    assert RunFolder("~/runs").path == home / "runs"
    assert not (tmp_path / "~").exists()
    assert (
        expand_home("~,pile:~/a,b~c,https://host/~d") == f"{home},pile:{home}/a,b~c,https://host/~d"
    )


def test_a_prompt_keeps_its_tilde(monkeypatch):
    monkeypatch.setattr(generate, "run", lambda config, *rest: seen.append(config))
    seen: list = []
    generate._body(["--run=~/r", "--prompt=~/bin"])
    assert seen[0].prompt == "~/bin" and "~" not in seen[0].run


def test_a_folder_that_cannot_be_made_is_refused_before_data_are_prepared(tmp_path, capsys):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "run"
    flags = [f"--run_dir={folder}", f"--data={tmp_path / 'missing'}"]
    line = line_of(train.main, flags, capsys, "train")
    assert "cannot make the run's folder" in line and str(folder) in line


def test_another_run_is_not_resumed_before_its_data_are_opened(tmp_path, small_flags, capsys):
    flags = [*small_flags, f"--run_dir={tmp_path / 'run'}"]
    assert train._body([*flags, "--steps=1", "--checkpoint_every=1"]) == 0
    before = everything(tmp_path / "run")
    capsys.readouterr()
    other = [f"--data={tmp_path / 'missing'}", "--sequence_length=16", "--learning_rate=0.5"]
    line = line_of(train.main, [*flags, *other], capsys, "train")
    assert "cannot resume" in line and "data.sequence_length" in line, line
    assert "optimizer.learning_rate" in line, line
    assert everything(tmp_path / "run") == before
    assert train._body([*flags, "--steps=2"]) == 0  # with its own values it goes on


def test_looking_whether_a_run_folder_can_be_made_leaves_nothing(tmp_path):
    RunFolder(tmp_path / "runs" / "first").check_can_be_made()
    assert not list(tmp_path.iterdir())
    kept = RunFolder(begun_run(tmp_path))
    kept.check_can_be_made()
    assert kept.checkpoints_dir.is_dir()
