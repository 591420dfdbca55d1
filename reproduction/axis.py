"""An axis of a chart: where a value lies on paper, and at which round values its ticks stand.

Whether it counts by sums or by factors is decided by the values: those that lie close together near
one end, and spread out towards the other, are told apart only by factors.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)  # between ticks, times a power of ten
_CROWDED = 8  # times the median, the largest: then by factors
_FAR = 30  # times the smallest, the largest: then crowded lines are told apart by factors ...
_VERY_FAR = 1000  # ... and all lines are
_FEW = 10  # values that may all have a tick of their own
_SLACK = 1e-9  # of a step: what rounding takes away from a tick at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    low: float
    high: float
    start: float  # on paper, where `low` is
    end: float
    is_log: bool
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        """On paper."""
        if self.is_log:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)

    def label(self, tick: float) -> str:
        """All ticks of an axis by sums have equally many places."""
        largest = max(map(abs, self.ticks))
        if self.is_log or not 1e-3 <= largest < 1e9:
            return figure(tick)
        places = max(_places(value) for value in self.ticks)
        return f"{tick + 0.0:,.{places}f}"


def figure(value: float) -> str:
    """Three digits, or all of a larger number; never an exponent for what people can read."""
    if value == 0 or not 1e-4 <= abs(value) < 1e9:
        return f"{value:.3g}"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def height(values: Sequence[float], *, start: float, end: float, has_bars: bool) -> Axis:
    """From 0 if that leaves the values room; bars always stand on 0."""
    low, high = min(values), max(values)
    is_far = high >= min(_VERY_FAR * low, max(_FAR * low, _CROWDED * statistics.median(values)))
    if low > 0 and is_far and not has_bars:
        return _by_factors(low, high, start, end)
    if has_bars:
        low, high = min(low, 0.0), max(high, 0.0)
    elif 0 <= low <= high / 2:
        low = 0.0
    step = _step(low, high, 5)
    first, last = math.floor(low / step + _SLACK), math.ceil(high / step - _SLACK)
    last = max(last, first + 1)
    ticks = tuple(tick * step for tick in range(first, last + 1))
    return Axis(low=ticks[0], high=ticks[-1], start=start, end=end, is_log=False, ticks=ticks)


def width(values: Sequence[float], *, start: float, end: float, room: float) -> Axis:
    """As wide as the values; ticks at these if there are few, and `room` apart."""
    distinct = sorted(dict.fromkeys(values))
    low, high = distinct[0], distinct[-1]
    if low == high:
        low, high = low - 1, high + 1
    is_log = low > 0 and high >= _CROWDED * statistics.median(distinct)
    axis = Axis(low=low, high=high, start=start, end=end, is_log=is_log, ticks=tuple(distinct))
    places = [axis.at(value) for value in distinct]
    if len(distinct) <= _FEW and all(b - a >= room for a, b in pairwise(places)):
        return axis
    if is_log:
        ticks = _factors(low, high, int((end - start) / room))
    else:
        step = _step(low, high, max(2, int((end - start) / room / 1.5)))
        first, last = math.ceil(low / step - _SLACK), math.floor(high / step + _SLACK)
        ticks = tuple(tick * step for tick in range(first, last + 1))
    return Axis(low=low, high=high, start=start, end=end, is_log=is_log, ticks=ticks)


def _by_factors(low: float, high: float, start: float, end: float) -> Axis:
    """Between powers of ten, or 1, 2, 5 times these if there are few of them."""
    digits = (1.0, 2.0, 5.0) if high < _VERY_FAR * low else (1.0,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    round_values = [digit * 10.0**power for power in powers for digit in digits]
    first = max(value for value in round_values if value <= low * (1 + _SLACK))
    last = min(value for value in round_values if value >= high * (1 - _SLACK))
    ticks = [value for value in round_values if first <= value <= last]
    ticks = ticks[:: -(-len(ticks) // 10)]
    return Axis(low=first, high=last, start=start, end=end, is_log=True, ticks=tuple(ticks))


def _factors(low: float, high: float, most: int) -> tuple[float, ...]:
    """1, 2, 5 times powers of ten, or these powers alone if that is too many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1.0, 2.0, 5.0), (1.0,)):
        ticks = tuple(d * 10.0**p for p in powers for d in digits if low <= d * 10.0**p <= high)
        if 2 <= len(ticks) <= most:
            return ticks
    return ticks or (low, high)


def _step(low: float, high: float, about: int) -> float:
    """A round distance of which about so many make the whole way."""
    exact = (high - low) / about or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(exact))
    return next(step * power for step in _STEPS if step * power >= exact * (1 - _SLACK))


def _places(value: float) -> int:
    """Behind the point, as far as they matter."""
    text = f"{value:.10f}".rstrip("0")
    return len(text.partition(".")[2])
