import contextlib
import dataclasses
import re
import time

import pytest

from data_pipeline import near_duplicates, progress, stages
from data_pipeline.preparation import prepare
from data_pipeline.work import WorkFolder

SIZES = {"a": 4_000_000_000, "b": 2_000_000_000, "c": 1_000_000_000}


def test_a_line_says_rate_and_time_left_of_all_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "_SAY_EVERY", 0.02)
    work, said = WorkFolder(tmp_path), []

    def perform(item):
        other.progress = 1_500_000_000 if item == "a" else 0
        deadline = time.monotonic() + 30
        while item == "b" and not any("2 items" in text or "of 3 items" in text for text in said):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return {}

    other = WorkFolder(tmp_path)  # of another process, for all that this one knows
    with progress.shown("tokenizing", SIZES, work, said.append):
        other.run(["a", "b", "c"], perform)
    assert progress.bytes_done(SIZES, work) == 7_000_000_000
    line = re.compile(
        r"  tokenizing: \d\.\d\d of 7\.00 GB, \d+ MB/s(, \d+ min left)? \(\d of 3 items\)"
    )
    assert said and all(line.fullmatch(text) for text in said)
    with progress.shown("tokenizing", SIZES, work, None):
        pass


def test_what_is_in_flight_counts(tmp_path):
    work = WorkFolder(tmp_path)
    work.run(["a"], lambda item: {})
    assert progress.bytes_done(SIZES, work) == SIZES["a"]
    assert work._claim("b")
    (tmp_path / "work" / "claims" / "b").write_text(f"{work._owner} 750000000")
    assert progress.bytes_done(SIZES, work) == SIZES["a"] + 750_000_000


SHOWN = ("reading text for the tokenizer", "finding duplicates", "ordering documents")


@pytest.mark.parametrize("near", [0.0, 0.8])
def test_the_stages_of_one_process_show_what_they_read(prepare_config, monkeypatch, near):
    """All of what is said to be read when they end: the bar reaches its end, and not before."""
    if near:
        pytest.importorskip("rensa")
        monkeypatch.setattr(near_duplicates, "_BATCH_TOKENS", 200)
    seen, said, original = {}, [], stages.shown

    def is_said(what):
        return any(text.startswith(f"  {what}: ") for text in said)

    @contextlib.contextmanager
    def shown(what, sizes, work, say):
        with original(what, sizes, work, say):
            yield
            deadline = time.monotonic() + 10  # stages this small may end before the first line
            while what in SHOWN and not is_said(what) and time.monotonic() < deadline:
                time.sleep(0.001)
        seen[what] = (work.progress, [*sizes.values()])

    monkeypatch.setattr(stages, "shown", shown)
    monkeypatch.setattr(progress, "_SAY_EVERY", 0.0005)
    config = dataclasses.replace(prepare_config, remove_duplicates=True, near_duplicates=near)
    prepare(config, said.append)
    for what in SHOWN:
        found, sizes = seen[what]
        assert found in sizes and min(sizes) > 0  # of the last item
        assert is_said(what)
