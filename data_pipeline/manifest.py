"""The manifest: what a data folder holds. Written last, so that a folder without one is no data."""

import json
import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_pipeline.order import ORDER_VERSION
from data_pipeline.shards import RecordLayout, ShardInfo
from tfbig.durable_file import write_atomic
from tfbig.errors import UserError

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
FORMAT = "tfbig data"
FORMAT_VERSION = 2
DATASET_NAME = "tfbig_text"  # the shards' name for TFDS
DATASET_VERSION = "1.0.0"
_FIELDS = (
    "settings tokenizer sequence_length dtype stride features packing order sources mixture"
    " token_store inputs statistics splits"
).split()


class Manifest(NamedTuple):
    """A manifest as it was read.

    Attributes:
      contents: the file, sources that were added later merged in.
      sha256: of what it was when it was made: later segments and sources leave it as it is.
    """

    contents: dict[str, Any]
    sha256: str


def shard_name(split: str, index: int, num_shards: int) -> str:
    """Returns a shard's file name, in TFDS' pattern.

    >>> shard_name("train", 0, 2)
    'tfbig_text-train.tfrecord-00000-of-00002'
    """
    return f"{DATASET_NAME}-{split}.tfrecord-{index:05d}-of-{num_shards:05d}"


def exists(folder: str | os.PathLike[str]) -> bool:
    """Returns whether a folder holds complete data."""
    return os.path.isfile(os.path.join(folder, MANIFEST))


def read(folder: Path) -> Manifest:
    """Returns a data folder's manifest.

    Raises:
      UserError: there is no such folder, or it is not a data folder of this version's format.
    """
    if not folder.exists():
        raise UserError(f"there is no data folder {folder}: make it with `tfbig prepare`.")
    if not folder.is_dir():
        raise UserError(f"{folder} is a file, not a data folder: name a folder.")
    if not exists(folder):
        raise UserError(
            f"{folder} is not a data folder, or not a complete one: it has no {MANIFEST}. "
            f"Make it with `tfbig prepare --data={folder}`."
        )
    try:
        data = (folder / MANIFEST).read_bytes()
        contents = json.loads(data)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / MANIFEST} cannot be read: {error}; prepare anew.") from None
    if not isinstance(contents, dict) or contents.get("format") != FORMAT:
        raise UserError(
            f"{folder} is not a data folder: its {MANIFEST} is of something else; name one that "
            "`tfbig prepare` made."
        )
    version, order = contents.get("format_version"), contents.get("order_version")
    if (version, order) != (FORMAT_VERSION, ORDER_VERSION):
        raise UserError(
            f"{folder} is of data format {version}, order {order}; this tfbig reads format "
            f"{FORMAT_VERSION}, order {ORDER_VERSION}: use the tfbig that made it, or prepare anew."
        )
    if lacking := [name for name in _FIELDS if name not in contents]:
        raise UserError(
            f"{folder / MANIFEST} lacks {', '.join(lacking)}: it was changed; restore it, or "
            "prepare anew."
        )
    made_as = identity(contents)
    return Manifest(_with_additions(contents), made_as)


def identity(contents: Mapping[str, Any]) -> str:
    """Returns the hash of a manifest without what was appended to it later."""
    first = {name: value for name, value in contents.items() if name != "additions"}
    first["mixture"] = contents["mixture"][:1] if contents.get("mixture") else []
    data = json.dumps(first, sort_keys=True, ensure_ascii=False).encode()
    return sha256(data).hexdigest()


def corpus_sha256(contents: Mapping[str, Any]) -> str:
    """Returns one hash of a prepared corpus: its tokenizer and every shard, whoever made them.

    Args:
      contents: of a manifest.
    """
    shards = {
        split: [[shard[name] for name in ("file", "source", "rows", "sha256")] for shard in shards]
        for split, shards in ((k, v["shards"]) for k, v in contents["splits"].items())
    }
    named = {"tokenizer": contents["tokenizer"]["sha256"], "shards": shards}
    return sha256(json.dumps(named, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def mixture_identity(contents: Mapping[str, Any], consumed_samples: int) -> str:
    """Returns the hash of the segments that a run has begun to consume.

    Args:
      contents: of a manifest.
      consumed_samples: of the run.
    """
    begun = [s for s in contents["mixture"] if s["first_sample"] < max(1, consumed_samples)]
    return sha256(json.dumps(begun, sort_keys=True).encode()).hexdigest()


def read_as_written(folder: Path) -> dict[str, Any]:
    """Returns the contents of a folder's manifest as the file has them, for appending to it.

    Raises:
      UserError: as `read` does.
    """
    read(folder)
    return json.loads((folder / MANIFEST).read_bytes())


def _with_additions(contents: dict[str, Any]) -> dict[str, Any]:
    """Returns a manifest whose sources and train shards include those that were added."""
    for addition in contents.get("additions", []):
        contents["sources"] = [*contents["sources"], *addition["sources"]]
        train = contents["splits"]["train"]
        train["sources"] |= addition["split"]["sources"]
        for name in ("rows", "bytes"):
            train[name] += addition["split"][name]
        train["shards"] = [*train["shards"], *addition["split"]["shards"]]
    return contents


def write(folder: Path, contents: Mapping[str, Any]) -> None:
    """Writes the manifest, which makes the folder complete."""
    header = {"format": FORMAT, "format_version": FORMAT_VERSION, "order_version": ORDER_VERSION}
    write_atomic(folder / MANIFEST, _json_bytes({**header, **contents}))


def write_dataset_info(
    folder: Path, layout: RecordLayout, shards: Mapping[str, list[ShardInfo]]
) -> None:
    """Writes what `tfds.builder_from_directory` reads: features.json and dataset_info.json.

    Args:
      folder: of the data.
      layout: of the records.
      shards: by split.
    """
    features = {
        feature.name: {
            "pythonClassName": "tensorflow_datasets.core.features.tensor_feature.Tensor",
            "tensor": {
                "shape": {"dimensions": [str(feature.length)]},
                "dtype": np.dtype(feature.dtype).name,
                "encoding": "bytes",
            },
        }
        for feature in layout.features
    }
    dictionary = "tensorflow_datasets.core.features.features_dict.FeaturesDict"
    write_atomic(
        folder / "features.json",
        _json_bytes({"pythonClassName": dictionary, "featuresDict": {"features": features}}),
    )
    info = {
        "name": DATASET_NAME,
        "version": DATASET_VERSION,
        "description": "Rows of tokens, packed by tfbig.",
        "fileFormat": "tfrecord",
        "splits": [
            {
                "name": split,
                "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
                "shardLengths": [str(shard.rows) for shard in of_split],
                "numBytes": str(sum(shard.bytes for shard in of_split)),
            }
            for split, of_split in sorted(shards.items())
        ],
    }
    write_atomic(folder / "dataset_info.json", _json_bytes(info))


def _json_bytes(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()
