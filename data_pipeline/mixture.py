"""Changes of a mixture: segments appended to a data folder, with or without more sources."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline import manifest
from data_pipeline.schedule import Schedule
from tfbig.durable_file import fsync_directory
from tfbig.errors import UserError, near_matches

# Of a round, all sources' rows times their weights: so many are counted exactly.
_MOST_SAMPLES = 1 << 48
# Of the two folders' manifests: rows are read alike, and ids mean the same.
_ALIKE = ("sequence_length", "dtype", "stride", "features", "packing", "order")


def parse_weights(text: str) -> dict[str, float]:
    """Returns {source: weight} of "Github=2,ArXiv=0.5".

    Raises:
      UserError: a part is no NAME=NUMBER with a number that is at least 0, a name comes twice, or
        there is none.

    >>> parse_weights("Github=2, Pile-CC=0.5")
    {'Github': 2.0, 'Pile-CC': 0.5}
    """
    weights = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, number = part.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if not equals or not name or not 0 <= value < float("inf"):
            raise UserError(f"--weights: {part!r} is no SOURCE=WEIGHT with a weight of 0 or more.")
        if name in weights:
            raise UserError(f"--weights names {name} twice: give it one weight.")
        weights[name] = value
    if not weights:
        raise UserError("--weights names no source: give SOURCE=WEIGHT.")
    return weights


def append_segment(
    folder: Path,
    first_sample: int,
    weights: Mapping[str, float],
    consumed_samples: int = 0,
    addition: Path | None = None,
) -> dict[str, Any]:
    """Appends a segment to a data folder's mixture, and returns it.

    What comes before its first sample stays as it is. At first_sample 0 it takes the place of the
    only segment, as long as nothing is consumed.

    Args:
      folder: of the data.
      first_sample: of the run, from which the weights hold.
      weights: by source; sources that are not named keep theirs, and new ones get 1.
      consumed_samples: what the run that uses the folder has consumed.
      addition: another data folder whose train split's sources are added.

    Raises:
      UserError: the segment would begin in the past, a source is unknown, or nothing is left to
        train on, or the added folder is made otherwise.
    """
    contents = manifest.read_as_written(folder)
    merged = manifest.read(folder).contents
    last = contents["mixture"][-1]
    if first_sample < consumed_samples:
        raise UserError(
            f"--first_sample={first_sample} lies in the past: the run has consumed "
            f"{consumed_samples:,} samples. A segment begins there or later."
        )
    replaces = first_sample == last["first_sample"] and consumed_samples <= first_sample
    if first_sample < last["first_sample"] or (
        first_sample == last["first_sample"] and not replaces
    ):
        raise UserError(
            f"--first_sample={first_sample} is not behind the last segment, which begins with "
            f"sample {last['first_sample']:,}."
        )
    if addition is not None:
        added = _add(folder, contents, merged, addition)
        contents["additions"] = [*contents.get("additions", []), added]
        merged["sources"] = [*merged["sources"], *added["sources"]]
        merged["splits"]["train"]["sources"] |= added["split"]["sources"]
    sources: list[str] = merged["sources"]
    _check_names(folder, weights, sources)
    complete = {name: weights.get(name, last["weights"].get(name, 1.0)) for name in sources}
    rows = np.array([_rows(merged, name) for name in sources], np.int64)
    _check_round(rows, np.array([complete[name] for name in sources]))
    segment = {"first_sample": first_sample, "weights": complete}
    kept = contents["mixture"][:-1] if replaces else contents["mixture"]
    contents["mixture"] = [*kept, segment]
    Schedule(contents["mixture"], sources, rows)  # as a reader will
    header = ("format", "format_version", "order_version")
    manifest.write(folder, {k: v for k, v in contents.items() if k not in header})
    return segment


def _check_round(rows: np.ndarray, weights: np.ndarray) -> None:
    """Checks that a round of all sources has samples, and not too many.

    Args:
      rows: (sources,) of each.
      weights: (sources,).
    """
    num_samples = float((rows * weights).sum())
    if not num_samples:
        raise UserError("all sources that have rows would have weight 0: nothing to train on.")
    if num_samples > _MOST_SAMPLES:
        raise UserError(
            f"--weights: a round of {rows.sum():,} rows would have {num_samples:.3g} samples, more "
            f"than {_MOST_SAMPLES:,}: only the weights' ratios matter, give smaller ones."
        )


def _check_names(folder: Path, weights: Mapping[str, float], sources: list[str]) -> None:
    for name in weights:
        if name not in sources:
            raise UserError(
                f"--weights: {folder} has no source {name!r}.{near_matches(name, sources)} It has "
                f"{', '.join(sources)}."
            )


def _rows(contents: Mapping[str, Any], source: str) -> int:
    return contents["splits"]["train"]["sources"].get(source, {"rows": 0})["rows"]


def _add(
    folder: Path, contents: dict[str, Any], merged: dict[str, Any], addition: Path
) -> dict[str, Any]:
    """Links or copies the train shards of another folder and returns the manifest's entry."""
    other = manifest.read(addition).contents
    if other["tokenizer"]["sha256"] != contents["tokenizer"]["sha256"]:
        raise UserError(f"--add={addition} has another tokenizer than {folder}.")
    for name in _ALIKE:
        if other[name] != contents[name]:
            raise UserError(
                f"--add={addition} is made otherwise: its {name} is {other[name]}, not "
                f"{contents[name]}."
            )
    train = other["splits"]["train"]
    names = [name for name in other["sources"] if name in train["sources"]]
    both = sorted(set(names) & set(merged["sources"]))
    if both:
        raise UserError(
            f"--add={addition} has sources of names that {folder} has too: {', '.join(both)}. "
            "Prepare it with another --source_name."
        )
    place = f"added-{len(contents.get('additions', [])) + 1:02d}"
    (folder / place).mkdir(exist_ok=True)
    shards = []
    for shard in train["shards"]:
        target = folder / place / Path(shard["file"]).name
        temporary = target.with_name(target.name + ".tmp")
        temporary.unlink(missing_ok=True)
        try:
            os.link(addition / shard["file"], temporary)
        except OSError:  # another file system
            shutil.copyfile(addition / shard["file"], temporary)
        os.replace(temporary, target)
        shards.append({**shard, "file": f"{place}/{target.name}"})
    fsync_directory(folder / place)
    split = {**train, "shards": shards}
    return {"sources": names, "from": other["inputs"], "split": split}
