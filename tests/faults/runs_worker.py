"""Makes several runs one after another in the same ranks, in each of which something befalls one.

usage: runs_worker.py PLAN, a JSON file: {"flags": [...], "runs": [{"name": ..., "flags": [...],
"fault": {"kind": ..., "rank": ..., ...}}, ...]}. Kinds of faults:
  signal  the rank gets a signal ("signal": "SIGTERM") at "where": a "step" (SIGNAL_STEP),
          "compile", the first "evaluation", the first "save"
  clock   at the launch of a step the clock of a rank leaps ("leaps": {STEP: [RANK, SECONDS]})
  tokens  five of the rank's samples ("samples") are one token over and over
  slow    each of the rank's batches takes 0.1 s
What each run did is written to NAME-rank-N.json beside the plan.
"""

import contextlib
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tfbig.command import launched_rank, quiet_tensorflow

quiet_tensorflow()

from data_pipeline.dataset import TokenData  # noqa: E402
from tfbig import evaluation, train  # noqa: E402
from tfbig.bad_steps import BadSteps  # noqa: E402
from tfbig.checkpoint import list_checkpoints  # noqa: E402
from tfbig.errors import RunError  # noqa: E402
from tfbig.loop import Loop  # noqa: E402
from tfbig.run_state import StateKeeper  # noqa: E402
from trainers.replica import ReplicaTrainer  # noqa: E402

SIGNAL_STEP = 6
# Where a signal comes: before which call of which method.
PLACES = {
    "step": (Loop, "_launch"),
    "compile": (ReplicaTrainer, "_train_graph"),
    "evaluation": (evaluation, "evaluate"),
    "save": (StateKeeper, "save"),
}


def before(call, action):
    """Returns a function that does `action`, with the same arguments, and then `call`."""

    def wrapped(*arguments, **fields):
        action(*arguments, **fields)
        return call(*arguments, **fields)

    return wrapped


def signal_action(fault: dict[str, Any], seen: dict[str, Any]):
    def send(*arguments, **fields):
        is_due = fault["where"] != "step" or arguments[1].step == SIGNAL_STEP
        if is_due and "signalled" not in seen:
            seen["signalled"] = time.monotonic()
            os.kill(os.getpid(), getattr(signal, fault["signal"]))

    return send


def clock_action(fault: dict[str, Any], rank: int, ahead: list[float]):
    def leap(loop, progress):
        who, seconds = fault["leaps"].get(str(progress.step), (-1, 0.0))
        if who == rank:
            ahead[0] += seconds

    return leap


def same_tokens(gather, samples: list[int]):
    """Returns TokenData._gather with some training samples replaced by one token, repeated."""

    def changed(self, split, place, positions):
        batch = gather(self, split, place, positions)
        if split == "train":
            rows = np.isin(positions, samples)
            batch["tokens"] = np.where(rows[:, None], 381, batch["tokens"]).astype(np.int32)
        return batch

    return changed


def slow_batches(opened):
    def open_batches(*arguments, **fields):
        for batch in opened(*arguments, **fields):
            time.sleep(0.1)
            yield batch

    return open_batches


def patches(fault: dict[str, Any], seen: dict[str, Any], rank: int):
    """Yields what a run's fault patches on this rank."""
    kind = fault.get("kind")
    if kind == "signal" and rank == fault["rank"]:
        owner, name = PLACES[fault["where"]]
        call = before(getattr(owner, name), signal_action(fault, seen))
        yield mock.patch.object(owner, name, call)
    if kind == "clock":  # the wall clock: time.monotonic goes on, as the kernel's does
        real, ahead = time.time, [0.0]
        yield mock.patch.object(time, "time", lambda: real() + ahead[0])
        action = clock_action(fault, rank, ahead)
        yield mock.patch.object(Loop, "_launch", before(Loop._launch, action))
    if kind == "tokens":  # each rank gathers its own rows only
        call = same_tokens(TokenData._gather, fault["samples"])
        yield mock.patch.object(TokenData, "_gather", call)
    if kind == "slow" and rank == fault["rank"]:
        yield mock.patch.object(train, "train_batches", slow_batches(train.train_batches))


def watched_verdicts(seen: dict[str, Any]):
    """Returns the patch that notes this rank's verdicts and where rollbacks took it."""
    seen["verdicts"], seen["steps"] = [], []
    judge, launch = BadSteps.judge, Loop._launch

    def noting(self, record, limit):
        bad = judge(self, record, limit)
        if bad is not None:
            seen["verdicts"].append([bad.step, bad.reason])
        return bad

    def launching(self, progress):
        seen["steps"].append(list(progress))
        return launch(self, progress)

    return [
        mock.patch.object(BadSteps, "judge", noting),
        mock.patch.object(Loop, "_launch", launching),
    ]


def one_run(flags: list[str], fault: dict[str, Any], rank: int) -> dict[str, Any]:
    """Makes one run and returns what this rank saw of it."""
    seen: dict[str, Any] = {}
    with contextlib.ExitStack() as held:
        # One by one: each wraps what the one before has left.
        for patch in itertools.chain(watched_verdicts(seen), patches(fault, seen, rank)):
            held.enter_context(patch)
        try:
            seen["code"] = train._body(flags)
        except RunError as error:
            seen["error"] = str(error)
        seen["left"] = time.monotonic()
    (folder,) = (flag.partition("=")[2] for flag in flags if flag.startswith("--run_dir="))
    seen["saved"] = [info.step for info in list_checkpoints(f"{folder}/checkpoints")]
    return seen


def main(path: str) -> None:
    plan, rank = json.loads(Path(path).read_text()), launched_rank()
    for run in plan["runs"]:
        print(f"run {run['name']}", flush=True)
        seen = one_run([*plan["flags"], *run["flags"]], run.get("fault", {}), rank)
        name = f"{run['name']}-rank-{rank}.json"
        Path(path).with_name(name).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
