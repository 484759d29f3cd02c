"""The account of a preparation: what was read, left out, changed and made, by input and source."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_pipeline.codecs import is_remote
from data_pipeline.documents import excluded
from data_pipeline.input_files import UNNAMED_SOURCE
from data_pipeline.plan import Plan
from data_pipeline.sharding import Shard
from data_pipeline.shards import ShardInfo
from data_pipeline.shuffling import PartStores
from data_pipeline.stage_time import Clocks
from data_pipeline.work import Result
from tfbig.config import PrepareConfig
from tfbig.durable_file import write_atomic
from tfbig.errors import UserError

BAD_RECORDS = "bad_records.jsonl"
_CHECKSUM_FILES = ("SHA256SUMS.txt", "SHA256SUMS")
_COUNTED = ("skipped", "changed", "bad")


def input_entries(
    plan: Plan, tokenized: dict[str, Result], splits: dict[int, Result]
) -> list[dict[str, Any]]:
    """Returns what the manifest says of each input, and its bad records.

    Args:
      plan: of the preparation.
      tokenized: results of the tokenizing stage.
      splits: results of the splitting stage, by input.

    Raises:
      UserError: a SHA256SUMS file beside an input says that it is another file.
    """
    entries: list[dict[str, Any]] = [
        {
            "path": item.name,
            "bytes": item.num_bytes,
            "sha256": splits[number]["sha256"] if number in splits else "",
            "documents": 0,
            **{name: Counter() for name in _COUNTED},
            "bad_records": [],
        }
        for number, item in enumerate(plan.inputs)
    ]
    for result in tokenized.values():
        for found in result["inputs"]:
            entry = entries[found["number"]]
            entry["sha256"] = entry["sha256"] or found["sha256"]
            entry["documents"] += found["documents"]
            entry["bad_records"] += found["bad_records"]
            for name in _COUNTED:
                entry[name].update(found[name])
    known: dict[str, dict[str, str]] = {}
    for entry in entries:
        _check_sha256(entry, known)
    return entries


def _check_sha256(entry: dict[str, Any], known: dict[str, dict[str, str]]) -> None:
    path = entry["path"]
    if is_remote(path) or not entry["sha256"]:
        return
    folder = os.path.dirname(path) or "."
    # The Pile's list stands beside its folder train/ and names train/00.jsonl.zst.
    for root in (folder, os.path.dirname(folder) or "."):
        if root not in known:
            known[root] = _checksums(root)
        expected = known[root].get(os.path.relpath(path, root))
        if expected and expected != entry["sha256"]:
            raise UserError(
                f"{path} is not the file that {root}'s SHA256SUMS names: its sha256 is "
                f"{entry['sha256'][:12]}..., not {expected[:12]}...: get it again."
            )


def _checksums(folder: str) -> dict[str, str]:
    found = {}
    for name in _CHECKSUM_FILES:
        path = Path(folder, name)
        if path.is_file():
            for line in path.read_text("utf-8", "replace").splitlines():
                digest, _, file = line.strip().partition(" ")
                file = file.strip().removeprefix("*").removeprefix("./")
                if len(digest) == 64:
                    found[file] = digest.lower()
    return found


def check_bad_fraction(config: PrepareConfig, inputs: list[dict[str, Any]]) -> None:
    """Raises UserError when more records are unfit than the options bear."""
    num_bad = sum(entry["bad"].total() for entry in inputs)
    num_records = num_bad + sum(entry["documents"] for entry in inputs)
    if num_bad > config.max_bad_fraction * num_records:
        reasons = sum((entry["bad"] for entry in inputs), Counter[str]())
        listed = ", ".join(f"{count:,} {reason}" for reason, count in reasons.most_common(3))
        first = next(entry["bad_records"][0] for entry in inputs if entry["bad_records"])
        raise UserError(
            f"{num_bad:,} of {num_records:,} records are unfit ({num_bad / num_records:.3%}), more "
            f"than --max_bad_fraction={config.max_bad_fraction}: {listed}; the first is "
            f"{first[0]} {first[1]}. What is tokenized is kept."
        )


def check_copies(config: PrepareConfig, inputs: list[dict[str, Any]]) -> None:
    """Raises UserError when two inputs of several documents are the same file."""
    seen: dict[str, str] = {}
    for entry in inputs:
        if not entry["sha256"] or entry["documents"] < 2:
            continue
        first = seen.setdefault(entry["sha256"], entry["path"])
        if first != entry["path"] and not config.remove_duplicates:
            raise UserError(
                f"{entry['path']} is a copy of {first}: its documents would count twice. Leave one "
                "out, or pass --remove_duplicates. What is tokenized is kept."
            )


@dataclass
class Account:
    """What the manifest says of the text and the rows.

    Attributes:
      shards: of each split, in their order.
      splits: the manifest's entries.
      sources: names of all sources, sorted.
      statistics: by split and source: documents, bytes, tokens, lengths, duplicates.
      inputs: the manifest's entries.
      bad_records: (file, place, reason) of each record left out.
    """

    shards: dict[str, list[ShardInfo]] = field(default_factory=dict)
    splits: dict[str, Any] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)
    statistics: dict[str, Any] = field(default_factory=dict)
    inputs: list[dict[str, Any]] = field(default_factory=list)
    bad_records: list[list[str]] = field(default_factory=list)

    def write_bad_records(self, folder: Path) -> None:
        """Writes the list of records that were left out, if there are any."""
        if self.bad_records:
            lines = [
                json.dumps({"file": file, "place": place, "reason": reason}, ensure_ascii=False)
                for file, place, reason in self.bad_records
            ]
            write_atomic(folder / BAD_RECORDS, ("\n".join(lines) + "\n").encode())

    def lines(self, config: PrepareConfig) -> list[str]:
        """Returns what is said at the end."""
        lines = []
        for name, word in (("skipped", "skipped"), ("changed", "changed"), ("bad", "left out")):
            total = sum((Counter(entry[name]) for entry in self.inputs), Counter[str]())
            for reason, count in sorted(total.items()):
                where = [entry["path"] for entry in self.inputs if entry[name].get(reason)]
                more = f" and {len(where) - 1} more files" if len(where) > 1 else ""
                lines.append(f"  {word}: {count:,} documents: {reason} ({where[0]}{more})")
        filtered = {reason for entry in self.inputs for reason in entry["skipped"]}
        for source in config.exclude_source:
            if excluded(source) not in filtered:
                lines.append(
                    f"  warning: --exclude_source={source} left out nothing: there are "
                    f"{', '.join(self.sources)}"
                )
        if config.source_field and self.sources == [config.source_name or UNNAMED_SOURCE]:
            lines.append(
                f"  warning: no record has --source_field={config.source_field}: all are of one "
                f"source, {self.sources[0]}"
            )
        if self.bad_records:
            lines.append(f"  {BAD_RECORDS} lists what was left out")
        for split, entry in self.splits.items():
            dropped = sum(counts["dropped_tokens"] for counts in entry["sources"].values())
            lines.append(
                f"  {split}: {entry['rows']:,} rows of {config.sequence_length} tokens, "
                f"{entry['bytes']:,} bytes of text; {dropped:,} tokens at the end fill no row"
            )
        return lines


def describe(
    tokenized: dict[str, Result],
    inputs: list[dict[str, Any]],
    orders: dict[str, tuple[PartStores, Result]],
    shards: dict[str, Shard],
    results: Sequence[Result],
) -> Account:
    """Returns the account of all stages' results."""
    account = Account()
    for entry in inputs:
        account.bad_records += entry["bad_records"]
        plain = {name: value for name, value in entry.items() if name != "bad_records"}
        account.inputs.append({**plain, **{name: dict(plain[name]) for name in _COUNTED}})
    account.sources = sorted({stores.part[1] for stores, _ in orders.values()})
    account.statistics = _statistics(tokenized, orders)
    counts: dict[str, dict[str, dict[str, int]]] = {}
    for stores, order in orders.values():
        split, source = stores.part
        counts.setdefault(split, {})[source] = {
            "documents": order["documents"],
            "rows": order["rows"],
            "tokens": 0,
            "bytes": 0,
            "dropped_tokens": order["dropped"],
        }
    for shard, result in zip(shards.values(), results, strict=True):
        info = ShardInfo(**result["shard"])
        split = info.file.split("-")[1].removesuffix(".tfrecord")
        account.shards.setdefault(split, []).append(info)
        of_source = counts[split][shard.source]
        of_source["tokens"] += result["tokens"]
        of_source["bytes"] += result["text_bytes"]
    for split, of_split in counts.items():
        if split in account.shards:
            account.splits[split] = {
                "rows": sum(of_source["rows"] for of_source in of_split.values()),
                "bytes": sum(of_source["bytes"] for of_source in of_split.values()),
                "sources": of_split,
                "shards": [info._asdict() for info in account.shards[split]],
            }
    return account


def _statistics(
    tokenized: dict[str, Result], orders: dict[str, tuple[PartStores, Result]]
) -> dict[str, Any]:
    """Returns {split: {source: what was tokenized of it}}."""
    found: dict[str, Any] = {}
    for stores, order in orders.values():
        split, source = stores.part
        found.setdefault(split, {})[source] = {
            "documents": 0,
            "bytes": 0,
            "tokens": 0,
            "duplicates": order["duplicates"],
            "removed": order["removed"],
            "lengths": Counter(),
        }
    for result in tokenized.values():
        for part in result["parts"]:
            entry = found[part["split"]][part["source"]]
            for name in ("documents", "bytes", "tokens"):
                entry[name] += part[name]
            entry["lengths"].update(part["lengths"])
    for of_split in found.values():
        for entry in of_split.values():
            entry["lengths"] = dict(sorted(entry["lengths"].items(), key=lambda kv: int(kv[0])))
    return found


def seconds_line(
    tokenized: dict[str, Result],
    orders: dict[str, tuple[PartStores, Result]],
    shards: Sequence[Result],
) -> str:
    """Returns how long each stage took, summed over all processes; in brackets, of their cores."""
    seconds = {
        name: [result["seconds"][name] for result in tokenized.values()]
        for name in ("read", "encode", "write")
    }
    seconds["shuffle"] = [result["seconds"] for _, result in orders.values()]
    seconds["pack"] = [result["seconds"] for result in shards]
    sums = {name: sum(map(Clocks.of, found), Clocks()) for name, found in seconds.items()}
    listed = ", ".join(f"{name} {wall:.1f} ({cpu:.1f})" for name, (wall, cpu) in sums.items())
    encoders = sorted({result["encoder"] for result in tokenized.values()})
    return f"  seconds (of CPU) of all processes: {listed}, encoded by {', '.join(encoders)}"
