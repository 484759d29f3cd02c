"""Documents to rows: joined by end-of-text, cut into S+1 tokens at a stride of S."""

from collections.abc import Iterable, Iterator

import numpy as np

_BLOCK_TOKENS = 1 << 22  # tokens that are joined at a time


class Packer:
    """Cuts a stream of documents into rows.

    The stream is end-of-text, then each document followed by end-of-text: the first token of every
    document is a label, like all its others. Row k is the stream's tokens [k*S, k*S + S + 1), so
    row k+1 begins with row k's last token, and every token but the stream's first is a label
    exactly once.

    Args:
      sequence_length: S.
      end_of_text_id: token id between documents.
      dtype: of the rows.

    Attributes:
      num_tokens: labels in all rows and the tail.
      num_tail_tokens: labels at the end of the stream that no row holds (after the last row).
    """

    def __init__(self, sequence_length: int, end_of_text_id: int, dtype: np.dtype) -> None:
        assert sequence_length >= 1
        self._length = sequence_length
        self._carry = np.array([end_of_text_id], dtype)
        self._end_of_text = np.array([end_of_text_id], dtype)
        self.num_tokens = 0

    def rows(self, documents: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Yields blocks (n, S+1) of rows.

        Args:
          documents: token ids without end-of-text, one array a document; of the rows' dtype.
        """
        pieces, num_waiting = [self._carry], 0
        for document in documents:
            pieces += [document, self._end_of_text]
            num_waiting += len(document) + 1
            if num_waiting >= _BLOCK_TOKENS:
                yield self._cut(pieces)
                pieces, num_waiting = [self._carry], 0
        block = self._cut(pieces)
        if len(block):
            yield block

    def pad_tail(self, fill_id: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tail as a row (1, S+1) filled up with `fill_id`, and its loss_mask (1, S).

        Both are empty, of 0 rows, when the stream ended with a row.
        """
        num_rows = 1 if self.num_tail_tokens else 0
        row = np.full((num_rows, self._length + 1), fill_id, self._carry.dtype)
        loss_mask = np.zeros((num_rows, self._length), np.uint8)
        row[:, : len(self._carry)] = self._carry
        loss_mask[:, : self.num_tail_tokens] = 1
        return row, loss_mask

    @property
    def num_tail_tokens(self) -> int:
        """Labels after the last row so far."""
        return len(self._carry) - 1

    def _cut(self, pieces: list[np.ndarray]) -> np.ndarray:
        """Returns the rows that `pieces` fill, and carries the rest."""
        stream = np.concatenate(pieces)
        assert stream.dtype == self._carry.dtype
        length, num_rows = self._length, (len(stream) - 1) // self._length
        self.num_tokens += len(stream) - len(self._carry)
        self._carry = stream[num_rows * length :].copy()
        if not num_rows:
            return np.empty((0, length + 1), stream.dtype)
        # Overlapping windows: (num_rows, S+1)
        return np.lib.stride_tricks.sliding_window_view(stream, length + 1)[::length]
