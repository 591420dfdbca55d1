"""Policies in a simulation: each runs to its end, and keeps its guarantee."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.describe.scenario import Slow
from polyrhythm.errors import PolicyError, UserError
from polyrhythm.simulate.job import SimulatedJob
from polyrhythm.simulate.result import SimulationResult
from polyrhythm.simulate.simulator import simulate
from polyrhythm.sync.modes import POLICIES
from polyrhythm.types import Worker
from tests.grids import num_examples
from tests.pure.simulate_cases import (
    equal_job,
    kills_and_joins,
    linked,
    lost,
    region_per_device,
    slow_entries,
    slowed,
    steps_after_first,
)

SYNCHRONOUS = ("all_reduce", "balanced")
# These can apply an average while the next step runs.
OVERLAPS = ("adaptive", "age", "partial_reduce", "random", "smart", "pairwise", "local")
names = st.sampled_from(sorted(POLICIES))


class CountingObserver:
    """Counts the calls of an observer."""

    def __init__(self) -> None:
        self.steps: Counter[Worker] = Counter()
        self.averages: dict[int, tuple[Worker, ...]] = {}
        self.applied: Counter[int] = Counter()
        self.served: Counter[tuple[Worker, bool]] = Counter()
        self.times: list[float] = []

    def on_step_start(self, worker: Worker, now: float) -> None:
        self.times.append(now)

    def on_step(self, worker: Worker, now: float) -> None:
        self.steps[worker] += 1
        self.times.append(now)

    def on_average(self, gid: int, members: Sequence[Worker], now: float) -> None:
        assert gid not in self.averages, "a group averages once"
        assert len(members) == len(set(members))
        assert len({member.stage for member in members}) == 1
        self.averages[gid] = tuple(members)
        self.times.append(now)

    def on_applied(self, worker: Worker, gid: int, now: float) -> None:
        assert worker in self.averages[gid]
        self.applied[gid] += 1
        self.times.append(now)

    def on_server_transfer(self, worker: Worker, is_push: bool, now: float) -> None:
        self.served[worker, is_push] += 1
        self.times.append(now)

    def on_copied(self, worker: Worker, source: Worker, now: float) -> None:
        self.times.append(now)


@st.composite
def jobs(draw: st.DrawFn, policy: str | None = None) -> SimulatedJob:
    name = draw(names) if policy is None else policy
    num_stages = 1 if name == "balanced" else draw(st.integers(1, 4))
    return equal_job(
        num_stages=num_stages,
        num_pipelines=draw(st.integers(1, 5)),
        forward=0.1,
        backward=0.2,
        activation_bytes=draw(st.sampled_from([0.0, 1e6])),
        gradient_bytes=draw(st.sampled_from([0.0, 1e3, 2e7])),
        num_microbatches=draw(st.integers(1, 4)),
        policy=name,
        latency=draw(st.sampled_from([0.0, 0.01])),
        bandwidth=1e8,
        uplink=draw(st.sampled_from([None, 1e8])),
        scenario=slowed(*draw(st.lists(slow_entries(), max_size=2)), seed=draw(st.integers(0, 9))),
        seed=draw(st.integers(0, 9)),
    )


def check(found: SimulationResult, job: SimulatedJob, num_steps: int) -> None:
    assert found.stop_reason == ""
    goal = num_steps * len(job.pipelines)
    assert goal <= sum(map(len, found.ends)) < goal + len(job.pipelines)  # some end at once
    assert all(list(ends) == sorted(ends) for ends in found.ends)
    assert found.duration >= max(ends[-1] for ends in found.ends if ends) > 0
    for worker, busy in found.busy.items():
        starved, waited = found.starved[worker], found.waited[worker]
        assert min(busy, starved, waited) >= 0
        assert busy + starved + waited <= found.duration + 1e-6, worker
    assert 0 <= found.bubble <= 1
    assert 0 <= found.waiting <= 1
    assert found.spread >= 0


@settings(max_examples=num_examples(80))
@given(jobs(), st.booleans())
def test_every_policy_runs_to_its_end_under_any_slowness(job: SimulatedJob, each: bool) -> None:
    observer = CountingObserver()
    found = simulate(job, num_steps=8, each=each, observers=[observer])
    check(found, job, 8)
    policy = job.sync.policy
    if each or policy in SYNCHRONOUS:
        assert [len(ends) for ends in found.ends] == [8] * len(job.pipelines)
    assert observer.times == sorted(observer.times)
    for gid, num_applied in observer.applied.items():
        assert num_applied <= len(observer.averages[gid])
    if len(job.pipelines) == 1:
        assert not observer.averages
    if policy == "ssp":
        assert not observer.averages
        for worker, steps in observer.steps.items():
            assert steps - 1 <= observer.served[worker, False] <= observer.served[worker, True]
            assert observer.served[worker, True] <= steps


def test_decoupled_all_reduce_averages_models_if_there_are_steps_between() -> None:
    job = equal_job(num_pipelines=3, forward=0.1, backward=0.2, decoupled=True)
    assert not simulate(job, num_steps=8).group_sizes  # gradients, by the optimizer
    every_two = replace(job, sync=replace(job.sync, every=2))
    assert simulate(every_two, num_steps=8).group_sizes == {3: 4}


@settings(max_examples=num_examples(40))
@given(st.data(), st.sampled_from(OVERLAPS), st.booleans())
def test_policies_run_with_overlap_or_decoupled(
    data: st.DataObject, policy: str, overlap: bool
) -> None:
    job = data.draw(jobs(policy))
    if overlap:
        job = replace(job, overlap=True)
    elif job.sync.mode.can_decouple:
        job = replace(job, decoupled=True)
    check(simulate(job, num_steps=6), job, 6)
    each = simulate(job, num_steps=6, each=True)
    assert [len(ends) for ends in each.ends] == [6] * len(job.pipelines)


@settings(max_examples=25)
@given(jobs("all_reduce"))
def test_decoupled_all_reduce_ends_and_makes_equal_steps(job: SimulatedJob) -> None:
    job = replace(job, decoupled=True)
    found = simulate(job, num_steps=6)
    check(found, job, 6)
    assert [len(ends) for ends in found.ends] == [6] * len(job.pipelines)


@pytest.mark.long
@settings(max_examples=25)
@given(jobs(), st.integers(0, 99))
def test_later_events_do_not_change_earlier_results(job: SimulatedJob, seed: int) -> None:
    """A loss or a link change after the end disables the fast path, with the same result."""
    # Speeds differ from action to action: of two simultaneous events, either may come first.
    unequal = slowed(Slow(device="*", trace="sdpipe_16gpu", trace_duration=1e4), seed=seed)
    job = replace(job, scenario=unequal)
    if seed % 4 == 0 and job.sync.policy != "balanced":
        job = replace(job, in_flight=tuple(range(len(job.stages) + 1, 1, -1)))
    found = simulate(job, num_steps=8)
    faults = [kills_and_joins(kill=[("d0", 1e6)]), linked(lost(1e6))]
    for later in faults[job.sync.policy == "static" :]:
        scenario = replace(unequal, kill=later.kill, link=later.link)
        again = simulate(replace(job, scenario=scenario), num_steps=8)
        for ends, same in zip(found.ends, again.ends, strict=True):
            assert same == pytest.approx(ends, rel=1e-9)
        assert again.group_sizes == found.group_sizes
        assert again.num_actions == found.num_actions
        assert again.busy == pytest.approx(found.busy, rel=1e-9)
        assert again.starved == pytest.approx(found.starved, rel=1e-9, abs=1e-9)


def run_policy(
    policy: str, *, slow: Sequence[Slow] = (), num_steps: int = 40, **more: object
) -> SimulationResult:
    settings_: dict[str, object] = {
        "num_pipelines": 4,
        "forward": 0.1,
        "backward": 0.2,
        "gradient_bytes": 1e6,
        "bandwidth": 1e8,
        "num_microbatches": 8,
        **more,
    }
    job = equal_job(policy=policy, scenario=slowed(*slow), **settings_)  # type: ignore[arg-type]
    return simulate(job, num_steps=num_steps)


ONE_SLOW = (Slow(device="d0", factor=4.0),)


def test_all_reduce_runs_at_the_speed_of_the_slowest() -> None:
    assert run_policy("all_reduce", slow=ONE_SLOW).step_time == pytest.approx(
        4 * run_policy("all_reduce").step_time, rel=0.02
    )


@pytest.mark.parametrize("policy", ["adaptive", "age", "pairwise", "balanced", "local"])
def test_other_policies_are_not_slowed_by_one_straggler(policy: str) -> None:
    assert (
        run_policy(policy, slow=ONE_SLOW).step_time
        < 0.6 * run_policy("all_reduce", slow=ONE_SLOW).step_time
    )


def test_balanced_gives_stragglers_fewer_microbatches() -> None:
    """The straggler takes as long for 3 of 32 as the others for 9 or 10."""
    found = run_policy("balanced", slow=ONE_SLOW)
    assert steps_after_first(found) == pytest.approx(10 * 0.3, rel=0.15)
    assert found.busy[Worker(0, 0)] == pytest.approx(found.busy[Worker(0, 1)], rel=0.35)
    assert found.throughput == pytest.approx(32 / found.step_time, rel=1e-6)


def test_balanced_in_a_pipeline_is_refused() -> None:
    with pytest.raises(PolicyError, match="balanced"):
        run_policy("balanced", num_stages=2)


def test_ssp_keeps_fast_workers_within_the_staleness_bound() -> None:
    observer, ahead = CountingObserver(), [0]

    class Ahead(CountingObserver):
        def on_step(self, worker: Worker, now: float) -> None:
            super().on_step(worker, now)
            steps = [self.steps[Worker(0, pipeline)] for pipeline in range(4)]
            ahead.append(max(steps) - min(steps))

    for staleness in (0, 3):
        observer, ahead[:] = Ahead(), [0]
        job = equal_job(
            num_pipelines=4,
            forward=0.1,
            backward=0.2,
            gradient_bytes=1e3,
            bandwidth=1e8,
            policy="ssp",
            options={"staleness": staleness},
            scenario=slowed(*ONE_SLOW),
        )
        simulate(job, num_steps=30, observers=[observer])
        assert max(ahead) == staleness + 1


def test_parameter_server_shares_its_connection_among_pushes() -> None:
    """Three of four push 1e7 bytes at once over 1e8 bytes per second, then pull as much."""
    sizes = {"gradient_bytes": 1e7, "uplink": 1e8, "options": {"staleness": 0}}
    found = run_policy("ssp", num_microbatches=1, **sizes)
    assert steps_after_first(found) == pytest.approx(0.3 + 0.3 + 0.3, rel=0.01)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_single_pipeline_never_waits(policy: str) -> None:
    found = run_policy(policy, num_pipelines=1, num_microbatches=1)
    assert found.ends[0] == pytest.approx([0.3 * (step + 1) for step in range(40)])
    assert set(found.group_sizes) <= {1}
    assert found.bytes_sent.sum() == 0


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"balanced"}))
def test_far_workers_wait_for_coordinator_latency(policy: str) -> None:
    """All policies wait, except local, which averages rarely."""
    job = equal_job(num_pipelines=2, forward=0.1, backward=0.2, policy=policy, latency=0.5)
    near = simulate(replace(job, cluster=region_per_device(2)), num_steps=10)
    far = simulate(job, num_steps=10)
    if policy in ("local",):
        assert far.duration == pytest.approx(near.duration)
    else:
        assert far.duration > near.duration + 0.5


@pytest.mark.parametrize("num_pipelines", [1, 3])
def test_rate_is_known_after_few_steps(num_pipelines: int) -> None:
    found = run_policy("all_reduce", num_steps=1, num_pipelines=num_pipelines, gradient_bytes=0.0)
    assert found.step_time == pytest.approx(2.4)
    assert found.throughput == pytest.approx(num_pipelines * 8 / 2.4)


def test_steady_rate_is_independent_of_num_steps() -> None:
    short, long = (run_policy("all_reduce", num_steps=count) for count in (12, 60))
    assert short.step_time == pytest.approx(long.step_time, rel=1e-6)
    assert long.throughput == pytest.approx(32 / long.step_time, rel=1e-6)


def test_cost_of_averages_follows_their_frequency() -> None:
    job = equal_job(
        num_pipelines=4,
        forward=0.1,
        backward=0.2,
        gradient_bytes=1e7,
        bandwidth=1e8,
        policy="local",
    )
    often, seldom = (
        simulate(replace(job, sync=replace(job.sync, every=every)), num_steps=20)
        for every in (1, 5)
    )
    assert often.group_sizes == {4: 20}
    assert seldom.group_sizes == {4: 4}
    assert seldom.bytes_sent.sum() == pytest.approx(often.bytes_sent.sum() / 5)
    assert often.duration - 20 * 0.3 == pytest.approx(5 * (seldom.duration - 20 * 0.3))


def test_other_seeds_draw_other_groups() -> None:
    first, same, other = (
        run_policy(
            "random",
            seed=seed,
            num_pipelines=5,
            slow=[Slow(device="*", probability=0.5, sleep_factor=2)],
        )
        for seed in (0, 0, 1)
    )
    assert first.ends == same.ends
    assert first.ends != other.ends


def plain(**more: object) -> SimulatedJob:
    settings_: dict[str, object] = {"num_stages": 2, "num_pipelines": 2, "num_microbatches": 2}
    return equal_job(**{**settings_, "forward": 0.1, "backward": 0.2, **more})  # type: ignore[arg-type]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"forward": -0.1}, "forward of stage 0"),
        ({"backward": -0.1}, "backward of stage 0"),
        ({"forward": NAN}, "forward of stage 0"),
        ({"backward": INF}, "backward of stage 0"),
        ({"forward": 0.0, "backward": 0.0}, "has no compute"),
        ({"activation_bytes": -1.0}, "activation_bytes of stage 0"),
        ({"gradient_bytes": NAN}, "gradient_bytes of stage 0"),
        ({"in_flight": (2,)}, "in_flight"),
        ({"in_flight": (1, 2)}, "in_flight"),
        ({"in_flight": (1, 0)}, "in_flight"),
        ({"nodes": ("a",)}, "1 nodes"),
        ({"policy": "ssp", "overlap": True}, "overlap with ssp"),
        ({"policy": "all_reduce", "overlap": True}, "overlap with all_reduce"),
        ({"policy": "ssp", "decoupled": True}, "decoupled with ssp"),
        ({"policy": "age", "overlap": True, "decoupled": True}, "overlap with decoupled"),
    ],
)
def test_invalid_job_is_refused(wrong: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plain(**wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"coordinator": 9}, "device 9 of a cluster of 4"),
        ({"coordinator": -1}, "device -1 of a cluster of 4"),
        ({"samples": (1,)}, "1 samples"),
        ({"num_buckets": 0}, "num_buckets=0"),
        ({"cluster": region_per_device(3)}, "device 3 of a cluster of 3"),
        ({"pipelines": plain().pipelines[:1]}, "a scheduler for 2 stages x 2 pipelines"),
        ({"pipelines": plain().pipelines[:1] * 2}, "has 2 parts"),
        ({"stages": plain().stages[:1]}, "runs stages"),
    ],
)
def test_a_job_of_another_plan_or_cluster_is_refused(change: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(plain(), **change)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda lists: lists[:1],
        lambda lists: [*lists, lists[0]],
        lambda lists: [lists[0][::-1], lists[1]],
        lambda lists: [lists[0][:2], lists[1]],
        lambda lists: [[], []],
    ],
)
def test_a_schedule_that_cannot_run_is_refused(spoil: Callable) -> None:
    job = plain()
    spoilt = replace(job.pipelines[0], schedule=spoil(list(job.pipelines[0].schedule)))
    with pytest.raises(UserError):
        replace(job, pipelines=(spoilt, job.pipelines[1]))


@pytest.mark.parametrize("num_steps", [0, -1])
def test_non_positive_num_steps_are_refused(num_steps: int) -> None:
    with pytest.raises(UserError, match="num_steps"):
        simulate(plain(), num_steps=num_steps)
