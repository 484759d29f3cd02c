import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.schedule import BLOCK_SAMPLES, Schedule

NAMES = ["a", "b", "c"]


def uniform(names=NAMES):
    return [{"first_sample": 0, "weights": dict.fromkeys(names, 1.0)}]


mixtures = st.lists(
    st.tuples(
        st.integers(1, 4000), st.lists(st.sampled_from([0, 0.25, 1, 2.5]), min_size=3, max_size=3)
    ).filter(lambda segment: any(segment[1])),
    min_size=1,
    max_size=4,
)


@given(mixtures, st.lists(st.integers(1, 3000), min_size=3, max_size=3))
@settings(max_examples=60, deadline=None)
def test_a_sources_stream_goes_on_without_a_gap_whatever_the_segments(mixture, rows):
    segments, first = [], 0
    for length, weights in mixture:
        segments.append({"first_sample": first, "weights": dict(zip(NAMES, weights, strict=True))})
        first += length
    schedule = Schedule(segments, NAMES, np.array(rows))
    num_samples = first + 500
    sources, indices = schedule.locate(np.arange(num_samples))
    for source in range(3):
        of_source = indices[sources == source]
        assert np.array_equal(of_source, np.arange(len(of_source)))
    for stop in {0, 1, first - 1, first, num_samples - 1, *(s["first_sample"] for s in segments)}:
        expected = np.bincount(sources[:stop], minlength=3)
        assert np.array_equal(schedule.counts(stop), expected), stop
    some = np.array([num_samples - 1, 0, first])
    assert np.array_equal(schedule.locate(some)[1], indices[some])


@given(st.lists(st.integers(0, 5000), min_size=3, max_size=3).filter(any))
@settings(max_examples=30, deadline=None)
def test_weight_one_takes_every_row_once_a_round(rows):
    schedule = Schedule(uniform(), NAMES, np.array(rows))
    total = sum(rows)
    for number in range(3):
        sources, _ = schedule.locate(np.arange(number * total, (number + 1) * total))
        assert np.bincount(sources, minlength=3).tolist() == rows


def test_the_past_is_untouched_by_a_segment_that_follows():
    rows = np.array([500, 300, 0])
    before = Schedule(uniform(), NAMES, rows)
    later = {"first_sample": 777, "weights": {"a": 0.1, "b": 2.0, "c": 1.0}}
    after = Schedule([*uniform(), later], NAMES, np.array([500, 300, 900]))
    for one, other in zip(before.locate(np.arange(777)), after.locate(np.arange(777)), strict=True):
        # The new source was in the first segment's weights only by name: it had no rows then.
        assert len(one) == len(other)
    named = {"first_sample": 0, "weights": {"a": 1.0, "b": 1.0}}
    after = Schedule([named, later], NAMES, np.array([500, 300, 900]))
    for one, other in zip(before.locate(np.arange(777)), after.locate(np.arange(777)), strict=True):
        assert np.array_equal(one, other)
    sources, _ = after.locate(np.arange(777, 777 + 10000))
    shares = np.bincount(sources, minlength=3) / 10000
    assert shares == pytest.approx(np.array([50, 600, 900]) / 1550, abs=0.002)


def test_every_stretch_has_about_the_mixtures_shares():
    rows = np.array([70_000, 20_000, 10_000])
    sources, _ = Schedule(uniform(), NAMES, rows).locate(np.arange(100_000))
    for start in range(0, 99_000, BLOCK_SAMPLES):
        counts = np.bincount(sources[start : start + BLOCK_SAMPLES], minlength=3)
        assert np.abs(counts - BLOCK_SAMPLES * rows / 100_000).max() < 60
    runs = np.flatnonzero(np.diff(sources)).size
    assert runs > 30_000  # spread, not one source after the other


def test_terabytes_are_counted_exactly():
    rows = np.array([3_000_000_000, 3, 1])
    schedule = Schedule(uniform(), NAMES, rows)
    total = int(rows.sum())
    assert schedule.counts(total).tolist() == rows.tolist()
    assert schedule.counts(7 * total).tolist() == (7 * rows).tolist()
    assert schedule.locate(np.array([total - 1]))[1][0] < rows[0]
