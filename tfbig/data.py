"""A data folder looked at and changed: `tfbig data inspect|verify|report|mixture|export`."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfbig.command import EXIT_FAULT, run_command
from tfbig.errors import UserError
from tfbig.flags import Flags


@dataclass(frozen=True, kw_only=True)
class DataCommandConfig:
    """What to do with a data folder; the command's first word says which of it."""

    data: str = ""
    """Data folder; empty means that of --run."""
    run: str = ""
    """Run folder: its data, seed, batch size and consumed samples are meant."""
    step: int = 0
    """inspect: the step whose samples are shown, counted from 1."""
    global_batch: int = 32
    """inspect: samples of a step; a run has its own."""
    seed: int = 0
    """inspect: seed of the run; a run has its own."""
    samples: int = 4
    """inspect: samples that are shown; 0 means all of the step."""
    characters: int = 400
    """inspect: text that is shown of a sample; 0 means all."""
    split: str = "train"
    """export: the split that is written."""
    to: str = ""
    """export, report: path that is written (without .bin and .idx)."""
    first_sample: int = -1
    """mixture: sample from which the new weights hold; -1 means the next one of --run."""
    weights: str = ""
    """mixture: SOURCE=WEIGHT, several separated by commas; 1 takes every row once a round."""
    add: str = ""
    """mixture: another data folder whose sources are added."""


_INSPECTED = {
    "step": "it counts from 1, name the one to show",
    "global_batch": "name the run's, or give --run",
    "samples": "0 shows all of the step",
    "characters": "0 shows all of a sample",
}
_MAX_SEED = 2**31 - 1
_MAX_SAMPLE = 2**62
_SHOWN_TOGETHER = 64  # samples that are read at a time


def inspect(config: DataCommandConfig) -> int:
    """Prints the documents of one step as text, with their sources."""
    import numpy as np

    from data_pipeline.dataset import TokenData

    for name, least in (("step", 1), ("global_batch", 1), ("samples", 0), ("characters", 0)):
        if getattr(config, name) < least:
            given = f"--{name}={getattr(config, name)}"
            raise UserError(f"{given} must be at least {least}: {_INSPECTED[name]}.")
    if not 0 <= config.seed <= _MAX_SEED:
        raise UserError(f"--seed={config.seed} must lie between 0 and {_MAX_SEED}: give a run's.")
    folder, run = _folder_and_run(config)
    data = TokenData.open(folder)
    first, count = (config.step - 1) * config.global_batch, config.global_batch
    seed = config.seed
    if run is not None:
        first, count, seed = _samples_of_step(run, config.step)
    if first + count > _MAX_SAMPLE:
        raise UserError(
            f"--step={config.step} of {count:,} samples lies beyond sample {_MAX_SAMPLE:,}: name "
            "an earlier one."
        )
    print(f"step {config.step}: samples {first:,} to {first + count - 1:,} of {folder}")
    stop = first + min(count, config.samples or count)
    for begin in range(first, stop, _SHOWN_TOGETHER):
        positions = np.arange(begin, min(begin + _SHOWN_TOGETHER, stop), dtype=np.int64)
        batch = data.rows("train", positions, seed)
        for row, position in enumerate(positions.tolist()):
            source = data.sources[batch["source_index"][row]]
            labels = int(batch["loss_mask"][row].sum())
            print(f"\n--- sample {position:,}, {source}, {labels} labels")
            print(_text(data, batch, row, config.characters))
    return 0


def _text(data: Any, batch: Mapping[str, Any], row: int, limit: int) -> str:
    """Returns a row as text up to its last label: end-of-text is shown, padding is not."""
    tokens, mask = batch["tokens"][row], batch["loss_mask"][row]
    last = int(mask.nonzero()[0][-1]) + 2 if mask.any() else 1
    text = data.tokenizer.decode(tokens[:last])
    return (
        text
        if not limit or len(text) <= limit
        else f"{text[:limit]} ... ({len(text):,} characters)"
    )


def verify(config: DataCommandConfig) -> int:
    """Checks every checksum and id; the exit code is 1 when something is wrong."""
    from data_pipeline import manifest
    from data_pipeline.verifying import find_problems

    folder, _ = _folder_and_run(config)
    problems = list(find_problems(folder, print))
    for problem in problems:
        print(f"tfbig data: {problem}", file=sys.stderr)
    print(f"{folder}: {f'{len(problems)} problems' if problems else 'all of it is intact'}")
    if not problems:  # then the shards' hashes are the manifest's
        print(f"corpus sha256 {manifest.corpus_sha256(manifest.read(folder).contents)}")
    return EXIT_FAULT if problems else 0


def report(config: DataCommandConfig) -> int:
    """Writes a page of tables and plots about the folder."""
    from data_pipeline.report import write_report

    folder, _ = _folder_and_run(config)
    with _writing(config):
        path = write_report(folder, Path(config.to) if config.to else None)
    print(f"{path} is written")
    return 0


def _append(config: DataCommandConfig, folder: Path, run: Any) -> None:
    """Appends the segment that the flags describe; no job may be at work on the run meanwhile."""
    from data_pipeline.mixture import append_segment, parse_weights
    from tfbig.run_lock import RunLock

    if config.first_sample < -1 or config.first_sample > _MAX_SAMPLE:
        raise UserError(
            f"--first_sample={config.first_sample} must lie between 0 and {_MAX_SAMPLE}, or be "
            "-1 for the next one of --run."
        )
    if config.first_sample < 0 and run is None:
        raise UserError("name the --run that uses the data, or --first_sample.")
    weights = parse_weights(config.weights) if config.weights else {}
    addition = Path(config.add) if config.add else None
    # A job that runs has read the manifest and would not see the change.
    with contextlib.nullcontext() if run is None else RunLock(config.run):
        consumed = 0 if run is None else _consumed_samples(run)
        first = consumed if config.first_sample < 0 else config.first_sample
        append_segment(folder, first, weights, consumed, addition)
    if run is None:
        print(
            f"no --run is named: whether one has consumed sample {first:,} already was not "
            "checked; one that has will not resume"
        )


def mixture(config: DataCommandConfig) -> int:
    """Shows the mixture, or appends a segment to it."""
    from data_pipeline import manifest

    folder, run = _folder_and_run(config)
    if config.weights or config.add:
        _append(config, folder, run)
    elif config.first_sample != -1:
        raise UserError("--first_sample says where a change begins: give --weights or --add too.")
    contents = manifest.read(folder).contents
    rows = {name: found["rows"] for name, found in contents["splits"]["train"]["sources"].items()}
    for segment in contents["mixture"]:
        shares = {n: w * rows.get(n, 0) for n, w in segment["weights"].items()}
        total = sum(shares.values())
        print(f"from sample {segment['first_sample']:,}:")
        for name, weight in segment["weights"].items():
            print(
                f"  {name:<24} weight {weight:<8g} {shares[name] / total:7.2%} of the samples, "
                f"{rows.get(name, 0):,} rows"
            )
    return 0


def export(config: DataCommandConfig) -> int:
    """Writes a split as Megatron-LM's .bin and .idx."""
    from data_pipeline.exporting import export_megatron

    folder, _ = _folder_and_run(config)
    if not config.to:
        raise UserError("--to is missing: name the files to write, without .bin and .idx.")
    with _writing(config):
        documents, tokens = export_megatron(folder, Path(config.to), config.split)
    print(f"{config.to}.bin and .idx: {documents:,} documents, {tokens:,} tokens")
    return 0


@contextlib.contextmanager
def _writing(config: DataCommandConfig) -> Iterator[None]:
    """Says in one line why --to cannot be written."""
    from data_pipeline.input_files import check_local

    check_local(config.to, "to")
    try:
        yield
    except OSError as error:
        where = f"--to={config.to}" if config.to else f"the page into {config.data or config.run}"
        raise UserError(f"cannot write {where}: {error.strerror}; name another place.") from None


ACTIONS: dict[str, Callable[[DataCommandConfig], int]] = {
    "inspect": inspect,
    "verify": verify,
    "report": report,
    "mixture": mixture,
    "export": export,
}


def _folder_and_run(config: DataCommandConfig) -> tuple[Path, Any]:
    """Returns the data folder, and the config of the run if one is named."""
    if not config.run:
        if not config.data:
            raise UserError("--data is missing: name a data folder, or a --run.")
        return Path(config.data), None
    from tfbig.config import from_dict
    from tfbig.run_folder import RunFolder

    if not Path(config.run).is_dir():
        raise UserError(f"--run={config.run} is not a folder.")
    folder = RunFolder(config.run)
    run = from_dict(folder.read_config()["config"])
    return Path(config.data or run.data.data), (folder, run)


def _samples_of_step(run: Any, step: int) -> tuple[int, int, int]:
    """Returns the first sample, the number of samples and the seed of a run's step."""
    from dataclasses import replace

    from tfbig.schedule import batch_segments

    _, config = run
    done = 0
    for segment in batch_segments(replace(config.run, steps=step), 0, 0):
        done += segment.num_steps
        last = segment
    assert done == step
    first = last.start_sample + (last.num_steps - 1) * last.global_batch
    return first, last.global_batch, config.run.seed


def _consumed_samples(run: Any) -> int:
    """Returns the samples of a run's newest checkpoint, or 0."""
    from tfbig.checkpoint import list_checkpoints
    from tfbig.checkpoint_reader import CheckpointReader

    folder, _ = run
    found = list_checkpoints(folder.checkpoints_dir)
    if not found:
        return 0
    newest = max(found, key=lambda info: info.step)
    return int(CheckpointReader(newest.path).manifest["consumed_samples"])


def _body(arguments: Sequence[str]) -> int:
    summary = f"{'|'.join(ACTIONS)}: looks at a data folder and changes its mixture."
    flags = Flags("data", (DataCommandConfig,), summary)
    action, given = flags.parse_action("data", ACTIONS, arguments)
    return ACTIONS[action](DataCommandConfig(**given))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits."""
    run_command("data", _body, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    main()
