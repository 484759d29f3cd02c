"""The text that a tokenizer is trained on."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data_pipeline.documents import ReadCounts, filtered, split_of
from data_pipeline.input_files import TOKEN_FORMS
from data_pipeline.plan import Plan
from data_pipeline.reading import Piece, PieceReader
from data_pipeline.tokenizing import filters
from data_pipeline.work import WorkFolder
from tfbig.errors import UserError

_TRAINING_CHARACTERS = 1 << 28  # text that a tokenizer is trained on at most


def training_texts(
    plan: Plan,
    chunks: list[list[Piece]],
    sizes: Sequence[int],
    work: WorkFolder,
    folder: Path,
    say: Any,
) -> Iterator[str]:
    """Yields what a tokenizer is trained on: the train split, evenly from all chunks if it is much.

    Args:
      plan: of the preparation.
      chunks: its chunks.
      sizes: stored bytes of each: progress is counted in them.
      work: is told the progress.
      folder: of the data.
      say: is handed messages.

    Raises:
      UserError: there is no text to train on.
    """
    config = plan.config
    fractions = config.validation_fraction, config.test_fraction
    room = max(1, _TRAINING_CHARACTERS // max(1, len(chunks)))
    found = limited = False
    first_bad = ""
    for pieces, size in zip(chunks, sizes, strict=True):
        taken, before, done = 0, work.progress, 0
        for piece in pieces:
            source = plan.inputs[piece.number]
            if source.form in TOKEN_FORMS:
                raise UserError(
                    f"{source.name} holds tokens: give the --tokenizer that they were made with."
                )
            counts = ReadCounts(1.0)  # the next stage judges
            reader = PieceReader(source, piece, counts, str(folder))
            for document in filtered(iter(reader), filters(config), counts):
                if (source.split or split_of(document.digest.key, *fractions)) != "train":
                    continue
                if taken > room:
                    limited = True
                    break
                taken += len(document.text) + len(document.prompt)
                found = True
                if document.prompt:
                    yield document.prompt
                yield document.text
                work.progress = before + min(size, done + reader.num_bytes)
            done += reader.num_bytes
            first_bad = first_bad or counts.first_bad()
        work.progress = before + size
    if limited:
        say(f"  the tokenizer sees {room:,} characters of each chunk only")
    if not found:
        raise UserError(f"there is no text in the train split to train a tokenizer on.{first_bad}")
