"""The switch: one process that carries every packet of the lab, each by the channel of its pair.

It reads the hosts' TUN devices, delivers what is due, obeys orders on a Unix socket, and watches
itself. It ends when its owner does, which it learns from the end of the lifeline, a pipe: then it
kills what runs on the hosts and removes its socket.
"""

import contextlib
import ctypes
import gc
import heapq
import math
import os
import select
import signal
import socket
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from polyrhythm.lab.channel import Channel
from polyrhythm.lab.lateness import Lateness
from polyrhythm.lab.namespace import Host
from polyrhythm.lab.orders import (
    Answer,
    AnyOrder,
    ChangeLinks,
    GetHosts,
    GetReport,
    HostEntry,
    KillHost,
    OwnProcess,
    PairCounters,
    PauseHost,
    Punctuality,
    Report,
    ResetReport,
    ReviveHost,
    decode_order,
    encode,
)
from polyrhythm.lab.packet import MOST_BYTES, destination, wire_bytes
from polyrhythm.lab.session import Session
from polyrhythm.types import Seconds

TURN: Seconds = 2e-4  # looks at the devices at most so often: packets are read in batches
READS = 64  # packets of one host in a turn, so that none is forgotten for another
REAL_TIME_PRIORITY = 10
IDLE: Seconds = 1.0


def serve(
    hosts: Sequence[tuple[str, Host]],
    channels: list[list[Channel]],
    listening: socket.socket,
    lifeline: int,
) -> None:
    """Carry packets until the lifeline ends. `channels[i][j]` goes from host i to host j."""
    gc.disable()  # nothing here makes cycles, and a collection is a pause
    _be_punctual()
    switch = Switch(hosts, channels)
    try:
        switch.loop(listening, lifeline)
    finally:
        with contextlib.suppress(OSError):
            Path(listening.getsockname()).unlink()
        switch.end_sessions()


class Switch:
    def __init__(self, hosts: Sequence[tuple[str, Host]], channels: list[list[Channel]]) -> None:
        self._hosts, self._channels = hosts, channels
        self._tuns = [host.tun for _, host in hosts]
        self._number = {tun: number for number, tun in enumerate(self._tuns)}
        self._sessions: list[Session] = []
        self._cut_off: set[int] = set()
        # One entry for each channel that carries something: (next arrival, number, channel, TUN)
        self._due: list[tuple[Seconds, int, Channel, int]] = []
        self._later: list[tuple[Seconds, int, AnyOrder]] = []
        self._num_orders = 0
        self._longest_turn: Seconds = 0.0
        self._reset()

    def loop(self, listening: socket.socket, lifeline: int) -> None:
        clients: dict[int, tuple[socket.socket, bytearray]] = {}
        turn = time.monotonic()
        while True:
            self._obey_later(time.monotonic())
            self._deliver(time.monotonic())
            self._longest_turn = max(self._longest_turn, time.monotonic() - turn)
            time.sleep(max(0.0, turn + TURN - time.monotonic()))
            watched = [*self._tuns, listening.fileno(), lifeline, *clients]
            ready, _, _ = select.select(watched, [], [], self._rest())
            turn = time.monotonic()
            for file in ready:
                if file in self._number:
                    self._receive(file)
                elif file == lifeline:
                    return
                elif file == listening.fileno():
                    client, _ = listening.accept()
                    clients[client.fileno()] = (client, bytearray())
                else:
                    self._converse(clients, file)

    def _rest(self) -> Seconds:
        next_time = min(
            self._due[0][0] if self._due else math.inf,
            self._later[0][0] if self._later else math.inf,
        )
        return min(IDLE, max(0.0, next_time - time.monotonic()))

    def _receive(self, tun: int) -> None:
        source = self._number[tun]
        channels, num_hosts = self._channels[source], len(self._tuns)
        for _ in range(READS):
            try:
                packet = os.read(tun, MOST_BYTES)
            except OSError:  # nothing more to read
                return
            target = destination(packet, num_hosts)
            if target is None or target == source:
                self._strays += 1
                continue
            channel = channels[target]
            if source in self._cut_off or target in self._cut_off:
                channel.drops += 1
                continue
            idle = channel.next_arrival() == math.inf
            channel.offer(time.monotonic(), wire_bytes(packet), packet)
            if idle:
                self._expect(source, target, channel)

    def _expect(self, source: int, target: int, channel: Channel) -> None:
        if (due := channel.next_arrival()) < math.inf:
            number = source * len(self._tuns) + target
            heapq.heappush(self._due, (due, number, channel, self._tuns[target]))

    def _deliver(self, now: Seconds) -> None:
        due = self._due
        while due and due[0][0] <= now:
            _, number, channel, tun = heapq.heappop(due)
            for arrival, packet in channel.arrived(now):
                self._lateness.add(time.monotonic() - arrival)
                with contextlib.suppress(
                    OSError
                ):  # its device is full or gone: lost, as on any host
                    os.write(tun, packet)
            if (next_due := channel.next_arrival()) < math.inf:
                heapq.heappush(due, (next_due, number, channel, tun))

    def _converse(self, clients: dict[int, tuple[socket.socket, bytearray]], file: int) -> None:
        client, unread = clients[file]
        try:
            received = client.recv(1 << 20)
            unread += received
            *lines, rest = unread.split(b"\n")
            unread[:] = rest
            for line in lines:
                client.sendall(encode(self._answer(bytes(line))) + b"\n")
        except OSError:
            received = b""
        if not received:
            client.close()
            del clients[file]

    def _answer(self, line: bytes) -> Answer:
        try:
            order = decode_order(line)
            if order.at is not None and order.at > time.monotonic():
                self._num_orders += 1
                heapq.heappush(self._later, (order.at, self._num_orders, order))
                return Answer()
            return self._obey(order)
        except (msgspec.MsgspecError, IndexError) as error:
            return Answer(refused=f"{type(error).__name__}: {error}")

    def _obey_later(self, now: Seconds) -> None:
        while self._later and self._later[0][0] <= now:
            self._obey(heapq.heappop(self._later)[2])

    def _obey(self, order: AnyOrder) -> Answer:
        match order:
            case ChangeLinks():
                for source, target in order.pairs:
                    self._channels[source][target].change(
                        time.monotonic(),
                        latency=order.latency,
                        bandwidth=order.bandwidth,
                        lost=order.lost,
                    )
            case KillHost():
                if order.silent:
                    self._cut_off.add(order.host)
                self._signal(order.host, signal.SIGKILL)
            case ReviveHost():
                self._cut_off.discard(order.host)
            case PauseHost():
                for other in range(len(self._hosts)):
                    for a, b in ((order.host, other), (other, order.host)):
                        self._channels[a][b].change(time.monotonic(), held=order.paused)
                self._signal(order.host, signal.SIGSTOP if order.paused else signal.SIGCONT)
            case OwnProcess():
                self._sessions.append(Session(order.host, order.pid))
            case GetHosts():
                return Answer(hosts=self._entries())
            case ResetReport():
                self._reset()
            case GetReport():
                return Answer(report=self._report())
        self._due.clear()
        for source, row in enumerate(self._channels):
            for target, channel in enumerate(row):
                self._expect(source, target, channel)
        return Answer()

    def _signal(self, host: int, what: signal.Signals) -> None:
        for session in self._sessions:
            if session.host == host:
                session.signal(what)

    def end_sessions(self) -> None:
        for session in self._sessions:
            session.signal(signal.SIGKILL)

    def _entries(self) -> tuple[HostEntry, ...]:
        running = Counter(session.host for session in self._sessions if session.is_alive())
        return tuple(
            HostEntry(
                name=name,
                address=host.address,
                namespace=f"/proc/{os.getpid()}/fd/{host.namespace}",
                processes=running[number],
            )
            for number, (name, host) in enumerate(self._hosts)
        )

    def _reset(self) -> None:
        self._lateness = Lateness()
        self._longest_turn = 0.0
        self._strays = 0
        self._since, self._cpu = time.monotonic(), time.process_time()
        for row in self._channels:
            for channel in row:
                channel.reset_counters()

    def _report(self) -> Report:
        now = time.monotonic()
        elapsed = now - self._since
        pairs = [
            PairCounters(
                source=source,
                target=target,
                packets=channel.packets,
                wire_bytes=channel.wire_bytes,
                drops=channel.drops,
                backlog=channel.backlog(now),
                peak_backlog=channel.peak_backlog,
            )
            for source, row in enumerate(self._channels)
            for target, channel in enumerate(row)
            if channel.packets or channel.drops or channel.backlog(now)
        ]
        return Report(
            elapsed=elapsed,
            strays=self._strays,
            pairs=tuple(pairs),
            punctuality=Punctuality(
                late_p50=self._lateness.quantile(0.5),
                late_p99=self._lateness.quantile(0.99),
                late_max=self._lateness.longest,
                busy=(time.process_time() - self._cpu) / elapsed if elapsed else 0.0,
                longest_turn=self._longest_turn,
            ),
        )


def _be_punctual() -> None:
    """Wake up on time, and before the hosts' own work; without the right to, as well as it goes."""
    pr_set_timerslack = 29
    ctypes.CDLL(None).prctl(pr_set_timerslack, 1)  # 1 ns; the default is 50 us
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(REAL_TIME_PRIORITY))
    except PermissionError:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, -20)
