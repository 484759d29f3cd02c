"""Exceptions whose message says all: what the user can mend, and what befell the machine."""


class UserError(ValueError):
    """A user's mistake: an entry point prints it as one line and exits with code 2.

    Anything else that escapes is a fault of ours or the machine's, and keeps its traceback.
    """


class RunError(RuntimeError):
    """What ended a run and is neither a user's mistake nor a fault of the code: one line, code 1.

    A full disk, a rank that hangs, losses that are not finite.

    Args:
      text: the line.
      on_all_ranks: whether every rank raises the same, so that one of them says it.
    """

    def __init__(self, text: str, on_all_ranks: bool = False) -> None:
        super().__init__(text)
        self.on_all_ranks = on_all_ranks


class WorldChanged(Exception):
    """Ranks come or go: an elastic run goes on in another world, from where it stood."""


def near_matches(word: str, known: list[str]) -> str:
    """Returns " Did you mean ...?" for the known words closest to `word`, or "".

    >>> near_matches("horovd", ["single", "horovod"])
    ' Did you mean horovod?'
    """
    import difflib

    spelt = {name.lower(): name for name in reversed(known)}
    close = [
        spelt[name] for name in difflib.get_close_matches(word.lower(), spelt, n=3, cutoff=0.6)
    ]
    return f" Did you mean {' or '.join(close)}?" if close else ""
