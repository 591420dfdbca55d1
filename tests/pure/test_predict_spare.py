"""Which of several runs counts: decided by how late the network was, within the time there is."""

from benchmarks.predict.spare import Spare
from benchmarks.sleeping.measured import Measured
from polyrhythm.lab.commands import SwitchTiming


def measured(milliseconds: float) -> Measured:
    late = milliseconds / 1e3
    switch_timing = SwitchTiming(late_p50=0.0, late_p99=late, late_max=late, busy=0.1)
    return Measured(ends=((milliseconds,),), switch_timing=switch_timing)


class Runs:
    """One after the other, each so many milliseconds late, on a clock that they alone move."""

    def __init__(self) -> None:
        self.now, self.takes, self.left = 0.0, 1.0, list[float]()

    def clock(self) -> float:
        return self.now

    def run(self) -> Measured:
        self.now += self.takes
        return measured(self.left.pop(0))

    def least_late(self, spare: Spare, *late: float, takes: float = 1.0) -> Measured:
        self.left, self.takes = list(late), takes
        return spare.least_late(self.run)


def test_a_punctual_run_is_not_repeated() -> None:
    runs = Runs()
    assert runs.least_late(Spare(60, runs.clock), 1.0, 0.5) == measured(1.0)
    assert runs.left == [0.5]


def test_late_runs_are_repeated_until_one_is_punctual() -> None:
    runs = Runs()
    assert runs.least_late(Spare(60, runs.clock), 9.0, 3.0, 1.5, 0.1) == measured(1.5)
    assert runs.left == [0.1]


def test_of_late_runs_only_the_least_late_one_counts() -> None:
    runs = Runs()
    assert runs.least_late(Spare(60, runs.clock), 9.0, 7.0, 3.0, 8.0, 5.0, 1.0) == measured(3.0)
    assert runs.left == [1.0], "it is not tried for ever"


def test_runs_share_the_time_that_there_is() -> None:
    runs = Runs()
    spare = Spare(5, runs.clock)
    assert runs.least_late(spare, 9.0, 0.1, takes=2.0) == measured(0.1)
    assert runs.least_late(spare, 9.0, 0.1, takes=4.0) == measured(9.0), "3 s are left"
    assert runs.left == [0.1]
    assert runs.least_late(spare, 9.0, 0.1, takes=3.0) == measured(0.1), "as long as one takes"
