"""Text that is tokenized already: Megatron's .bin/.idx, nanoGPT's .bin, and kept token stores."""

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_pipeline import manifest
from data_pipeline.codecs import file_facts, list_files
from data_pipeline.documents import ReadCounts, digest_of
from data_pipeline.input_files import InputFile, RecordFormat
from data_pipeline.reading import Piece
from data_pipeline.token_store import IndexedTokens, TokenStore
from data_pipeline.tokenizer import Tokenizer
from tfbig.errors import UserError

_BATCH_TOKENS = 1 << 22
_NANOGPT = np.dtype("<u2")  # of its ids


class TokenBatch(NamedTuple):
    """Documents of one file, as the tokenizing stage takes them."""

    names: list[tuple[str, str]]  # split ("" where the hash decides) and source
    name_of: np.ndarray  # (m,) index into `names` of each document
    digests: np.ndarray  # (m, 2) uint64, key and check
    num_bytes: np.ndarray  # (m,)
    ids: np.ndarray  # (n,) without end-of-text
    lengths: np.ndarray  # (m,)


def find_token_files(form: str, path: str, record_format: RecordFormat) -> list[InputFile]:
    """Returns the inputs of one specification.

    Args:
      form: megatron (PREFIX, or a glob of .bin), nanogpt (a .bin, or a glob) or tokens (a data
        folder that kept its token stores).
      path: of them.
      record_format: its `name` is the source of all documents.

    Raises:
      UserError: there are none.
    """
    if form == "tokens":
        return _kept_stores(Path(path))
    pattern = path if path.endswith(".bin") else f"{path}.bin"
    names = list_files(path if os.path.isdir(path) else pattern)
    names = [name for name in names if name.endswith(".bin")]
    if not names:
        raise UserError(f"--source={form}:{path} names no .bin file.")
    inputs = []
    for name in names:
        facts = file_facts(name)
        source = record_format.name or os.path.basename(name).removesuffix(".bin")
        inputs.append(
            InputFile(
                name,
                name,
                form,
                _split_of_name(name),
                replace(record_format, name=source),
                facts.num_bytes,
                facts.changed,
            )
        )
    return inputs


def _split_of_name(name: str) -> str:
    """NanoGPT's preparation writes train.bin and val.bin."""
    stem = os.path.basename(name).removesuffix(".bin")
    return {"val": "validation", "validation": "validation", "test": "test", "train": "train"}.get(
        stem, ""
    )


def _kept_stores(folder: Path) -> list[InputFile]:
    contents = manifest.read(folder).contents
    if not contents["token_store"]:
        raise UserError(
            f"--source=tokens:{folder}: it kept no token store; prepare it with --keep_tokens."
        )
    inputs = []
    for store in contents["stores"]:
        path = str(folder / contents["token_store"] / store["folder"] / "tokens")
        facts = file_facts(f"{path}.bin")
        inputs.append(
            InputFile(path, path, "tokens", "", RecordFormat(), facts.num_bytes, facts.changed)
        )
    return inputs


def document_ranges(item: InputFile, chunk_bytes: int) -> list[tuple[int, int]]:
    """Returns ranges of documents that are read apart; of tokens they begin at, for nanoGPT."""
    if item.form == "nanogpt":
        num_tokens, limit = item.num_bytes // _NANOGPT.itemsize, _tokens_of(chunk_bytes, _NANOGPT)
        cuts = [*range(0, num_tokens, limit), num_tokens]
        return list(itertools.pairwise(cuts))
    prefix = item.path.removesuffix(".bin")
    found = IndexedTokens(prefix)
    limit = _tokens_of(chunk_bytes, found.dtype)
    targets = np.arange(limit, len(found.tokens), limit)
    places = np.unique(np.searchsorted(found.ends, targets, side="left") + 1)
    cuts = [0, *places[places < found.num_documents].tolist(), found.num_documents]
    return [(int(a), int(b)) for a, b in itertools.pairwise(cuts)]


def _tokens_of(chunk_bytes: int, dtype: np.dtype) -> int:
    return max(1, chunk_bytes // (4 * dtype.itemsize))  # a token is about 4 bytes of text


def read_token_documents(
    item: InputFile, piece: Piece, tokenizer: Tokenizer, counts: ReadCounts
) -> Iterator[TokenBatch]:
    """Yields the documents of one piece.

    Args:
      item: the input.
      piece: of it.
      tokenizer: whose ids they should be.
      counts: is added to.

    Raises:
      UserError: ids are beyond the tokenizer's, or a store was made with another tokenizer.
    """
    if item.form == "tokens":
        yield from _read_store(item, piece, tokenizer)
        return
    if item.form == "megatron":
        found = IndexedTokens(item.path.removesuffix(".bin"))
        tokens, ends, start = found.tokens, found.ends, piece.start
        stop = len(ends) if piece.stop < 0 else piece.stop
    else:
        tokens = _nanogpt_tokens(item, piece, tokenizer.end_of_text_id)
        ends = np.flatnonzero(tokens == tokenizer.end_of_text_id) + 1
        if len(tokens) and (not len(ends) or ends[-1] < len(tokens)):
            ends = np.append(ends, len(tokens))
        start, stop = 0, len(ends)
    for first, last in _batch_bounds(ends, start, stop):
        documents = [
            _without_end(tokens[start:end], tokenizer.end_of_text_id)
            for start, end in zip(_starts(ends, first, last), ends[first:last], strict=True)
        ]
        num_empty = sum(not len(document) for document in documents)
        if num_empty:
            counts.skipped["empty text"] += num_empty
        yield _batch(item, [d for d in documents if len(d)], tokenizer)


def _nanogpt_tokens(item: InputFile, piece: Piece, end_of_text_id: int) -> np.ndarray:
    """Returns the documents that begin in a piece, the last one to its end, which may lie behind.

    So a file is cut without being read, and each document is in one piece, wherever the cuts are.
    """
    if item.num_bytes % _NANOGPT.itemsize:
        raise UserError(f"{item.name} has {item.num_bytes} bytes: no whole number of uint16 ids.")
    if not item.num_bytes:
        return np.empty(0, _NANOGPT)
    tokens = np.asarray(np.memmap(item.path, _NANOGPT, "r"))
    start = _next_document(tokens, piece.start, end_of_text_id)
    stop = len(tokens) if piece.stop < 0 else piece.stop
    return tokens[start : max(start, _next_document(tokens, stop, end_of_text_id))]


def _next_document(tokens: np.ndarray, place: int, end_of_text_id: int) -> int:
    """Returns where the first document begins that does not begin before a place."""
    if not place:
        return 0
    for first in range(place - 1, len(tokens), _BATCH_TOKENS):
        ends = np.flatnonzero(tokens[first : first + _BATCH_TOKENS] == end_of_text_id)
        if len(ends):
            return first + int(ends[0]) + 1
    return len(tokens)


def _starts(ends: np.ndarray, first: int, last: int) -> np.ndarray:
    return ends[first - 1 : last - 1] if first else np.concatenate([[0], ends[: last - 1]])


def _batch_bounds(ends: np.ndarray, start: int, stop: int) -> Iterator[tuple[int, int]]:
    while start < stop:
        before = ends[start - 1] if start else 0
        last = int(np.searchsorted(ends, before + _BATCH_TOKENS, side="right"))
        last = min(max(last, start + 1), stop)
        yield start, last
        start = last


def _without_end(document: np.ndarray, end_of_text_id: int) -> np.ndarray:
    return document[:-1] if len(document) and document[-1] == end_of_text_id else document


def _batch(item: InputFile, documents: list[np.ndarray], tokenizer: Tokenizer) -> TokenBatch:
    ids = np.concatenate(documents) if documents else np.empty(0, tokenizer.dtype)
    _check_ids(ids, item, tokenizer)
    if (ids == tokenizer.end_of_text_id).any():
        raise UserError(
            f"{item.name} has end-of-text (id {tokenizer.end_of_text_id}) inside a document: it "
            "was made with another tokenizer, or its index is wrong."
        )
    lengths = np.array([len(document) for document in documents], np.int64)
    digests = [digest_of(document.astype("<i4").tobytes()) for document in documents]
    return TokenBatch(
        [(item.split, item.format.name)],
        np.zeros(len(documents), np.int64),
        np.array(digests, np.uint64).reshape(-1, 2),  # (m, 2)
        _text_bytes(ids, lengths, tokenizer),
        ids.astype(tokenizer.dtype),
        lengths,
    )


def _text_bytes(ids: np.ndarray, lengths: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Returns the bytes of text (m,) of documents."""
    sizes = np.concatenate([[0], np.cumsum(tokenizer.num_bytes_of_token[ids], dtype=np.int64)])
    ends = np.cumsum(lengths)
    return sizes[ends] - sizes[ends - lengths]


def _check_ids(ids: np.ndarray, item: InputFile, tokenizer: Tokenizer) -> None:
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < tokenizer.vocab_size:
        raise UserError(
            f"{item.name} has ids from {ids.min()} to {ids.max()}, beyond the tokenizer's "
            f"{tokenizer.vocab_size}: give the --tokenizer that it was made with."
        )


def _read_store(item: InputFile, piece: Piece, tokenizer: Tokenizer) -> Iterator[TokenBatch]:
    """Yields a kept store's documents with the splits, sources and digests that they had."""
    folder = Path(item.path).parents[2]
    contents = manifest.read(folder).contents
    if contents["tokenizer"]["sha256"] != tokenizer.sha256:
        raise UserError(
            f"{item.name} was made with another tokenizer: give --tokenizer={folder}/tokenizer.json"
        )
    name = Path(item.path).parent.name
    described: dict[str, Any] = next(s for s in contents["stores"] if s["folder"] == name)
    store = TokenStore(item.path)
    if store.prompts is not None:
        raise UserError(f"{item.name} holds prompt/completion records: prepare them from the text.")
    firsts = np.array([part["first"] for part in described["parts"]])
    names = [(part["split"], part["source"]) for part in described["parts"]]
    stop = store.num_documents if piece.stop < 0 else piece.stop
    for first, last in _batch_bounds(store.ends, piece.start, stop):
        lengths = store.lengths[first:last] - 1
        kept = np.ones(int(store.lengths[first:last].sum()), bool)
        kept[np.cumsum(store.lengths[first:last]) - 1] = False
        ids = store.tokens[store.starts[first] : store.ends[last - 1]][kept]
        _check_ids(ids, item, tokenizer)
        part = np.searchsorted(firsts, np.arange(first, last), side="right") - 1
        yield TokenBatch(
            names,
            part,
            np.stack([store.keys[first:last], store.checks[first:last]], axis=1),
            _text_bytes(ids, lengths, tokenizer),
            ids,
            lengths,
        )
