"""Workers that only speak: the load on a coordinator, from one process and one thread.

One socket holds all connections (a ROUTER that connects many times, each time under another name),
so each worker has a TCP connection with CURVE of its own, as in a job; or fewer connections speak
for several workers each. A worker says Ready, answers Assign with Done at once, and is through with
its cycle at Commit (or Skip).
"""

import gc
import heapq
import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from polyrhythm.errors import PeerError
from polyrhythm.run.coordinator.keys import JobKeys
from polyrhythm.run.coordinator.wire import PROTOCOL, Accepted, FromWorker, Hello, Welcome
from polyrhythm.sync.protocol import Assign, Commit, Done, Ready, Skip
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Seconds, Worker

INCARNATION = 1
_STANDSTILL: Seconds = 30.0  # of a machine that is busy elsewhere
BATCH = 64  # messages between two looks at who is to begin
JITTER = 0.1  # of a worker's period, so that they do not come to march in step


@dataclass(slots=True)
class Times:
    """When what was sent, and when what came: all on the clock that the coordinator has, too."""

    ready: dict[tuple[Worker, int], Seconds] = field(default_factory=dict)  # by clock
    done: dict[tuple[Worker, int], Seconds] = field(default_factory=dict)  # by gid
    assigned: dict[tuple[Worker, int], Seconds] = field(default_factory=dict)
    committed: dict[tuple[Worker, int], Seconds] = field(default_factory=dict)


class _Assign(msgspec.Struct, frozen=True, array_like=True, tag="Assign", gc=False):
    """As much of it as a worker with a connection of its own needs: to read is not to measure."""

    gid: int


class _Commit(msgspec.Struct, frozen=True, array_like=True, tag="Commit", gc=False):
    gid: int


class Load:
    def __init__(self, address: str, keys: JobKeys, setup: Setup, num_connections: int) -> None:
        self.num_cycles = 0
        self.times: Times | None = None  # recorded if there are any
        self._workers = [
            Worker(s, p) for s in range(setup.num_stages) for p in range(setup.num_pipelines)
        ]
        self._clocks = dict.fromkeys(self._workers, 0)
        self._encode = msgspec.msgpack.Encoder().encode
        has_own = num_connections == len(self._workers)
        kinds = Accepted | Welcome | Skip | (_Assign | _Commit if has_own else Assign | Commit)
        self._decode = msgspec.msgpack.Decoder(kinds).decode
        self._period: Seconds = 0.0  # of a worker; 0 to begin anew at once
        self._in_step: set[Worker] = set()  # who has yet to fall out of step with the others
        self._begins: list[tuple[Seconds, Worker]] = []  # a heap
        self._chance = random.Random(0)
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
        self._send = super(zmq.Socket, self._socket).send
        self._names: dict[Worker, bytes] = {}
        self._behind: dict[bytes, tuple[Worker, ...]] = {}  # workers, by connection
        for number in range(num_connections):
            name = b"%04d" % number
            self._socket.setsockopt(zmq.CONNECT_ROUTING_ID, name)
            self._socket.connect(address)
            self._behind[name] = tuple(self._workers[number::num_connections])
            for worker in self._behind[name]:
                self._names[worker] = name
                hello = Hello(PROTOCOL, worker, "load", 0, INCARNATION, setup.text, ())
                self._say(worker, hello)

    def join(self, timeout: Seconds) -> None:
        """Until all connections are welcomed."""
        began, awaited = time.monotonic(), set(self._names.values())
        while awaited:
            waited = time.monotonic() - began
            if waited > timeout:
                raise PeerError(
                    "coordinator",
                    action="joining",
                    waited=waited,
                    cause=f"{len(awaited)} of {len(self._names)} workers are not welcome yet",
                )
            for name, message in self._messages(0.1):
                if isinstance(message, Welcome):
                    awaited.discard(name)
                assert isinstance(message, Welcome | Accepted), message

    def begin(self) -> None:
        for worker in self._workers:
            self._ready(worker, time.monotonic())

    def pace(self, per_s: float) -> None:
        """From now on, all workers together go through so many cycles per second."""
        self._period = len(self._workers) / per_s
        self._in_step = set(self._workers)

    def run(self, seconds: Seconds) -> float:
        """For so long, and until there was a cycle; the cycles per second."""
        began, before = time.monotonic(), self.num_cycles
        now = began
        while now < began + (seconds if self.num_cycles > before else max(seconds, _STANDSTILL)):
            while self._begins and self._begins[0][0] <= now:
                self._ready(heapq.heappop(self._begins)[1], now)
            until = self._begins[0][0] if self._begins else math.inf
            for name, message in self._messages(max(min(until, began + seconds) - now, 0.001)):
                self._obey(name, message, time.monotonic())
            now = time.monotonic()
        return (self.num_cycles - before) / (now - began)

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _messages(self, timeout: Seconds) -> Iterator[tuple[bytes, Any]]:
        if not self._socket.poll(max(0, math.ceil(1e3 * timeout))):
            return
        receive, decode = self._socket.recv, self._decode
        try:
            for _ in range(BATCH):
                name = receive(1)
                yield name, decode(receive(1))
        except zmq.Again:
            return

    def _obey(self, name: bytes, message: Any, now: Seconds) -> None:
        if isinstance(message, Skip):
            self._through(message.worker, now)
            return
        workers, times = self._behind[name], self.times
        if isinstance(message, Assign | Commit):
            workers = tuple(worker for worker in message.members if self._names[worker] == name)
        for worker in workers:
            if isinstance(message, Assign | _Assign):
                if times is not None:
                    times.assigned[worker, message.gid] = times.done[worker, message.gid] = now
                self._say(worker, Done(worker, message.gid, True, INCARNATION))
            else:
                if times is not None:
                    times.committed[worker, message.gid] = now
                self._through(worker, now)

    def _through(self, worker: Worker, now: Seconds) -> None:
        self.num_cycles += 1
        if self._period:
            pause = 1 + self._chance.uniform(-JITTER, JITTER)
            if worker in self._in_step:
                self._in_step.remove(worker)
                pause = self._chance.random()
            heapq.heappush(self._begins, (now + pause * self._period, worker))
        else:
            self._ready(worker, now)

    def _ready(self, worker: Worker, now: Seconds) -> None:
        self._clocks[worker] += 1
        if self.times is not None:
            self.times.ready[worker, self._clocks[worker]] = now
        self._say(worker, Ready(worker, self._clocks[worker], INCARNATION))

    def _say(self, worker: Worker, message: FromWorker) -> None:
        self._send(self._names[worker], 2)  # SNDMORE
        self._send(self._encode(message), 0)


@contextmanager
def loaded(address: str, keys: JobKeys, setup: Setup, num_connections: int) -> Iterator[Load]:
    """Joined. Nothing is collected meanwhile, so that no pause of ours counts as the other's."""
    load = Load(address, keys, setup, num_connections)
    gc.disable()
    try:
        load.join(timeout=30.0)
        yield load
    finally:
        gc.enable()
        load.close()
