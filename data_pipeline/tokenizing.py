"""Chunks of documents to token stores, each document in its place of the shuffle."""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.documents import BadRecord, Document, Filters, ReadCounts, filtered, split_of
from data_pipeline.encoders import TokenEncoder
from data_pipeline.input_files import TOKEN_FORMS, InputFile
from data_pipeline.permutation import hash_with_seed
from data_pipeline.plan import Plan
from data_pipeline.reading import Piece, PieceReader
from data_pipeline.token_store import write_store
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.work import Result, WorkFolder, commit_folder
from tfbig.config import PrepareConfig
from tfbig.errors import UserError

STORE_FOLDER = "tokens"  # of the data folder
PREFIX = "tokens"  # of a chunk's store
_BATCH_CHARACTERS = 1 << 22  # text that is encoded at a time
_TRAINING_CHARACTERS = 1 << 28  # text that a tokenizer is trained on at most

Part = tuple[str, str]  # split, source


@dataclass
class PartCounts:
    """What one source has in one split of one chunk.

    Attributes:
      documents: of it.
      tokens: end-of-text included.
      bytes: of text.
      lengths: documents by number of tokens: entry k counts those in [2**k, 2**(k + 1)).
    """

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    lengths: Counter[int] = field(default_factory=Counter)


class ChunkStore:
    """Collects the documents of one chunk and writes them sorted by part and shuffled.

    Args:
      tokenizer: whose ids these are.
      seed: of the shuffle.
      has_prompts: whether documents begin with tokens that are not learned.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int, has_prompts: bool) -> None:
        self._tokenizer, self._seed, self._has_prompts = tokenizer, seed, has_prompts
        self._documents: list[np.ndarray] = []  # ids with end-of-text
        self._parts: list[int] = []
        self._digests: list[tuple[int, int]] = []
        self._prompts: list[int] = []
        self._numbers: dict[Part, int] = {}
        self.counts: dict[Part, PartCounts] = {}

    def add(
        self,
        parts: list[Part],
        digests: list[tuple[int, int]],
        num_bytes: list[int],
        ids: np.ndarray,
        lengths: np.ndarray,
        prompts: list[int],
    ) -> None:
        """Appends documents.

        Args:
          parts: split and source of each.
          digests: key and check of each.
          num_bytes: of each one's text.
          ids: (n,) of all, one after the other, without end-of-text.
          lengths: of each.
          prompts: leading tokens of each that are not learned.
        """
        stops = np.cumsum(lengths)
        with_ends = np.insert(ids, stops, ids.dtype.type(self._tokenizer.end_of_text_id))
        ends = (stops + np.arange(1, len(stops) + 1)).tolist()
        self._documents += [
            with_ends[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)
        ]
        self._digests += digests
        self._prompts += prompts
        bins = np.frexp(lengths + 1)[1] - 1  # floor(log2)
        rows = zip(parts, num_bytes, lengths.tolist(), bins.tolist(), strict=True)
        for part, size, length, place in rows:
            counts = self.counts.get(part)
            if counts is None:
                counts = self.counts[part] = PartCounts()
                self._numbers[part] = len(self._numbers)
            self._parts.append(self._numbers[part])
            counts.documents += 1
            counts.tokens += length + 1
            counts.bytes += size
            counts.lengths[place] += 1

    def write(self, folder: Path) -> dict[str, Any]:
        """Writes the store and returns {"parts": ..., "sha256": of its tokens}.

        Args:
          folder: empty.
        """
        names = sorted(self._numbers)
        rank = np.empty(len(names), np.int64)
        rank[[self._numbers[part] for part in names]] = np.arange(len(names))
        part_of = rank[np.array(self._parts, np.int64)]  # (documents,)
        digests = np.array(self._digests, np.uint64).reshape(-1, 2)  # (documents, 2)
        places = hash_with_seed(self._seed, digests[:, 0])
        order = np.lexsort((places, part_of))  # stable: equal documents stay in their order
        digest = write_store(
            folder / PREFIX,
            (self._documents[index] for index in order.tolist()),
            digests[order, 0],
            digests[order, 1],
            self._tokenizer.dtype,
            np.array(self._prompts, np.int64)[order] if self._has_prompts else None,
        )
        firsts = np.searchsorted(part_of[order], np.arange(len(names) + 1))
        parts = [
            {
                "split": split,
                "source": source,
                "first": int(firsts[k]),
                "documents": self.counts[split, source].documents,
                "tokens": self.counts[split, source].tokens,
                "bytes": self.counts[split, source].bytes,
                "lengths": dict(sorted(self.counts[split, source].lengths.items())),
            }
            for k, (split, source) in enumerate(names)
        ]
        return {"parts": parts, "sha256": digest}


@dataclass(frozen=True)
class ChunkTokenizer:
    """Does the items of the tokenizing stage.

    Args:
      plan: of the preparation.
      chunks: pieces by item.
      folder: of the data.
      work: its work folder.
      tokenizer: of the folder.
      num_threads: that encode at the same time.
    """

    plan: Plan
    chunks: dict[str, list[Piece]]
    folder: Path
    work: WorkFolder
    tokenizer: Tokenizer
    num_threads: int

    @cached_property
    def encoder(self) -> TokenEncoder:
        """One for all chunks: it remembers pieces of text that it has seen."""
        return TokenEncoder(self.tokenizer, self.plan.config.encoder)

    def __call__(self, item: str) -> Result:
        """Tokenizes one chunk and commits its store."""
        config = self.plan.config
        encoder = self.encoder
        store = ChunkStore(self.tokenizer, config.seed, has_prompts(config))
        start, encoding = time.perf_counter(), 0.0
        inputs, warnings = [], set()
        before = 0
        for piece in self.chunks[item]:
            source = self.plan.inputs[piece.number]
            counts = ReadCounts(config.max_bad_fraction)
            if source.form in TOKEN_FORMS:
                sha256 = self._add_tokens(store, source, piece, counts)
            else:
                reader = PieceReader(source, piece, counts, str(self.folder))
                checked = False
                for batch in _batches(filtered(iter(reader), filters(config), counts)):
                    began = time.perf_counter()
                    if not checked and (warning := encoder.check([d.text for d in batch])):
                        warnings.add(warning)
                    checked = True
                    self._add_batch(store, encoder, source, batch, counts)
                    encoding += time.perf_counter() - began
                    self.work.progress = before + reader.num_bytes
                before += reader.num_bytes
                sha256 = reader.sha256
            inputs.append(_input_entry(piece, counts, sha256))
        began = time.perf_counter()
        temporary = self.work.temporary(item)
        temporary.mkdir(exist_ok=True)
        written = store.write(temporary)
        final = self.folder / STORE_FOLDER / item
        final.parent.mkdir(exist_ok=True)
        commit_folder(temporary, final)
        seconds = {
            "read": began - start - encoding,
            "encode": encoding,
            "write": time.perf_counter() - began,
        }
        return {
            **written,
            "inputs": inputs,
            "warnings": sorted(warnings),
            "encoder": encoder.name,
            "seconds": seconds,
        }

    def _add_batch(
        self,
        store: ChunkStore,
        encoder: TokenEncoder,
        source: InputFile,
        batch: list[Document],
        counts: ReadCounts,
    ) -> None:
        ids, lengths = encoder.encode([d.text for d in batch], self.num_threads)
        prompts = np.zeros(len(batch), np.int64)
        if has_prompts(self.plan.config):
            before, prompts = encoder.encode([d.prompt for d in batch], self.num_threads)
            ids = _interleave(before, prompts, ids, lengths)
            lengths = prompts + lengths
            ids, lengths, prompts, batch = self._that_fit(
                source, batch, ids, lengths, prompts, counts
            )
        config = self.plan.config
        fractions = config.validation_fraction, config.test_fraction
        parts = [(source.split or split_of(d.digest.key, *fractions), d.source) for d in batch]
        sizes = [len(d.data) for d in batch]
        store.add(parts, [d.digest for d in batch], sizes, ids, lengths, prompts.tolist())

    def _that_fit(
        self,
        source: InputFile,
        batch: list[Document],
        ids: np.ndarray,
        lengths: np.ndarray,
        prompts: np.ndarray,
        counts: ReadCounts,
    ) -> Any:
        """Returns what is left without the prompt/completion records that no row holds."""
        limit = self.plan.config.sequence_length
        too_long = lengths + 1 > limit
        if not too_long.any():
            return ids, lengths, prompts, batch
        for index in np.flatnonzero(too_long):
            reason = BadRecord(
                f"is longer than --sequence_length={limit}",
                f": {lengths[index] + 1} tokens; it begins {batch[index].prompt[:40]!r}",
            )
            counts.documents -= 1
            counts.reject(source.name, "", reason)
        kept = np.repeat(~too_long, lengths)
        left = [d for d, long in zip(batch, too_long, strict=True) if not long]
        return ids[kept], lengths[~too_long], prompts[~too_long], left

    def _add_tokens(
        self, store: ChunkStore, source: InputFile, piece: Piece, counts: ReadCounts
    ) -> str:
        from data_pipeline.token_sources import read_token_documents

        config = self.plan.config
        fractions = config.validation_fraction, config.test_fraction
        for batch in read_token_documents(source, piece, self.tokenizer, counts):
            counts.documents += len(batch.lengths)
            parts = [
                (split or split_of(digest[0], *fractions), name)
                for (split, name), digest in zip(batch.parts, batch.digests, strict=True)
            ]
            sizes = batch.num_bytes.tolist()
            nothing = [0] * len(sizes)
            store.add(parts, batch.digests, sizes, batch.ids, batch.lengths, nothing)
            self.work.progress += len(batch.ids) * batch.ids.itemsize
        return ""


def has_prompts(config: PrepareConfig) -> bool:
    """Returns whether documents begin with text that is read and not learned."""
    return bool(config.prompt_field or config.completion_field or config.chat_field)


def filters(config: PrepareConfig) -> Filters:
    """Returns which documents are wanted."""
    return Filters(config.min_characters, config.max_characters, config.exclude_source)


def _interleave(
    first: np.ndarray, first_lengths: np.ndarray, second: np.ndarray, second_lengths: np.ndarray
) -> np.ndarray:
    """Returns the documents of two batches joined pairwise, one after the other."""
    pairs = zip(
        np.split(first, np.cumsum(first_lengths)[:-1]),
        np.split(second, np.cumsum(second_lengths)[:-1]),
        strict=True,
    )
    return np.concatenate([ids for pair in pairs for ids in pair])


def training_texts(plan: Plan, chunks: list[list[Piece]], folder: Path, say: Any) -> Iterator[str]:
    """Yields what a tokenizer is trained on: the train split, evenly from all chunks if it is much.

    Args:
      plan: of the preparation.
      chunks: its chunks.
      folder: of the data.
      say: is handed messages.

    Raises:
      UserError: there is no text to train on.
    """
    config = plan.config
    fractions = config.validation_fraction, config.test_fraction
    room = max(1, _TRAINING_CHARACTERS // max(1, len(chunks)))
    found = limited = False
    for pieces in chunks:
        taken = 0
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
    if limited:
        say(f"  the tokenizer sees {room:,} characters of each chunk only")
    if not found:
        raise UserError("there is no text in the train split to train a tokenizer on.")


def _input_entry(piece: Piece, counts: ReadCounts, sha256: str) -> dict[str, Any]:
    return {
        "number": piece.number,
        "sha256": sha256,
        "documents": counts.documents,
        "skipped": dict(counts.skipped),
        "changed": dict(counts.changed),
        "bad": dict(counts.bad),
        "bad_records": counts.bad_records,
    }


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Groups documents, so that each group is worth several threads."""
    batch: list[Document] = []
    num_characters = 0
    for document in documents:
        batch.append(document)
        num_characters += len(document.text)
        if num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch
