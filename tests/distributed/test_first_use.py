"""Data is prepared on first use by rank 0 alone, while the other ranks wait."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from tests.distributed.launch import run
from tfbig.run_folder import read_metrics

TEXT = "def square(number):\n    return number * number\n\n"
FLAGS = (
    "--strategy=horovod --source=text.jsonl --sequence_length=16 --max_length=16 --vocab_size=300"
    " --embed_dim=16 --num_layers=1 --num_heads=2 --global_batch=4 --steps=2 --eval_every=0"
)


@pytest.mark.distributed
def test_a_process_without_horovodrun_is_a_world_of_one(tmp_path, small_flags):
    flags = [*small_flags, "--strategy=horovod", "--steps=2", f"--run_dir={tmp_path / 'run'}"]
    flags.append("--verify")  # first, and then the run itself
    done = run([sys.executable, "-m", "tfbig.train", *flags], timeout=400)
    assert done.returncode == 0, done.stdout
    assert "verify: gradients: " in done.stdout.partition("run folder")[0]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert [record["num_tokens"] for record in read_metrics(tmp_path / "run")] == [6 * 32] * 2


@pytest.mark.distributed
def test_rank_0_prepares_and_both_ranks_train(tmp_path):
    lines = [json.dumps({"text": f"{TEXT * 40}# {number}\n"}) for number in range(200)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines) + "\n")
    horovodrun = Path(sys.executable).with_name("horovodrun")
    command = f"{horovodrun} -np 2 {sys.executable} -m tfbig.train {FLAGS}"
    done = run(["bash", "-c", f"cd {shlex.quote(str(tmp_path))} && {command}"], timeout=240)
    assert done.returncode == 0, done.stdout
    assert len(list(tmp_path.glob("data/*/manifest.json"))) == 1
    reports = [line for line in done.stdout.splitlines() if "training samples from" in line]
    assert len(reports) == 1 and reports[0].startswith("[0]"), done.stdout
    prepared = [line for line in done.stdout.splitlines() if "tokenizer" in line]
    assert prepared and all(line.startswith("[0]") for line in prepared), done.stdout
    records = read_metrics(tmp_path / "runs" / "gpt_tiny")
    assert [record["consumed_samples"] for record in records] == [4, 8]
