"""Which of several runs counts: decided by how late the network was, within the time there is."""

import time
from collections.abc import Callable

from polyrhythm.bench.predict.spare import Spare
from polyrhythm.bench.sleeping.job import Measured
from polyrhythm.lab.orders import Punctuality


def measured(milliseconds: float) -> Measured:
    late = milliseconds / 1e3
    punctuality = Punctuality(late_p50=0.0, late_p99=late, late_max=late, busy=0.1)
    return Measured(ends=((milliseconds,),), punctuality=punctuality)


def runs(*late: float, takes: float = 0.0) -> tuple[Callable[[], Measured], list[float]]:
    """One after the other, each so many milliseconds late; and those that are left."""
    left = list(late)

    def run() -> Measured:
        time.sleep(takes)
        return measured(left.pop(0))

    return run, left


def test_a_punctual_run_is_not_repeated() -> None:
    run, left = runs(1.0, 0.5)
    assert Spare(60).least_late(run) == measured(1.0)
    assert left == [0.5]


def test_late_runs_are_repeated_until_one_is_punctual() -> None:
    run, left = runs(9.0, 3.0, 1.5, 0.1)
    assert Spare(60).least_late(run) == measured(1.5)
    assert left == [0.1]


def test_of_late_runs_only_the_least_late_one_counts() -> None:
    run, left = runs(9.0, 7.0, 3.0, 8.0, 5.0, 1.0)
    assert Spare(60).least_late(run) == measured(3.0)
    assert left == [1.0], "it is not tried for ever"


def test_runs_share_the_time_that_there_is() -> None:
    spare = Spare(0.5)
    first, left_of_first = runs(9.0, 0.1, takes=0.2)
    assert spare.least_late(first) == measured(0.1)
    assert not left_of_first
    second, left_of_second = runs(9.0, 0.1, takes=0.4)
    assert spare.least_late(second) == measured(9.0), "0.3 s are left at the most"
    assert left_of_second == [0.1]
