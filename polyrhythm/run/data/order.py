"""The order of samples: which one comes at a position, found without a list of them.

A position counts samples from the beginning of training on, over epochs: the one at `position` is
that of place `position % num_samples` in epoch `position // num_samples`. Each epoch is a shuffle
of its own, given by a key and not by drawing: a small cipher turns a place into a sample. So any
part of any epoch is known at once, on every machine alike, and there is nothing to keep or to save.

The cipher is a Feistel network on two digits, which it adds to in turns, modulo a and b with
a * b >= num_samples; what comes out above goes in again, until it is a sample. Its round function
is the finaliser of SplitMix64, in whole numbers of 64 bits alone: this order will never change, as
that of a library's random generator may.

Source: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002 (the generalised
Feistel cipher, and cycle walking); Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014 (SplitMix64). Departure: more rounds, for shuffles of a few samples, too.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyrhythm.run.data.errors import DataError

_ROUNDS = 6  # even: each digit is added to as often as the other
_BLOCK = 1 << 15  # positions at a time, which stay in the cache
_MAX_SAMPLES = 1 << 62  # samples, and positions
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / the golden ratio, odd: SplitMix64's step
_HALF = np.uint64(32)  # the bits of half a word; a digit has no more than 31

_CounterText = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class SampleOrder:
    num_samples: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.num_samples <= _MAX_SAMPLES:
            raise DataError(
                f"{self.num_samples} samples",
                expected="at least one, and no more than 2^62",
                fix="give a dataset that is not empty",
            )
        if not 0 <= self.seed < 1 << 64:
            raise DataError(
                f"seed={self.seed}",
                expected="a whole number from 0 to 2^64 - 1",
                fix="use 0, or any other of them",
            )

    def ids(self, start: int, end: int) -> NDArray[np.int64]:
        """The samples at positions from `start` until before `end`."""
        assert 0 <= start <= end <= _MAX_SAMPLES, f"positions {start} to {end}"
        found = np.empty(end - start, np.int64)
        for begin in range(start, end, _BLOCK):
            stop = min(begin + _BLOCK, end)
            found[begin - start : stop - start] = self._block(begin, stop)
        return found

    def _block(self, start: int, end: int) -> NDArray[np.int64]:
        positions = np.arange(start, end, dtype=np.uint64)
        epochs, places = np.divmod(positions, np.uint64(self.num_samples))
        if not self.shuffle:
            return places.astype(np.int64)
        if epochs[0] == epochs[-1]:
            epochs = epochs[:1]
        keys = self._keys(epochs)
        ids = self._encipher(places, keys)
        while (above := np.flatnonzero(ids >= self.num_samples)).size:
            theirs = keys if len(epochs) == 1 else keys[:, above]
            ids[above] = self._encipher(ids[above], theirs)
        return ids.astype(np.int64)

    def _keys(self, epochs: _CounterText) -> _CounterText:
        """One per round and epoch."""
        seed = _mix_bits(np.array([self.seed], np.uint64) + _GOLDEN)
        rounds = np.arange(1, _ROUNDS + 1, dtype=np.uint64)[:, None]
        return _mix_bits(_mix_bits(seed + epochs * _GOLDEN) + rounds * _GOLDEN)

    def _encipher(self, places: _CounterText, keys: _CounterText) -> _CounterText:
        """Another number below a * b for each; for one key, no two of them the same."""
        size = math.isqrt(self.num_samples - 1) + 1
        a, b = np.uint64(size), np.uint64(-(-self.num_samples // size))
        high, low = np.divmod(places, b)
        for number in range(0, _ROUNDS, 2):
            high = _add_digits(high, _mix_bits(keys[number] ^ low), a)
            low = _add_digits(low, _mix_bits(keys[number + 1] ^ high), b)
        return high * b + low


def _add_digits(digits: _CounterText, words: _CounterText, base: np.uint64) -> _CounterText:
    """The upper half of each word, scaled to a digit, and added to one."""
    sums = digits + (((words >> _HALF) * base) >> _HALF)
    return sums - base * (sums >= base)


def _mix_bits(words: _CounterText) -> _CounterText:
    """Each a word that depends on all bits of it, and on no others'."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
