"""`make` sets up again whenever something has changed that the set-up is made from."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from tests.distributed.launch import REPOSITORY

OURS = re.compile(r"^from tfbig\.(install_horovod|horovod_\w+) import", re.MULTILINE)


def modules_of_the_build() -> set[str]:
    """Returns install_horovod and the modules beside it that it imports, at any depth."""
    found, waiting = set(), {"install_horovod"}
    while waiting:
        name = waiting.pop()
        found.add(name)
        waiting |= set(OURS.findall((REPOSITORY / f"tfbig/{name}.py").read_text())) - found
    return found


def is_ready(folder: Path) -> bool:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--question", ".venv/.tfbig-ready"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=60)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode == 0


def test_a_change_of_what_builds_horovod_makes_the_set_up_again(tmp_path):
    stamp = tmp_path / ".venv" / ".tfbig-ready"
    stamp.parent.mkdir()
    stamp.touch()
    shutil.copytree(REPOSITORY / "tfbig", tmp_path / "tfbig")
    for name in ("Makefile", "setup.py"):
        shutil.copy(REPOSITORY / name, tmp_path)
    modules = modules_of_the_build()
    assert {"install_horovod", "horovod_build", "horovod_edits", "horovod_wheel"} <= modules
    files = [tmp_path / "setup.py", *(tmp_path / f"tfbig/{name}.py" for name in modules)]
    for path in [*files, *tmp_path.glob("tfbig/*.py")]:
        os.utime(path, (1e9, 1e9))
    assert is_ready(tmp_path)
    for path in files:
        os.utime(path)
        os.utime(stamp, (1.1e9, 1.1e9))
        assert not is_ready(tmp_path), path
        os.utime(path, (1e9, 1e9))
        assert is_ready(tmp_path)
