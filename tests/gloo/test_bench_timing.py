"""Measurements that the machine's host disturbs are repeated, and chosen by that alone."""

from itertools import count

import pytest

from benchmarks.harness import timing
from benchmarks.harness.timing import MAX_STOLEN, StolenTime, undisturbed


@pytest.mark.parametrize(
    ("shares", "max_tries", "chosen"),
    [
        ([0.0], 3, 0),
        ([0.2, MAX_STOLEN], 3, 1),
        ([0.3, 0.1, 0.2], 3, 1),  # the least disturbed one
        ([0.3], 1, 0),
    ],
)
def test_disturbed_measurements_are_repeated(
    monkeypatch: pytest.MonkeyPatch, shares: list[float], max_tries: int, chosen: int
) -> None:
    remaining, measured = iter(shares), count()
    monkeypatch.setattr(timing.StolenTime, "share", lambda self: next(remaining))
    assert undisturbed(lambda: next(measured), max_tries=max_tries) == chosen
    assert next(measured) == len(shares)


def test_stolen_share_is_a_share() -> None:
    stolen = StolenTime()
    sum(range(1_000_000))
    assert 0 <= stolen.share() <= 1
