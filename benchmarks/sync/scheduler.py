"""How much a scheduler can take: one coordinator over loopback, and workers that only speak.

Throughput: cycles of workers per second (Ready, Assign, Done, Commit), each worker beginning anew
as soon as it is through; the median of half-second windows. Answers: how long workers wait, at half
of that load, for what is not meant to make them wait. An answer's time is
- of a Commit: from when the last member of the group has sent Done until each member has it;
- of an Assign: until each member has it, from when it was due. It is due when a window closes, or,
  if no timer had to pass, when the message was sent that made the group possible. A replay of the
  decision log tells which, and when; so it is also a test that the log replays.
Connections with CURVE, policy `age`, the decision log written. Both sides share this machine.
"""

import gc
import os
import signal
import statistics
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from rich.console import Console

from benchmarks.sync.scheduler_load import Load, Times, loaded
from polyrhythm.processes import Child
from polyrhythm.run.coordinator.coordinator import Coordinator
from polyrhythm.run.coordinator.keys import JobKeys
from polyrhythm.sync.decision_log import LOG_NAME, DecisionReader
from polyrhythm.sync.protocol import Assign, Commit, Done, Event, Ready
from polyrhythm.sync.setup import Setup
from polyrhythm.tables import print_line, print_table
from polyrhythm.types import Seconds, Worker

ENDING: Seconds = 5.0  # for a coordinator to end by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerFigures:
    """Of one connection per worker, where nothing else is said."""

    num_workers: int
    per_s: float  # cycles of workers at saturation
    cpu_us: float  # of the coordinator's process, all threads, per cycle
    half_per_s: float  # cycles while answers were timed
    p50_ms: float  # of all answers
    p99_ms: float
    assign_p99_ms: float
    commit_p99_ms: float
    num_answers: int
    num_replayed: int  # decisions of the log, all of which came out the same
    per_s_by_connections: dict[int, float]  # at saturation


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    num_stages: int
    num_pipelines: int
    fewer_connections: tuple[int, ...]
    window: Seconds  # of which the median is taken
    num_windows: int
    timed: Seconds

    @property
    def setup(self) -> Setup:
        return Setup(policy="age", num_stages=self.num_stages, num_pipelines=self.num_pipelines)


FULL = _Plan(
    num_stages=8,
    num_pipelines=125,
    fewer_connections=(125, 8),
    window=0.5,
    num_windows=7,
    timed=4.0,
)
QUICK = _Plan(
    num_stages=8,
    num_pipelines=16,
    fewer_connections=(8,),
    window=0.1,
    num_windows=3,
    timed=0.5,
)


def measure(*, quick: bool, console: Console) -> SchedulerFigures:
    """Under 25 s, or 4 s if quick."""
    plan = QUICK if quick else FULL
    num_workers = plan.num_stages * plan.num_pipelines
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / LOG_NAME
        per_s = {}
        with (
            _coordinator(plan.setup, log) as (address, keys, process),
            loaded(address, keys, plan.setup, num_workers) as load,
        ):
            per_s[num_workers], cpu = _saturate(load, plan, process)
            load.pace(per_s[num_workers] / 2)
            load.run(2 * plan.window)  # until they do not march in step any more
            times = load.times = Times()
            half = load.run(plan.timed)
        assigns, commits, num_replayed = _answers(log, times)
    for num_connections in plan.fewer_connections:
        with (
            tempfile.TemporaryDirectory() as folder,
            _coordinator(plan.setup, Path(folder) / LOG_NAME) as (address, keys, process),
            loaded(address, keys, plan.setup, num_connections) as load,
        ):
            per_s[num_connections], _ = _saturate(load, plan, process)
    figures = SchedulerFigures(
        num_workers=num_workers,
        per_s=per_s[num_workers],
        cpu_us=1e6 * cpu,
        half_per_s=half,
        p50_ms=1e3 * statistics.median(assigns + commits),
        p99_ms=1e3 * _p99(assigns + commits),
        assign_p99_ms=1e3 * _p99(assigns),
        commit_p99_ms=1e3 * _p99(commits),
        num_answers=len(assigns) + len(commits),
        num_replayed=num_replayed,
        per_s_by_connections=per_s,
    )
    _show(figures, console)
    return figures


def _saturate(load: Load, plan: _Plan, process: psutil.Process) -> tuple[float, Seconds]:
    """Cycles per second, and the coordinator's processor time per cycle."""
    load.begin()
    load.run(plan.window)
    before, spent = load.num_cycles, _processor_time(process)
    windows = [load.run(plan.window) for _ in range(plan.num_windows)]
    spent = _processor_time(process) - spent
    return statistics.median(windows), spent / max(load.num_cycles - before, 1)


def _processor_time(process: psutil.Process) -> Seconds:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def _coordinator(setup: Setup, log: Path) -> Iterator[tuple[str, JobKeys, psutil.Process]]:
    """In a process of its own: its address, its keys, the process."""
    keys = JobKeys.new()
    read, write = os.pipe()
    child = Child(partial(_serve, setup, keys, log, write))
    try:
        os.close(write)
        with os.fdopen(read) as told:
            address = told.readline().strip()
        assert address, f"the coordinator {child.reason}"
        yield address, keys, psutil.Process(child.pid)
        child.signal(signal.SIGTERM)
        assert child.wait(ENDING) == 0, f"the coordinator {child.reason}"
    finally:
        child.end()


def _serve(setup: Setup, keys: JobKeys, log: Path, write: int) -> None:
    gc.freeze()  # what was forked with it is not its own to go through
    until = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: until.set())
    coordinator = Coordinator.of(setup, bind="tcp://127.0.0.1:0", keys=keys, log=log)
    with os.fdopen(write, "w") as tell:
        tell.write(coordinator.address + "\n")
    coordinator.serve(until)


def _answers(log: Path, times: Times) -> tuple[list[Seconds], list[Seconds], int]:
    """How long each member waited for Assign, and for Commit; and how much was replayed."""
    reader = DecisionReader(log)
    scheduler = reader.setup.scheduler()
    assigns: list[Seconds] = []
    commits: list[Seconds] = []
    num_replayed = 0
    for line, decision in reader.decisions():
        timer, event = scheduler.next_timer(), decision.event
        assert scheduler.step(event) == list(decision.commands), f"line {line} of {log}"
        num_replayed += 1
        for command in decision.commands:
            if isinstance(command, Assign):
                due = timer if timer <= event.now else _sent(event, times)
                assigns += _since(due, times.assigned, command)
            elif isinstance(command, Commit):
                sent = [times.done.get((worker, command.gid)) for worker in command.members]
                last = None if None in sent else max(at for at in sent if at is not None)
                commits += _since(last, times.committed, command)
    return assigns, commits, num_replayed


def _since(
    due: Seconds | None, came: Mapping[tuple[Worker, int], Seconds], command: Assign | Commit
) -> list[Seconds]:
    """For each member, as far as it was recorded."""
    if due is None:
        return []
    at = [came.get((worker, command.gid)) for worker in command.members]
    return [moment - due for moment in at if moment is not None]


def _sent(event: Event, times: Times) -> Seconds | None:
    """When the message was sent that an event stands for; None if that was not recorded."""
    if isinstance(event, Ready):
        return times.ready.get((event.worker, event.clock))
    return times.done.get((event.worker, event.gid)) if isinstance(event, Done) else None


def _p99(waits: list[Seconds]) -> Seconds:
    return statistics.quantiles(waits, n=100)[98]


def _show(figures: SchedulerFigures, console: Console) -> None:
    print_table(
        console,
        ["connections", "worker cycles/s at saturation"],
        [[f"{n:,}", f"{rate:,.0f}"] for n, rate in figures.per_s_by_connections.items()],
        title=f"one coordinator, {figures.num_workers:,} workers, policy age, CURVE, log written",
        numbers=True,
    )
    print_line(
        console,
        f"the coordinator took {figures.cpu_us:.0f} us of processor time per cycle; at "
        f"{figures.half_per_s:,.0f} cycles/s, answers took {figures.p50_ms:.2f} ms in the median, "
        f"99 % at most {figures.p99_ms:.2f} ms "
        f"(Assign {figures.assign_p99_ms:.2f}, Commit {figures.commit_p99_ms:.2f}; "
        f"{figures.num_answers:,} answers); the log of {figures.num_replayed:,} decisions replays",
    )
