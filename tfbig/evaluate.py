"""Evaluates a checkpoint: `python -m tfbig.evaluate --run runs/gpt_tiny`."""

import sys
from collections.abc import Sequence
from typing import Any

from tfbig.batch_memory import check_batch_memory
from tfbig.command import run_command
from tfbig.command_config import EvaluateConfig
from tfbig.config import section_values
from tfbig.errors import UserError
from tfbig.flags import Flags
from tfbig.parallel_config import ParallelConfig
from tfbig.saved_run import SavedRun

COMMON_FLAGS = "run checkpoint split data strategy precision".split()


def run(config: EvaluateConfig, parallel: dict[str, Any]) -> dict[str, float]:
    """Returns the measures of a checkpoint on a split, and prints them on rank 0.

    Args:
      config: which checkpoint, on what.
      parallel: fields of ParallelConfig that differ from the defaults.

    Raises:
      UserError: there is no such run, checkpoint, data or split, or they don't fit.
    """
    saved = SavedRun.open(config.run, config.checkpoint)
    import trainers
    from data_pipeline.dataset import TokenData
    from tfbig.evaluation import evaluate

    layout = saved.with_parallel(parallel)
    path = config.data or saved.config.data.data
    data = TokenData.open(path, vocab_size=saved.config.model.vocab_size)
    if data.tokenizer_sha256 != saved.reader.manifest["tokenizer_sha256"]:
        raise UserError(f"{path} was made with another tokenizer than {config.run}.")
    if config.split not in data.splits or data.num_rows(config.split) == 0:
        raise UserError(f"{path} has no samples in a split {config.split!r}.")
    trainer = trainers.trainer_class(layout.parallel.strategy)(layout)
    try:
        if config.eval_batch < 1 or config.eval_batch % trainer.num_replicas:
            raise UserError(
                f"--eval_batch={config.eval_batch} does not divide among {trainer.num_replicas} "
                "replicas: take a multiple of them."
            )
        length = data.sequence_length
        check_batch_memory("eval_batch", config.eval_batch, trainer.data_size, length)
        trainer.build(False, len(data.sources), data.vocab_size)
        trainer.load_state(saved.weights(config.weights), weights_only=True)
        batches = data.evaluation_batches(
            config.split, config.eval_batch, trainer.data_rank, trainer.data_size
        )
        measures = evaluate(trainer, batches, data.num_bytes(config.split))
        if trainer.rank == 0:
            print(f"{config.run} at step {saved.step}, {config.split} split of {path}")
            for name, value in measures.items():
                print(
                    f"  {name:<14} {value:,.0f}"
                    if name == "num_tokens"
                    else f"  {name:<14} {value:.4f}"
                )
        return measures
    finally:
        trainer.close()


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
