"""Whether a data folder's files are those its manifest tells of, and fit the model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_pipeline import manifest
from tfbig.durable_file import digest_file
from tfbig.errors import UserError


def check_tokenizer(folder: Path, contents: Mapping[str, Any]) -> None:
    """Raises UserError where the tokenizer is not the one that made the data."""
    path = folder / manifest.TOKENIZER
    if not path.is_file():
        raise UserError(f"{folder} has no {manifest.TOKENIZER}: prepare it anew.")
    if digest_file(path).sha256 != contents["tokenizer"]["sha256"]:
        raise UserError(
            f"{path} has changed since the data was made with it: put the old one back, or prepare "
            "another folder."
        )


def check_shards(folder: Path, contents: Mapping[str, Any]) -> None:
    """Raises UserError where a shard is missing or of another size than its rows take."""
    for split in contents["splits"].values():
        for shard in split["shards"]:
            path = folder / shard["file"]
            expected = shard["rows"] * contents["stride"]
            if not path.is_file():
                raise UserError(f"{folder} lacks its shard {shard['file']}: prepare it anew.")
            found = path.stat().st_size
            if found != expected:
                raise UserError(
                    f"{path} has {found} bytes instead of {expected} ({shard['rows']} rows x "
                    f"{contents['stride']}): it is cut or changed; restore it, "
                    "or prepare anew."
                )


def check_vocabulary(folder: Path, contents: Mapping[str, Any], vocab_size: int) -> None:
    """Embedding lookups take ids beyond the table without a word: they are refused here."""
    shards = [shard for split in contents["splits"].values() for shard in split["shards"]]
    largest = max((shard["max_id"] for shard in shards), default=-1)
    largest = max(largest, contents["tokenizer"]["vocab_size"] - 1)
    if largest >= vocab_size:
        raise UserError(
            f"{folder} has token ids up to {largest}, beyond --vocab_size={vocab_size}: the model "
            f"needs --vocab_size={largest + 1} or more."
        )
