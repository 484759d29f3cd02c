"""TFDS datasets of text as a source: `tfds:name/config`, already prepared on this machine."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from data_pipeline.codecs import Meter
from data_pipeline.input_files import InputFile, RecordFormat
from tfbig.errors import UserError

_SPLITS = {"train": "train", "validation": "validation", "test": "test"}


def _builder(name: str) -> Any:
    import tensorflow_datasets as tfds

    try:
        builder = tfds.builder(name)
    except Exception as error:  # the registry raises its own kinds
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"--source=tfds:{name}: {why}") from None
    if not builder.is_prepared():
        raise UserError(
            f"--source=tfds:{name} is not prepared in {builder.data_dir}: run `tfds build {name}` "
            "first (preparing never downloads)."
        )
    return builder


def find_splits(name: str, record_format: RecordFormat) -> list[InputFile]:
    """Returns one input a split of a TFDS dataset; splits of other names are divided by hash.

    Raises:
      UserError: there is no such dataset, it isn't prepared here, or it has no such text feature.
    """
    builder = _builder(name)
    features = builder.info.features
    for field in (record_format.completion or record_format.text, record_format.prompt):
        if field and field.partition(".")[0] not in features:
            raise UserError(
                f'--source=tfds:{name} has no feature "{field}"; it has {", ".join(features)}: '
                "name one with --text_field."
            )
    record_format = replace(record_format, name=record_format.name or builder.info.name)
    return [
        InputFile(
            name,
            f"tfds:{builder.info.full_name}:{split}",
            "tfds",
            _SPLITS.get(split, ""),
            record_format,
            int(info.num_bytes),
        )
        for split, info in sorted(builder.info.splits.items())
    ]


def example_ranges(item: InputFile, chunk_bytes: int) -> list[tuple[int, int]]:
    """Returns ranges of examples, each of about `chunk_bytes`."""
    info = _builder(item.path).info.splits[item.name.rpartition(":")[2]]
    num_ranges = max(1, -(-int(info.num_bytes) // chunk_bytes))
    ends = [info.num_examples * k // num_ranges for k in range(num_ranges + 1)]
    return list(itertools.pairwise(ends))


def tfds_records(item: InputFile, start: int, stop: int, meter: Meter) -> Iterator[tuple[str, Any]]:
    """Yields (place, record) of examples [start, stop) of a split, in the stored order.

    Args:
      item: the split.
      start: first example.
      stop: example after the last one; -1 means all that follow.
      meter: is set to these examples' share of the split.
    """
    import tensorflow_datasets as tfds

    split = item.name.rpartition(":")[2]
    end = "" if stop < 0 else str(stop)
    builder = _builder(item.path)
    num_examples = builder.info.splits[split].num_examples
    dataset = builder.as_dataset(
        split=f"{split}[{start}:{end}]",
        shuffle_files=False,
        read_config=tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False),
    )
    for number, example in enumerate(tfds.as_numpy(dataset), start + 1):
        meter.num_bytes = item.num_bytes * (number - start) // num_examples
        yield f"example {number}", _plain(example)


def _plain(value: Any) -> Any:
    """Returns an example with strings in place of bytes."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    return value
