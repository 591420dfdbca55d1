"""Faults: the other pipelines continue after a detection delay; a returned device takes part."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.describe.scenario import LinkChange, Pause, Scenario, Slow
from polyrhythm.describe.spot import SpotTrace, spot_scenario
from polyrhythm.errors import PolicyError, UserError
from polyrhythm.simulate.job import SimulatedJob
from polyrhythm.simulate.result import SimulationResult
from polyrhythm.simulate.simulator import simulate
from polyrhythm.sync.modes import POLICIES
from polyrhythm.types import Worker
from tests.grids import num_examples
from tests.pure.simulate_cases import (
    back,
    equal_job,
    kills_and_joins,
    linked,
    lost,
    slowed,
    three_pipelines,
)

SOME = sorted(set(POLICIES) - {"balanced", "static"})
IN_GROUPS = sorted({*SOME} - {"all_reduce"})


def grid(scenario: Scenario, *, policy: str = "all_reduce", **more: object) -> SimulatedJob:
    return three_pipelines(policy, scenario, **more)


def steps(found: SimulationResult) -> list[int]:
    return [len(ends) for ends in found.ends]


def has_made(found: SimulationResult, num_steps: int) -> bool:
    """Whether the requested steps were run; a few more, if several end at the same time."""
    return num_steps <= sum(steps(found)) < num_steps + len(found.ends)


def steps_between(found: SimulationResult, pipeline: int, start: float, end: float) -> int:
    return sum(start < at <= end for at in found.ends[pipeline])


@settings(max_examples=num_examples(40))
@given(
    st.sampled_from(IN_GROUPS),
    st.integers(0, 5),
    st.floats(0, 20),
    st.sampled_from([0.0, 1e3, 1e6, 1e8]),
    st.sampled_from([None, 1e8]),
)
def test_other_pipelines_continue_when_any_device_is_lost(
    policy: str, device: int, at: float, gradients: float, uplink: float | None
) -> None:
    scenario = kills_and_joins(kill=[(f"d{device}", at)])
    job = grid(scenario, policy=policy, gradient_bytes=gradients, uplink=uplink)
    found = simulate(job, num_steps=15)
    assert found.stop_reason == ""
    assert has_made(found, 45)
    dead = device // 2
    # A step that ended before the kill counts a latency later at most.
    assert all(end <= at + 0.01 for end in found.ends[dead])
    others = [count for pipeline, count in enumerate(steps(found)) if pipeline != dead]
    assert min(others) >= 10


@pytest.mark.parametrize("at", [0.31, 0.35, 0.45, 0.52])
def test_transfers_of_a_killed_worker_do_not_restart_it(at: float) -> None:
    """A push is active from 0.3 to 0.5 s, then a pull."""
    job = grid(
        kills_and_joins(kill=[("d1", at)]),
        policy="ssp",
        num_stages=1,
        num_microbatches=1,
        gradient_bytes=1e7,
        uplink=1e8,
    )
    found = simulate(job, num_steps=20)
    assert len(found.ends[1]) == 0
    assert found.busy[Worker(0, 1)] == pytest.approx(0.3)
    assert has_made(found, 60)


@settings(max_examples=num_examples(40))
@given(
    st.sampled_from(IN_GROUPS),
    st.integers(0, 5),
    st.floats(0, 15),
    st.floats(0.01, 20),
    st.sampled_from([1e3, 1e6, 2e7]),
)
def test_returned_device_trains_again(
    policy: str, device: int, at: float, away: float, gradients: float
) -> None:
    scenario = kills_and_joins(kill=[(f"d{device}", at)], join=[(f"d{device}", at + away)])
    found = simulate(grid(scenario, policy=policy, gradient_bytes=gradients), num_steps=40)
    assert found.stop_reason == ""
    assert has_made(found, 120)
    assert steps_between(found, device // 2, at + away, float("inf")) >= 3
    assert steps_between(found, device // 2, at + 0.01, at + away) == 0


@settings(max_examples=num_examples(40))
@given(
    st.integers(2, 4),
    st.integers(0, 5),
    st.floats(4, 15),
    st.floats(0.01, 20),
    st.lists(st.sampled_from([1.0, 1.5, 4.0]), min_size=12, max_size=12),
)
def test_step_time_recovers_after_a_pipeline_returns(
    num_stages: int, device: int, at: float, away: float, factors: list[float]
) -> None:
    """In all_reduce, stages out of step with the others would delay every further step."""
    slow = tuple(Slow(device=f"d{i}", factor=factors[i]) for i in range(3 * num_stages))
    lost = kills_and_joins(kill=[(f"d{device}", at)], join=[(f"d{device}", at + away)])
    undisturbed = grid(replace(lost, kill=(), join=(), slow=slow), num_stages=num_stages)
    usual = simulate(undisturbed, num_steps=20).ends[0]
    disturbed = replace(undisturbed, scenario=replace(lost, slow=slow))
    ends = simulate(disturbed, num_steps=60).ends[device // num_stages]
    assert ends[-1] - ends[-6] == pytest.approx(usual[-1] - usual[-6], rel=0.01)


@settings(max_examples=25)
@given(st.sampled_from(SOME), st.integers(0, 5), st.floats(0, 15))
def test_device_absent_at_start_joins(policy: str, device: int, at: float) -> None:
    found = simulate(grid(kills_and_joins(join=[(f"d{device}", at)]), policy=policy), num_steps=40)
    assert found.stop_reason == ""
    late = found.ends[device // 2]
    assert len(late) >= 3
    assert late[0] > at + 1.2  # a whole step


@settings(max_examples=num_examples(40))
@given(st.data(), st.sampled_from(["all_reduce", "adaptive", "ssp", "pairwise", "smart"]))
def test_repeated_kills_and_joins_complete_all_steps(data: st.DataObject, policy: str) -> None:
    """Several devices, whole pipelines or all at once: the present pipelines continue."""
    kills, joins = [], []
    for device in range(6):
        times = data.draw(st.lists(st.integers(1, 30), max_size=4, unique=True).map(sorted))
        is_away = data.draw(st.booleans())
        for time in times:
            (joins if is_away else kills).append((f"d{device}", float(time)))
            is_away = not is_away
        if is_away:
            joins.append((f"d{device}", 31.0 + data.draw(st.integers(0, 3))))
    factors = data.draw(st.lists(st.sampled_from([1.0, 1.5]), min_size=6, max_size=6))
    slow = tuple(Slow(device=f"d{i}", factor=factor) for i, factor in enumerate(factors))
    scenario = replace(kills_and_joins(kills, joins), slow=slow)
    found = simulate(grid(scenario, policy=policy), num_steps=30)
    assert found.stop_reason == ""
    assert len(found.ends[0]) == 30 if policy == "all_reduce" else has_made(found, 90)
    for pipeline, ends in enumerate(found.ends):
        assert list(ends) == sorted(ends)
        assert steps_between(found, pipeline, 40.0, float("inf")) > 0


def test_throughput_falls_by_what_is_lost_and_recovers() -> None:
    scenario = kills_and_joins(kill=[("d2", 30.0)], join=[("d2", 60.0)])
    found = simulate(grid(scenario, policy="adaptive"), num_steps=60)
    calm = simulate(grid(kills_and_joins(), policy="adaptive"), num_steps=60)

    def rate(result: SimulationResult, start: float, end: float) -> float:
        return sum(steps_between(result, p, start, end) for p in range(3)) / (end - start)

    usual = rate(calm, 10.0, 80.0)
    assert rate(found, 5.0, 28.0) == pytest.approx(usual, rel=0.1)
    assert rate(found, 36.0, 60.0) == pytest.approx(usual * 2 / 3, rel=0.1)
    assert rate(found, 66.0, 90.0) == pytest.approx(usual, rel=0.1)


def test_loss_of_all_devices_is_reported() -> None:
    scenario = kills_and_joins(kill=[(f"d{device}", 5.0) for device in range(6)])
    found = simulate(grid(scenario), num_steps=60)
    assert "no pipeline could continue" in found.stop_reason
    assert steps(found) == [3, 3, 3]


def test_all_devices_lost_and_returned_continue() -> None:
    away = [(f"d{device}", 5.0) for device in range(6)]
    returns = [(f"d{device}", 7.0 + device / 10) for device in range(6)]
    found = simulate(grid(kills_and_joins(away, returns)), num_steps=20)
    # The first pipeline does not wait for the others, which begin after its first step.
    assert steps(found) == [20, 19, 19]


@pytest.mark.parametrize(
    "scenario", [kills_and_joins([("d2", 3.3)]), kills_and_joins([], [("d2", 9.0)])]
)
def test_modes_without_fault_tolerance_refuse_kill_and_join(scenario: Scenario) -> None:
    with pytest.raises(PolicyError, match="static with devices that are lost"):
        grid(scenario, policy="static")


def test_each_runs_exact_steps_after_kill_and_join() -> None:
    scenario = kills_and_joins(kill=[("d2", 8.0)], join=[("d2", 15.0)])
    found = simulate(grid(scenario, policy="adaptive"), num_steps=20, each=True)
    assert steps(found) == [20, 20, 20]


def test_finished_pipeline_runs_no_more_steps() -> None:
    slow = Scenario(name="s", pause=(Pause(device="d0", at=3.0, until=60.0),))
    scenario = replace(kills_and_joins(kill=[("d4", 20.0)], join=[("d4", 25.0)]), pause=slow.pause)
    found = simulate(grid(scenario, policy="adaptive"), num_steps=10, each=True)
    assert steps(found) == [10, 10, 10]


@pytest.mark.parametrize("policy", ["partial_reduce", "ssp"])
def test_finished_pipeline_blocks_no_other(policy: str) -> None:
    """A finished pipeline blocks none by leaving, nor by rejoining after a death."""
    scenario = kills_and_joins([("d2", 5.0), ("d0", 20.0)], [("d2", 12.0), ("d0", 21.0)])
    job = grid(scenario, policy=policy, num_microbatches=2)
    found = simulate(job, num_steps=15, each=True)
    assert found.stop_reason == ""
    assert steps(found) == [15, 15, 15]


def test_pause_delays_one_pipeline_by_its_length() -> None:
    scenario = Scenario(name="p", pause=(Pause(device="d2", at=10.0, until=25.0),))
    found = simulate(grid(scenario, policy="local"), num_steps=30)
    calm = simulate(grid(kills_and_joins(), policy="local"), num_steps=30)
    late = [end for end in found.ends[1] if end > 10.0]
    usual = [end for end in calm.ends[1] if end > 10.0]
    assert late[0] == pytest.approx(usual[0] + 15.0)
    assert found.ends[0][: len(calm.ends[0])] == calm.ends[0]


@pytest.mark.parametrize(
    ("scenario", "longer"),
    [
        (Scenario(name="p", pause=(Pause(device="d0", at=1.0, until=90_001.0),)), 90_000.0),
        (Scenario(name="k", pause=(Pause(device="d0", at=0.0, until=90_000.0),)), 90_000.0),
    ],
)
def test_long_pause_does_not_end_the_simulation(scenario: Scenario, longer: float) -> None:
    found = simulate(grid(scenario), num_steps=5)
    assert steps(found) == [5, 5, 5]
    assert found.duration == pytest.approx(
        longer + simulate(grid(kills_and_joins()), num_steps=5).duration
    )


def test_steps_may_take_days() -> None:
    found = simulate(grid(kills_and_joins(), forward=1e5, backward=2e5), num_steps=3)
    assert steps(found) == [3, 3, 3]


@pytest.mark.parametrize("policy", SOME)
def test_lost_and_restored_link_only_delays(policy: str) -> None:
    found = simulate(grid(linked(lost(10.0), back(20.0)), policy=policy), num_steps=30)
    calm = simulate(grid(linked(), policy=policy), num_steps=30)
    assert found.stop_reason == ""
    assert has_made(found, 90)
    # Ten seconds, and the policy's timeouts in the worst case.
    assert calm.duration + 7.0 < found.duration < calm.duration + 10.0 + 35.0


@pytest.mark.parametrize("gradients", [0.0, 1e3, 1e6])
def test_averages_of_any_size_resume_when_a_link_is_restored(gradients: float) -> None:
    scenario = linked(lost(3.0), back(5.0))
    found = simulate(grid(scenario, num_stages=1, gradient_bytes=gradients), num_steps=20)
    calm = simulate(grid(linked(), num_stages=1, gradient_bytes=gradients), num_steps=20)
    assert found.duration < calm.duration + 2.5


def test_decoupled_replicas_wait_for_a_lost_link() -> None:
    found = simulate(
        grid(linked(lost(3.0), back(13.0)), decoupled=True, num_stages=1), num_steps=20
    )
    assert found.stop_reason == ""
    assert steps(found) == [20, 20, 20]
    assert not any(5.0 < end < 13.0 for ends in found.ends for end in ends)


def test_decoupled_groups_wait_for_a_lost_link() -> None:
    """At any time, also between reduce-scatter and all-gather."""
    for tenth in range(30, 60, 2):
        scenario = linked(lost(tenth / 10), back(tenth / 10 + 5.0))
        found = simulate(grid(scenario, policy="adaptive", decoupled=True), num_steps=10)
        assert found.stop_reason == ""
        assert found.duration < 100.0


def test_an_average_may_take_days() -> None:
    job = grid(kills_and_joins(), decoupled=True, num_stages=1, gradient_bytes=3e13)
    assert simulate(job, num_steps=2).duration == pytest.approx(3e5, rel=1e-4)  # three phases


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], 10.3),
        ([lost(2.0), back(4.0)], 12.3),
        ([lost(0.2), back(4.0)], 14.0),
        ([LinkChange(at=2.0, source="here", target="here", bandwidth=1e8)], 2.83),
        ([LinkChange(at=5.3, source="here", target="here", bandwidth=5e6)], 15.3),
    ],
)
@pytest.mark.parametrize("uplink", [None, 1e9])
def test_running_exchange_follows_bandwidth_changes(
    changes: list, expected: float, uplink: float | None
) -> None:
    job = equal_job(
        num_pipelines=2,
        forward=0.1,
        backward=0.2,
        gradient_bytes=1e8,
        bandwidth=1e7,
        uplink=uplink,
        scenario=linked(*changes),
    )
    assert simulate(job, num_steps=1).ends[0] == pytest.approx((expected,), rel=1e-6)


def test_messages_in_flight_follow_bandwidth_changes() -> None:
    """10 bytes at 10 per second, then at 1: half are sent in half a second, the rest in 5 s."""
    base = {"forward": 1.0, "backward": 1.0, "activation_bytes": 10.0, "bandwidth": 10.0}
    slower = linked(LinkChange(at=1.5, source="here", target="here", bandwidth=1.0))
    job = equal_job(num_stages=2, num_pipelines=1, scenario=slower, **base)  # type: ignore[arg-type]
    # F0 until 1, its message until 1.5 + 5, F and B until 8.5, the gradient until 18.5, B.
    assert simulate(job, num_steps=1).ends == (pytest.approx((19.5,)),)


def test_one_direction_of_a_link_may_be_slower() -> None:
    base = {"forward": 1.0, "backward": 1.0, "activation_bytes": 10.0, "bandwidth": 10.0}
    job = equal_job(num_stages=2, num_pipelines=1, **base)  # type: ignore[arg-type]
    to_d1, to_d0 = (
        linked(LinkChange(at=0.0, source=a, target=b, bandwidth=1.0, one_way=True))
        for a, b in (("d0", "d1"), ("d1", "d0"))
    )
    both = linked(LinkChange(at=0.0, source="d0", target="d1", bandwidth=1.0))
    durations = [
        simulate(replace(job, scenario=scenario), num_steps=1).duration
        for scenario in (linked(), to_d1, to_d0, both)
    ]
    assert durations == pytest.approx([6.0, 15.0, 15.0, 24.0])


def test_coordinator_messages_use_the_current_latency() -> None:
    later = linked(LinkChange(at=5.0, source="here", target="here", latency=0.05))
    job = equal_job(num_pipelines=2, forward=0.1, backward=0.2, scenario=later)
    ends = simulate(job, num_steps=30).ends[1]
    # Two round trips to the coordinator, and two phases with a round trip each.
    assert ends[-1] - ends[-2] == pytest.approx(0.3 + 4 * 0.05 + 2 * 2 * 0.05)


def test_spot_trace_can_be_simulated() -> None:
    trace = SpotTrace(name="t", times=(0.0, 10.0, 20.0, 40.0), counts=(6, 4, 3, 6))
    job = grid(kills_and_joins(), policy="adaptive")
    found = simulate(replace(job, scenario=spot_scenario(trace, job.cluster)), num_steps=40)
    assert found.stop_reason == ""
    assert has_made(found, 120)
    assert min(steps(found)) > 5


def test_a_device_that_no_pipeline_uses_may_be_lost() -> None:
    job = grid(kills_and_joins())
    spare = replace(job.cluster.devices[0], name="spare")
    cluster = replace(job.cluster, devices=(*job.cluster.devices, spare))
    found = simulate(
        replace(job, cluster=cluster, scenario=kills_and_joins(kill=[("spare", 3.0)])), num_steps=10
    )
    assert found.ends == simulate(job, num_steps=10).ends


@pytest.mark.parametrize("kind", ["kill", "join", "slow", "pause", "link"])
def test_scenario_with_unknown_names_is_refused(kind: str) -> None:
    entries = {
        "kill": kills_and_joins(kill=[("d9", 1.0)]),
        "join": kills_and_joins(join=[("d9", 1.0)]),
        "slow": slowed(Slow(device="d9", factor=2.0)),
        "pause": Scenario(name="p", pause=(Pause(device="d9", at=1.0, until=2.0),)),
        "link": linked(lost(1.0, "here", "there")),
    }
    with pytest.raises(UserError, match=f"{kind}\\[0\\]"):
        grid(entries[kind])


def test_returned_pipeline_copies_state_before_it_starts() -> None:
    scenario = kills_and_joins(kill=[("d3", 6.0)], join=[("d3", 23.0)])
    slow = replace(scenario, slow=(Slow(device="d7", factor=4.0),))
    usual = simulate(grid(replace(slow, kill=(), join=()), num_stages=3), num_steps=20).ends[1]
    ends = simulate(grid(slow, num_stages=3), num_steps=60).ends[1]
    assert ends[-1] - ends[-6] == pytest.approx(usual[-1] - usual[-6], rel=0.01)
