"""The command on this host alone."""

import json

import pytest

from tests.distributed.launch import run
from tests.error_line import line_of
from tfbig import doctor
from tfbig.diagnosis import versions
from tfbig.horovod_build import HorovodUnfit


def test_this_host_alone(capsys, tmp_path, small_data):
    flags = [f"--run_dir={tmp_path / 'run'}", f"--data={small_data}", "--megabytes=2"]
    with pytest.raises(SystemExit) as stop:
        doctor.main([*flags, "--json"])
    values = json.loads(capsys.readouterr().out)
    problems = [f["text"] for f in values["findings"] if f["level"] == "problem"]
    assert stop.value.code == (1 if problems else 0), problems
    groups = {f["group"] for f in values["findings"]}
    assert groups == {"versions", "devices", "network", "disk", "limits", "hashes"}
    assert any("load together" in f["text"] for f in values["findings"])
    facts = values["ranks"][0]["facts"]
    assert {"python", "tensorflow", "Horovod's build", "tfbig's code", "tokenizer"} <= set(facts)


def test_a_horovod_that_does_not_fit_is_the_first_line(capsys, monkeypatch, tmp_path):
    def unfit():
        raise HorovodUnfit("Horovod is not installed: run `python -m tfbig.install_horovod`")

    monkeypatch.setattr(versions, "check_installed", unfit)
    with pytest.raises(SystemExit) as stop:
        doctor.main([f"--run_dir={tmp_path}", "--megabytes=1"])
    assert stop.value.code == 1
    shown = capsys.readouterr().out
    assert shown.startswith("PROBLEM  versions   Horovod is not installed: run")


def test_a_tensorflow_that_does_not_load(tmp_path):
    (tmp_path / "tensorflow.py").write_text("raise ImportError('libcudart.so.12: not found')")
    found, seen = versions.probe({"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"})
    assert not seen and "libcudart.so.12: not found" in found.findings[0].text


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--hosts=a:b", "'a:b' is no host"),
        ("--megabytes=0", "--megabytes=0 must be at least 1"),
        ("--min_bandwidth=-1", "must be at least 0"),
        ("--preset=gpt2_12m", "Did you mean gpt2_124m"),
        ("--dato=x", "Did you mean data"),
    ],
)
def test_mistakes_are_one_line(flag, words, capsys):
    assert words in line_of(doctor.main, [flag], capsys, "doctor")


def test_the_page_starts_without_tensorflow():
    import sys

    code = "import sys, tfbig.doctor; sys.exit('tensorflow' in sys.modules)"
    assert run([sys.executable, "-c", code], 60).returncode == 0
