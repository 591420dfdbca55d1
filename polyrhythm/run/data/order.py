"""The order of samples: the sample at any position, computed without a list of samples.

A position counts samples from the start of training, across epochs: position `p` is index
`p % num_samples` of epoch `p // num_samples`. Each epoch has its own shuffle, given by a key
instead of random draws: a small cipher maps an index to a sample. Any part of any epoch is known
at once, equally on every machine, and there is no state to save.

The cipher is a Feistel network on two digits, to which it adds in turns, modulo a and b with
a * b >= num_samples; a result above the range is enciphered again, until it is a sample. Its round
function is the finaliser of SplitMix64, in 64-bit integers only: this order never changes, unlike
that of a library's random generator.

Source: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002 (the generalised
Feistel cipher, and cycle walking); Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014 (SplitMix64). Departure: more rounds, which shuffles of few samples need.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from polyrhythm.errors import UserError

_ROUNDS = 6  # even: both digits change equally often
_BLOCK = 1 << 15  # positions at a time, which fit in the cache
_CACHED = 512  # positions that are computed at once for micro-batches; a call costs as much as 100
_MAX_SAMPLES = 1 << 62  # also the largest position
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / the golden ratio, odd: SplitMix64's step
_HALF = np.uint64(32)  # bits in half a word; a digit has at most 31

_UInt64Array = NDArray[np.uint64]


class DataError(UserError):
    """A dataset that cannot be used, or a sample that cannot be loaded."""


@dataclass(frozen=True, slots=True)
class SampleOrder:
    num_samples: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.num_samples <= _MAX_SAMPLES:
            raise DataError(
                f"{self.num_samples} samples",
                expected="at least 1, and at most 2^62",
                fix="pass a dataset that is not empty",
            )
        if not 0 <= self.seed < 1 << 64:
            raise DataError(
                f"seed={self.seed}",
                expected="an integer from 0 to 2^64 - 1",
                fix="use seed=0, or another integer in this range",
            )

    def ids(self, start: int, end: int) -> NDArray[np.int64]:
        """Return the samples at positions `start` to `end - 1`."""
        assert 0 <= start <= end <= _MAX_SAMPLES, f"positions {start} to {end}"
        found = np.empty(end - start, np.int64)
        for block in range(start, end, _BLOCK):
            stop = min(block + _BLOCK, end)
            found[block - start : stop - start] = self._block(block, stop)
        return found

    def samples(self, start: int, end: int) -> list[int]:
        """Return what `ids` does, for the few positions of a micro-batch, mostly from a cache."""
        found = list[int]()
        while start < end:
            number, offset = divmod(start, _CACHED)
            part = _cached_samples(self, number)[offset : offset + end - start]
            found += part
            start += len(part)
        return found

    def _block(self, start: int, end: int) -> NDArray[np.int64]:
        positions = np.arange(start, end, dtype=np.uint64)
        epochs, indices = np.divmod(positions, np.uint64(self.num_samples))
        if not self.shuffle:
            return indices.astype(np.int64)
        if epochs[0] == epochs[-1]:
            epochs = epochs[:1]
        keys = self._keys(epochs)
        ids = self._encipher(indices, keys)
        while (above := np.flatnonzero(ids >= self.num_samples)).size:
            sample_keys = keys if len(epochs) == 1 else keys[:, above]
            ids[above] = self._encipher(ids[above], sample_keys)
        return ids.astype(np.int64)

    def _keys(self, epochs: _UInt64Array) -> _UInt64Array:
        """Return one key per round and epoch."""
        seed = _mix_bits(np.array([self.seed], np.uint64) + _GOLDEN)
        rounds = np.arange(1, _ROUNDS + 1, dtype=np.uint64)[:, None]
        return _mix_bits(_mix_bits(seed + epochs * _GOLDEN) + rounds * _GOLDEN)

    def _encipher(self, indices: _UInt64Array, keys: _UInt64Array) -> _UInt64Array:
        """Map indices to numbers below a * b; for one key the map is a permutation."""
        size = math.isqrt(self.num_samples - 1) + 1
        a, b = np.uint64(size), np.uint64(-(-self.num_samples // size))
        high, low = np.divmod(indices, b)
        for number in range(0, _ROUNDS, 2):
            high = _add_digits(high, _mix_bits(keys[number] ^ low), a)
            low = _add_digits(low, _mix_bits(keys[number + 1] ^ high), b)
        return high * b + low


@lru_cache(maxsize=8)  # blocks: of training, an evaluation, and steps that are read ahead
def _cached_samples(order: SampleOrder, number: int) -> list[int]:
    start = number * _CACHED
    return order.ids(start, min(start + _CACHED, _MAX_SAMPLES)).tolist()


def _add_digits(digits: _UInt64Array, words: _UInt64Array, base: np.uint64) -> _UInt64Array:
    """Scale the upper half of each word to a digit, and add it modulo `base`."""
    sums = digits + (((words >> _HALF) * base) >> _HALF)
    return sums - base * (sums >= base)


def _mix_bits(words: _UInt64Array) -> _UInt64Array:
    """Mix the bits of each word: every output bit depends on all its input bits."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
