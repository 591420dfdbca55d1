"""A histogram of lateness in constant memory: each bucket is a quarter wider than the last."""

import math
from collections import Counter

from polyrhythm.types import Seconds

_LEAST: Seconds = 1e-6
_GROWTH = math.log(1.25)


class LatenessHistogram:
    def __init__(self) -> None:
        self.longest: Seconds = 0.0
        self._counts: Counter[int] = Counter()

    def add(self, late: Seconds) -> None:
        self.longest = max(self.longest, late)
        self._counts[0 if late <= _LEAST else math.ceil(math.log(late / _LEAST) / _GROWTH)] += 1

    def quantile(self, share: float) -> Seconds:
        """Return an upper bound of the quantile, at most 25 % too high; 0 without values."""
        counted, total = 0, self._counts.total()
        for bucket, count in sorted(self._counts.items()):
            counted += count
            if counted >= share * total:
                return min(self.longest, _LEAST * math.exp(bucket * _GROWTH))
        return 0.0
