"""Writes text with a checkpoint: `python -m tfbig.generate --run runs/gpt_tiny --prompt "def "`."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfbig.command import launched_rank, run_command
from tfbig.command_config import GenerateConfig
from tfbig.config import section_values
from tfbig.errors import UserError
from tfbig.flags import Flags
from tfbig.parallel_config import ParallelConfig
from tfbig.saved_run import SavedRun

if TYPE_CHECKING:  # NumPy is loaded once the flags are known to be right
    from tfbig.generation.beam_search import BeamOptions
    from tfbig.generation.many_texts import TextWriter
    from tfbig.generation.sampling import SamplingOptions

COMMON_FLAGS = (
    "run checkpoint prompt max_tokens temperature top_k top_p stop sampling_seed strategy"
).split()


def run(
    config: GenerateConfig, parallel: dict[str, Any], write: Callable[[str], None] | None = None
) -> str:
    """Returns the text that a checkpoint writes after the prompt, or a line of JSON for each text.

    Args:
      config: which checkpoint writes what.
      parallel: fields of ParallelConfig that differ from the defaults.
      write: is handed each piece of text as soon as it is certain, on rank 0.

    Raises:
      UserError: there is no such run or checkpoint, or an option is out of range.
    """
    options, beams = _options(config)
    prompts = _prompts(config)
    saved = SavedRun.open(config.run, config.checkpoint)
    import trainers
    from data_pipeline.tokenizer import Tokenizer
    from tfbig.generation.many_texts import TextWriter

    tokenizer = Tokenizer.load(saved.folder.tokenizer_path)
    _check_biased(options, tokenizer.vocab_size)
    layout = saved.with_parallel(parallel)
    trainer = trainers.start(layout)
    pieces: list[str] = []

    def hand_out(piece: str) -> None:
        if write is not None and piece and trainer.rank == 0:
            write(piece)

    try:
        trainer.build(training=False, vocab_size=tokenizer.vocab_size)
        trainer.load_state(saved.reader, weights_only=True)
        max_length = layout.model.max_length
        writer = TextWriter(trainer, tokenizer, max_length, config.max_tokens, config.stop)
        if writes_json(config):
            found = _lines(config, writer, prompts, options, beams)
        else:
            hand_out(config.prompt)
            found = _one_text(writer, config.prompt, options, beams)
        for piece in found:
            pieces.append(piece)
            hand_out(piece)
        return "".join(pieces)
    finally:
        trainer.close()


def writes_json(config: GenerateConfig) -> bool:
    """Returns whether each text is a line of JSON, and not simply printed."""
    return bool(config.prompts_file) or config.num_texts > 1 or config.logprobs >= 0


# Options.


def _options(config: GenerateConfig) -> "tuple[SamplingOptions, BeamOptions | None]":
    """Returns how texts are drawn, or searched for.

    Raises:
      UserError: an option is out of range, or means nothing beside another.
    """
    from tfbig.generation.beam_search import BeamOptions
    from tfbig.generation.sampling import MAX_TOP_LOGPROBS, SamplingOptions

    for name, low, high in (
        ("max_tokens", 1, None),
        ("num_texts", 1, None),
        ("logprobs", -1, MAX_TOP_LOGPROBS),
    ):
        value = getattr(config, name)
        if value < low or (high is not None and value > high):
            most = "" if high is None else f" and at most {high}"
            raise UserError(f"--{name}={value} must be at least {low}{most}: give e.g. {low + 1}.")
    options = SamplingOptions(
        config.temperature,
        config.top_k,
        config.top_p,
        config.sampling_seed,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
        logit_bias=dict(_bias(text) for text in config.logit_bias),
        min_tokens=config.min_tokens,
    )
    if not config.num_beams:
        return options, None
    for name, unused in (("logprobs", -1), ("logit_bias", ())):
        if getattr(config, name) != unused:
            raise UserError(f"--{name} is not for beam search: leave --num_beams out.")
    beams = BeamOptions(
        config.num_beams,
        config.length_penalty,
        config.no_repeat_ngram_size,
        config.min_tokens,
        "never" if config.early_stopping == "never" else config.early_stopping == "true",
    )
    if config.num_texts > config.num_beams:
        raise UserError(
            f"--num_texts={config.num_texts} is more than the --num_beams={config.num_beams} texts"
            " that are kept: give as many beams."
        )
    return options, beams


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition(":")
    try:
        return int(token), float(bias)
    except ValueError:
        raise UserError(
            f"--logit_bias={text} is no TOKEN:BIAS: give e.g. --logit_bias=50256:-100."
        ) from None


def _check_biased(options: "SamplingOptions", vocab_size: int) -> None:
    for token in options.logit_bias:
        if not 0 <= token < vocab_size:
            raise UserError(
                f"--logit_bias={token}:... names no token: give an id below {vocab_size}."
            )


def _prompts(config: GenerateConfig) -> list[str]:
    """Returns the prompts of --prompts_file, or the one of --prompt.

    Raises:
      UserError: there is no such file, or it has something else in it.
    """
    if not config.prompts_file:
        return [config.prompt]
    if config.prompt:
        raise UserError("--prompt and --prompts_file are two: give one of them.")
    path = Path(config.prompts_file)
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts_file={path} cannot be read: {error}; name a file.") from None
    if lines == [""]:
        raise UserError(f"--prompts_file={path} is empty: give a prompt a line.")
    if path.suffix != ".jsonl":
        return lines
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            prompt = json.loads(line)
            prompt.encode()  # no lone surrogates
        except (ValueError, AttributeError):
            raise UserError(
                f'--prompts_file={path}: line {number} is no JSON string: give "...".'
            ) from None
        prompts.append(prompt)
    return prompts


# Texts.


def _lines(
    config: GenerateConfig,
    writer: "TextWriter",
    prompts: list[str],
    options: "SamplingOptions",
    beams: "BeamOptions | None",
) -> Iterator[str]:
    """Yields a line of JSON for each text."""
    if beams is None:
        texts = writer.sampled(prompts, config.num_texts, options, config.logprobs)
    else:
        texts = writer.searched(prompts, config.num_texts, beams)
    for text in texts:
        yield text.to_json(writer.tokenizer) + "\n"


def _one_text(
    writer: "TextWriter", prompt: str, options: "SamplingOptions", beams: "BeamOptions | None"
) -> Iterator[str]:
    """Yields a text in pieces; what is sampled may be longer than the model's positions."""
    from tfbig.generation.generator import generate_tokens
    from tfbig.generation.text_stream import TextStream

    if beams is not None:
        yield next(iter(writer.searched([prompt], 1, beams))).text
        return
    stream = TextStream(writer.stop)
    tokens = generate_tokens(
        writer.trainer,
        writer.ids(prompt),
        options,
        max_length=writer.max_length,
        max_tokens=writer.max_tokens,
        end_token=writer.tokenizer.end_of_text_id,
        stopped=lambda: stream.stopped,
    )
    for token in tokens:
        yield stream.feed(writer.tokenizer.decode_bytes([token]))
    yield stream.finish()


def _body(arguments: Sequence[str]) -> None:
    sections = (GenerateConfig, ParallelConfig)
    flags = Flags("generate", sections, "writes text with a checkpoint.", COMMON_FLAGS)
    given = flags.parse(arguments)
    config = GenerateConfig(**section_values(GenerateConfig, given))

    def write(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    run(config, section_values(ParallelConfig, given), write)
    if launched_rank() == 0 and not writes_json(config):
        write("\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits."""
    run_command("generate", _body, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    main()
