"""The registered TFDS dataset `tfbig_text`: a data folder's rows as TFDS stores its own.

The folder itself is a TFDS dataset already, `tfds.builder_from_directory(folder)`; this builder
copies rows into TFDS's data directory, where pipelines that name datasets find them.

Example:
  import data_pipeline.tfds_builder
  tfds.load("tfbig_text", builder_kwargs={"folder": "data/pile_2048"}, download=True)
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from data_pipeline.dataset import TokenData
from data_pipeline.manifest import DATASET_VERSION
from data_pipeline.shards import DOCUMENT_IDS, TOKENS

_BLOCK_ROWS = 1024


class TfbigText(tfds.core.GeneratorBasedBuilder):
    """Rows of tokens, the name of their source, which labels count and, where stored, document ids.

    Args:
      folder: prepared by `tfbig prepare`.
      arguments: those of every TFDS builder.
    """

    VERSION = tfds.core.Version(DATASET_VERSION)

    def __init__(self, *, folder: str, **arguments: Any) -> None:
        self._data = TokenData.open(Path(folder))
        super().__init__(**arguments)

    def _info(self) -> tfds.core.DatasetInfo:
        length = self._data.sequence_length
        features = {
            "tokens": tfds.features.Tensor(shape=(length + 1,), dtype=np.int32),
            "loss_mask": tfds.features.Tensor(shape=(length,), dtype=np.uint8),
            "source": tfds.features.ClassLabel(names=list(self._data.sources)),
        }
        if DOCUMENT_IDS in self._data.contents["features"]:
            features[DOCUMENT_IDS] = tfds.features.Tensor(shape=(length + 1,), dtype=np.int32)
        return tfds.core.DatasetInfo(
            builder=self,
            description="Rows of tokens, packed by tfbig.",
            features=tfds.features.FeaturesDict(features),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {split: self._generate_examples(split) for split in self._data.splits}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
        num_rows = self._data.num_rows(split)
        for first in range(0, num_rows, _BLOCK_ROWS):
            positions = np.arange(first, min(first + _BLOCK_ROWS, num_rows))
            batch = self._data.rows_in_order(split, positions)
            for k, number in enumerate(positions.tolist()):
                example = {
                    "tokens": batch[TOKENS][k],
                    "loss_mask": batch["loss_mask"][k],
                    "source": int(batch["source_index"][k]),
                }
                if DOCUMENT_IDS in batch:
                    example[DOCUMENT_IDS] = batch[DOCUMENT_IDS][k]
                yield number, example
