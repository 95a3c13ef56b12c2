"""Computes keyed permutations of 0 … n-1 at single places.

A balanced Feistel network permutes 0 … 2^(2b)-1. A result of n or more is permuted again until it is below n (cycle
walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
"""

import hashlib
from collections.abc import Sequence

import numpy as np

_ROUNDS = 6


def permuted(places: np.ndarray | Sequence[int], count: int, *, key: Sequence[int]) -> np.ndarray:
    """Returns the numbers at `places` of the permutation of 0 … count-1 that `key` selects."""
    bits = max((count - 1).bit_length() + 1 >> 1, 1)  # bits of each half
    mask, shift = np.uint64(2**bits - 1), np.uint64(bits)
    digest = hashlib.sha512(repr(tuple(map(int, key))).encode()).digest()
    keys = np.frombuffer(digest, "<u8")[:_ROUNDS]
    found = np.array(places, np.uint64)
    outside = np.ones(found.shape, bool)
    while outside.any():
        left, right = found[outside] >> shift, found[outside] & mask
        for round_key in keys:
            left, right = right, left ^ (mixed(right ^ round_key) & mask)
        found[outside] = left << shift | right
        outside = found >= count
    return found.astype(np.int64)


def mixed(values: np.ndarray) -> np.ndarray:
    """Mixes the bits of uint64 numbers with the finalizer of splitmix64."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
