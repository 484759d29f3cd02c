"""Which files to read and how: what --source names, and the presets of well-known corpora.

A specification is [PRESET:]PATH, several are separated by commas; PATH may be a file, a folder, a
glob or a URL that tf.io.gfile opens.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from data_pipeline.codecs import codec_of, file_facts, is_remote, list_files
from tfbig.errors import UserError, near_matches

UNNAMED_SOURCE = "text"  # of documents that don't say where they are from
TOKEN_FORMS = ("tokens", "megatron", "nanogpt")  # hold ids, not text
_INNER_FORMS = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "json",  # lines, or one array
    ".txt": "text",
    ".dat": "lengths",
    ".tar": "tar",
}
_OUTER_FORMS = {".parquet": "parquet", ".zip": "zip", ".tgz": "tar"}
SUFFIXES = (*_INNER_FORMS, *_OUTER_FORMS)
_SKIPPED_FOLDERS = (".git", ".hg", ".svn", "__pycache__", "node_modules")


@dataclass(frozen=True)
class RecordFormat:
    """Where a record holds what; fields are paths with dots, as meta.pile_set_name.

    Args:
      text: field of the text.
      source: field of the source's name; "" where `name` holds for all.
      name: source of records without one.
      prompt: field of text that is read but not learned; "" for plain documents.
      completion: field of the text that is learned after it.
      chat: field of a conversation's messages, whose replies are learned.
    """

    text: str = "text"
    source: str = "meta.pile_set_name"
    name: str = UNNAMED_SOURCE
    prompt: str = ""
    completion: str = ""
    chat: str = ""

    @property
    def has_prompts(self) -> bool:
        """Whether a record is a prompt and what follows it."""
        return bool(self.prompt or self.completion)


@dataclass(frozen=True)
class InputFile:
    """One file, or one TFDS split, of documents.

    Args:
      path: of the file, or the TFDS name.
      name: as the manifest names it.
      form: how records are found in it.
      split: "" where each document's hash decides.
      format: of its records.
      num_bytes: as stored.
      changed: when it was; with the size it tells that a file was replaced.
    """

    path: str
    name: str
    form: str = "lines"
    split: str = ""
    format: RecordFormat = RecordFormat()
    num_bytes: int = 0
    changed: int = 0

    @property
    def codec(self) -> str:
        """The suffix of its compression, or ""."""
        if self.form in ("parquet", "zip", "tfds", *TOKEN_FORMS):
            return ""
        return ".gz" if self.path.endswith(".tgz") else codec_of(self.path)

    def to_json(self) -> dict[str, Any]:
        """Returns what `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "InputFile":
        """Returns the file that `to_json` described."""
        return cls(**{**values, "format": RecordFormat(**values["format"])})


# Field names are those of each corpus' data card or reader: the-pile's README, allenai/dolma's data
# format, togethercomputer/RedPajama-Data, litgpt's SlimPajama reader, HuggingFaceFW/fineweb's card.
PRESETS = {
    "pile": RecordFormat(),
    "lines": RecordFormat(),
    "dolma": RecordFormat(source="source", name="dolma"),
    "common_pile": RecordFormat(source="source", name="common_pile"),
    "redpajama": RecordFormat(source="meta.source", name="redpajama"),
    "slimpajama": RecordFormat(source="meta.redpajama_set_name", name="slimpajama"),
    "fineweb": RecordFormat(source="", name="fineweb"),
    "c4": RecordFormat(source="", name="c4"),
    "openwebtext": RecordFormat(source="", name="openwebtext"),
    "tree": RecordFormat(source="", name="source code"),
    "tfds": RecordFormat(source="", name=""),
    "megatron": RecordFormat(source="", name=""),
    "nanogpt": RecordFormat(source="", name=""),
    "tokens": RecordFormat(source="", name=""),
}


def suffix_form(name: str) -> str:
    """Returns how records are found in a file of this name, "" when it is not a kind we read.

    >>> [suffix_form(name) for name in ("a.jsonl.zst", "b.json.gz", "c.txt", "d.tar.zst", "e.md")]
    ['lines', 'json', 'text', 'tar', '']
    """
    suffix = os.path.splitext(name)[1]
    if suffix in _OUTER_FORMS:
        return _OUTER_FORMS[suffix]
    codec = codec_of(name)
    inner = os.path.splitext(name[: len(name) - len(codec)])[1]
    if inner in _INNER_FORMS:
        return _INNER_FORMS[inner]
    return "json" if codec == ".gz" and not inner else ""


def find_inputs(source: str, overrides: RecordFormat | None = None) -> list[InputFile]:
    """Returns the files that --source names, sorted by name within each specification.

    Args:
      source: [PRESET:]PATH, several separated by commas.
      overrides: its non-empty fields replace the preset's; None replaces nothing.

    Raises:
      UserError: there is no file, one is of a kind that is not read, or one comes twice.
    """
    inputs: list[InputFile] = []
    for specification in source.split(","):
        preset, path = _split_specification(specification.strip())
        record_format = _overridden(PRESETS[preset], overrides)
        inputs += _find(preset, path, record_format)
    names = set()
    for item in inputs:
        is_file = item.form != "tfds" and not is_remote(item.path)
        name = os.path.abspath(item.path) if is_file else item.name
        if name in names:
            raise UserError(f"--source={source} names {item.name} twice.")
        names.add(name)
    return inputs


def check_apart(source: str, inputs: Sequence[InputFile], folder: str) -> None:
    """Raises UserError when the data folder lies among what it is made of.

    Args:
      source: as --source names it.
      inputs: its files.
      folder: of the data, which may not be there yet.
    """
    inside = os.path.realpath(folder) + os.sep
    paths = [item.path for item in inputs if item.form not in ("tfds", *TOKEN_FORMS)]
    files = any(os.path.realpath(path).startswith(inside) for path in paths)
    named = [_split_specification(part.strip()) for part in source.split(",")]
    walked = [path for preset, path in named if preset not in ("tfds", *TOKEN_FORMS)]
    folders = [os.path.realpath(path) + os.sep for path in walked if os.path.isdir(path)]
    if files or any(inside.startswith(walked) for walked in folders):
        raise UserError(
            f"--data={folder} lies inside --source={source}: its own files would be read as text. "
            "Name a folder outside."
        )


def _split_specification(specification: str) -> tuple[str, str]:
    preset, colon, path = specification.partition(":")
    if not colon or path.startswith("//"):
        return "pile" if not colon else "lines", specification
    if preset in PRESETS:
        return preset, path
    if os.path.exists(specification) or not preset.isidentifier():
        return "lines", specification
    raise UserError(
        f"--source={specification}: there is no preset {preset!r}."
        f"{near_matches(preset, list(PRESETS))} They are: {', '.join(PRESETS)}."
    )


def _overridden(record_format: RecordFormat, overrides: RecordFormat | None) -> RecordFormat:
    given = {name: value for name, value in asdict(overrides).items() if value} if overrides else {}
    if "name" in given and "source" not in given:
        given["source"] = ""  # a constant that the user names holds for all records
    return replace(record_format, **given)


def _find(preset: str, path: str, record_format: RecordFormat) -> list[InputFile]:
    if preset == "tfds":
        from data_pipeline.tfds_source import find_splits

        return find_splits(path, record_format)
    if preset in TOKEN_FORMS:
        from data_pipeline.token_sources import find_token_files

        return find_token_files(preset, path, record_format)
    names = list_files(path)
    if preset == "tree":
        files = [name for name in names if not _is_in_skipped_folder(name)]
        forms = dict.fromkeys(files, "text")
    else:
        if len(names) > 1 or path not in names:  # a folder or a glob may hold other files too
            names = [n for n in names if suffix_form(n)] or names
        forms = {name: suffix_form(name) for name in names}
    if not forms:
        raise UserError(
            f"--source={path} names no file: give stdlib, or a file, folder or glob of "
            f"{', '.join(SUFFIXES)} files (also compressed)."
        )
    for name, form in forms.items():
        if not form:
            raise UserError(f"{name}: only {', '.join(SUFFIXES)} files are read.")
    splits = _named_splits(list(forms)) if preset == "pile" else {}
    return [
        _with_facts(InputFile(name, name, form, splits.get(name, ""), record_format))
        for name, form in forms.items()
    ]


def _with_facts(item: InputFile) -> InputFile:
    if not is_remote(item.path) and not os.path.isfile(item.path):  # a pipe, a link to nothing
        raise UserError(
            f"{item.path} is neither a file nor a link to one: take it away, or name the files."
        )
    facts = file_facts(item.path)
    return replace(item, num_bytes=facts.num_bytes, changed=facts.changed)


def _is_in_skipped_folder(name: str) -> bool:
    return any(part in _SKIPPED_FOLDERS for part in name.split(os.sep)[:-1])


def _named_splits(names: list[str]) -> dict[str, str]:
    """Returns the splits of the Pile's release: val.jsonl.zst, test.jsonl.zst, train/00.jsonl.zst.

    Only where both a training and a held-out file are among the names: any other folder's
    documents are divided by their hashes.
    """
    held_out = {"val": "validation", "validation": "validation", "test": "test"}
    splits = {}
    for name in names:
        stem = os.path.basename(name).split(".")[0]
        splits[name] = held_out.get(stem, "train")
    found = set(splits.values())
    return splits if "train" in found and len(found) > 1 else {}


def check_local(path: str, flag: str) -> None:
    """Raises UserError for an output folder on an object store."""
    if is_remote(path):
        raise UserError(
            f"--{flag}={path}: data is read from object stores but written to file systems only "
            "(renames and mapped files are needed): name a local or shared folder."
        )
