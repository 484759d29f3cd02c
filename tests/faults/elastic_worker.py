"""Trains like `tfbig.train --elastic`, and has ranks come and go at given steps.

usage: elastic_worker.py PLAN FLAGS..., where PLAN is a JSON file: a list of
  {"step": 5, "size": 1, "hosts": [...]}   rank 0 changes the hosts that the launcher discovers;
                                           none means rank 0's alone
  {"step": 9, "size": 3, "kill": [0, 1]}   these ranks are killed, before they make that step
  {"step": 9, "size": 3, "kill_late": [1]} this rank is killed when it has made that step
Each is done in a world of that size only.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from tfbig.command import quiet_tensorflow

quiet_tensorflow()

from tfbig import train  # noqa: E402
from tfbig.loop import Loop  # noqa: E402

PATIENCE = 120.0  # seconds for the launcher to see the hosts


def change_hosts(path: Path, hosts: list[str], loop: Loop) -> None:
    path.with_suffix(".tmp").write_text("".join(f"{host}\n" for host in hosts))
    os.replace(path.with_suffix(".tmp"), path)
    deadline = time.monotonic() + PATIENCE
    while not loop.stop_signal.value:
        assert time.monotonic() < deadline, "the launcher told of no change"
        time.sleep(0.05)


def main(plan_path: str, flags: list[str]) -> None:
    plan = json.loads(Path(plan_path).read_text())
    real = Loop._launch

    def launch(self, progress):
        rank = self.trainer.rank
        acts = [a for a in plan if (a["step"], a["size"]) == (progress.step, self.trainer.size)]
        for act in acts:
            if rank == 0 and "hosts" in act:
                hosts = act["hosts"] or [f"{os.environ['HOROVOD_HOSTNAME']}:1"]
                change_hosts(Path(plan_path).with_name("hosts"), hosts, self)
            if rank in act.get("kill", ()):
                os.kill(os.getpid(), signal.SIGKILL)
        launched = real(self, progress)
        if any(rank in act.get("kill_late", ()) for act in acts):
            os.kill(os.getpid(), signal.SIGKILL)
        return launched

    Loop._launch = launch
    train.main(flags)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
