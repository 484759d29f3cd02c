"""A user's mistake that one rank meets ends all ranks at the same point, with one line in all.

Without it the failing rank leaves and the others wait for it in their next collective, or, worse,
one rank's collective meets another one of the others. TensorFlow-free.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from tfbig.errors import UserError

T = TypeVar("T")
_CHUNK = 7  # bytes of text that an agreed integer carries
_LONGEST = 2100  # bytes


class SharedError(UserError):
    """A user's mistake that every rank raises at the same point: rank 0 alone prints it.

    Args:
      text: the line.
      is_agreed: whether the ranks have told each other; else all are taken to have the same flags.
    """

    on_all_ranks = True

    def __init__(self, text: str, is_agreed: bool = True) -> None:
        super().__init__(text)
        self.is_agreed = is_agreed


class Outcome(Generic[T]):
    """What an action gave, or the user's mistake it ended with, kept until ranks can agree.

    Args:
      action: is run at once.
    """

    def __init__(self, action: Callable[[], T]) -> None:
        self.error: UserError | None = None
        try:
            self._result = action()
        except UserError as error:
            self.error = error

    def alone(self) -> T:
        """Returns the result, or raises the mistake, of this rank."""
        if self.error is not None:
            raise self.error
        return self._result

    def of_all(self, trainer: Any) -> T:
        """Returns this rank's result when every rank has one; all ranks call it.

        Args:
          trainer: its `rank`, `size` and `agree` are used.

        Raises:
          SharedError: on every rank, with the words of the first one that failed.
        """
        raise_together(trainer, self.error)
        return self._result


def together(trainer: Any, action: Callable[[], T]) -> T:
    """Returns what `action` gives on this rank when it succeeds on every rank; all ranks call it.

    Args:
      trainer: its `rank`, `size` and `agree` are used.
      action: uses no collective.

    Raises:
      SharedError: on every rank, with the words of the first one that failed.
    """
    return Outcome(action).of_all(trainer)


def raise_together(trainer: Any, error: UserError | str | None) -> None:
    """Raises on every rank what one of them has found; all ranks call it.

    Args:
      trainer: its `rank`, `size` and `agree` are used.
      error: this rank's, None or "" where it has found nothing.

    Raises:
      SharedError: with the words of the first rank that failed.
    """
    first = trainer.agree(trainer.rank if error else trainer.size, "min")
    if first == trainer.size:
        return
    own = str(error).encode()[:_LONGEST] if trainer.rank == first else b""
    length = trainer.agree(len(own), "max")
    text = b""
    for start in range(0, length, _CHUNK):
        number = int.from_bytes(own[start : start + _CHUNK], "little")
        text += trainer.agree(number, "max").to_bytes(_CHUNK, "little")
    words = text[:length].decode(errors="replace")
    cause = error if isinstance(error, UserError) and trainer.rank == first else None
    raise SharedError(f"rank {first}: {words}" if first else words) from cause


@contextlib.contextmanager
def on_every_rank(is_agreed: bool = True) -> Iterator[None]:
    """Marks the user's mistakes inside as ones that every rank raises at this point.

    Args:
      is_agreed: False where they follow from the flags, before the ranks have met.
    """
    try:
        yield
    except SharedError:
        raise
    except UserError as error:
        raise SharedError(str(error), is_agreed) from error
