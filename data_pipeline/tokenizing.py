"""Chunks of documents to token stores, each document in its place of the shuffle."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.document_batch import DocumentBatch
from data_pipeline.documents import (
    SPLITS,
    BadRecord,
    Filters,
    ReadCounts,
    splits_of,
)
from data_pipeline.encoders import TokenEncoder
from data_pipeline.input_files import TOKEN_FORMS, InputFile
from data_pipeline.permutation import hash_with_seed
from data_pipeline.plan import Plan
from data_pipeline.reading import Piece, PieceReader
from data_pipeline.stage_time import Clocks
from data_pipeline.token_store import write_store
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.work import Result, WorkFolder, commit_folder
from tfbig.config import PrepareConfig

STORE_FOLDER = "tokens"  # of the data folder
PREFIX = "tokens"  # of a chunk's store

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
      fractions: of documents that are held out for validation and for the test.
      has_prompts: whether documents begin with tokens that are not learned.
    """

    def __init__(
        self, tokenizer: Tokenizer, seed: int, fractions: tuple[float, float], has_prompts: bool
    ) -> None:
        self._tokenizer, self._seed, self._fractions = tokenizer, seed, fractions
        self._has_prompts = has_prompts
        self._documents: list[np.ndarray] = []  # ids without end-of-text
        # One array a batch.
        self._parts = [np.empty(0, np.int64)]
        self._digests = [np.empty((0, 2), np.uint64)]
        self._prompts = [np.empty(0, np.int64)]
        self._numbers: dict[Part, int] = {}
        self.counts: dict[Part, PartCounts] = {}

    def add(
        self,
        names: Sequence[Part],
        name_of: np.ndarray,
        digests: np.ndarray,
        num_bytes: np.ndarray,
        ids: np.ndarray,
        lengths: np.ndarray,
        prompts: np.ndarray | None = None,
    ) -> None:
        """Appends documents.

        Args:
          names: split and source; a split of "" stands for the one that a document's key decides.
          name_of: (m,) index into `names` of each document.
          digests: (m, 2) uint64, key and check of each.
          num_bytes: (m,) of each one's text.
          ids: (n,) of all, one after the other, without end-of-text.
          lengths: (m,) of each.
          prompts: (m,) leading tokens of each that are not learned; None means none.
        """
        if not len(lengths):
            return
        stops = np.cumsum(lengths)
        places = zip((stops - lengths).tolist(), stops.tolist(), strict=True)
        self._documents += [ids[start:stop] for start, stop in places]
        self._digests.append(digests)
        self._prompts.append(np.zeros(len(lengths), np.int64) if prompts is None else prompts)
        part_of = self._numbered(names, name_of, digests[:, 0])  # (m,)
        self._parts.append(part_of)
        found, which = np.unique(part_of, return_inverse=True)
        columns = (np.ones_like(lengths), lengths + 1, num_bytes)
        sums = np.zeros((len(found), len(columns)), np.int64)
        np.add.at(sums, which, np.stack(columns, axis=1))
        bins = np.frexp(lengths + 1)[1] - 1  # floor(log2)
        pairs, numbers = np.unique(which * 64 + bins, return_counts=True)
        parts = list(self._numbers)
        for number, (documents, tokens, size) in zip(found.tolist(), sums.tolist(), strict=True):
            counts = self.counts.setdefault(parts[number], PartCounts())
            counts.documents += documents
            counts.tokens += tokens
            counts.bytes += size
        for pair, count in zip(pairs.tolist(), numbers.tolist(), strict=True):
            self.counts[parts[int(found[pair // 64])]].lengths[pair % 64] += count

    def _numbered(self, names: Sequence[Part], name_of: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Returns each document's part (m,), as a number that is the part's from now on."""
        split_of = np.array([SPLITS.index(split) if split else -1 for split, _ in names])[name_of]
        free = split_of < 0
        split_of[free] = splits_of(keys[free], *self._fractions)
        codes, which = np.unique(split_of * len(names) + name_of, return_inverse=True)
        numbers = np.empty(len(codes), np.int64)
        for place, code in enumerate(codes.tolist()):
            part = SPLITS[code // len(names)], names[code % len(names)][1]
            numbers[place] = self._numbers.setdefault(part, len(self._numbers))
        return numbers[which]

    def write(self, folder: Path) -> dict[str, Any]:
        """Writes the store and returns {"parts": ..., "sha256": of its tokens}.

        Args:
          folder: empty.
        """
        names = sorted(self._numbers)
        rank = np.empty(len(names), np.int64)
        rank[[self._numbers[part] for part in names]] = np.arange(len(names))
        part_of = rank[np.concatenate(self._parts)]  # (documents,)
        digests = np.concatenate(self._digests)  # (documents, 2)
        places = hash_with_seed(self._seed, digests[:, 0])
        order = np.lexsort((places, part_of))  # stable: equal documents stay in their order
        digest = write_store(
            folder / PREFIX,
            [self._documents[index] for index in order.tolist()],
            self._tokenizer.end_of_text_id,
            digests[order],
            self._tokenizer.dtype,
            np.concatenate(self._prompts)[order] if self._has_prompts else None,
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
      known_encoder: one of that tokenizer where there is one already.
    """

    plan: Plan
    chunks: dict[str, list[Piece]]
    folder: Path
    work: WorkFolder
    tokenizer: Tokenizer
    num_threads: int
    known_encoder: TokenEncoder | None = None

    @cached_property
    def encoder(self) -> TokenEncoder:
        """One for all chunks: it is costly to make."""
        return self.known_encoder or TokenEncoder(self.tokenizer, self.plan.config.encoder)

    def __call__(self, item: str) -> Result:
        """Tokenizes one chunk and commits its store."""
        config = self.plan.config
        encoder = self.encoder
        encoder.begin()
        fractions = config.validation_fraction, config.test_fraction
        store = ChunkStore(self.tokenizer, config.seed, fractions, has_prompts(config))
        start, encoding = Clocks.now(), Clocks()
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
                for batch in reader.batches(filters(config)):
                    began = Clocks.now()
                    if not checked and (warning := encoder.check(batch.texts)):
                        warnings.add(warning)
                    checked = True
                    warnings.update(encoder.notes)
                    self._add_batch(store, encoder, source, batch, counts)
                    encoding += Clocks.now() - began
                    self.work.progress = before + reader.num_bytes
                before += reader.num_bytes
                sha256 = reader.sha256
            inputs.append(_input_entry(piece, counts, sha256))
        began = Clocks.now()
        temporary = self.work.temporary(item)
        temporary.mkdir(exist_ok=True)
        written = store.write(temporary)
        final = self.folder / STORE_FOLDER / item
        final.parent.mkdir(exist_ok=True)
        commit_folder(temporary, final)
        seconds = {
            "read": began - start - encoding,
            "encode": encoding,
            "write": Clocks.now() - began,
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
        batch: DocumentBatch,
        counts: ReadCounts,
    ) -> None:
        ids, lengths = encoder.encode(batch.texts, self.num_threads, batch.data)
        prompts = None
        if has_prompts(self.plan.config):
            texts = batch.prompts or [""] * len(batch.texts)
            before, prompts = encoder.encode(texts, self.num_threads)
            ids = _interleave(before, prompts, ids, lengths)
            lengths = prompts + lengths
            fits = self._fits(source, batch.places, texts, lengths, counts)
            ids, batch = ids[np.repeat(fits, lengths)], batch.chosen(fits)
            lengths, prompts = lengths[fits], prompts[fits]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(batch.sources))}
        store.add(
            [(source.split, name) for name in numbers],
            np.array([numbers[name] for name in batch.sources], np.int64),
            np.stack([batch.keys, batch.checks], axis=1),
            np.array([len(data) for data in batch.data], np.int64),
            ids,
            lengths,
            prompts,
        )

    def _fits(
        self,
        source: InputFile,
        places: list[str],
        prompts: list[str],
        lengths: np.ndarray,
        counts: ReadCounts,
    ) -> np.ndarray:
        """Returns, (m,) bool, which prompt/completion records a row holds; counts the others."""
        limit = self.plan.config.sequence_length
        fits = lengths + 1 <= limit
        for index in np.flatnonzero(~fits):
            reason = BadRecord(
                f"is longer than --sequence_length={limit}",
                f": {lengths[index] + 1} tokens; it begins {prompts[index][:40]!r}",
            )
            counts.documents -= 1
            counts.reject(source.name, places[index], reason)
        return fits

    def _add_tokens(
        self, store: ChunkStore, source: InputFile, piece: Piece, counts: ReadCounts
    ) -> str:
        from data_pipeline.token_sources import read_token_documents

        for batch in read_token_documents(source, piece, self.tokenizer, counts):
            counts.documents += len(batch.lengths)
            store.add(*batch)
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
