"""What a preparation will give and cost, from a sample of its text."""

import time
from collections.abc import Callable

import numpy as np

from data_pipeline.documents import ReadCounts, filtered
from data_pipeline.encoders import TokenEncoder
from data_pipeline.input_files import TOKEN_FORMS, InputFile
from data_pipeline.plan import Plan
from data_pipeline.reading import Piece, PieceReader
from data_pipeline.shards import RecordLayout, row_features
from data_pipeline.tokenizer import Tokenizer, train_tokenizer
from data_pipeline.tokenizing import filters, has_prompts
from tfbig.config import PrepareConfig
from tfbig.errors import UserError

_SAMPLED_INPUTS = 24
_SAMPLE_CHARACTERS = 1 << 21  # of each sampled input


def estimate(
    config: PrepareConfig, inputs: list[InputFile], workers: int, say: Callable[[str], None]
) -> None:
    """Says documents, tokens, rows, disk and time to expect; writes nothing.

    Args:
      config: the options.
      inputs: all files.
      workers: processes.
      say: is handed the lines.

    Raises:
      UserError: there is no text in the sample, or it is unfit.
    """
    start = time.perf_counter()
    texts, counts, stored = _sample(config, inputs)
    read_seconds = time.perf_counter() - start
    if not texts:
        raise UserError(f"there is no text in the sample of the inputs.{counts.first_bad()}")
    text_bytes = sum(len(text.encode()) for text in texts)
    if config.tokenizer:
        tokenizer = Tokenizer.load(config.tokenizer)
    else:
        tokenizer = Tokenizer(train_tokenizer(texts, config.vocab_size))
    encoder = TokenEncoder(tokenizer, config.encoder)
    differs = encoder.check(texts)
    for warning in [*encoder.notes, *filter(None, [differs])]:
        say(f"  warning: {warning}")
    encoder.encode(texts[:1])
    start = time.perf_counter()
    ids, _ = encoder.encode(texts)
    encode_seconds = time.perf_counter() - start
    total_stored = sum(item.num_bytes for item in inputs)
    factor = total_stored / max(1, stored)
    num_tokens = (len(ids) + len(texts)) * factor
    shard_bytes = num_tokens / config.sequence_length * _row_bytes(config, tokenizer)
    store_bytes = num_tokens * tokenizer.dtype.itemsize
    seconds = (read_seconds + 2 * encode_seconds) * factor  # shards take about as long again
    split = Plan({}, config, inputs).num_recoded_bytes()
    say(
        f"estimated from {text_bytes / 1e6:.1f} MB of text in {len(texts):,} documents of "
        f"{min(len(inputs), _SAMPLED_INPUTS)} of {len(inputs):,} files:\n"
        f"  documents  {len(texts) * factor:,.0f}\n"
        f"  text       {text_bytes * factor / 1e9:,.3f} GB in {total_stored / 1e9:,.3f} GB\n"
        f"  tokens     {num_tokens:,.0f} ({text_bytes / max(1, len(ids)):.2f} bytes each)\n"
        f"  rows       {num_tokens / config.sequence_length:,.0f} of {config.sequence_length}\n"
        f"  disk       {(shard_bytes + store_bytes + split) / 1e9:,.3f} GB while it runs, "
        f"{(shard_bytes + store_bytes * config.keep_tokens) / 1e9:,.3f} GB at the end\n"
        f"  time       {seconds / workers / 60:,.1f} minutes with {workers} workers "
        f"({encoder.name} at {text_bytes / max(1e-9, encode_seconds) / 1e6:.1f} MB/s a core)"
    )
    unfit = counts.bad.total()
    if unfit:
        say(f"  {unfit:,} records of the sample are unfit: {dict(counts.bad)}")


def _row_bytes(config: PrepareConfig, tokenizer: Tokenizer) -> int:
    has_mask = config.packing != "join" or config.tail == "pad" or has_prompts(config)
    features = row_features(config.sequence_length, tokenizer.dtype, has_mask, config.document_mask)
    return RecordLayout(features).stride


def _sample(config: PrepareConfig, inputs: list[InputFile]) -> tuple[list[str], ReadCounts, int]:
    """Returns texts from evenly chosen inputs, and the stored bytes they were read from."""
    chosen = np.unique(np.linspace(0, len(inputs) - 1, _SAMPLED_INPUTS).astype(int))
    texts: list[str] = []
    counts, stored = ReadCounts(1.0), 0
    for number in chosen:
        item = inputs[number]
        if item.form in TOKEN_FORMS:
            raise UserError(f"{item.name} holds tokens: --dry_run estimates text only.")
        reader = PieceReader(item, Piece(int(number)), counts)
        taken = 0
        for document in filtered(iter(reader), filters(config), counts):
            texts.append(document.prompt + document.text)
            taken += len(document.text)
            if taken >= _SAMPLE_CHARACTERS:
                stored += reader.num_bytes
                break
        else:
            stored += item.num_bytes
    return texts, counts, stored
