"""The command on this host alone."""

import json
import os
import subprocess
import sys

import pytest

from tests.distributed.launch import run
from tests.error_line import line_of
from tfbig import doctor
from tfbig.diagnosis import devices, versions
from tfbig.diagnosis.devices import Gpu
from tfbig.diagnosis.doctor_config import DoctorConfig
from tfbig.diagnosis.finding import Examined
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


NCCL = """
extern "C" int ncclGetVersion(int* version) { *version = 22703; return 0; }
"""
ASK = """
import ctypes, sys
from tfbig.diagnosis.versions import loaded_nccl
assert loaded_nccl() == ""
ctypes.CDLL(sys.argv[1])
print(loaded_nccl())
"""


def test_the_nccl_that_is_loaded_says_its_version(tmp_path):
    (tmp_path / "nccl.cc").write_text(NCCL)
    library = tmp_path / "another folder/libnccl.so.2"
    library.parent.mkdir()
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, "-shared", "-fPIC", "-o", str(library), str(tmp_path / "nccl.cc")]
    subprocess.run(command, check=True)
    done = run([sys.executable, "-c", ASK, str(library)], 60)
    assert (done.returncode, done.stdout) == (0, "2.27.3\n"), done.stdout


@pytest.mark.parametrize(
    ("loaded", "package", "level", "words"),
    [
        ("2.27.3", "2.27.3", "fine", "Horovod has loaded NCCL 2.27.3"),
        ("2.27.3", None, "fine", "Horovod has loaded NCCL 2.27.3"),
        ("2.20.5", "2.27.3", "warning", "NCCL 2.20.5 is loaded, the package that is"),
        ("", "2.27.3", "fine", "NCCL 2.27.3 is installed; Horovod has loaded none"),
    ],
)
def test_the_page_has_a_line_about_nccl(loaded, package, level, words, monkeypatch):
    def version(name):
        if package is None or name != "nvidia-nccl-cu12":
            raise versions.metadata.PackageNotFoundError(name)
        return package

    monkeypatch.setattr(versions.metadata, "version", version)
    found = versions.examine_nccl(loaded)
    assert [f.level for f in found.findings] == [level] and words in found.findings[0].text
    assert found.facts == {"NCCL": loaded or package}


def test_without_nccl_there_is_no_line_about_it():
    assert versions.examine_nccl("") == Examined()


def test_gpus_and_a_horovod_that_was_built_without_nccl(monkeypatch, tmp_path):
    gpu = Gpu("L4", 24 << 30, 0, 0)
    monkeypatch.setattr(devices, "read_gpus", lambda: ([gpu, gpu], "550"))
    config = DoctorConfig(run_dir=str(tmp_path), megabytes=1)

    def lines():
        found = doctor._examine_host(config, [], {}, local_size=1, num_hosts=1)
        return [(f.level, f.text) for one in found for f in one.findings if "NCCL: " in f.text]

    built = dict(versions.installed_record() or {})
    for operations, expected in (("NCCL", []), ("", ["problem"])):
        record = built | {"options": {"HOROVOD_GPU_OPERATIONS": operations}}
        monkeypatch.setattr(versions, "installed_record", lambda record=record: record)
        assert [level for level, _ in lines()] == expected
    assert lines()[0][1].startswith("Horovod was built without NCCL: tensors would cross")


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
    code = "import sys, tfbig.doctor; sys.exit('tensorflow' in sys.modules)"
    assert run([sys.executable, "-c", code], 60).returncode == 0
