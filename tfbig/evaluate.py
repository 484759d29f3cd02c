"""Evaluates a checkpoint: `python -m tfbig.evaluate --run runs/gpt_tiny`."""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfbig.batch_memory import check_batch_memory
from tfbig.command import is_launched, run_command
from tfbig.command_config import EvaluateConfig
from tfbig.config import section_values
from tfbig.errors import UserError
from tfbig.flags import Flags
from tfbig.parallel_config import ParallelConfig
from tfbig.saved_run import SavedRun
from tfbig.together import Outcome, together

COMMON_FLAGS = "run checkpoint split data stride tasks strategy precision".split()


def run(config: EvaluateConfig, parallel: dict[str, Any]) -> dict[str, Any]:
    """Returns the measures of a checkpoint on a split, and prints them on rank 0.

    Args:
      config: which checkpoint, on what.
      parallel: fields of ParallelConfig that differ from the defaults.

    Returns:
      The split's measures, and under "sources" those of each source by name.

    Raises:
      UserError: there is no such run, checkpoint, data or split, or they don't fit.
    """
    saved = SavedRun.open(config.run, config.checkpoint)
    if config.tasks:
        return _run_tasks(config, saved, parallel)
    import trainers
    from data_pipeline.dataset import TokenData

    layout = saved.with_parallel(parallel)
    path = config.data or saved.config.data.data

    def open_data() -> TokenData:
        data = TokenData.open(path, vocab_size=saved.config.model.vocab_size)
        if data.tokenizer_sha256 != saved.reader.manifest["tokenizer_sha256"]:
            raise UserError(
                f"{path} was made with another tokenizer than {config.run}: name that run's data."
            )
        if config.split not in data.splits or data.num_rows(config.split) == 0:
            raise UserError(
                f"{path} has no samples in a split {config.split!r}: it has "
                f"{', '.join(data.splits)}."
            )
        _check_window(config, data.sequence_length, saved.config.model.max_length)
        return data

    opened = Outcome(open_data)
    if not is_launched():
        opened.alone()
    trainer = trainers.start(layout)
    try:
        data = opened.of_all(trainer)
        together(trainer, lambda: _check_batch(config, trainer, data.sequence_length))
        trainer.build(False, len(data.sources), data.vocab_size)
        trainer.load_state(saved.weights(config.weights), weights_only=True)
        measures = _measure(config, data, trainer)
        if trainer.rank == 0:
            print(f"{config.run} at step {saved.step}, {config.split} split of {path}")
            _print(measures)
        return measures
    finally:
        trainer.close()


def _run_tasks(config: EvaluateConfig, saved: SavedRun, parallel: dict[str, Any]) -> dict[str, Any]:
    """Returns the results of the harness' tasks by name, and prints them on rank 0."""
    import trainers

    opened = Outcome(lambda: _open_tasks(saved))
    if not is_launched():
        opened.alone()
    layout = saved.with_parallel(parallel)
    trainer = trainers.start(layout)
    try:
        evaluate_tasks, tokenizer = opened.of_all(trainer)
        together(trainer, lambda: _check_batch(config, trainer))
        trainer.build(False, 1, tokenizer.vocab_size)
        trainer.load_state(saved.weights(config.weights), weights_only=True)
        max_length = saved.config.model.max_length
        results = evaluate_tasks(
            trainer, tokenizer, max_length, config.eval_batch, config.tasks, config.task_path
        )
        if trainer.rank == 0:
            print(f"{config.run} at step {saved.step}")
            for task, values in results.items():
                for name, value in values.items():
                    print(f"  {task}  {name}  {value}")
        return results
    finally:
        trainer.close()


def _open_tasks(saved: SavedRun) -> tuple[Callable[..., dict[str, Any]], Any]:
    """Returns what evaluates the harness' tasks, and the run's tokenizer."""
    try:
        from tfbig.interop.lm_evaluation import evaluate_tasks
    except ImportError as error:
        raise UserError(
            f"--tasks needs the package lm-eval ({error}): pip install 'tfbig[evaluation]'."
        ) from None
    from data_pipeline.tokenizer import Tokenizer

    return evaluate_tasks, Tokenizer.load(saved.folder.tokenizer_path)


def _check_window(config: EvaluateConfig, sequence_length: int, max_length: int) -> None:
    window = config.window or sequence_length
    if window > max_length:
        raise UserError(
            f"--window={window} is longer than the model's {max_length} positions: give at most "
            "these, with --stride."
        )
    if config.window and not config.stride:
        raise UserError(
            "--window needs --stride, as rows as they are stored have their own length: give both "
            "or neither."
        )


def _check_batch(config: EvaluateConfig, trainer: Any, sequence_length: int = 0) -> None:
    """Checks that --eval_batch can be shared among the replicas, and held.

    Args:
      config: its `eval_batch`.
      trainer: of this process.
      sequence_length: of a row; 0 where rows have no fixed one, and memory isn't looked at.

    Raises:
      UserError: with the arithmetic.
    """
    if config.eval_batch < 1 or config.eval_batch % trainer.num_replicas:
        raise UserError(
            f"--eval_batch={config.eval_batch} does not divide among {trainer.num_replicas} "
            "replicas: take a multiple of them."
        )
    if sequence_length:
        check_batch_memory("eval_batch", config.eval_batch, trainer.data_size, sequence_length)


def _measure(config: EvaluateConfig, data: Any, trainer: Any) -> dict[str, Any]:
    """Returns the measures of all and of each source, on every rank."""
    from tfbig.evaluation import measures_of, totals_by_source

    split, batch = config.split, config.eval_batch
    place = (batch, trainer.data_rank, trainer.data_size)
    if config.stride:
        from data_pipeline.sliding import SlidingWindows

        windows = SlidingWindows(data, split, config.window or data.sequence_length, config.stride)
        batches, sources = windows.batches(*place), windows.sources(batch)
    else:
        batches = data.evaluation_batches(split, *place)
        starts = range(0, data.num_rows(split), batch)
        sources = (data.sources_in_order(split, start + np.arange(batch)) for start in starts)
    totals = totals_by_source(trainer, batches, sources, len(data.sources))
    measures: dict[str, Any] = measures_of(totals.sum(axis=0), data.num_bytes(split))
    measures["sources"] = {
        name: measures_of(totals[index], data.num_bytes(split, name))
        for index, name in enumerate(data.sources)
        if totals[index, 1]
    }
    return measures


def _print(measures: dict[str, Any]) -> None:
    """Prints the measures, and a line for each source where there are several."""
    sources = measures["sources"]
    for name, value in measures.items():
        if name != "sources":
            print(f"  {name:<14} {value:{',.0f' if name == 'num_tokens' else '.4f'}}")
    if len(sources) < 2:
        return
    names = ("num_tokens", "loss", "perplexity", "bits_per_byte", "accuracy")
    width = max(len("source"), *map(len, sources))
    print(f"  {'source':<{width}}" + "".join(f" {name:>13}" for name in names))
    for source, found in sources.items():
        values = [f"{found['num_tokens']:>13,.0f}"]
        values += [f"{found.get(name, math.nan):>13.4f}" for name in names[1:]]
        print(f"  {source:<{width}} " + " ".join(values))


def _body(arguments: Sequence[str]) -> None:
    sections = (EvaluateConfig, ParallelConfig)
    flags = Flags("evaluate", sections, "evaluates a checkpoint.", COMMON_FLAGS)
    given = flags.parse(arguments)
    config = EvaluateConfig(**section_values(EvaluateConfig, given))
    run(config, section_values(ParallelConfig, given))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits."""
    run_command("evaluate", _body, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    main()
