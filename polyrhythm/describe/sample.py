"""A figure that was measured several times: its median, and how far the times lie apart."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Self

from polyrhythm.errors import DescriptionError


@dataclass(frozen=True, slots=True)
class Sample:
    """The median counts: one pause of the machine spoils a mean."""

    median: float
    spread: float  # a fraction of the median: the middle half of the values lies so far apart

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        assert values, "nothing was measured"
        median = statistics.median(values)
        if len(values) < 2 or median == 0:
            return cls(median, 0.0)
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, (high - low) / median)


def check_measured_at(text: str) -> None:
    """Refuse what is no time of day; an empty text is fine: nobody wrote it down."""
    try:
        if text:
            datetime.fromisoformat(text)
    except ValueError:
        raise DescriptionError(
            f"measured_at is {text!r}",
            expected="a date and a time as ISO 8601 has them",
            fix='write it like "2026-05-12T14:30:00+00:00", or leave it out',
        ) from None
