"""The stages of a preparation, as any number of processes go through them."""

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline import manifest
from data_pipeline.account import (
    check_bad_fraction,
    check_copies,
    describe,
    input_entries,
    seconds_line,
)
from data_pipeline.building import finish_building, remove_other_shards
from data_pipeline.duplicates import DuplicateFinder
from data_pipeline.encoders import TokenEncoder
from data_pipeline.plan import SPLIT_FORMS, Plan
from data_pipeline.progress import shown
from data_pipeline.reading import Piece
from data_pipeline.sharding import Shard, ShardMaker, plan_shards
from data_pipeline.shards import RecordLayout, row_features
from data_pipeline.shuffling import PartStores, order_bytes, order_part
from data_pipeline.splitting import split_input
from data_pipeline.tokenizer import Tokenizer, read_tokenizer_file, train_tokenizer
from data_pipeline.tokenizing import (
    STORE_FOLDER,
    ChunkTokenizer,
    has_prompts,
)
from data_pipeline.training_texts import training_texts
from data_pipeline.work import FOLDER, Result, WorkFolder
from tfbig.durable_file import write_atomic
from tfbig.errors import UserError

Say = Callable[[str], None]


@dataclass
class Stages:
    """Goes through all stages of one plan.

    Args:
      plan: what to make.
      folder: of the data, taken part in.
      num_threads: that encode at the same time.
      say: is handed messages; None means another process of this machine says them.
      known_tokenizer: the given one where it is loaded already.
      known_encoder: of that one, where there is one already.
    """

    plan: Plan
    folder: Path
    num_threads: int
    say: Say | None
    known_tokenizer: Tokenizer | None = None
    known_encoder: TokenEncoder | None = None

    def __post_init__(self) -> None:
        self.work = WorkFolder(self.folder)

    def run(self) -> None:
        """Returns when the folder is complete, whoever completed it.

        Raises:
          UserError: the text is unfit or too little.
        """
        try:
            self._run()
        except FileNotFoundError:
            if not manifest.exists(self.folder):
                raise
        if manifest.exists(self.folder):
            finish_building(self.folder)

    def tell(self, text: str) -> None:
        """Hands a message on where this process is the one that speaks."""
        if self.say is not None:
            self.say(text)

    def chunks(self) -> list[list[Piece]]:
        """Does the splitting stage, and returns the pieces of each chunk."""
        large = self.plan.large_inputs()
        sizes = {item: self.plan.inputs[number].num_bytes for item, number in large.items()}
        with shown("splitting large files", sizes, self.work, self.say):
            found = self.work.run(
                list(large), lambda item: split_input(self.plan, item, self.folder, self.work)
            )
        self._splits = dict(zip(large.values(), found, strict=True))
        return self.plan.chunks(self._splits)

    def _run(self) -> None:
        chunks = self.chunks()
        tokenizer = self._tokenizer(chunks)
        items = self.plan.chunk_items(chunks, tokenizer.sha256)
        tokenized = self._tokenize(chunks, items, tokenizer)
        inputs = input_entries(self.plan, tokenized, self._splits)
        check_bad_fraction(self.plan.config, inputs)
        check_copies(self.plan.config, inputs)
        for part in self.folder.glob(f"{FOLDER}/split-*.zst"):
            part.unlink(missing_ok=True)
        name = self.plan.sha256[:12] + tokenizer.sha256[:8]
        parts = self._parts(tokenized)
        orders, duplicates = self._order(name, parts)
        shards, results, layout = self._shard(name, orders, tokenizer)
        self.work.run(
            [f"finish-{name}"],
            lambda _: self._finish(
                tokenizer, tokenized, inputs, orders, duplicates, shards, results, layout
            ),
        )

    def _tokenizer(self, chunks: list[list[Piece]]) -> Tokenizer:
        """Returns the given tokenizer, or one trained on the train split; the folder keeps it."""
        path, config = self.folder / manifest.TOKENIZER, self.plan.config
        sizes = [] if config.tokenizer else self._sizes(chunks)

        def make(item: str) -> Result:
            if config.tokenizer:
                contents = read_tokenizer_file(config.tokenizer)
            else:
                self.tell("  training the tokenizer on the train split")
                texts = training_texts(self.plan, chunks, sizes, self.work, self.folder, self.tell)
                contents = train_tokenizer(texts, config.vocab_size)
            write_atomic(path, contents)
            return {}

        item = f"tokenizer-{self.plan.sha256[:12]}"
        with shown("reading text for the tokenizer", {item: sum(sizes)}, self.work, self.say):
            self.work.run([item], make)
        if not path.exists():  # of an earlier plan that went back to this one
            make(item)
        if self.known_tokenizer and self.known_tokenizer.is_of(path.read_bytes()):
            return self.known_tokenizer
        return Tokenizer(path.read_bytes())

    def _tokenize(
        self, chunks: list[list[Piece]], items: list[str], tokenizer: Tokenizer
    ) -> dict[str, Result]:
        by_item = dict(zip(items, chunks, strict=True))
        sizes = dict(zip(items, self._sizes(chunks), strict=True))
        known = self.known_encoder if tokenizer is self.known_tokenizer else None
        perform = ChunkTokenizer(
            self.plan, by_item, self.folder, self.work, tokenizer, self.num_threads, known
        )
        with shown("tokenizing", sizes, self.work, self.say):
            found = dict(zip(items, self.work.run(items, perform), strict=True))
        for warning in sorted({text for result in found.values() for text in result["warnings"]}):
            self.tell(f"  warning: {warning}")
        return found

    def _sizes(self, chunks: list[list[Piece]]) -> list[int]:
        """Returns the stored bytes of each chunk."""
        numbers = Counter(piece.number for pieces in chunks for piece in pieces)
        return [
            sum(self._size(piece, numbers[piece.number]) for piece in pieces) for pieces in chunks
        ]

    def _size(self, piece: Piece, num_pieces: int) -> int:
        """Returns the stored bytes of a piece of an input of so many."""
        item = self.plan.inputs[piece.number]
        if piece.part:
            path = self.folder / piece.part
            return path.stat().st_size if path.exists() else 0
        if piece.stop > 0 and item.form in SPLIT_FORMS:
            return piece.stop - piece.start
        return item.num_bytes // num_pieces

    def _parts(self, tokenized: dict[str, Result]) -> list[PartStores]:
        names = {
            (part["split"], part["source"])
            for result in tokenized.values()
            for part in result["parts"]
        }
        return [PartStores(part, tokenized) for part in sorted(names)]

    def _order(
        self, name: str, parts: list[PartStores]
    ) -> tuple[dict[str, tuple[PartStores, Result]], Result]:
        config, duplicates = self.plan.config, {}
        finder = None
        if config.remove_duplicates or config.near_duplicates:
            finder = DuplicateFinder(name, parts, self.plan, self.folder, self.work)
            with shown("finding duplicates", finder.sizes(), self.work, self.say):
                duplicates = finder.run()
        by_item = {f"order-{name}-{number:05d}": part for number, part in enumerate(parts)}
        sizes = {item: order_bytes(part) for item, part in by_item.items()}
        with shown("ordering documents", sizes, self.work, self.say):
            found = self.work.run(
                list(by_item),
                lambda item: order_part(
                    by_item[item],
                    item,
                    self.plan,
                    self.folder,
                    self.work,
                    finder.kept(by_item[item]) if finder else None,
                ),
            )
        orders = {
            item: (part, result)
            for (item, part), result in zip(by_item.items(), found, strict=True)
        }
        self._check_rows(orders)
        return orders, duplicates

    def _check_rows(self, orders: dict[str, tuple[PartStores, Result]]) -> None:
        """Raises UserError when a split that was asked for has too little text for one row."""
        config = self.plan.config
        asked = {
            "train": 1.0,
            "validation": config.validation_fraction,
            "test": config.test_fraction,
        }
        if any(item.split for item in self.plan.inputs):
            asked = dict.fromkeys({stores.part[0] for stores, _ in orders.values()} | {"train"}, 1)
        for split, fraction in asked.items():
            of_split = [result for stores, result in orders.values() if stores.part[0] == split]
            if fraction and not sum(result["rows"] for result in of_split):
                raise UserError(
                    f"the {split} split has {sum(r['labels'] for r in of_split)} tokens in "
                    f"{sum(r['documents'] for r in of_split)} documents: no row of "
                    f"--sequence_length={config.sequence_length}. Give more text, a shorter "
                    "sequence, or another fraction."
                )

    def _shard(
        self, name: str, orders: dict[str, tuple[PartStores, Result]], tokenizer: Tokenizer
    ) -> tuple[dict[str, Shard], list[Result], RecordLayout]:
        config = self.plan.config
        masked = config.packing != "join" or config.tail == "pad" or has_prompts(config)
        length = config.sequence_length
        layout = RecordLayout(row_features(length, tokenizer.dtype, masked, config.document_mask))
        rows_per_shard = config.shard_bytes // layout.stride
        if rows_per_shard < 1:
            raise UserError(
                f"--shard_bytes={config.shard_bytes} is less than one row of {length} tokens, "
                f"which takes {layout.stride} bytes."
            )
        shards = plan_shards(orders, rows_per_shard)
        by_item = {f"{item}-{name}": shard for item, shard in shards.items()}
        perform = ShardMaker(by_item, config, self.folder, self.work, tokenizer, layout)
        sizes = {i: (s.last_row - s.first_row) * layout.stride for i, s in by_item.items()}
        with shown("writing shards", sizes, self.work, self.say):
            return by_item, self.work.run(list(by_item), perform), layout

    def _finish(
        self,
        tokenizer: Tokenizer,
        tokenized: dict[str, Result],
        inputs: list[dict[str, Any]],
        orders: dict[str, tuple[PartStores, Result]],
        duplicates: Result,
        shards: dict[str, Shard],
        results: Sequence[Result],
        layout: RecordLayout,
    ) -> Result:
        """Writes what is left; the manifest is the last thing."""
        config, folder = self.plan.config, self.folder
        account = describe(tokenized, inputs, orders, shards, results)
        remove_other_shards(folder, {shard.file for shard in shards.values()})
        manifest.write_dataset_info(folder, layout, account.shards)
        account.write_bad_records(folder)
        stores = self._settle_stores(tokenized) if config.keep_tokens else []
        for line in account.lines(config):
            self.tell(line)
        self.tell(seconds_line(tokenized, orders, results))
        manifest.write(
            folder,
            {
                "settings": self.plan.settings,
                "tokenizer": {
                    "sha256": tokenizer.sha256,
                    "vocab_size": tokenizer.vocab_size,
                    "end_of_text_id": tokenizer.end_of_text_id,
                },
                "seed": config.seed,
                "sequence_length": config.sequence_length,
                "dtype": tokenizer.dtype.name,
                "stride": layout.stride,
                "features": layout.to_manifest(),
                "packing": {
                    "policy": config.packing,
                    "shuffle": "documents",
                    "tail": config.tail if config.packing == "join" else "none",
                },
                "order": {"block_rows": max(1, config.order_block_bytes // layout.stride)},
                "sources": account.sources,
                "mixture": [{"first_sample": 0, "weights": dict.fromkeys(account.sources, 1.0)}],
                "token_store": STORE_FOLDER if config.keep_tokens else "",
                "stores": stores,
                "inputs": account.inputs,
                "duplicates": duplicates,
                "statistics": account.statistics,
                "splits": account.splits,
            },
        )
        return {}

    def _settle_stores(self, tokenized: dict[str, Result]) -> list[dict[str, Any]]:
        """Gives kept token stores their final names, and removes all others."""
        root, stores = self.folder / STORE_FOLDER, []
        for number, (item, result) in enumerate(tokenized.items()):
            final = root / f"{number:05d}"
            if (root / item).exists():
                shutil.rmtree(final, ignore_errors=True)
                (root / item).rename(final)
            parts = [
                {name: part[name] for name in ("split", "source", "first", "documents")}
                for part in result["parts"]
            ]
            stores.append({"folder": final.name, "sha256": result["sha256"], "parts": parts})
        for path in root.iterdir():
            if path.name not in {store["folder"] for store in stores}:
                shutil.rmtree(path)
        return stores
