"""What a run shows on a terminal: a line that is kept up to date, and a cursor that comes back."""

import contextlib
import os
import threading

import pytest

from tfbig import train

HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"


def screen_of(arguments: list[str], monkeypatch) -> tuple[int, str]:
    """Returns the exit code of a training, and what it wrote to a terminal that is its output."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    ours, its = os.openpty()
    written: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # Linux' sign that the other end is closed
            while piece := os.read(ours, 4096):
                written.append(piece)

    reader = threading.Thread(target=read)
    reader.start()
    with open(its, "w", encoding="utf-8") as screen, contextlib.redirect_stdout(screen):
        with pytest.raises(SystemExit) as stop:
            train.main(arguments)
    reader.join(30)
    os.close(ours)
    return stop.value.code, b"".join(written).decode()


@pytest.mark.parametrize(
    ("more", "code", "last"),
    [
        ([], 0, "step      3  finished"),
        (["--max_loss=0.01", "--bad_step_policy=stop"], 1, "UPDATE SKIPPED"),
    ],
)
def test_a_run_on_a_terminal(more, code, last, tmp_path, small_flags, monkeypatch):
    flags = [f"--run_dir={tmp_path / 'run'}", "--steps=3", "--eval_every=0", "--log_every=100"]
    found, text = screen_of([*small_flags, *flags, *more], monkeypatch)
    assert found == code, text
    before, _, after = text.partition(HIDDEN)
    live = after.partition(SHOWN)[0]
    assert "training samples from" in before and last in after
    assert "step      1/3  loss" in live
    # No step but the first is logged: the line alone shows the last one's rate.
    assert ("tokens/s" in live) == (code == 0)
    assert text.count(HIDDEN) == text.count(SHOWN) == 1, "the cursor is left hidden"
