"""No constants that a developer measured or recalibrated get into these tests."""

import pytest


@pytest.fixture(autouse=True)
def packaged_constants(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("TFBIG_CONSTANTS", str(tmp_path / "constants.json"))
