"""Shared by all tests: few threads, and a small data folder made once."""

import json
import os
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("OMP_NUM_THREADS", "2")

import pytest

from tfbig.config import PrepareConfig

SMALL_LENGTH, SMALL_VOCABULARY = 32, 384


@pytest.fixture(scope="session")
def small_data(tmp_path_factory) -> str:
    """A data folder of real text, prepared in a second: 40 files of the standard library."""
    import sysconfig

    from data_pipeline.preparation import prepare

    folder = tmp_path_factory.mktemp("small_data")
    library = Path(sysconfig.get_path("stdlib"))
    with open(folder / "text.jsonl", "w", encoding="utf-8") as file:
        for number, path in enumerate(sorted(library.glob("*.py"))[:40]):
            text = path.read_text(encoding="utf-8")[:6000]
            source = "even" if number % 2 == 0 else "odd"
            file.write(json.dumps({"text": text, "meta": {"pile_set_name": source}}) + "\n")
    prepare(
        PrepareConfig(
            data=str(folder / "data"),
            source=str(folder / "text.jsonl"),
            sequence_length=SMALL_LENGTH,
            vocab_size=SMALL_VOCABULARY,
            validation_fraction=0.15,
        )
    )
    return str(folder / "data")


@pytest.fixture(scope="session")
def small_flags(small_data) -> list[str]:
    """Flags of a run that trains a very small model on `small_data`."""
    return [
        f"--data={small_data}",
        f"--sequence_length={SMALL_LENGTH}",
        f"--max_length={SMALL_LENGTH}",
        f"--vocab_size={SMALL_VOCABULARY}",
        "--embed_dim=32",
        "--num_layers=1",
        "--num_heads=2",
        "--dropout=0.1",
        "--global_batch=6",
        "--warmup_steps=3",
        "--decay_steps=20",
        "--log_every=1",
    ]


@pytest.fixture(scope="session")
def short_run(tmp_path_factory, small_flags) -> str:
    """The folder of a run of two steps and two layers, which tests only read."""
    from tfbig import train

    folder = str(tmp_path_factory.mktemp("runs") / "short")
    flags = [*small_flags, "--num_layers=2", f"--run_dir={folder}", "--steps=2", "--eval_every=0"]
    assert train._body(flags) == 0
    return folder


_START = time.monotonic()
LATE_FILES = pytest.StashKey[dict[Path, bool]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts tests that start several processes last: a mistake in one process shows first."""
    items.sort(key=lambda item: item.get_closest_marker("distributed") is not None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips, and says so, what comes after a limit that a machine of ours sets for all tests.

    TFBIG_TEST_MINUTES: minutes after which no further file of tests with several processes, or of
    `make test-system`, begins.
    """
    minutes = float(os.environ.get("TFBIG_TEST_MINUTES", "0"))
    if not minutes or not any(map(item.get_closest_marker, ("distributed", "system"))):
        return
    # Once a file: its processes run in its first test, and the others look at what those saw.
    late_files = item.config.stash.setdefault(LATE_FILES, {})
    if late_files.setdefault(item.path, time.monotonic() - _START > 60 * minutes):
        pytest.skip(f"the {minutes:g} minutes of TFBIG_TEST_MINUTES are over")
