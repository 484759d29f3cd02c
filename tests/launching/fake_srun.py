#!/usr/bin/env python3
"""Slurm's srun for one machine: really starts the tasks, with a step's variables.

Understands -n/--ntasks=N, --ntasks-per-node=N, --cpus-per-task=N, --nodes, --kill-on-bad-exit and
--distribution as srun does (slurm.schedmd.com/srun.html), passes SIGTERM on, and ends with the
highest exit code. As since Slurm 22.05, a step has one core a task unless --cpus-per-task or
SRUN_CPUS_PER_TASK says more, whatever sbatch was told.
FAKE_SRUN_NODES names the nodes, e.g. n1,n2; all of them are this machine.
"""

import os
import re
import signal
import subprocess
import sys

OPTIONS = re.compile(
    r"--(ntasks|ntasks-per-node|cpus-per-task|nodes|kill-on-bad-exit|distribution|export|cpu-bind)"
    r"=(\S+)"
)


def main() -> int:
    words, options = sys.argv[1:], {}
    while words and words[0].startswith("-"):
        word = words.pop(0)
        match = OPTIONS.fullmatch(word)
        if match:
            options[match[1]] = match[2]
        elif word in ("-n", "--ntasks"):
            options["ntasks"] = words.pop(0)
        else:
            sys.exit(f"srun: unrecognized option '{word}'")
    nodes = os.environ.get("FAKE_SRUN_NODES", "localhost").split(",")
    per_node = int(options.get("ntasks-per-node", os.environ.get("SLURM_NTASKS_PER_NODE", "0")))
    total = int(options.get("ntasks", per_node * len(nodes) or 1))
    per_node = per_node or -(-total // len(nodes))
    cores = options.get("cpus-per-task", os.environ.get("SRUN_CPUS_PER_TASK", ""))
    inherited = {k: v for k, v in os.environ.items() if k != "SLURM_CPUS_PER_TASK"}
    if cores:
        inherited |= {"SLURM_CPUS_PER_TASK": cores}
    tasks = []
    for rank in range(total):
        step = {
            "SLURM_STEP_ID": "0",
            "SLURM_JOB_ID": os.environ.get("SLURM_JOB_ID", "77"),
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % per_node),
            "SLURM_NODEID": str(rank // per_node),
            "SLURM_STEP_NUM_TASKS": str(total),
            "SLURM_STEP_NODELIST": ",".join(nodes),
            "SLURM_STEP_TASKS_PER_NODE": ",".join(str(per_node) for _ in nodes),
        }
        tasks.append(subprocess.Popen(words, env=inherited | step))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, frame: [task.send_signal(n) for task in tasks])
    return max(task.wait() if task.wait() >= 0 else 128 - task.wait() for task in tasks)


if __name__ == "__main__":
    sys.exit(main())
