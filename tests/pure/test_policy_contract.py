"""The contract of every policy: each step ends, groups do not overlap, no worker waits for ever."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.errors import PolicyError
from polyrhythm.types import Worker
from tests.pure.policy_driver import MAKE, job_of, node_lists, random_durations


@pytest.mark.parametrize("name", MAKE)
@given(nodes=node_lists, seed=st.integers(0, 99), reports_lone=st.booleans())
def test_every_step_ends_and_groups_never_overlap(
    name: str, nodes: list[int], seed: int, reports_lone: bool
) -> None:
    job = job_of(MAKE[name](len(nodes)), nodes, random_durations(seed), num_steps=6)
    job.reports_lone = reports_lone
    job.run()
    if len(nodes) == 1:
        assert all(len(group.members) == 1 for _, group in job.formed)


@pytest.mark.parametrize("name", MAKE)
@given(
    nodes=node_lists,
    seed=st.integers(0, 99),
    leaves=st.lists(st.tuples(st.integers(0, 8), st.floats(0, 12)), max_size=4),
    joins=st.lists(st.tuples(st.integers(0, 3), st.floats(0, 12)), max_size=3),
    failing=st.sets(st.integers(0, 12), max_size=4),
)
def test_no_deadlock_with_churn_and_failing_averages(
    name: str,
    nodes: list[int],
    seed: int,
    leaves: list[tuple[int, float]],
    joins: list[tuple[int, float]],
    failing: set[int],
) -> None:
    job = job_of(MAKE[name](len(nodes)), nodes, random_durations(seed), num_steps=5)
    job.fails = failing.__contains__
    for pipeline, when in leaves:
        job.at(when, lambda p=pipeline: job.leave(Worker(0, p)))
    for nth, (node, when) in enumerate(joins):
        job.at(when, lambda p=20 + nth, n=node: job.join(Worker(0, p), f"n{n}"))
    assert not job.run().steps, "all workers have left"


@pytest.mark.parametrize("name", [name for name in MAKE if name != "ssp"])
def test_all_workers_are_connected_by_their_groups(name: str) -> None:
    nodes = [0, 0, 0, 0, 1, 1, 1, 2, 2]
    job = job_of(MAKE[name](len(nodes)), nodes, random_durations(3), num_steps=30).run()
    reached = {Worker(0, 0)}
    for _ in nodes:
        reached.update(m for _, g in job.formed if reached & set(g.members) for m in g.members)
    assert len(reached) == len(nodes)


@pytest.mark.parametrize("name", ["static", "random", "smart", "pairwise", "ssp"])
def test_reports_of_unknown_workers_and_second_joins_are_refused(name: str) -> None:
    policy, worker = MAKE[name](2), Worker(0, 0)
    report = policy.on_request if name in ("random", "smart") else policy.on_ready
    with pytest.raises(PolicyError, match="s0p0 has not joined"):
        report(worker, 0.0)
    with pytest.raises(PolicyError, match="s0p0 has not joined"):
        policy.on_leave(worker, 0.0)
    policy.on_join(worker, "n0", 0.0)
    with pytest.raises(PolicyError, match=r"s0p0 .*(twice|already)"):
        policy.on_join(worker, "n0", 0.0)


SCRIPT = """
from tests.pure.policy_driver import MAKE, job_of, random_durations
nodes = [0, 0, 1, 1, 2, 2, 2]
for name, make in MAKE.items():
    print(name, job_of(make(7), nodes, random_durations(2), 8).run().formed)
"""


def test_the_same_events_give_the_same_groups_for_any_hash_seed() -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1] != ""
