"""Writes text with a checkpoint: `python -m tfbig.generate --run runs/gpt_tiny --prompt "def "`."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfbig.command import launched_rank, run_command
from tfbig.command_config import GenerateConfig
from tfbig.config import Config, section_values
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
        raise UserError(f"--max_tokens={config.max_tokens} must be at least 1: give e.g. 200.")
    from tfbig.generation.beam_search import BeamOptions
    from tfbig.generation.text_stream import TextStream

    options = _sampling_options(config)
    beams = None
    if config.num_beams:
        beams = BeamOptions(config.num_beams, config.length_penalty, config.no_repeat_ngram_size)
    saved = SavedRun.open(config.run, config.checkpoint)
    import trainers
    from data_pipeline.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(saved.folder.tokenizer_path)
    layout = saved.with_parallel(parallel)
    trainer = trainers.start(layout)
    try:
        trainer.build(training=False, vocab_size=tokenizer.vocab_size)
        trainer.load_state(saved.reader, weights_only=True)
        stream = TextStream(config.stop)
        pieces: list[str] = []
        if write is not None and trainer.rank == 0:
            write(config.prompt)

        def hand_out(piece: str) -> None:
            pieces.append(piece)
            if write is not None and piece and trainer.rank == 0:
                write(piece)

        ids = [int(token) for token in tokenizer.encode(config.prompt)]
        prompt, end_token = ids or [tokenizer.end_of_text_id], tokenizer.end_of_text_id
        if beams is None:
            tokens = _sample(config, layout, options, trainer, prompt, end_token, stream)
        else:
            tokens = _search(config, layout, beams, trainer, prompt, end_token)
        for token in tokens:
            hand_out(stream.feed(tokenizer.decode_bytes([token])))
        hand_out(stream.finish())
        return "".join(pieces)
    finally:
        trainer.close()


def _sampling_options(config: GenerateConfig) -> Any:
    from tfbig.generation.sampling import SamplingOptions

    return SamplingOptions(
        config.temperature,
        config.top_k,
        config.top_p,
        config.sampling_seed,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
    )


def _sample(
    config: GenerateConfig,
    layout: Config,
    options: Any,
    trainer: Any,
    prompt: list[int],
    end_token: int,
    stream: Any,
) -> Iterator[int]:
    """Yields sampled tokens until the text has a stop string."""
    from tfbig.generation.generator import generate_tokens

    return generate_tokens(
        trainer,
        prompt,
        options,
        max_length=layout.model.max_length,
        max_tokens=config.max_tokens,
        end_token=end_token,
        stopped=lambda: stream.stopped,
    )


def _search(
    config: GenerateConfig,
    layout: Config,
    options: Any,
    trainer: Any,
    prompt: list[int],
    end_token: int,
) -> Iterator[int]:
    """Yields the tokens of the likeliest text."""
    from tfbig.generation.beam_search import beam_search

    max_length = layout.model.max_length
    found = beam_search(
        trainer, prompt, options, config.max_tokens, frozenset({end_token}), max_length
    )
    return iter(found[0].tokens)


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
