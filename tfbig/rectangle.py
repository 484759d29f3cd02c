"""Rectangles of a variable: intersection, and whether a set of them tiles it exactly once."""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Rectangle(NamedTuple):
    """A part of a tensor: `start[d] <= index[d] < start[d] + shape[d]` in every dim d.

    Args:
        start: first index in every dim.
        shape: extent in every dim.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def stop(self) -> tuple[int, ...]:
        """One past the last index, in every dim."""
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    @property
    def volume(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What indexes it out of a numpy array of the whole tensor."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def relative_to(self, origin: Sequence[int]) -> "Rectangle":
        """Returns it as a part of another rectangle which begins at `origin`.

        Args:
            origin: that rectangle's start.
        """
        start = tuple(a - o for a, o in zip(self.start, origin, strict=True))
        return Rectangle(start, self.shape)

    def __str__(self) -> str:
        """The way numpy would index it, `[0:2, 4:8]`."""
        ranges = (f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True))
        return "[" + ", ".join(ranges) + "]"


def intersect(a: Rectangle, b: Rectangle) -> Rectangle | None:
    """Returns what two rectangles of the same tensor have in common.

    Args:
        a: a rectangle.
        b: another, with as many dims.

    Returns:
        Their intersection, or None when it holds no element.
    """
    start = tuple(map(max, a.start, b.start))
    shape = tuple(min(p, q) - s for p, q, s in zip(a.stop, b.stop, start, strict=True))
    return Rectangle(start, shape) if all(n > 0 for n in shape) else None


def bounds_problem(global_shape: Sequence[int], rectangle: Rectangle) -> str | None:
    """Says why a rectangle is not one of a tensor of this shape.

    Args:
        global_shape: the tensor's shape.
        rectangle: the candidate.

    Returns:
        One phrase, or None when it lies within the tensor.
    """
    num_dims = len(global_shape)
    if len(rectangle.start) != num_dims or len(rectangle.shape) != num_dims:
        return (
            f"start {rectangle.start} and shape {rectangle.shape} do not have the {num_dims} dims "
            f"of {tuple(global_shape)}"
        )
    for start, extent, size in zip(rectangle.start, rectangle.shape, global_shape, strict=True):
        if start < 0 or extent < 0 or start + extent > size:
            return f"{rectangle} is not within shape {tuple(global_shape)}"
    return None


def tiling_problem(
    global_shape: Sequence[int], rectangles: Sequence[Rectangle], labels: Sequence[str]
) -> str | None:
    """Says why rectangles don't tile a tensor exactly once.

    Rectangles within the tensor which don't overlap and whose volumes sum to the tensor's tile it.
    Overlaps are sought by a sweep along the dim in which the rectangles start at the most places,
    so that thousands of them (a variable sharded over as many ranks) take no quadratic time.

    Args:
        global_shape: the tensor's shape.
        rectangles: the parts; empty ones are allowed and don't count.
        labels: where each comes from, for the message.

    Returns:
        One phrase, or None when every element is covered once.

    Example:
        >>> tiling_problem((4,), [Rectangle((0,), (2,))], ["part-00000"])
        'a gap: the slices cover 2 of 4 elements'
    """
    for rectangle, label in zip(rectangles, labels, strict=True):
        if problem := bounds_problem(global_shape, rectangle):
            return f"{problem} ({label})"
    solid = [i for i, rectangle in enumerate(rectangles) if rectangle.volume]
    if overlap := _find_overlap(len(global_shape), rectangles, solid):
        i, j = overlap
        return f"an overlap of {rectangles[i]} ({labels[i]}) and {rectangles[j]} ({labels[j]})"
    covered, volume = sum(rectangles[i].volume for i in solid), math.prod(global_shape)
    if covered != volume:
        return f"a gap: the slices cover {covered} of {volume} elements"
    return None


def _find_overlap(
    num_dims: int, rectangles: Sequence[Rectangle], solid: list[int]
) -> tuple[int, int] | None:
    if num_dims == 0:
        return (solid[0], solid[1]) if len(solid) > 1 else None
    stops = {i: rectangles[i].stop for i in solid}
    dim = max(range(num_dims), key=lambda d: len({rectangles[i].start[d] for i in solid}))
    active: list[int] = []  # rectangles the sweep has entered and not yet left
    for i in sorted(solid, key=lambda i: rectangles[i].start[dim]):
        start = rectangles[i].start
        active = [j for j in active if stops[j][dim] > start[dim]]
        for j in active:
            if _spans_meet(start, stops[i], rectangles[j].start, stops[j]):
                return j, i
        active.append(i)
    return None


def _spans_meet(
    start: tuple[int, ...], stop: tuple[int, ...], start2: tuple[int, ...], stop2: tuple[int, ...]
) -> bool:
    for a, b, c, d in zip(start, stop, start2, stop2, strict=True):
        if a >= d or c >= b:
            return False
    return True


def rectangles_of_range(shape: Sequence[int], start: int, stop: int) -> list[Rectangle]:
    """Returns, in order, the rectangles that tile elements [start, stop) of a row-major tensor.

    Each of them is a range of its own in row-major order; there are fewer than two a dim.

    Args:
        shape: the tensor's shape.
        start: first element.
        stop: one past the last element.

    >>> [str(part) for part in rectangles_of_range((4, 5), 3, 17)]
    ['[0:1, 3:5]', '[1:3, 0:5]', '[3:4, 0:2]']
    """
    if start >= stop:
        return []
    if not shape:
        return [Rectangle((), ())]
    rest, row_size = tuple(shape[1:]), math.prod(shape[1:])
    first, last = start // row_size, (stop - 1) // row_size  # rows
    head, tail = start - first * row_size, stop - last * row_size

    def within(row: int, begin: int, end: int) -> list[Rectangle]:
        parts = rectangles_of_range(rest, begin, end)
        return [Rectangle((row, *part.start), (1, *part.shape)) for part in parts]

    if first == last and tail - head < row_size:
        return within(first, head, tail)
    before = within(first, head, row_size) if head else []
    after = within(last, 0, tail) if tail < row_size else []
    begin, end = first + bool(before), last + (not after)
    whole = [Rectangle((begin, *[0] * len(rest)), (end - begin, *rest))] if end > begin else []
    return before + whole + after
