"""The one line that a command ends with after a user's mistake."""

from collections.abc import Callable

import pytest


def line_of(main: Callable, arguments: list[str], capsys, command: str) -> str:
    """Returns the line; exit code 2, the command's name and the lack of a traceback are checked."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    error = capsys.readouterr().err
    assert stop.value.code == 2, error
    assert error.startswith(f"tfbig {command}: error: ") and error.count("\n") == 1, error
    assert "Traceback" not in error
    return error
