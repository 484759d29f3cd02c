"""Starts and finds the processes of the small runs that soak.py and endurance.py disturb."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from data_pipeline.preparation import prepare
from tfbig.config import PrepareConfig

CHECKPOINT_EVERY, EVAL_EVERY = 5, 15


def make_data(folder: Path) -> list[str]:
    """Prepares 40 small files of the standard library; returns flags of a very small model."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    lines = [json.dumps({"text": path.read_text(encoding="utf-8")[:6000]}) for path in paths]
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    sizes = {"sequence_length": 32, "vocab_size": 384}
    prepare(
        PrepareConfig(
            data=str(folder / "data"),
            source=str(folder / "text.jsonl"),
            validation_fraction=0.15,
            **sizes,
        )
    )
    return (
        f"--data={folder / 'data'} --sequence_length=32 --max_length=32 --vocab_size=384"
        " --embed_dim=32 --num_layers=1 --num_heads=2 --dropout=0.1 --warmup_steps=3"
        " --decay_steps=400"
    ).split()


def command_of(
    flags: list[str],
    run_dir: Path,
    steps: int,
    num_ranks: int,
    checkpoint_every: int = CHECKPOINT_EVERY,
    eval_every: int = EVAL_EVERY,
) -> list[str]:
    """Returns the command of a run, under horovodrun for several ranks."""
    launcher = [str(Path(sys.executable).with_name("horovodrun")), "-np", str(num_ranks)]
    strategy = "horovod" if num_ranks > 1 else "single"
    return [
        *(launcher if num_ranks > 1 else []),
        *(sys.executable, "-m", "tfbig.train", f"--strategy={strategy}", "--deterministic"),
        *(f"--run_dir={run_dir}", f"--steps={steps}", f"--checkpoint_every={checkpoint_every}"),
        *(f"--eval_every={eval_every}", "--notensorboard", "--global_batch=6", *flags),
    ]


def start(command: list[str], log: Path) -> subprocess.Popen:
    """Starts a run in a session of its own, few threads a process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    environment["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "60"
    with open(log, "ab") as file:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def processes_of(run_dir: Path) -> list[int]:
    """Returns the Python processes that train in a folder."""
    found = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                words = (directory / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"--run_dir={run_dir}".encode() in words and words[0].endswith(b"python"):
                found.append(int(directory.name))
    return sorted(found)


def ranks_of(run_dir: Path) -> list[int]:
    """Returns the processes that train in a folder, their launchers left out."""
    found = []
    for pid in processes_of(run_dir):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if not any(word.endswith((b"horovodrun", b"tfbig.launch")) for word in words):
            found.append(pid)
    return found
