"""Windows: groups have the target size, the paper's is a step over N, and none is too long."""

import math
import random

import pytest

from polyrhythm.sync.policies.adaptive import Adaptive
from polyrhythm.sync.policies.age import Age
from polyrhythm.sync.policies.windowed import PaperWindow, RateWindow
from polyrhythm.types import Group, Seconds, Worker
from tests.pure.policy_driver import join_all, train, workers


@pytest.mark.parametrize("name", ["adaptive", "age"])
def test_the_rate_window_aims_at_the_group_size(name: str) -> None:
    """Independent arrivals, as the rule assumes: groups have the target size for any number."""
    kind = {"adaptive": Adaptive, "age": Age}[name]
    loose = {"last_groups": 10**6} if kind is Adaptive else {"max_age": 10**6}
    for num_workers in (8, 32):
        for target in (2, 4):
            rng = random.Random(0)
            policy = kind(num_workers, group_size=target, **loose)
            step = lambda worker: rng.expovariate(1.0)  # noqa: E731, B023
            formed = train(policy, num_workers, step, num_groups=1500)[100:]
            mean = sum(len(f.group.members) for f in formed) / len(formed)
            assert mean == pytest.approx(target, rel=0.2)


def test_paper_window_is_step_time_over_n_and_grows_after_solo_groups() -> None:
    window = PaperWindow(longest=100.0)
    assert window.open(4) == 100.0  # before the first measurement
    assert [window.is_full(size) for size in (1, 2)] == [False, True]
    for now in (1.0, 2.0, 3.0):
        for worker in workers(4):
            window.record_arrival(worker, now, 4)
    assert window.open(4) == 0.25
    assert not window.is_full(3)
    for size, length in [(1, 0.5), (1, 1.0), (1, 1.0), (2, 0.9), (4, 0.81)]:
        window.record_group(size, 4)
        assert window.open(4) == pytest.approx(length)
    for _ in range(20):
        window.record_group(3, 4)
    assert window.open(4) == 0.25


def test_pause_with_all_workers_gone_is_no_arrival_gap() -> None:
    window = RateWindow(target=3, longest=100.0)
    for now in range(20):
        window.record_arrival(Worker(0, now % 4), float(now), 4)
    assert window.open(4) == 2.0
    for worker in workers(4):
        window.record_leave(worker)
    for now in range(1000, 1004):
        window.record_arrival(Worker(0, now % 4), float(now), 4)
        assert window.open(4) == 2.0


def test_windows_are_clipped_and_never_negative() -> None:
    window = RateWindow(target=4, longest=2.0)
    for now in (0.0, 10.0, 20.0):
        window.record_arrival(Worker(0, 0), now, 8)
    assert window.open(8) == 2.0
    assert window.open(1) == 0.0  # no other worker could arrive


def test_burst_of_arrivals_is_one_group() -> None:
    """Ten workers arrive within a third of a step, one after another; the window is for three."""
    policy = Adaptive(11, group_size=3, last_groups=1000)
    for worker in workers(11):
        policy.on_join(worker, "node", 0.0)
    sizes = []
    for step in range(1, 20):
        formed = []
        for i, worker in enumerate(workers(10)):
            now = step + 0.03 * i
            if policy.next_timer() <= now:
                formed += policy.on_timer(now)
            formed += policy.on_ready(worker, now)
        formed += policy.on_timer(step + 0.9)
        for group in formed:
            policy.on_done(group, True, step + 0.9)
        sizes.append([len(group.members) for group in formed])
    assert sizes[5] == [10], "not three, and three, and so on"


@pytest.mark.parametrize("max_window", [0.5, 2.0, 5.0])
def test_windows_never_exceed_max_window(max_window: float) -> None:
    """After rare arrivals, each faster one would keep the window open for half a gap more."""
    policy = Adaptive(16, max_window=max_window, last_groups=1000)
    join_all(policy, 16)
    now, opened, waits = 0.0, math.inf, []

    def close(groups: list[Group], at: Seconds) -> None:
        nonlocal opened
        for group in groups:
            waits.append(at - opened)
            opened = math.inf
            policy.on_done(group, True, at)

    for gap in [4.0] * 48 + [0.3 * max_window] * 160:
        now += gap
        while policy.next_timer() <= now:
            close(policy.on_timer(at := policy.next_timer()), at)
        worker = Worker(0, len(waits) * 7 % 16)
        while worker in policy.roster.ready:
            worker = Worker(0, (worker.pipeline + 1) % 16)
        opened = min(opened, now)
        close(policy.on_ready(worker, now), now)
    assert max(waits) == pytest.approx(max_window)


def test_fixed_window_may_exceed_max_window() -> None:
    policy = Adaptive(3, window=50.0, max_window=2.0)
    join_all(policy, 3)
    policy.on_ready(Worker(0, 0), 1.0)
    policy.on_ready(Worker(0, 1), 30.0)
    assert policy.next_timer() == 51.0
