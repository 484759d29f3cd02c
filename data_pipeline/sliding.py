"""Evaluation windows that overlap, so that each label is predicted after enough that precedes it.

Rows as stored predict their first labels from almost nothing. Windows of W tokens, `stride` apart,
count only the labels that the window before did not: each is counted once, after at least
W - stride others where the text has them. Source of the method: the perplexity of fixed-length
models, e.g. GPT-2 on WikiText (Radford et al. 2019, section 3.1).
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from data_pipeline.dataset import SAMPLE_INDEX, SOURCE_INDEX, TokenData
from data_pipeline.packing import document_ids
from data_pipeline.shards import DOCUMENT_IDS, LOSS_MASK, TOKENS
from tfbig.errors import UserError


class SlidingWindows:
    """The windows of one split, as batches.

    Args:
      data: of rows that continue each other (--packing=join).
      split: of the data.
      window: tokens W that a window feeds.
      stride: labels by which windows are apart, at most W.

    Raises:
      UserError: rows that are independent, or a stride beyond the window.
    """

    def __init__(self, data: TokenData, split: str, window: int, stride: int) -> None:
        if not 1 <= stride <= window:
            raise UserError(f"--stride={stride} must lie between 1 and the window of {window}.")
        if data.contents["settings"].get("packing", "join") != "join":
            raise UserError(
                f"--stride: the rows of {data.folder} are independent, not joined text: leave it "
                "out."
            )
        self._data, self._split, self._window, self._stride = data, split, window, stride
        self._has_documents = DOCUMENT_IDS in data.contents["features"]
        # (first row of the shard, its labels, first label of the window, first that counts)
        self._places: list[tuple[int, int, int, int]] = []
        first_row = 0
        for shard in data.contents["splits"][split]["shards"]:
            num_labels = shard["rows"] * data.sequence_length
            counted = 0
            while counted < num_labels:
                stop = min(window if not counted else counted + stride, num_labels)
                self._places.append((first_row, num_labels, max(0, stop - window), counted))
                counted = stop
            first_row += shard["rows"]

    def __len__(self) -> int:
        return len(self._places)

    def batches(
        self, global_batch: int, data_rank: int = 0, data_size: int = 1
    ) -> Iterator[Mapping[str, np.ndarray]]:
        """Yields this process's slices of the global batches; the last one is filled up.

        Args:
          global_batch: windows of all processes together.
          data_rank: which slice.
          data_size: number of slices.
        """
        local = global_batch // data_size
        for start in range(0, len(self), global_batch):
            numbers = range(start + data_rank * local, start + (data_rank + 1) * local)
            windows = [self._read(number) for number in numbers]
            yield {name: np.stack([w[name] for w in windows]) for name in windows[0]}

    def _read(self, number: int) -> dict[str, np.ndarray]:
        """Returns one window; behind the last one, the last again with nothing that counts."""
        length, window = self._data.sequence_length, self._window
        first_row, num_labels, start, counted = self._places[min(number, len(self) - 1)]
        stop = min(start + window, num_labels)
        rows = np.arange(first_row + start // length, first_row + -(-stop // length))
        stored = self._data.rows_in_order(self._split, rows)
        # Row k + 1 begins with row k's last token.
        text = np.concatenate([stored[TOKENS][:, :-1].ravel(), stored[TOKENS][-1, -1:]])
        mask = stored[LOSS_MASK].ravel()
        skipped = start - start // length * length
        tokens = np.full(window + 1, self._data.end_of_text_id, np.int32)
        tokens[: stop - start + 1] = text[skipped : skipped + stop - start + 1]
        loss_mask = np.zeros(window, np.uint8)
        if number < len(self):
            loss_mask[counted - start : stop - start] = mask[
                skipped + counted - start : skipped + stop - start
            ]
        result: dict[str, Any] = {
            TOKENS: tokens,
            SAMPLE_INDEX: np.int64(number),
            SOURCE_INDEX: stored[SOURCE_INDEX][0],
            LOSS_MASK: loss_mask,
        }
        if self._has_documents:
            result[DOCUMENT_IDS] = document_ids(tokens[np.newaxis], self._data.end_of_text_id)[0]
        return result

    def sources(self, global_batch: int) -> Iterator[np.ndarray]:
        """Yields the sources (global_batch,) of the windows of each global batch."""
        order = np.array([place[0] for place in self._places])
        of_window = self._data.sources_in_order(self._split, order)
        for start in range(0, len(self), global_batch):
            numbers = np.arange(start, start + global_batch)
            yield of_window[np.minimum(numbers, len(self) - 1)]
