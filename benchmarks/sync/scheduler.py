"""The load that one coordinator sustains, over loopback, from workers that only send messages.

Throughput: cycles of workers per second (Ready, Assign, Done, Commit), where each worker starts its
next cycle at once; the median of half-second windows. Answer times: how long workers wait, at half
that load, for messages that should not make them wait. A window that the machine's host disturbed
is repeated. The answer time is
- of a Commit: from when the last member of the group has sent Done until each member receives it;
- of an Assign: from when it was due until each member receives it. It is due when a window closes
  or, if no timer had to pass, when the message was sent that made the group possible. A replay of
  the decision log shows which of the two, and when; so this also tests that the log replays.
Connections use CURVE, the policy is `age`, the decision log is written. The coordinator and the
load share this machine.
"""

import gc
import heapq
import math
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil  # type: ignore[import-untyped]
import zmq
from rich.console import Console

from benchmarks.harness.timing import undisturbed
from polyrhythm.errors import PeerError
from polyrhythm.processes import Child
from polyrhythm.run.coordinator.keys import JobKeys
from polyrhythm.run.coordinator.server import Coordinator
from polyrhythm.run.coordinator.sessions import PROTOCOL, Accepted, FromWorker, Hello, Welcome
from polyrhythm.sync.decision_log import LOG_NAME
from polyrhythm.sync.log_reader import DecisionReader
from polyrhythm.sync.protocol import Abort, Assign, Commit, Done, Event, Ready, Skip
from polyrhythm.sync.setup import Setup
from polyrhythm.tables import print_line, print_table
from polyrhythm.types import Seconds, Worker

_INCARNATION = 1
_JOIN_TIMEOUT: Seconds = 30.0
_STOP_TIMEOUT: Seconds = 5.0  # for the coordinator to end by itself
_STANDSTILL: Seconds = 30.0  # of a machine that is busy elsewhere
_BATCH = 64  # messages between two checks for workers whose next cycle is due
_JITTER = 0.1  # of a worker's period, so that workers do not fall into step


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSetting:
    num_stages: int
    num_pipelines: int
    fewer_connections: tuple[int, ...]
    window: Seconds  # of which the median is taken
    num_windows: int
    num_timed_windows: int  # in which answers are timed
    max_tries: int  # of a window that the host disturbs

    @property
    def setup(self) -> Setup:
        return Setup(policy="age", num_stages=self.num_stages, num_pipelines=self.num_pipelines)


FULL = SchedulerSetting(
    num_stages=8,
    num_pipelines=125,
    fewer_connections=(125, 8),
    window=0.5,
    num_windows=7,
    num_timed_windows=8,
    max_tries=4,
)
QUICK = replace(
    FULL,
    num_pipelines=16,
    fewer_connections=(8,),
    window=0.1,
    num_windows=3,
    num_timed_windows=5,
    max_tries=1,
)


class Window(NamedTuple):
    start: Seconds
    end: Seconds
    per_s: float  # cycles of workers


@dataclass(slots=True)
class MessageTimes:
    """When messages were sent or received, on the clock that the coordinator has, too."""

    ready: dict[tuple[Worker, int], Seconds] = field(default_factory=dict)  # sent, by clock
    done: dict[tuple[Worker, int], Seconds] = field(default_factory=dict)  # sent, by gid
    assigned: dict[tuple[Worker, int], Seconds] = field(default_factory=dict)
    committed: dict[tuple[Worker, int], Seconds] = field(default_factory=dict)


def measure(*, quick: bool, console: Console) -> dict[str, float]:
    """Measure and print the figures, in under 25 s, or 4 s if quick: a connection per worker."""
    setting = QUICK if quick else FULL
    num_workers = setting.num_stages * setting.num_pipelines
    per_s = {}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / LOG_NAME
        with _loaded_coordinator(setting.setup, log, num_workers) as (load, process):
            per_s[num_workers], cpu = _saturate(load, setting, process)
            load.set_rate(per_s[num_workers] / 2)
            load.run(2 * setting.window)  # until workers are out of step
            load.times = MessageTimes()
            timed = [_run_window(load, setting) for _ in range(setting.num_timed_windows)]
        assigns, commits, num_replayed = _answer_times(log, load.times, timed)
        for number in setting.fewer_connections:
            log = Path(folder) / f"{number} {LOG_NAME}"
            with _loaded_coordinator(setting.setup, log, number) as (load, process):
                per_s[number], _ = _saturate(load, setting, process)
    waits = assigns + commits
    figures = {
        "per_s": per_s[num_workers],  # cycles of workers at saturation
        "cpu_us": 1e6 * cpu,  # of the coordinator's process, all threads, per cycle
        "half_per_s": statistics.fmean(window.per_s for window in timed),
        "p50_ms": 1e3 * statistics.median(waits),
        "p99_ms": 1e3 * _p99(waits),
        "assign_p99_ms": 1e3 * _p99(assigns),
        "commit_p99_ms": 1e3 * _p99(commits),
        "answers": len(waits),
        "replayed": num_replayed,  # decisions of the log, all of which came out the same
    }
    print_table(
        console,
        ["connections", "worker cycles/s at saturation"],
        [[f"{number:,}", f"{rate:,.0f}"] for number, rate in per_s.items()],
        title=f"one coordinator, {num_workers:,} workers, policy age, CURVE, log written",
        numbers=True,
    )
    print_line(
        console,
        "the coordinator took {cpu_us:.0f} us of processor time per cycle; at {half_per_s:,.0f} "
        "cycles/s, answers took {p50_ms:.2f} ms in the median, 99 % at most {p99_ms:.2f} ms "
        "(Assign {assign_p99_ms:.2f}, Commit {commit_p99_ms:.2f}; {answers:,} answers); the log of "
        "{replayed:,} decisions replays".format(**figures),
    )
    return figures


def _saturate(
    load: "CoordinatorLoad", setting: SchedulerSetting, process: psutil.Process
) -> tuple[float, Seconds]:
    """Return the cycles per second, and the coordinator's processor time per cycle."""
    load.start()
    load.run(setting.window)
    cycles, cpu = load.num_cycles, sum(process.cpu_times()[:2])  # user and system
    windows = [_run_window(load, setting).per_s for _ in range(setting.num_windows)]
    cpu = sum(process.cpu_times()[:2]) - cpu
    return statistics.median(windows), cpu / max(load.num_cycles - cycles, 1)


def _run_window(load: "CoordinatorLoad", setting: SchedulerSetting) -> Window:
    return undisturbed(partial(load.run, setting.window), max_tries=setting.max_tries)


@contextmanager
def _loaded_coordinator(
    setup: Setup, log: Path, num_connections: int
) -> Iterator[tuple["CoordinatorLoad", psutil.Process]]:
    """Run a coordinator in a process of its own; yield its load, joined, and the process."""
    keys = JobKeys.new()
    read, write = os.pipe()
    child = Child(partial(_serve, setup, keys, log, write))
    try:
        os.close(write)
        with os.fdopen(read) as pipe:
            address = pipe.readline().strip()
        assert address, f"the coordinator {child.reason}"
        load = CoordinatorLoad(address, keys, setup, num_connections)
        gc.disable()  # a pause of this process would count as one of the coordinator
        try:
            load.join(_JOIN_TIMEOUT)
            yield load, psutil.Process(child.pid)
        finally:
            gc.enable()
            load.close()
        child.signal(signal.SIGTERM)
        assert child.wait(_STOP_TIMEOUT) == 0, f"the coordinator {child.reason}"
    finally:
        child.end()


def _serve(setup: Setup, keys: JobKeys, log: Path, write: int) -> None:
    until = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: until.set())
    coordinator = Coordinator(setup, bind="tcp://127.0.0.1:0", keys=keys.server_keys, log=log)
    with os.fdopen(write, "w") as pipe:
        pipe.write(coordinator.address + "\n")
    coordinator.serve(until)


class _Assign(msgspec.Struct, frozen=True, array_like=True, tag="Assign", gc=False):
    """The part that a worker with a connection of its own needs: decoding is not measured."""

    gid: int


class _Commit(msgspec.Struct, frozen=True, array_like=True, tag="Commit", gc=False):
    gid: int


class CoordinatorLoad:
    """Workers that only send messages, all in one process and one thread.

    One socket holds all connections (a ROUTER that connects many times, each time under another
    name), so each worker has a TCP connection with CURVE of its own, as in a job; or fewer
    connections serve several workers each. A worker sends Ready, answers Assign with Done at once,
    and ends its cycle at Commit (or Skip).
    """

    def __init__(self, address: str, keys: JobKeys, setup: Setup, num_connections: int) -> None:
        self.num_cycles = 0
        self.times: MessageTimes | None = None  # recorded if set
        self._workers = [
            Worker(s, p) for s in range(setup.num_stages) for p in range(setup.num_pipelines)
        ]
        self._clocks = dict.fromkeys(self._workers, 0)
        self._encode = msgspec.msgpack.Encoder().encode
        has_own = num_connections == len(self._workers)
        kinds = (
            Accepted | Welcome | Skip | Abort | (_Assign | _Commit if has_own else Assign | Commit)
        )
        self._decode = msgspec.msgpack.Decoder(kinds).decode
        self._period: Seconds = 0.0  # of a worker; 0: the next cycle starts at once
        self._in_step: set[Worker] = set()  # workers that still cycle in step
        self._due: list[tuple[Seconds, Worker]] = []  # heap of next cycles
        self._random = random.Random(0)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.CURVE_SERVERKEY, keys.server_public.encode()),
            (zmq.CURVE_PUBLICKEY, keys.client_public.encode()),
            (zmq.CURVE_SECRETKEY, keys.client_secret.encode()),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.LINGER, 0),
        ):
            self._socket.setsockopt(option, value)
        self._send_frame = super(zmq.Socket, self._socket).send
        self._names: dict[Worker, bytes] = {}
        self._workers_of: dict[bytes, tuple[Worker, ...]] = {}  # by connection
        for number in range(num_connections):
            name = b"%04d" % number
            self._socket.setsockopt(zmq.CONNECT_ROUTING_ID, name)
            self._socket.connect(address)
            self._workers_of[name] = tuple(self._workers[number::num_connections])
            for worker in self._workers_of[name]:
                self._names[worker] = name
                self._send(worker, Hello(PROTOCOL, worker, "load", 0, _INCARNATION, setup.text, ()))

    def join(self, timeout: Seconds) -> None:
        """Wait until the coordinator has welcomed all connections."""
        start, awaited = time.monotonic(), set(self._names.values())
        while awaited:
            waited = time.monotonic() - start
            if waited > timeout:
                raise PeerError(
                    "coordinator",
                    action="joining",
                    waited=waited,
                    cause=f"{len(awaited)} of {len(self._names)} workers have not joined",
                )
            for name, message in self._messages(0.1):
                if isinstance(message, Welcome):
                    awaited.discard(name)
                assert isinstance(message, Welcome | Accepted), message

    def start(self) -> None:
        for worker in self._workers:
            self._send_ready(worker, time.monotonic())

    def set_rate(self, per_s: float) -> None:
        """From now on, all workers together run `per_s` cycles per second."""
        self._period = len(self._workers) / per_s
        self._in_step = set(self._workers)

    def run(self, seconds: Seconds) -> Window:
        """Run for `seconds` and until a cycle has ended."""
        start, before = time.monotonic(), self.num_cycles
        now = start
        while now < start + (seconds if self.num_cycles > before else max(seconds, _STANDSTILL)):
            while self._due and self._due[0][0] <= now:
                self._send_ready(heapq.heappop(self._due)[1], now)
            until = self._due[0][0] if self._due else math.inf
            for name, message in self._messages(max(min(until, start + seconds) - now, 0.001)):
                self._answer(name, message, time.monotonic())
            now = time.monotonic()
        return Window(start, now, (self.num_cycles - before) / (now - start))

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _messages(self, timeout: Seconds) -> Iterator[tuple[bytes, Any]]:
        if not self._socket.poll(max(0, math.ceil(1e3 * timeout))):
            return
        receive, decode = self._socket.recv, self._decode
        try:
            for _ in range(_BATCH):
                name = receive(1)
                yield name, decode(receive(1))
        except zmq.Again:
            return

    def _answer(self, name: bytes, message: Any, now: Seconds) -> None:
        kind = type(message)
        if kind is Skip:
            self._end_cycle(message.worker, now)
            return
        if kind is Abort:  # of a group that this process answered late
            return  # Assign or Skip follows
        workers, times = self._workers_of[name], self.times
        if kind is Assign or kind is Commit:
            workers = tuple(worker for worker in message.members if self._names[worker] == name)
        for worker in workers:
            if kind is _Assign or kind is Assign:
                if times is not None:
                    times.assigned[worker, message.gid] = times.done[worker, message.gid] = now
                self._send(worker, Done(worker, message.gid, True, _INCARNATION))
            else:
                if times is not None:
                    times.committed[worker, message.gid] = now
                self._end_cycle(worker, now)

    def _end_cycle(self, worker: Worker, now: Seconds) -> None:
        self.num_cycles += 1
        if self._period:
            pause = 1 + self._random.uniform(-_JITTER, _JITTER)
            if worker in self._in_step:
                self._in_step.remove(worker)
                pause = self._random.random()
            heapq.heappush(self._due, (now + pause * self._period, worker))
        else:
            self._send_ready(worker, now)

    def _send_ready(self, worker: Worker, now: Seconds) -> None:
        self._clocks[worker] += 1
        if self.times is not None:
            self.times.ready[worker, self._clocks[worker]] = now
        self._send(worker, Ready(worker, self._clocks[worker], _INCARNATION))

    def _send(self, worker: Worker, message: FromWorker) -> None:
        self._send_frame(self._names[worker], 2)  # SNDMORE
        self._send_frame(self._encode(message), 0)


def _answer_times(
    log: Path, times: MessageTimes, windows: Sequence[Window]
) -> tuple[list[Seconds], list[Seconds], int]:
    """Replay the log; return the waits for Assign and for Commit, and the number of decisions.

    A wait counts if its answer was due in one of the windows, whenever it came.
    """
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
                waits, received = assigns, times.assigned
            elif isinstance(command, Commit):
                sent = [times.done.get((worker, command.gid)) for worker in command.members]
                due = None if None in sent else max(at for at in sent if at is not None)
                waits, received = commits, times.committed
            else:
                continue
            if due is not None and any(start <= due < end for start, end, _ in windows):
                answered = [received.get((worker, command.gid)) for worker in command.members]
                waits += [at - due for at in answered if at is not None]
    return assigns, commits, num_replayed


def _sent(event: Event, times: MessageTimes) -> Seconds | None:
    """Return when the message of an event was sent; None if that was not recorded."""
    if isinstance(event, Ready):
        return times.ready.get((event.worker, event.clock))
    return times.done.get((event.worker, event.gid)) if isinstance(event, Done) else None


def _p99(waits: list[Seconds]) -> Seconds:
    return statistics.quantiles(waits, n=100)[98]
