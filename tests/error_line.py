"""The one line that a command ends with after a user's mistake."""

import re
from collections.abc import Callable

import pytest

# Words that a line's way out begins with: what to do, or what there is to choose from.
WAY_OUT = re.compile(
    r"\b(add|change|choose|decay|did you mean|free|get|give|install|is not one of|leave"
    r"|lists all|make|mount|move|name|needs|pass|prepare|put|remove|restore|set|shorten"
    r"|should look like|start|strategies are|take|train|use|warm up for|write)\b",
    re.IGNORECASE,
)


def line_of(main: Callable, arguments: list[str], capsys, command: str) -> str:
    """Returns the line; exit code 2, the command's name and way out are checked."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    error = capsys.readouterr().err
    assert stop.value.code == 2, error
    assert error.startswith(f"tfbig {command}: error: ") and error.count("\n") == 1, error
    assert "Traceback" not in error
    assert WAY_OUT.search(error.partition("error: ")[2]), f"no way out: {error}"
    return error
