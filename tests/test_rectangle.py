import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfbig import rectangle
from tfbig.rectangle import (
    Rectangle,
    bounds_problem,
    intersect,
    rectangles_of_range,
    tiling_problem,
)


@st.composite
def rectangle_sets(draw):
    shape = draw(st.lists(st.integers(1, 4), min_size=0, max_size=3))
    rectangles = []
    for _ in range(draw(st.integers(0, 5))):
        start = tuple(draw(st.integers(0, size - 1)) for size in shape)
        extent = tuple(
            draw(st.integers(0, size - first)) for size, first in zip(shape, start, strict=True)
        )
        rectangles.append(Rectangle(start, extent))
    return tuple(shape), rectangles


@settings(deadline=None, max_examples=150)
@given(rectangle_sets())
def test_tiling_problem_is_found_exactly_when_an_element_is_not_covered_once(case):
    shape, rectangles = case
    counts = np.zeros(shape, int)
    for each in rectangles:
        counts[each.slices] += 1
    problem = tiling_problem(shape, rectangles, [f"file {i}" for i in range(len(rectangles))])
    if (counts == 1).all():
        assert problem is None
    elif (counts > 1).any():
        assert "an overlap of" in problem
    else:
        assert problem == f"a gap: the slices cover {(counts == 1).sum()} of {counts.size} elements"


@settings(deadline=None, max_examples=100)
@given(rectangle_sets())
def test_intersection_holds_the_common_elements(case):
    shape, rectangles = case
    for a, b in itertools.combinations(rectangles, 2):
        masks = np.zeros((2, *shape), bool)
        masks[(0, *a.slices)] = True
        masks[(1, *b.slices)] = True
        common = intersect(a, b)
        assert (common.volume if common else 0) == (masks[0] & masks[1]).sum()
        if common:
            assert (masks[0] & masks[1])[common.slices].all()


def test_overlap_names_both_slices_and_where_they_are_from():
    rectangles = [Rectangle((0, 0), (2, 4)), Rectangle((1, 2), (1, 2))]
    problem = tiling_problem((2, 4), rectangles, ["part-00000", "part-00001"])
    assert problem == "an overlap of [0:2, 0:4] (part-00000) and [1:2, 2:4] (part-00001)"


@pytest.mark.parametrize(
    "outside",
    [
        Rectangle((0,), (5,)),
        Rectangle((3,), (2,)),
        Rectangle((-1,), (2,)),
        Rectangle((0, 0), (4, 1)),
        Rectangle((0,), (-1,)),
    ],
)
def test_rectangles_outside_a_tensor_are_refused(outside):
    assert bounds_problem((4,), outside)
    assert tiling_problem((4,), [outside], ["a"])


def test_a_grid_over_a_thousand_ranks_takes_no_quadratic_time(monkeypatch):
    calls = 0

    real = rectangle._spans_meet

    def counted(*spans):
        nonlocal calls
        calls += 1
        return real(*spans)

    monkeypatch.setattr(rectangle, "_spans_meet", counted)
    side = 64
    rectangles = [Rectangle((i, j), (1, 1)) for i in range(side) for j in range(side)]
    assert tiling_problem((side, side), rectangles, [""] * len(rectangles)) is None
    assert 0 < calls < 40 * len(rectangles) < math.comb(len(rectangles), 2)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_rectangles_of_a_range_are_its_elements_in_order(shape, data):
    whole = np.arange(math.prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, whole.size))
    stop = data.draw(st.integers(start, whole.size))
    parts = rectangles_of_range(tuple(shape), start, stop)
    elements = [whole[part.slices].reshape(-1) for part in parts]
    assert np.concatenate([np.zeros(0, int), *elements]).tolist() == list(range(start, stop))
    assert len(parts) <= max(1, 2 * len(shape) - 1)
