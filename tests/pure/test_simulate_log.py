"""A simulation writes a real run's log, deterministically, and counts bytes by region."""

import hashlib
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polyrhythm.describe.scenario import LinkChange, Pause, Scenario, Slow
from polyrhythm.errors import EventError
from polyrhythm.events import Event, read_run
from polyrhythm.observe.report import RunReport
from polyrhythm.simulate.job import SimulatedJob
from polyrhythm.simulate.result import SimulationResult
from polyrhythm.simulate.simulator import simulate
from polyrhythm.sync.decision_log import LOG_NAME
from polyrhythm.sync.log_reader import DecisionReader, replay
from polyrhythm.sync.modes import POLICIES
from polyrhythm.sync.protocol import Assign, Commit, Ready
from polyrhythm.types import Worker
from tests.pure.simulate_cases import (
    back,
    equal_job,
    kills_and_joins,
    linked,
    region_per_device,
    slowed,
    three_pipelines,
)

SLEEPS = Slow(device="*", probability=0.2, sleep_factor=2.0)


def job_of(policy: str, scenario: Scenario | None = None, **more: object) -> SimulatedJob:
    return three_pipelines(policy, slowed(SLEEPS) if scenario is None else scenario, **more)


def events_of(folder: Path, kind: str) -> list[Event]:
    return [event for event in read_run(folder) if event.kind == kind]


def digest(folder: Path) -> str:
    sha = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            sha.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return sha.hexdigest()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_decisions_of_every_policy_replay_alike(tmp_path: Path, policy: str) -> None:
    job = job_of(policy)
    found = simulate(job, num_steps=12, run=tmp_path / "run")
    assert replay(tmp_path / "run" / LOG_NAME) is None
    reader = DecisionReader(tmp_path / "run" / LOG_NAME)
    assert reader.setup == job.setup
    decisions = [decision for _, decision in reader.decisions()]
    times = [decision.event.now for decision in decisions]
    assert times == sorted(times)
    if policy != "local":
        num_ready = sum(isinstance(decision.event, Ready) for decision in decisions)
        assert num_ready >= sum(map(len, found.ends))
    commands = [command for decision in decisions for command in decision.commands]
    assigned = {command.gid for command in commands if isinstance(command, Assign)}
    assert {command.gid for command in commands if isinstance(command, Commit)} <= assigned


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["all_reduce", "adaptive", "smart", "pairwise", "ssp"]),
    st.integers(0, 5),
    st.floats(0, 12),
    st.floats(0.1, 9),
)
def test_decisions_replay_after_faults(
    tmp_path_factory: pytest.TempPathFactory, policy: str, device: int, at: float, away: float
) -> None:
    folder = tmp_path_factory.mktemp("run") / "log"
    name = f"d{device}"
    simulate(
        job_of(policy, kills_and_joins([(name, at)], [(name, at + away)])), num_steps=15, run=folder
    )
    assert replay(folder / LOG_NAME) is None


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_report_agrees_with_the_result(tmp_path: Path, policy: str) -> None:
    found = simulate(job_of(policy), num_steps=12, run=tmp_path / "run")
    report = RunReport.of(read_run(tmp_path / "run"))
    assert report.num_planned == 12
    assert set(report.workers) == set(found.busy)
    for worker, spent in report.workers.items():
        assert spent.steps >= len(found.ends[worker.pipeline])
        assert spent.compute + spent.wait + spent.sync == pytest.approx(spent.total, rel=1e-6)
        assert spent.other == pytest.approx(0.0, abs=1e-6)
        assert spent.total == pytest.approx(found.ends[worker.pipeline][-1], rel=0.35)
        # The result also counts the unfinished step at the end.
        assert spent.compute <= found.busy[worker] * (1 + 1e-9)
        assert spent.sync <= found.waited[worker] * (1 + 1e-9)


def test_report_equals_the_result_with_all_reduce(tmp_path: Path) -> None:
    found = simulate(job_of("all_reduce"), num_steps=12, each=True, run=tmp_path / "run")
    report = RunReport.of(read_run(tmp_path / "run"))
    for worker, spent in report.workers.items():
        assert spent.steps == 12
        assert spent.compute == pytest.approx(found.busy[worker])
        assert spent.wait == pytest.approx(found.starved[worker])
        assert spent.sync == pytest.approx(found.waited[worker])


def check_log(folder: Path, found: SimulationResult, job: SimulatedJob) -> None:
    """Check that a worker's actions do not overlap and are inside of their steps."""
    spans: dict[tuple[Worker | None, int | None], tuple[float, float]] = {}
    for event in events_of(folder, "step"):
        key = event.worker, event.step
        assert key not in spans, "a step of a worker ends once"
        assert event.duration is not None
        spans[key] = event.time, event.time + event.duration
    ends: dict[Worker | None, float] = defaultdict(float)
    for event in sorted(events_of(folder, "action"), key=lambda event: event.time):
        assert event.duration is not None
        assert event.time >= ends[event.worker] - 1e-9
        ends[event.worker] = event.time + event.duration
        if span := spans.get((event.worker, event.step)):
            assert span[0] - 1e-9 <= event.time
            assert event.time + event.duration <= span[1] + 1e-9
    for pipeline, steps in enumerate(found.ends):
        for step, end in enumerate(steps):
            of_stages = [spans[Worker(s, pipeline), step][1] for s in range(len(job.stages))]
            assert max(of_stages) == pytest.approx(end)


@pytest.mark.parametrize("policy", ["all_reduce", "adaptive", "ssp"])
def test_actions_are_inside_of_their_steps(tmp_path: Path, policy: str) -> None:
    job = job_of(policy)
    check_log(tmp_path / "run", simulate(job, num_steps=10, run=tmp_path / "run"), job)


def test_actions_are_inside_of_their_steps_in_a_pipeline_that_is_never_flushed(
    tmp_path: Path,
) -> None:
    job = job_of("adaptive", in_flight=(3, 1), num_microbatches=1)
    check_log(tmp_path / "run", simulate(job, num_steps=20, run=tmp_path / "run"), job)


@pytest.mark.parametrize("device", ["d2", "d3"])
def test_actions_are_inside_of_their_steps_after_a_restart(tmp_path: Path, device: str) -> None:
    job = job_of("adaptive", kills_and_joins([(device, 6.2)], [(device, 11.0)]))
    check_log(tmp_path / "run", simulate(job, num_steps=20, run=tmp_path / "run"), job)


def test_averages_are_logged_with_their_members_and_bytes(tmp_path: Path) -> None:
    found = simulate(job_of("adaptive"), num_steps=12, run=tmp_path / "run")
    groups: dict[str | None, list[Event]] = defaultdict(list)
    for event in events_of(tmp_path / "run", "average"):
        groups[event.name].append(event)
    sizes = [len(events) for events in groups.values()]
    for size in (2, 3):
        assert sizes.count(size) == found.group_sizes[size]
    for events in groups.values():
        members = str(events[0].values["members"]).split()
        assert sorted(str(event.worker) for event in events) == sorted(members)
        assert {event.values["bytes"] for event in events} == {1_000_000}


def test_a_folder_with_a_log_is_not_written_again(tmp_path: Path) -> None:
    job = job_of("all_reduce")
    simulate(job, num_steps=1, run=tmp_path / "run")
    before = digest(tmp_path / "run")
    with pytest.raises(EventError, match="already"):
        simulate(job, num_steps=1, run=tmp_path / "run")
    assert digest(tmp_path / "run") == before


FAULTS = Scenario(
    name="all of it",
    seed=3,
    slow=(SLEEPS, Slow(device="d1", trace="sdpipe_16gpu", trace_duration=1000.0)),
    link=(LinkChange(at=4.0, source="here", target="here", bandwidth=5e7),),
    pause=(Pause(device="d0", at=2.0, until=3.0),),
    kill=kills_and_joins([("d2", 5.0)]).kill,
    join=kills_and_joins(join=[("d2", 9.0)]).join,
)


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"balanced", "static"}))
def test_simulation_is_deterministic(tmp_path: Path, policy: str) -> None:
    def once(folder: Path) -> tuple:
        job = job_of(policy, FAULTS, uplink=1e8)
        found = simulate(job, num_steps=10, run=folder)
        return found.ends, found.duration, found.group_sizes, found.busy, digest(folder)

    assert once(tmp_path / "a") == once(tmp_path / "b")


def test_log_does_not_change_the_result(tmp_path: Path) -> None:
    job = job_of("adaptive", FAULTS)
    with_log, without = simulate(job, num_steps=10, run=tmp_path / "a"), simulate(job, num_steps=10)
    assert with_log.ends == without.ends
    assert with_log.bytes_sent.tolist() == without.bytes_sent.tolist()


def digests_of_runs(folder: Path) -> list[str]:
    policies = ("adaptive", "smart", "ssp")
    for policy in policies:
        simulate(job_of(policy, FAULTS, uplink=1e8), num_steps=10, run=folder / policy)
    return [digest(folder / policy) for policy in policies]


@pytest.mark.long
def test_other_processes_write_the_same_bytes(tmp_path: Path) -> None:
    """For any hash seed; that of this process is random."""
    code = (
        "import sys; from pathlib import Path; from tests.pure import test_simulate_log as runs;"
        "print(*runs.digests_of_runs(Path(sys.argv[1])))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "other")],
        env={**os.environ, "PYTHONHASHSEED": "4242"},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert other.stdout.split() == digests_of_runs(tmp_path / "here")


@pytest.mark.parametrize("num_members", [2, 4])
def test_bytes_of_an_all_reduce_are_those_of_its_formula(num_members: int) -> None:
    job = equal_job(num_pipelines=num_members, forward=0.1, backward=0.2, gradient_bytes=1e6)
    sent = simulate(job, num_steps=5).bytes_sent
    assert sent.tolist() == [[pytest.approx(5 * 2 * (num_members - 1) * 1e6)]]


def test_small_buffers_are_sent_through_their_owner() -> None:
    job = equal_job(num_pipelines=3, forward=0.1, backward=0.2, gradient_bytes=1e4)
    job = replace(job, cluster=region_per_device(3))
    sent = simulate(job, num_steps=1).bytes_sent
    assert sent.tolist() == [[0.0, 1e4, 1e4], [1e4, 0.0, 0.0], [1e4, 0.0, 0.0]]


def test_messages_are_counted_from_region_to_region() -> None:
    job = equal_job(
        num_stages=3,
        num_pipelines=1,
        forward=0.1,
        backward=0.2,
        activation_bytes=100.0,
        num_microbatches=4,
    )
    job = replace(job, cluster=region_per_device(3))
    sent = simulate(job, num_steps=5).bytes_sent
    assert sent.tolist() == [[0.0, 2000.0, 0.0], [2000.0, 0.0, 2000.0], [0.0, 2000.0, 0.0]]


def test_bytes_are_by_region_if_a_device_link_changes() -> None:
    job = equal_job(
        num_stages=3, num_pipelines=1, forward=0.1, backward=0.2, activation_bytes=100.0
    )
    cluster = region_per_device(3)
    moved = zip(cluster.devices, ("r2", "r0", "r1"), strict=True)
    devices = tuple(replace(device, region=region) for device, region in moved)
    job = replace(job, cluster=replace(cluster, devices=devices))
    expected = simulate(job, num_steps=2).bytes_sent.tolist()
    assert expected == [[0.0, 200.0, 200.0], [200.0, 0.0, 0.0], [200.0, 0.0, 0.0]]
    changed = replace(job, scenario=linked(back(0.1, "d0", "d1")))
    assert simulate(changed, num_steps=2).bytes_sent.tolist() == expected
