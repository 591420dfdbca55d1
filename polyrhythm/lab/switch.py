"""The switch: one process that carries every packet of the lab, each by the channel of its pair.

It reads the hosts' TUN devices, delivers what is due, obeys orders on Unix sockets, and watches
itself. It ends when it is told to, or when its owner ends, in whatever way: then it kills what
runs on the hosts and removes its socket.
"""

import contextlib
import ctypes
import gc
import heapq
import math
import os
import select
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from polyrhythm.lab.channel import Channel
from polyrhythm.lab.clients import Clients
from polyrhythm.lab.lateness import Lateness
from polyrhythm.lab.namespace import Host
from polyrhythm.lab.orders import (
    Answer,
    AnyOrder,
    ChangeLinks,
    EndLab,
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
from polyrhythm.lab.population import Population
from polyrhythm.lab.residents import namespace_id
from polyrhythm.types import Seconds

TURN: Seconds = 2e-4  # looks at the devices at most so often: packets are read in batches
READS = 64  # packets of one host in a turn, so that none is forgotten for another
REAL_TIME_PRIORITY = 10
IDLE: Seconds = 1.0


def serve(
    hosts: Sequence[tuple[str, Host]],
    channels: list[list[Channel]],
    listening: socket.socket,
    owner: int,
    owners_socket: socket.socket,
) -> None:
    """Carry packets while `owner`, our parent, lives. `channels[i][j]` goes from host i to j."""
    gc.disable()  # nothing here makes cycles, and a collection is a pause
    _be_punctual()
    owners_end = os.pidfd_open(owner)
    switch = Switch(hosts, channels)
    clients = Clients(listening, switch.answer)
    clients.add(owners_socket)
    try:
        if os.getppid() == owner:
            switch.loop(clients, owners_end)
    finally:
        with contextlib.suppress(OSError):
            Path(listening.getsockname()).unlink()
        switch.population.end()


class Switch:
    def __init__(self, hosts: Sequence[tuple[str, Host]], channels: list[list[Channel]]) -> None:
        self._hosts, self._channels = hosts, channels
        self._tuns = [host.tun for _, host in hosts]
        self._number = {tun: number for number, tun in enumerate(self._tuns)}
        self.population = Population([namespace_id(host.namespace) for _, host in hosts])
        # One entry for each channel that carries something: (next arrival, number, channel, TUN)
        self._due: list[tuple[Seconds, int, Channel, int]] = []
        self._later: list[tuple[Seconds, int, AnyOrder]] = []
        self._num_orders = 0
        self._ended = False
        self._reset()

    def loop(self, clients: Clients, owners_end: int) -> None:
        turn = time.monotonic()
        while not self._ended:
            self._obey_later(time.monotonic())
            self._deliver(time.monotonic())
            time.sleep(max(0.0, turn + TURN - time.monotonic()))
            watched = [*self._tuns, owners_end, *clients.reading]
            readable, writable, _ = select.select(watched, clients.writing, [], self._rest())
            turn = time.monotonic()
            if owners_end in readable:
                return
            for file in {*readable, *writable}:
                if file in self._number:
                    self._receive(file)
                else:
                    clients.serve(file)

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
            if self.population.is_cut_off(source) or self.population.is_cut_off(target):
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

    def answer(self, line: bytes) -> bytes:
        """To an order, as JSON, its answer."""
        try:
            order = decode_order(line)
            self._check(order)
        except (msgspec.MsgspecError, ValueError) as error:
            return encode(Answer(refused=str(error)))
        if order.at is not None and order.at > time.monotonic():
            self._num_orders += 1
            heapq.heappush(self._later, (order.at, self._num_orders, order))
            return encode(Answer())
        return encode(self._obey(order))

    def _check(self, order: AnyOrder) -> None:
        named = [host for pair in order.pairs for host in pair] if hasattr(order, "pairs") else []
        if hasattr(order, "host"):
            named.append(order.host)
        if any(host >= len(self._hosts) for host in named):
            raise ValueError(
                f"there are {len(self._hosts)} hosts, not one with number {max(named)}"
            )

    def _obey_later(self, now: Seconds) -> None:
        while self._later and self._later[0][0] <= now:
            self._obey(heapq.heappop(self._later)[2])

    def _obey(self, order: AnyOrder) -> Answer:
        match order:
            case ChangeLinks():
                self._change_links(order)
            case KillHost():
                self.population.kill(order.host, silent=order.silent)
            case ReviveHost():
                self.population.revive(order.host)
            case PauseHost():
                self._pause(order.host, order.paused)
            case OwnProcess():
                self.population.welcome(order.pid, order.host)
            case EndLab():
                self._ended = True
            case ResetReport():
                self._reset()
            case GetHosts():
                return Answer(hosts=self._entries())
            case GetReport():
                return Answer(report=self._report())
        return Answer()

    def _change_links(self, order: ChangeLinks) -> None:
        for source, target in order.pairs:
            self._channels[source][target].change(
                time.monotonic(),
                latency=order.latency,
                bandwidth=order.bandwidth,
                lost=order.lost,
            )
        self._expect_all()

    def _pause(self, host: int, paused: bool) -> None:
        self.population.pause(host, paused=paused)
        for other in range(len(self._hosts)):
            held = self.population.pauses(host) + self.population.pauses(other) > 0
            for a, b in ((host, other), (other, host)):
                self._channels[a][b].change(time.monotonic(), held=held)
        self._expect_all()

    def _expect_all(self) -> None:
        self._due.clear()
        for source, row in enumerate(self._channels):
            for target, channel in enumerate(row):
                self._expect(source, target, channel)

    def _entries(self) -> tuple[HostEntry, ...]:
        return tuple(
            HostEntry(
                name=name,
                address=host.address,
                namespace=f"/proc/{os.getpid()}/fd/{host.namespace}",
                processes=self.population.count(number),
                killed=self.population.is_dead(number),
                pauses=self.population.pauses(number),
            )
            for number, (name, host) in enumerate(self._hosts)
        )

    def _reset(self) -> None:
        self._lateness = Lateness()
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
