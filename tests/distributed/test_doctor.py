"""The doctor under horovodrun: rank 0 tells what all ranks found."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.distributed.launch import horovodrun, run


def doctor(arguments, **options):
    return horovodrun(2, ["-m", "tfbig.doctor", "--megabytes=2", *arguments], **options)


@pytest.mark.distributed
def test_bandwidth_of_the_mesh_and_equal_facts(small_data, tmp_path):
    done = doctor(
        [
            "--json",
            f"--data={small_data}",
            f"--run_dir={tmp_path}",
            "--tensor_parallel_degree=2",
        ]
    )
    (line,) = [line for line in done.stdout.splitlines() if '{"problems"' in line]
    values = json.loads(line[line.index("{") :])
    problems = [f["text"] for f in values["findings"] if f["level"] == "problem"]
    assert done.returncode == (1 if problems else 0), done.stdout
    assert not any("differs" in text for text in problems)
    measured = [f["text"] for f in values["findings"] if f["group"] == "bandwidth"]
    assert len(measured) == 1 and measured[0].startswith("tensor axis, ranks 0, 1: ")
    first, second = (one["facts"] for one in values["ranks"])
    assert first["tokenizer"] == second["tokenizer"] and first["GPUs"]


@pytest.mark.distributed
def test_ranks_with_other_data_are_a_problem(small_data, tmp_path):
    shutil.copytree(small_data, tmp_path / "0")
    other = shutil.copytree(small_data, tmp_path / "1")
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["settings"]["seed"] = 12345
    (other / "manifest.json").write_text(json.dumps(manifest))
    command = f"exec {sys.executable} -m tfbig.doctor --megabytes=1 --data={tmp_path}/$HOROVOD_RANK"
    launcher = str(Path(sys.executable).with_name("horovodrun"))
    done = run([launcher, "-np", "2", "bash", "-c", command], 300)
    assert done.returncode != 0
    first = next(line for line in done.stdout.splitlines() if "PROBLEM" in line)
    assert "hashes" in first and "data manifest differs" in first, done.stdout


@pytest.mark.distributed
def test_a_mesh_that_does_not_fit_is_one_line():
    done = doctor(["--pipeline_parallel_degree=3"])
    assert done.returncode != 0
    assert done.stdout.count("tfbig doctor: error: 2 ranks are no multiple") == 1, done.stdout


@pytest.mark.distributed
def test_a_clock_that_is_wrong_is_a_problem(tmp_path):
    flags = ["--megabytes=1", f"--run_dir={tmp_path}"]
    done = horovodrun(2, ["tests/distributed/doctor_worker.py", *flags])
    assert done.returncode != 0
    (line,) = [line for line in done.stdout.splitlines() if " s from rank 0's" in line]
    assert "PROBLEM  network    the clock is +5.0 s from rank 0's" in line, done.stdout
