"""The one exception that means "the user can mend this"."""


class UserError(ValueError):
    """A user's mistake: an entry point prints it as one line and exits with code 2.

    Anything else that escapes is a fault of ours or the machine's, and keeps its traceback.
    """


def near_matches(word: str, known: list[str]) -> str:
    """Returns " Did you mean ...?" for the known words closest to `word`, or "".

    >>> near_matches("horovd", ["single", "horovod"])
    ' Did you mean horovod?'
    """
    import difflib

    close = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(close)}?" if close else ""
