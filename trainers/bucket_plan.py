"""Which gradients travel together. TensorFlow-free."""


def plan_buckets(sizes: dict[str, int], max_elements: int) -> list[list[str]]:
    """Returns the paths of each bucket.

    Backward makes the last layer's gradients first, so the first bucket holds the last paths and
    can leave while the others are still being computed.

    Args:
      sizes: elements by path, in forward order.
      max_elements: of one bucket; a larger variable gets one of its own.

    >>> plan_buckets({"a": 3, "b": 2, "c": 2}, 4)
    [['c', 'b'], ['a']]
    """
    buckets: list[list[str]] = []
    room = 0
    for path in reversed(sizes):
        if not buckets or sizes[path] > room:
            buckets.append([])
            room = max_elements
        buckets[-1].append(path)
        room -= sizes[path]
    return buckets
