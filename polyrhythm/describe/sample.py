"""A value that was measured several times: its median and spread."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Self

from polyrhythm.errors import DescriptionError


@dataclass(frozen=True, slots=True)
class Sample:
    """Median and spread; not the mean, which one pause of the machine would spoil."""

    median: float
    spread: float  # interquartile range as a fraction of the median

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        assert values, "nothing was measured"
        median = statistics.median(values)
        if len(values) < 2 or median == 0:
            return cls(median, 0.0)
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, (high - low) / median)


def check_measured_at(text: str) -> None:
    """Refuse a text that is not a date and time; empty means unknown."""
    try:
        if text:
            datetime.fromisoformat(text)
    except ValueError:
        raise DescriptionError(
            f"measured_at is {text!r}",
            expected="a date and a time as ISO 8601 has them",
            fix='write it like "2026-05-12T14:30:00+00:00", or omit it',
        ) from None
