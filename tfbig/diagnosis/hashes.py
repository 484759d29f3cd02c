"""Whether the data folder is whole, and the same on all hosts. TensorFlow-free."""

from pathlib import Path

from data_pipeline import manifest
from data_pipeline.folder_check import check_shards, check_tokenizer
from data_pipeline.verifying import find_problems
from tfbig.diagnosis.finding import Examined
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
    problems = []
    for check in (check_shards, check_tokenizer):
        try:
            check(folder, contents)
        except UserError as error:
            problems.append(str(error))
    if verify and not problems:
        problems = [f"{folder}: {problem}" for problem in _contents(folder)]
    for problem in problems[:_SHOWN]:
        found.add("hashes", "problem", problem)
    if len(problems) > _SHOWN:
        text = f"{folder}: {len(problems) - _SHOWN} more such problems"
        found.add("hashes", "problem", text, f"tfbig data verify --data={folder} lists them")
    if not problems:
        how = "every shard hashed" if verify else "sizes of all shards right"
        rows = sum(split["rows"] for split in contents["splits"].values())
        found.add("hashes", "fine", f"{folder}: {rows} rows, manifest {read.sha256[:16]}, {how}")
    return found


def _contents(folder: Path) -> list[str]:
    """Returns a line for whatever is wrong in the shards; reads all of them."""
    try:
        return [*find_problems(folder, lambda _: None)]
    except UserError as error:
        return [str(error)]
