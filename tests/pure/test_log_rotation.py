"""Logs are rotated, and lead to the identical state, wherever a coordinator stops.

Events are those of random jobs: of the scheduler under each policy, with losses, late joins, global
averages and samples; and of epochs, with members that follow no protocol at all.
"""

import gzip
import json
import random
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polyrhythm.errors import EventError
from polyrhythm.sync import decision_log, epochs, log_segments, protocol
from polyrhythm.sync.decision_log import DecisionLog
from polyrhythm.sync.dispatch import SamplerState
from polyrhythm.sync.epochs import EpochsSetup, JobEpochs
from polyrhythm.sync.log_reader import DecisionReader, membership_changes, rebuild, replay
from polyrhythm.sync.log_segments import LogFiles
from polyrhythm.sync.members import Limits
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.sync.setup import Setup
from polyrhythm.sync.snapshot import restore, take_snapshot
from tests.grids import long_except, num_examples
from tests.pure.simulated_steps import SimulatedSteps

POLICIES = (
    "adaptive",
    "age",
    "all_reduce",
    "pairwise",
    "partial_reduce",
    "random",
    "smart",
    "ssp",
    "static",
)
KINDS = (*POLICIES, "membership")
SOME_KINDS = long_except(list(KINDS), KINDS.index("adaptive"), KINDS.index("membership"))
MEMBERS = range(4)
NUM_EVENTS = 150
Log = list[tuple[Any, list[Any]]]  # events with their commands
PER_FUNCTION = [HealthCheck.function_scoped_fixture]
encode = msgspec.json.Encoder().encode


@pytest.fixture(autouse=True, scope="module")
def segments_of_any_size() -> Iterator[None]:
    """Let a segment be shorter than its snapshot."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decision_log, "_HEADERS_PER_SEGMENT", 0)
        yield


def setup_of(kind: str) -> Setup | EpochsSetup:
    if kind == "membership":
        return EpochsSetup(num_expected=4, answer_timeout=10.0, departure_window=0.0)
    return Setup(
        policy=kind,
        num_stages=2,
        num_pipelines=4,
        seed=1,
        lease=20.0,
        limits=Limits(ceiling=10.0),
        sampler_state=None if kind == "static" else SamplerState(limit=10**6),
    )


def new_machine(setup: Setup | EpochsSetup) -> Scheduler | JobEpochs:
    return setup.epochs() if isinstance(setup, EpochsSetup) else setup.scheduler()


@cache
def random_log(kind: str, seed: int) -> Log:
    setup = setup_of(kind)
    machine, rng = new_machine(setup), random.Random(f"{kind} {seed}")
    source = random_epochs if kind == "membership" else random_steps
    log: Log = []
    for event in source(machine, rng, lambda: log[-1][1]):
        log.append((event, machine.step(event)))
        if len(log) == NUM_EVENTS:
            break
    return log


def random_epochs(
    job: JobEpochs, rng: random.Random, commands: Callable[[], list[Any]]
) -> Iterable[epochs.Event]:
    """Yield events that members of a job might send, mostly in a sensible order."""
    now, incarnations = 0.0, dict.fromkeys(MEMBERS, 0)
    for member in MEMBERS:
        yield epochs.Enroll(member, 0, f"n{member}", now)
    while True:
        now += rng.choice([0.0, 0.1, rng.random()])
        member, number = rng.choice(MEMBERS), (job._committed or 0) + 1
        key = member, incarnations[member]
        choice = rng.random()
        if choice < 0.35:
            for each in job.present:
                yield epochs.Await(each, incarnations[each], job.epoch, "", now)
        elif choice < 0.7:
            num = max(len(job.present), 1)
            for each in list(job.present):
                yield epochs.Vote(each, incarnations[each], job.epoch, number, num, now=now)
        elif choice < 0.75:
            yield epochs.Lost(*key, "SIGKILL", now)
        elif choice < 0.85:
            incarnations[member] += 1
            yield epochs.Enroll(member, incarnations[member], "there", now)
            yield epochs.Await(member, incarnations[member], job.epoch, "", now)
        elif choice < 0.9:
            yield epochs.Depart(*key, "SIGTERM", rng.random() < 0.5, now)
        elif choice < 0.94:
            yield epochs.Unreachable(*key, job.epoch, (rng.choice(MEMBERS),), now)
        elif choice < 0.96:
            yield epochs.TrainInGroups(*key, job.epoch, now)
        else:
            now = min(max(now, job.next_timer()), now + 20)
            yield epochs.Tick(now, (member,))


def random_steps(
    scheduler: Scheduler, rng: random.Random, commands: Callable[[], list[Any]]
) -> Iterable[protocol.Event]:
    """Yield the events of workers that train, are lost, return, and average all."""
    now, clocks, chunks = 0.0, dict[Any, int](), dict[Any, int]()
    incarnations = dict.fromkeys(scheduler.membership.members, 0)
    open_groups: dict[int, protocol.Assign] = {}
    for worker in incarnations:
        clocks[worker] = chunks[worker] = 0
        yield protocol.Join(worker, f"n{worker.pipeline // 2}", 0, 0, now)
    while True:
        now += rng.choice([0.0, 0.01, rng.random()])
        if scheduler.next_timer() <= now:
            yield protocol.Timer(scheduler.next_timer())
        worker = rng.choice([*incarnations])
        incarnation, choice = incarnations[worker], rng.random()
        member = scheduler.membership.members[worker]
        is_waiting = member.is_ready or member.is_stopping  # for the end of its step
        if choice < 0.15:
            yield protocol.Request(worker, clocks[worker] + 1, incarnation, now)
        elif choice < 0.5 and not is_waiting:
            clocks[worker] += 1
            yield protocol.Ready(worker, clocks[worker], incarnation, now)
        elif choice < 0.7:
            for group in list(open_groups.values())[:2]:
                ok, lost = rng.random() < 0.9, ()
                for member in group.members:
                    if not ok:
                        lost = tuple(other for other in group.members if other != member)
                    key = member, group.gid, ok, incarnations[member], now
                    yield protocol.Done(*key, lost)
        elif choice < 0.78:
            yield protocol.Acquire(worker, chunks[worker], 3, None, incarnation, now)
            chunks[worker] += 1
        elif choice < 0.86:
            yield protocol.Acknowledge(worker, max(chunks[worker] - 1, 0), incarnation, now)
        elif 0.86 < choice < 0.89 and not is_waiting:
            yield protocol.AverageAll(worker, clocks[worker], incarnation, now)
        elif choice < 0.91:
            yield protocol.QueryProgress(worker, 3, incarnation, now)
        elif choice < 0.95:
            kind = rng.choice([protocol.Dead, protocol.Leave])
            yield kind(worker, incarnation, now)
        else:
            incarnations[worker] += 1
            chunks[worker] = 0
            yield protocol.Join(worker, "new", clocks[worker], incarnations[worker], now)
        groups = scheduler._queue.groups
        open_groups = {gid: each.assign for gid, each in groups.items() if each.assign is not None}


def write(path: Path, kind: str, log: Log, per_flush: int = 1, **options: Any) -> None:
    setup = setup_of(kind)
    machine = new_machine(setup)
    written = DecisionLog(path, setup, machine, job="this one", **options)
    for number, (event, commands) in enumerate(log, 1):
        assert machine.step(event) == commands
        written.add(event, commands)
        if number % per_flush == 0:
            written.flush()
    written.close()


def decisions_of(path: Path) -> Log:
    return [(each.event, [*each.commands]) for _, each in DecisionReader(path).decisions()]


@pytest.mark.parametrize("kind", KINDS)
def test_random_events_reach_all_kinds_of_commands(kind: str) -> None:
    """Else the tests below would prove little."""
    seen = {
        type(each).__name__ for seed in range(6) for _, c in random_log(kind, seed) for each in c
    }
    if kind == "membership":
        assert seen == {"Begin", "End", "Committed", "Fenced"}
    else:
        groups = set() if kind == "ssp" else {"Assign", "Commit", "Abort"}
        assert seen >= {"Skip", *groups}


@pytest.mark.parametrize("kind", SOME_KINDS)
@given(seed=st.integers(0, 30))
@settings(max_examples=num_examples(12), deadline=None, suppress_health_check=PER_FUNCTION)
def test_a_restart_at_any_event_changes_nothing(tmp_path: Path, kind: str, seed: int) -> None:
    """The successor has the same state, and decides the same; it may be lost at once, too."""
    log, path, rng = random_log(kind, seed), tmp_path / "log.jsonl", random.Random(seed)
    setup = setup_of(kind)
    never_lost, machine = new_machine(setup), new_machine(setup)
    written = DecisionLog(path, setup, machine, job="this one", segment_bytes=2000)
    for event, commands in log:
        assert machine.step(event) == never_lost.step(event) == commands
        written.add(event, commands)
        if rng.random() < 0.5:
            written.flush()
        if rng.random() < 0.1:
            written.close()  # as all that it has flushed is written
            rebuilt = rebuild(path, job="this one", setup=setup)
            assert take_snapshot(rebuilt.machine) == take_snapshot(never_lost)
            machine = rebuilt.machine
            written = DecisionLog(path, setup, machine, after=rebuilt.end, segment_bytes=2000)
    written.close()
    assert take_snapshot(rebuild(path).machine) == take_snapshot(never_lost)
    assert replay(path) is None
    assert decisions_of(path) == log


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_a_snapshot_at_every_event_leads_to_the_same_decisions(kind: str, tmp_path: Path) -> None:
    """Each segment has one event: its state is restored before the next one."""
    log = random_log(kind, 7)
    write(tmp_path / "log.jsonl", kind, log, segment_bytes=1, per_flush=1)
    segments = list(DecisionReader(tmp_path / "log.jsonl").segments())
    assert replay(tmp_path / "log.jsonl") is None
    assert decisions_of(tmp_path / "log.jsonl") == log
    assert sum(len(segment.lines) for segment in segments) == len(log)


@given(
    kind=st.sampled_from(KINDS),
    segment_bytes=st.integers(1, 20_000),
    max_bytes=st.integers(1, 30_000),
    per_flush=st.integers(1, 60),
    in_background=st.booleans(),
)
@settings(max_examples=num_examples(60), deadline=None, suppress_health_check=PER_FUNCTION)
def test_rotation_at_any_size_keeps_the_newest_decisions(
    tmp_path: Path,
    kind: str,
    segment_bytes: int,
    max_bytes: int,
    per_flush: int,
    in_background: bool,
) -> None:
    log, path = random_log(kind, 3), tmp_path / "log.jsonl"
    sizes = {"segment_bytes": segment_bytes, "max_bytes": max_bytes}
    write(path, kind, log, per_flush, in_background=in_background, **sizes)
    assert replay(path) is None
    reader = DecisionReader(path)
    kept = decisions_of(path)
    assert kept == log[len(log) - len(kept) :]
    assert next(reader.segments()).header.num_before == len(log) - len(kept)
    assert reader.num_before == len(log) - len(kept)
    machine = new_machine(setup_of(kind))
    for event, _ in log:
        machine.step(event)
    assert take_snapshot(rebuild(path).machine) == take_snapshot(machine)
    files = LogFiles.of(path)
    assert not files.rotated.exists()
    for archive in (files.older, files.recent):  # which may be too long by one segment
        if archive.exists():
            *_, last = DecisionReader(archive).segments()
            packed = len(gzip.compress(b"\n".join([encode(last.header), *last.lines])))
            assert archive.stat().st_size <= max_bytes + 1.2 * packed + 100


@pytest.mark.parametrize("policy", ["random", "smart"])
def test_state_does_not_depend_on_the_order_of_sets(policy: str) -> None:
    """A restored set may have another order, which depends on what it once had."""
    state = SamplerState(limit=10**9)
    setup = Setup(policy=policy, num_stages=1, num_pipelines=8, sampler_state=state)
    decisions: Log = []
    SimulatedSteps(setup, lambda event, commands: decisions.append((event, commands))).run(200)
    never_lost, machine = setup.scheduler(), setup.scheduler()
    for number, (event, commands) in enumerate(decisions):
        assert machine.step(event) == never_lost.step(event) == commands
        if number % 10 == 0:
            snapshot = take_snapshot(machine)
            assert snapshot == take_snapshot(never_lost)
            machine = restore(snapshot, setup.scheduler())


def test_an_archive_that_is_full_is_kept_until_the_next_one_is(tmp_path: Path) -> None:
    path, log = tmp_path / "log.jsonl", random_log("age", 0)
    numbers = []
    for num_events in (30, 60, 90):
        write(path, "age", log[:num_events], per_flush=30, segment_bytes=1, max_bytes=1)
        numbers.append([segment.header.number for segment in DecisionReader(path).segments()])
    assert numbers == [[1, 2], [2, 3], [3, 4]]
    assert decisions_of(path) == log[60:90]
    assert not LogFiles.of(path).recent.exists()


@pytest.mark.parametrize("kind", long_except(["age", "membership"], 1))
def test_a_log_torn_at_any_byte_leads_to_the_state_before(tmp_path: Path, kind: str) -> None:
    log, path = random_log(kind, 2)[:59], tmp_path / "log.jsonl"
    write(path, kind, log, per_flush=20, segment_bytes=1)
    assert LogFiles.of(path).recent.exists()
    states = [take_snapshot(machine := new_machine(setup_of(kind)))]
    for event, _ in log:
        machine.step(event)
        states.append(take_snapshot(machine))
    content = path.read_bytes()
    first, num_lines = content.index(b"\n") + 1, content.count(b"\n") - 1
    torn = list(range(len(content) - 150, len(content))) + list(range(first, first + 150))
    for end in torn:
        path.write_bytes(content[:end])
        num_lost = num_lines - content[first:end].count(b"\n")
        if content[end - 1 : end] == b"\n":
            found = rebuild(path)
        else:
            with pytest.warns(UserWarning, match="the last line is incomplete, and is dropped"):
                found = rebuild(path)
        assert take_snapshot(found.machine) == states[len(log) - num_lost]
        assert found.end.num_decisions == len(log) - num_lost
        assert replay(path) is None
    for end in range(0, first, 97):  # it had not even a header
        path.write_bytes(content[:end])
        found = rebuild(path)
        assert take_snapshot(found.machine) == states[len(log) - num_lines]


@pytest.mark.parametrize(
    "lose_newest",
    [
        pytest.param(lambda path: path.unlink(), id="before it is made"),
        pytest.param(lambda path: path.write_bytes(b""), id="before the header"),
        pytest.param(lambda path: path.write_bytes(path.read_bytes()[:50]), id="in the header"),
    ],
)
@pytest.mark.parametrize("cut", [None, 0, 1, 40, 500])
def test_a_successor_continues_after_a_crash_in_a_rotation(
    tmp_path: Path, lose_newest: Callable[[Path], None], cut: int | None
) -> None:
    """`cut`: bytes of the segment that are in the archive; None for all."""
    path, log, setup = tmp_path / "log.jsonl", random_log("age", 5), setup_of("age")
    write(path, "age", log[:120], per_flush=40, segment_bytes=1)
    files = LogFiles.of(path)
    segments = list(DecisionReader(path).segments())
    assert [segment.header.number for segment in segments] == [1, 2, 3, 4]
    lines = [encode(segments[2].header), *map(encode, log[80:120])]
    files.rotated.write_bytes(b"\n".join([*lines, b""]))
    if cut is not None:
        *before, last = members(files.recent)
        files.recent.write_bytes(b"".join([*before, last[:cut]]))
    lose_newest(path)
    assert decisions_of(path) == log[:120]
    rebuilt = rebuild(path)
    assert rebuilt.end.num_decisions == 120
    written = DecisionLog(path, setup, rebuilt.machine, after=rebuilt.end)
    for event, commands in log[120:]:
        assert rebuilt.machine.step(event) == commands
        written.add(event, commands)
    written.close()
    assert replay(path) is None
    assert decisions_of(path) == log
    assert not files.rotated.exists()


def members(archive: Path) -> list[bytes]:
    """The compressed segments of an archive."""
    ends = [0, *(end for _, end in log_segments.members(archive))]
    content = archive.read_bytes()
    return [content[start:end] for start, end in pairwise(ends)]


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(EventError) as caught:
        call()
    text = str(caught.value)
    assert "\n  expected: " in text
    assert "\n  fix: " in text
    return text


def test_logs_of_other_jobs_are_refused(tmp_path: Path) -> None:
    path, setup = tmp_path / "log.jsonl", setup_of("age")
    write(path, "age", random_log("age", 0)[:30])
    assert rebuild(path, job="this one", setup=setup).setup == setup
    assert "log of another job: this one" in refusal(lambda: rebuild(path, job="mine"))
    assert "another setup" in refusal(lambda: rebuild(path, setup=setup_of("adaptive")))
    assert "another setup" in refusal(lambda: rebuild(path, setup=setup_of("membership")))
    assert "No such file" in refusal(lambda: rebuild(tmp_path / "none.jsonl"))


def rotated(folder: Path, seed: int = 0, kind: str = "age") -> Path:
    folder.mkdir(exist_ok=True)
    write(folder / "log.jsonl", kind, random_log(kind, seed), per_flush=30, segment_bytes=1)
    return folder / "log.jsonl"


def test_segments_of_different_logs_are_refused(tmp_path: Path) -> None:
    path = rotated(tmp_path / "one")
    other = rotated(tmp_path / "other", kind="adaptive")
    archive = LogFiles.of(path).recent
    first, second, *later = members(archive)
    archive.write_bytes(LogFiles.of(other).recent.read_bytes())
    assert "is of another log than segment" in refusal(lambda: replay(path))
    archive.write_bytes(b"".join([first, *later]))
    assert "segment 3 follows segment 1" in refusal(lambda: replay(path))
    lines = gzip.decompress(second).splitlines(keepends=True)
    archive.write_bytes(b"".join([first, gzip.compress(b"".join(lines[:-1])), *later]))
    assert "59 decisions before segment 3, not 60" in refusal(lambda: replay(path))
    archive.write_bytes(b"".join([second, *later]))
    assert replay(path) is None, "the oldest may be missing"
    assert replay(archive) is None, "an archive can be replayed alone"
    assert decisions_of(path) == random_log("age", 0)[30:]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: data[:-9], "its last segment is incomplete"),
        (lambda data: data[:30] + bytes(20) + data[50:], "recent.jsonl.gz: "),
        (lambda data: b"nonsense" + data, "incorrect header check"),
        (lambda data: data + b"more", "recent.jsonl.gz: "),
    ],
)
def test_a_damaged_archive_is_refused(
    tmp_path: Path, change: Callable[[bytes], bytes], problem: str
) -> None:
    path = rotated(tmp_path)
    archive = LogFiles.of(path).recent
    archive.write_bytes(change(archive.read_bytes()))
    assert problem in refusal(lambda: replay(path))
    assert rebuild(path).setup == setup_of("age"), "only the newest segment is needed"


def test_a_changed_archive_replays_with_a_difference(tmp_path: Path) -> None:
    path = rotated(tmp_path)
    archive = LogFiles.of(path).recent
    first, *later = members(archive)
    lines = gzip.decompress(first).splitlines(keepends=True)
    number = max(n for n, line in enumerate(lines) if b'"Join"' in line)
    changed = {number: lines[number].replace(b'"n1"', b'"n2"')}  # no decision depends on it
    archive.write_bytes(b"".join([packed(lines, changed), *later]))
    difference = replay(path)
    assert difference is not None
    text = "segment 2: its state is not that after the decisions before"
    assert (difference.path, str(difference)) == (archive, text)
    event, checksum = json.loads(lines[16])
    assert [len(json.loads(line)) for line in lines[1:17]] == [1] * 15 + [2]
    archive.write_bytes(b"".join([packed(lines, {16: encode([event, checksum ^ 1])}), *later]))
    difference = replay(path)
    assert difference is not None
    assert difference.logged == checksum ^ 1
    assert str(difference).startswith("segment 1, line 17: ")
    assert "decisions differ from the log" in refusal(lambda: decisions_of(path))


def packed(lines: list[bytes], changed: dict[int, bytes]) -> bytes:
    rows = [changed.get(number, line).strip() for number, line in enumerate(lines)]
    return gzip.compress(b"\n".join([*rows, b""]))


@given(
    st.lists(
        st.floats(0, 1e9)
        | st.integers(0, 10**13).map(lambda number: number / 1e6)
        | st.floats(0, 1e6).map(lambda time: round(time, 6))
    )
)
def test_times_of_archived_events_are_exact(times: list[float]) -> None:
    header = log_segments.first_header(setup_of("age"), "", "")
    lines = [encode(header), *(encode([protocol.Timer(time), []]) for time in times)]
    unpacked = gzip.decompress(log_segments.pack(lines)).splitlines()[1:]
    events = [event for event, _ in log_segments.unpack(header.kind, unpacked)]
    assert [event.now for event in events] == times


def test_a_middle_that_is_torn_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write(path, "age", random_log("age", 0))
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    for number in (1, 20, 80):
        path.write_bytes(b"".join([*lines[:number], lines[number][:-7], *lines[number + 1 :]]))
        assert f"line {number + 1}: " in refusal(lambda: rebuild(path))
    number = next(n for n, line in enumerate(lines) if n > 20 and b'[["Ready"' in line)
    path.write_bytes(b"".join([*lines[:number], *lines[number + 1 :]]))
    assert "decisions differ from the log" in refusal(lambda: rebuild(path))


def test_a_state_of_another_version_is_refused(tmp_path: Path) -> None:
    path = rotated(tmp_path)
    header, *lines = path.read_bytes().splitlines(keepends=True)
    assert header.count(b'"_late_joins",') == 1
    path.write_bytes(b"".join([header.replace(b'"_late_joins",', b""), *lines]))
    text = refusal(lambda: rebuild(path))
    assert "a state that cannot be restored: ValueError: Scheduler has other fields" in text
    path.write_bytes(b"".join([header.replace(b'["Membership",', b'["Member",'), *lines]))
    assert "a state that cannot be restored: KeyError: 'Member'" in refusal(lambda: rebuild(path))


@pytest.mark.parametrize("policy", long_except(["adaptive", "age"], 0))
def test_a_log_is_small_after_rotation(tmp_path: Path, policy: str) -> None:
    """At most 40 bytes per worker and step, in which it also acquires samples."""
    path, num_workers, num_steps = tmp_path / "log.jsonl", 16, 300
    state = SamplerState(limit=10**9)
    setup = Setup(policy=policy, num_stages=1, num_pipelines=num_workers, sampler_state=state)
    decisions: Log = []
    steps = SimulatedSteps(setup, lambda event, commands: decisions.append((event, commands)))
    steps.run(num_workers * num_steps)
    scheduler = setup.scheduler()
    log = DecisionLog(path, setup, scheduler)
    for event, commands in decisions:
        assert scheduler.step(event) == commands
        log.add(event, commands)
    log.close()
    assert replay(path) is None
    *archived, _ = DecisionReader(path).segments()
    num_ready = sum(b'"Ready"' in line for segment in archived for line in segment.lines)
    assert num_ready > num_workers * num_steps / 2
    assert LogFiles.of(path).recent.stat().st_size / num_ready < 30
    assert take_snapshot(rebuild(path).machine) == take_snapshot(steps.scheduler)


def test_membership_changes_leave_out_votes(tmp_path: Path) -> None:
    log = random_log("membership", 0)
    write(tmp_path / "log.jsonl", "membership", log, per_flush=20, segment_bytes=1)
    changes = membership_changes(tmp_path / "log.jsonl")
    begins = [each for _, commands in log for each in commands if isinstance(each, epochs.Begin)]
    assert [change for name, change in changes if name == "Begin"] == begins
    assert not {"Vote", "Committed", "Await", "Tick"} & {name for name, _ in changes}
    assert {"Enroll", "Lost", "Begin", "Fenced"} <= {name for name, _ in changes}
