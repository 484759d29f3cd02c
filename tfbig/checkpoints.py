"""A run's checkpoints looked at and cleared: `tfbig checkpoints list|verify|diff|prune`."""

import datetime
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfbig.checkpoint import CheckpointInfo, flatten_fields, list_checkpoints, prune
from tfbig.checkpoint_format import MANIFEST_NAME, UnreadableCheckpointError
from tfbig.checkpoint_reader import CheckpointReader
from tfbig.command import EXIT_FAULT, run_command
from tfbig.errors import UserError
from tfbig.flags import Flags
from tfbig.number_rules import way_out
from tfbig.run_folder import RunFolder
from tfbig.run_lock import RunLock

_MIB = 1024**2


@dataclass(frozen=True, kw_only=True)
class CheckpointsConfig:
    """What to do with a run's checkpoints; the command's first word says which of it."""

    run: str = ""
    """Run folder."""
    step: int = -1
    """verify, diff: checkpoint of this step; -1 means all (verify) or the newest (diff)."""
    other_step: int = -1
    """diff: step to compare with; -1 means the one before."""
    other_run: str = ""
    """diff: run folder of the other checkpoint; empty means the same."""
    num_variables: int = 10
    """diff: variables that are shown, those of the largest difference first; 0 means all."""
    keep_last: int = 2
    """prune: newest checkpoints that are kept."""
    keep_every: int = 0
    """prune: checkpoints whose step is a multiple of this are kept too; 0 means none."""
    keep_best: int = 1
    """prune: as many of the lowest validation loss are kept too."""


def list_all(config: CheckpointsConfig) -> int:
    """Prints one line a checkpoint."""
    for info in _checkpoints(config.run):
        try:
            manifest = info.manifest
        except UnreadableCheckpointError as error:
            print(f"step {info.step:>8}  DAMAGED: {error}")
            continue
        size = sum(entry["bytes"] for entry in manifest["files"].values())
        saved = datetime.datetime.fromtimestamp((info.path / MANIFEST_NAME).stat().st_mtime)
        loss = manifest.get("metadata", {}).get("eval_loss")
        print(
            f"step {info.step:>8}  {saved:%Y-%m-%d %H:%M:%S}  {size / _MIB:,.1f} MiB in "
            f"{len(manifest['files'])} files  {manifest['consumed_samples']:,} samples"
            + (f"  validation loss {loss:.4f}" if loss is not None else "")
        )
    return 0


def verify(config: CheckpointsConfig) -> int:
    """Reads every file and says which checkpoints are intact; code 1 when one is not."""
    code = 0
    for info in _checkpoints(config.run):
        if config.step not in (-1, info.step):
            continue
        try:
            problems = CheckpointReader(info.path).problems()
        except UnreadableCheckpointError as error:
            problems = [str(error)]
        print(f"step {info.step:>8}  {'; '.join(problems) or 'intact'}")
        code = EXIT_FAULT if problems else code
    return code


def diff(config: CheckpointsConfig) -> int:
    """Prints in what two checkpoints differ: fields, variables, largest differences."""
    checkpoints = _checkpoints(config.run)
    new = _of_step(checkpoints, config.step, len(checkpoints) - 1)
    others = _checkpoints(config.other_run or config.run)
    is_same_run = others == checkpoints
    place = checkpoints.index(new) - 1 if is_same_run else len(others) - 1
    old = _of_step(others, config.other_step, place)
    first, second = CheckpointReader(old.path), CheckpointReader(new.path)
    print(f"from {old.path} to {new.path}")
    for line in _different_fields(first.manifest, second.manifest):
        print(line)
    for path in sorted(set(first.paths()) ^ set(second.paths())):
        print(f"{path}: only in {(first if first.has(path) else second).directory}")
    rows = []
    for path in sorted(set(first.paths()) & set(second.paths())):
        if first.shape(path) != second.shape(path):
            print(f"{path}: shape {first.shape(path)} and {second.shape(path)}")
            continue
        rows.append((relative_difference(first.read(path), second.read(path)), path))
    rows.sort(reverse=True)
    num_equal = sum(difference == 0 for difference, _ in rows)
    print(f"{num_equal} of {len(rows)} variables are equal bit by bit")
    for difference, path in rows[: config.num_variables or None]:
        if difference:
            print(f"  {difference:.3e}  {path}")
    return 0


def relative_difference(first: np.ndarray, second: np.ndarray) -> float:
    """Returns the largest difference of two arrays over the largest value of both.

    Infinity where one has NaN or Inf and the other one differs there.
    """
    if np.array_equal(first, second, equal_nan=first.dtype.kind == "f"):
        return 0.0
    left, right = first.astype(np.float64), second.astype(np.float64)
    scale = max(np.abs(left).max(), np.abs(right).max())
    difference = np.abs(left - right).max()
    return float(difference / scale) if np.isfinite(difference / scale) else float("inf")


def prune_now(config: CheckpointsConfig) -> int:
    """Deletes what the rules don't keep, unless a job is writing there."""
    _checkpoints(config.run)
    folder = RunFolder(config.run)
    with RunLock(folder.path):
        deleted = prune(
            folder.checkpoints_dir, config.keep_last, config.keep_every, config.keep_best
        )
    for path in deleted:
        print(f"deleted {path}")
    kept = ", ".join(str(info.step) for info in list_checkpoints(folder.checkpoints_dir))
    print(f"kept steps {kept}")
    return 0


ACTIONS: Mapping[str, Callable[[CheckpointsConfig], int]] = {
    "list": list_all,
    "verify": verify,
    "diff": diff,
    "prune": prune_now,
}


def _checkpoints(run: str) -> list[CheckpointInfo]:
    if not run:
        raise UserError("name the run's folder: --run=runs/gpt_tiny")
    folder = RunFolder(run)
    if not folder.path.is_dir():
        raise UserError(
            f"--run={run} is not a folder: name a run folder, e.g. --run=runs/gpt_tiny."
        )
    found = list_checkpoints(folder.checkpoints_dir)
    if not found:
        raise UserError(f"{run} has no complete checkpoint yet: train it further.")
    return found


def _of_step(checkpoints: Sequence[CheckpointInfo], step: int, default: int) -> CheckpointInfo:
    if step < 0:
        if not 0 <= default < len(checkpoints):
            raise UserError("there is no checkpoint before it: name two by --step, --other_step.")
        return checkpoints[default]
    for info in checkpoints:
        if info.step == step:
            return info
    steps = ", ".join(str(info.step) for info in checkpoints)
    raise UserError(f"there is no checkpoint of step {step}: there are {steps}.")


def _different_fields(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Returns a line for each field of two manifests that differs, variables and files aside."""
    names = ("step", "consumed_samples", "seeds", "loss_scale", "config", "data", "num_ranks")
    old, new = (
        flatten_fields({name: manifest.get(name) for name in names}) for manifest in (first, second)
    )
    return [
        f"{name}: {old.get(name)} -> {new.get(name)}"
        for name in sorted(set(old) | set(new))
        if old.get(name) != new.get(name)
    ]


def _body(arguments: Sequence[str]) -> int:
    summary = f"{'|'.join(ACTIONS)}: looks at a run's checkpoints and clears old ones."
    flags = Flags("checkpoints", (CheckpointsConfig,), summary)
    action, given = flags.parse_action("checkpoints", ACTIONS, arguments)
    config = CheckpointsConfig(**given)
    _check_numbers(config)
    return ACTIONS[action](config)


def _check_numbers(config: CheckpointsConfig) -> None:
    least = {
        "step": -1,
        "other_step": -1,
        "num_variables": 0,
        "keep_last": 1,
        "keep_every": 0,
        "keep_best": 0,
    }
    for name, minimum in least.items():
        value = getattr(config, name)
        if value < minimum:
            raise UserError(f"--{name}={value} must be at least {minimum}: {way_out(config, name)}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits."""
    run_command("checkpoints", _body, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    main()
