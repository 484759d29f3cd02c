"""What processes of one preparation say to each other through files."""

import pytest

from data_pipeline.work import WorkFolder


def test_what_was_done_between_the_look_and_the_claim_is_not_done_again(tmp_path, monkeypatch):
    other, late = WorkFolder(tmp_path), WorkFolder(tmp_path)
    claim = late._claim

    def claim_late(item: str) -> bool:
        other.run([item], lambda _: {"by": "other"})  # all of it, after the look
        return claim(item)

    monkeypatch.setattr(late, "_claim", claim_late)

    def perform(item: str) -> dict:
        pytest.fail(f"{item} was done twice")

    assert late.run(["chunk"], perform) == [{"by": "other"}]
    assert not list((tmp_path / "work").glob("claims/*")) and not late.in_flight()
