"""Writes text with a checkpoint: `python -m tfbig.generate --run runs/gpt_tiny --prompt "def "`."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from tfbig.command import launched_rank, run_command
from tfbig.command_config import GenerateConfig
from tfbig.config import section_values
from tfbig.errors import UserError
from tfbig.flags import Flags
from tfbig.parallel_config import ParallelConfig
from tfbig.saved_run import SavedRun

COMMON_FLAGS = (
    "run checkpoint prompt max_tokens temperature top_k top_p stop sampling_seed strategy"
).split()


def run(
    config: GenerateConfig, parallel: dict[str, Any], write: Callable[[str], None] | None = None
) -> str:
    """Returns the text that a checkpoint writes after the prompt.

    Args:
      config: which checkpoint writes what.
      parallel: fields of ParallelConfig that differ from the defaults.
      write: is handed each piece of text as soon as it is certain, on rank 0.

    Raises:
      UserError: there is no such run or checkpoint, or an option is out of range.
    """
    if config.max_tokens < 1:
        raise UserError(f"--max_tokens={config.max_tokens} must be at least 1.")
    from tfbig.generation.sampling import SamplingOptions
    from tfbig.generation.text_stream import TextStream

    options = SamplingOptions(config.temperature, config.top_k, config.top_p, config.sampling_seed)
    saved = SavedRun.open(config.run, config.checkpoint)
    import trainers
    from data_pipeline.tokenizer import Tokenizer
    from tfbig.generation.generator import generate_tokens

    tokenizer = Tokenizer.load(saved.folder.tokenizer_path)
    layout = saved.with_parallel(parallel)
    trainer = trainers.trainer_class(layout.parallel.strategy)(layout)
    try:
        trainer.build(training=False, vocab_size=tokenizer.vocab_size)
        trainer.load_state(saved.reader, weights_only=True)
        prompt = [int(token) for token in tokenizer.encode(config.prompt)]
        stream = TextStream(config.stop)
        pieces: list[str] = []
        if write is not None and trainer.rank == 0:
            write(config.prompt)

        def hand_out(piece: str) -> None:
            pieces.append(piece)
            if write is not None and piece and trainer.rank == 0:
                write(piece)

        for token in generate_tokens(
            trainer,
            prompt or [tokenizer.end_of_text_id],
            options,
            max_length=saved.config.model.max_length,
            max_tokens=config.max_tokens,
            end_token=tokenizer.end_of_text_id,
            stopped=lambda: stream.stopped,
        ):
            hand_out(stream.feed(tokenizer.decode_bytes([token])))
        hand_out(stream.finish())
        return "".join(pieces)
    finally:
        trainer.close()


def _body(arguments: Sequence[str]) -> None:
    sections = (GenerateConfig, ParallelConfig)
    flags = Flags("generate", sections, "writes text with a checkpoint.", COMMON_FLAGS)
    given = flags.parse(arguments)
    config = GenerateConfig(**section_values(GenerateConfig, given))

    def write(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    run(config, section_values(ParallelConfig, given), write)
    if launched_rank() == 0:
        write("\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits."""
    run_command("generate", _body, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    main()
