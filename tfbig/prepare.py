"""Raw text to a data folder: `python -m tfbig.prepare --source=stdlib`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from tfbig.command import run_command
from tfbig.config import PrepareConfig
from tfbig.flags import Flags

COMMON_FLAGS = (
    "source data sequence_length vocab_size tokenizer text_field packing document_mask"
    " validation_fraction max_bad_fraction seed workers dry_run"
).split()


def run(config: PrepareConfig) -> Path:
    """Returns the data folder that `config` describes, made where it is missing.

    Args:
      config: what to make of which text.

    Raises:
      UserError: an option or the text is unfit, or the folder is of other settings.
    """
    from data_pipeline.preparation import prepare

    return prepare(config)


def _body(arguments: Sequence[str]) -> None:
    flags = Flags("prepare", (PrepareConfig,), "turns raw text into shards.", COMMON_FLAGS)
    run(PrepareConfig(**flags.parse(arguments)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits."""
    run_command("prepare", _body, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    main()
