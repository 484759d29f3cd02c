"""Keyed hashes and permutations of numbers, computed for any element alone."""

import numpy as np

# Each round changes one half of the index, so each half is changed five times. NIST SP 800-38G
# takes ten rounds for format-preserving encryption; four correlate neighbours visibly.
NUM_ROUNDS = 10


def mix_bits(values: np.ndarray) -> np.ndarray:
    """Returns a bijective 64-bit hash of each value: the finalizer of SplitMix64.

    Args:
      values: uint64, any shape.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    values = np.asarray(values, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def hash_with_seed(seed: int, values: np.ndarray) -> np.ndarray:
    """Returns a uint64 hash of (seed, value) for each of `values` (uint64)."""
    keyed = mix_bits(np.array([seed % 2**64], np.uint64)) ^ np.asarray(values, np.uint64)
    return mix_bits(mix_bits(keyed))


def permute(indices: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Returns where a keyed permutation of range(size) takes each index.

    A Feistel network permutes the smallest power of two that holds `size`; an index that lands
    outside is sent through again until it is inside (cycle walking), which permutes range(size)
    itself, whatever `size` is.

    Args:
      indices: (n,) integers in range(size).
      size: of the permuted range, at most 2**62.
      keys: (n,) or (1,) uint64; the same key means the same permutation.

    Returns:
      (n,) int64.

    Source: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002.

    >>> sorted(permute(np.arange(5), 5, np.array([7], np.uint64)).tolist())
    [0, 1, 2, 3, 4]
    """
    assert 0 < size <= 2**62
    num_bits = max(1, (size - 1).bit_length())
    result = _feistel(np.asarray(indices).astype(np.uint64), num_bits, keys)
    while len(outside := np.flatnonzero(result >= size)):
        outside_keys = keys if len(keys) == 1 else keys[outside]
        result[outside] = _feistel(result[outside], num_bits, outside_keys)
    return result.astype(np.int64)


def _feistel(values: np.ndarray, num_bits: int, keys: np.ndarray) -> np.ndarray:
    """Permutes range(2**num_bits); every round XORs one half with a hash of the other."""
    low_bits = np.uint64(num_bits // 2)
    low_mask = (np.uint64(1) << low_bits) - np.uint64(1)
    high_mask = (np.uint64(1) << np.uint64(num_bits - num_bits // 2)) - np.uint64(1)
    low, high = values & low_mask, values >> low_bits
    for number in range(NUM_ROUNDS):
        round_keys = mix_bits(keys + np.uint64(number))
        if number % 2:
            low = low ^ (mix_bits(high ^ round_keys) & low_mask)
        else:
            high = high ^ (mix_bits(low ^ round_keys) & high_mask)
    return (high << low_bits) | low
