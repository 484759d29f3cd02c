import math
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.order import ORDER_VERSION, DataOrder, RowOrder
from data_pipeline.permutation import NUM_ROUNDS, mix_bits, permute

AWKWARD_SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 63, 64, 65, 255, 256, 257, 997, 1023, 1024]
AWKWARD_SIZES += [1025, 4095, 4096, 4097, 10007, 16383, 16385, 65535, 65536, 65537, 262143, 262145]


def key(number):
    return np.array([number], np.uint64)


@pytest.mark.parametrize("size", AWKWARD_SIZES)
def test_every_index_comes_exactly_once(size):
    for number in (0, 1, 2**64 - 1):
        permuted = permute(np.arange(size), size, key(number))
        assert permuted.dtype == np.int64
        assert np.array_equal(np.sort(permuted), np.arange(size))


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
@settings(max_examples=100, deadline=None)
def test_every_index_comes_exactly_once_at_any_size_and_key(size, number):
    assert np.array_equal(np.sort(permute(np.arange(size), size, key(number))), np.arange(size))


def test_an_index_is_permuted_alone_as_among_others_and_keys_may_differ_by_element():
    size, keys = 1000, np.array([3, 4], np.uint64)
    whole = [permute(np.arange(size), size, keys[k : k + 1]) for k in range(2)]
    indices = np.array([17, 17, 999, 0])
    mixed = permute(indices, size, keys[[0, 1, 1, 0]])
    assert mixed.tolist() == [whole[0][17], whole[1][17], whole[1][999], whole[0][0]]
    assert permute(np.array([500]), size, keys[:1])[0] == whole[0][500]


@pytest.mark.parametrize("size", [4096, 65537, 262145, 1 << 20])
def test_neighbours_are_not_correlated(size):
    """TensorFlow's index_shuffle shows 0.45 at 2**20; chance stays within 5 standard deviations."""
    for number in range(2 if size < 1 << 20 else 1):
        permuted = permute(np.arange(size), size, key(number)).astype(np.float64)
        limit = 5 / math.sqrt(size)
        for lag in (1, 2, 3, 8, 64):
            assert abs(np.corrcoef(permuted[:-lag], permuted[lag:])[0, 1]) < limit
        assert abs(np.corrcoef(permuted, np.arange(size))[0, 1]) < limit
        other = permute(np.arange(size), size, key(number + 1)).astype(np.float64)
        assert abs(np.corrcoef(permuted, other)[0, 1]) < limit


def test_small_permutations_are_all_about_equally_likely():
    keys = np.repeat(mix_bits(np.arange(4800)), 4)
    permuted = permute(np.tile(np.arange(4), 4800), 4, keys).reshape(4800, 4)  # (keys, 4)
    seen = Counter(map(tuple, permuted.tolist()))
    assert set(seen) == set(permutations(range(4)))
    assert all(130 < count < 270 for count in seen.values())  # 200 expected, 5 deviations = 69


def test_the_hash_is_splitmix64():
    """The first outputs of the generator seeded with 0, as its reference implementation's."""
    steps = np.arange(3, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert [hex(value) for value in mix_bits(steps)] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]


def test_the_order_is_the_one_that_checkpoints_rely_on():
    """A run resumes by position alone: if this changes, ORDER_VERSION must change with it."""

    def mix(value):
        return int(mix_bits(np.array([value % 2**64], np.uint64))[0])

    def walk(index, size, key):
        num_bits = max(1, (size - 1).bit_length())
        low_bits, high_bits = num_bits // 2, num_bits - num_bits // 2
        while True:
            low, high = index % 2**low_bits, index >> low_bits
            for number in range(10):
                if number % 2:
                    low ^= mix(high ^ mix(key + number)) % 2**low_bits
                else:
                    high ^= mix(low ^ mix(key + number)) % 2**high_bits
            index = high << low_bits | low
            if index < size:
                return index

    for size in (1, 2, 3, 100, 1000, 2**40 + 15):
        indices = np.array([k for k in (0, 1, 2, 77, size - 1) if k < size])
        expected = [walk(int(index), size, 2**64 - 3) for index in indices]
        assert permute(indices, size, key(2**64 - 3)).tolist() == expected
    assert ORDER_VERSION == 2 and NUM_ROUNDS == 10
    place = DataOrder([1000], [0], ["a"]).locate(np.array([0, 1, 999, 1000, 123456789]), seed=5)
    assert place.row.tolist() == [951, 463, 792, 409, 358]
    order = DataOrder([700, 300, 77], [0, 1, 0], ["a", "b"], None, block_rows=4)
    place = order.locate(np.array([0, 1, 999, 1000, 123456789]), seed=5)
    assert place.shard.tolist() == [0, 0, 1, 1, 1] and place.row.tolist() == [
        426,
        550,
        210,
        169,
        225,
    ]


def test_each_epoch_holds_every_row_once_in_another_order():
    order = DataOrder([5, 0, 7, 1], [0, 0, 1, 1], ["a", "b"])
    assert order.num_rows == 13
    place = order.locate(np.arange(39), seed=1)
    orders = []
    for epoch in range(3):
        chosen = slice(13 * epoch, 13 * (epoch + 1))
        assert (place.epoch[chosen] == epoch).all()
        rows = list(zip(place.shard[chosen].tolist(), place.row[chosen].tolist(), strict=True))
        expected = [(0, r) for r in range(5)] + [(2, r) for r in range(7)] + [(3, 0)]
        assert sorted(rows) == expected
        orders.append(rows)
    assert len({str(rows) for rows in orders}) == 3
    assert np.array_equal(place.source, np.array([0, 0, 1, 1])[place.shard])


def test_a_position_has_its_place_whatever_is_asked_with_it():
    order = DataOrder([60, 40], [0, 1], ["a", "b"], None, block_rows=3)
    whole = order.locate(np.arange(1000), seed=9).row
    assert [order.locate(np.array([p]), seed=9).row[0] for p in (0, 99, 100, 999)] == [
        *whole[[0, 99, 100, 999]]
    ]
    assert np.array_equal(order.locate(np.arange(350, 450), seed=9).row, whole[350:450])
    assert not np.array_equal(order.locate(np.arange(100), seed=8).row, whole[:100])


@given(st.integers(1, 2000), st.integers(1, 9), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_rows_in_blocks_come_once_an_epoch(num_rows, block_rows, seed):
    order = RowOrder(num_rows, block_rows)
    epochs, rows = order.locate(np.arange(2 * num_rows), seed)
    for epoch in range(2):
        chosen = rows[epoch * num_rows : (epoch + 1) * num_rows]
        assert (epochs[epoch * num_rows : (epoch + 1) * num_rows] == epoch).all()
        assert np.array_equal(np.sort(chosen), np.arange(num_rows))


def test_a_window_touches_few_blocks_and_windows_change_with_the_epoch():
    block_rows, num_rows = 16, 16 * 64 * 5 + 3
    order = RowOrder(num_rows, block_rows)
    _, rows = order.locate(np.arange(2 * num_rows), 7)
    windows = rows[: 64 * 16 * 5].reshape(5, -1) // block_rows  # (windows, rows)
    assert [len(np.unique(window)) for window in windows] == [64] * 5
    again = rows[num_rows : num_rows + 64 * 16] // block_rows
    assert len(set(again) & set(windows[0])) < 32
    assert abs(np.corrcoef(rows[:1023], rows[1:1024])[0, 1]) < 0.2


def test_sequential_places():
    place = DataOrder([2, 3], [1, 0], ["a", "b"]).locate_sequential(np.arange(5))
    assert place.shard.tolist() == [0, 0, 1, 1, 1]
    assert place.row.tolist() == [0, 1, 0, 1, 2]
    assert place.source.tolist() == [1, 1, 0, 0, 0]
