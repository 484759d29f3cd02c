"""Whether the data folder is whole, and the same on all hosts. TensorFlow-free."""

from pathlib import Path

from data_pipeline import manifest
from data_pipeline.verifying import find_problems
from tfbig.diagnosis.finding import Examined
from tfbig.durable_file import digest_file
from tfbig.errors import UserError

_SHOWN = 3  # problems of a folder


def examine(data: str, verify: bool) -> Examined:
    """Returns what is wrong with a data folder.

    Args:
      data: the folder.
      verify: whether every shard is read; else only its size is looked at.
    """
    found, folder = Examined(), Path(data).expanduser()
    try:
        read = manifest.read(folder)
    except UserError as error:
        found.facts = {"data manifest": "absent"}
        found.add("hashes", "problem", str(error))
        return found
    contents = read.contents
    tokenizer = contents["tokenizer"]["sha256"]
    found.facts = {"data manifest": read.sha256[:16], "tokenizer": tokenizer[:16]}
    problems = _sizes(folder, contents)
    if verify and not problems:
        problems = _contents(folder)
    try:
        if digest_file(folder / manifest.TOKENIZER).sha256 != tokenizer:
            problems.append(f"{manifest.TOKENIZER} is not the manifest's")
    except OSError as error:
        problems.append(f"{manifest.TOKENIZER} cannot be read: {error.strerror}")
    for problem in problems[:_SHOWN]:
        found.add("hashes", "problem", f"{folder}: {problem}", "restore it, or prepare anew")
    if len(problems) > _SHOWN:
        text = f"{folder}: {len(problems) - _SHOWN} more such problems"
        found.add("hashes", "problem", text, f"tfbig data verify --data={folder} lists them")
    if not problems:
        how = "every shard hashed" if verify else "sizes of all shards right"
        rows = sum(split["rows"] for split in contents["splits"].values())
        found.add("hashes", "fine", f"{folder}: {rows} rows, manifest {read.sha256[:16]}, {how}")
    return found


def _sizes(folder: Path, contents: dict) -> list[str]:
    """Returns a line for each shard that is missing or of another size."""
    problems = []
    for split in contents["splits"].values():
        for shard in split["shards"]:
            path = folder / shard["file"]
            if not path.is_file():
                problems.append(f"{shard['file']} is missing")
            elif path.stat().st_size != shard["rows"] * contents["stride"]:
                size = shard["rows"] * contents["stride"]
                problems.append(f"{shard['file']} has {path.stat().st_size} bytes, not {size}")
    return problems


def _contents(folder: Path) -> list[str]:
    """Returns a line for whatever is wrong in the shards; reads all of them."""
    try:
        return [*find_problems(folder, lambda _: None)]
    except UserError as error:
        return [str(error)]
