"""The switch: one process that carries every packet of the lab through its pair's channel.

It reads the hosts' TUN devices, delivers due packets, executes commands from Unix sockets, and
measures its own lateness. It ends on EndLab or when its owner ends, even by a kill; then it kills
all host processes and removes its socket.
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
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from polyrhythm.lab.channel import MAX_BYTES, Channel, destination, wire_bytes
from polyrhythm.lab.clients import Clients
from polyrhythm.lab.commands import (
    AnySwitchCommand,
    ChangeLinks,
    CommandReply,
    EndLab,
    GetHosts,
    GetReport,
    HostEntry,
    KillHost,
    PairCounters,
    PauseHost,
    RegisterProcess,
    ResetReport,
    ReviveHost,
    SwitchReport,
    SwitchTiming,
    decode_command,
    encode,
)
from polyrhythm.lab.host_state import HostStates, namespace_id
from polyrhythm.lab.namespace import Host
from polyrhythm.types import Seconds

POLL_INTERVAL: Seconds = 2e-4  # at least this long between polls, to read packets in batches
MAX_READS = 64  # packets of one host per poll, so that no host starves another
REAL_TIME_PRIORITY = 10
MAX_WAIT: Seconds = 1.0
_LEAST: Seconds = 1e-6  # upper end of the first bucket of lateness
_GROWTH = math.log(1.25)  # of the buckets


def serve(
    hosts: Sequence[tuple[str, Host]],
    channels: list[list[Channel]],
    listening: socket.socket,
    owner: int,
    owner_socket: socket.socket,
) -> None:
    """Run the switch until EndLab or the end of `owner`, the parent process.

    `channels[i][j]` carries packets from host i to host j.
    """
    gc.disable()  # nothing here makes cycles, and a collection delays packets
    _raise_priority()
    owner_pidfd = os.pidfd_open(owner)
    switch = Switch(hosts, channels)
    clients = Clients(listening, switch.reply_to)
    clients.add(owner_socket)
    try:
        if os.getppid() == owner:
            switch.loop(clients, owner_pidfd)
    finally:
        with contextlib.suppress(OSError):
            Path(listening.getsockname()).unlink()
        switch.host_states.end()


class Switch:
    """The state of the switch: channels, due packets, scheduled commands, counters."""

    def __init__(self, hosts: Sequence[tuple[str, Host]], channels: list[list[Channel]]) -> None:
        self._hosts, self._channels = hosts, channels
        self._tuns = [host.tun for _, host in hosts]
        self._number = {tun: number for number, tun in enumerate(self._tuns)}
        self.host_states = HostStates([namespace_id(host.namespace) for _, host in hosts])
        # One entry for each channel with packets: (next arrival, number, channel, TUN)
        self._due: list[tuple[Seconds, int, Channel, int]] = []
        self._scheduled: list[tuple[Seconds, int, AnySwitchCommand]] = []
        self._num_commands = 0
        self._ended = False
        self._reset()

    def loop(self, clients: Clients, owner_pidfd: int) -> None:
        last_poll = time.monotonic()
        while not self._ended:
            while self._scheduled and self._scheduled[0][0] <= time.monotonic():
                self._execute(heapq.heappop(self._scheduled)[2])
            self._deliver(time.monotonic())
            time.sleep(max(0.0, last_poll + POLL_INTERVAL - time.monotonic()))
            watched = [*self._tuns, owner_pidfd, *clients.reading]
            wait = self._time_to_next()
            readable, writable, _ = select.select(watched, clients.writing, [], wait)
            last_poll = time.monotonic()
            if owner_pidfd in readable:
                return
            for file in {*readable, *writable}:
                if file in self._number:
                    self._receive(file)
                else:
                    clients.serve(file)

    def _time_to_next(self) -> Seconds:
        next_time = min(
            self._due[0][0] if self._due else math.inf,
            self._scheduled[0][0] if self._scheduled else math.inf,
        )
        return min(MAX_WAIT, max(0.0, next_time - time.monotonic()))

    def _receive(self, tun: int) -> None:
        source = self._number[tun]
        channels, num_hosts = self._channels[source], len(self._tuns)
        for _ in range(MAX_READS):
            try:
                packet = os.read(tun, MAX_BYTES)
            except OSError:  # nothing more to read
                return
            target = destination(packet, num_hosts)
            if target is None or target == source:
                self._strays += 1
                continue
            channel = channels[target]
            if not self.host_states.disconnected.isdisjoint((source, target)):
                channel.drops += 1
                continue
            idle = channel.next_arrival() == math.inf
            channel.offer(time.monotonic(), wire_bytes(packet), packet)
            if idle:
                self._push_arrival(source, target, channel)

    def _push_arrival(self, source: int, target: int, channel: Channel) -> None:
        if (due := channel.next_arrival()) < math.inf:
            number = source * len(self._tuns) + target
            heapq.heappush(self._due, (due, number, channel, self._tuns[target]))

    def _deliver(self, now: Seconds) -> None:
        due = self._due
        while due and due[0][0] <= now:
            _, number, channel, tun = heapq.heappop(due)
            for arrival, packet in channel.arrived(now):
                self._lateness.add(time.monotonic() - arrival)
                with contextlib.suppress(OSError):  # device full or gone: lost, as on any host
                    os.write(tun, packet)
            if (next_deadline := channel.next_arrival()) < math.inf:
                heapq.heappush(due, (next_deadline, number, channel, tun))

    def reply_to(self, line: bytes) -> bytes:
        """Execute or schedule the command in a line of JSON; return the reply as JSON."""
        try:
            command = decode_command(line)
            self._check(command)
        except (msgspec.MsgspecError, ValueError) as error:
            return encode(CommandReply(refused=str(error)))
        if command.at is not None and command.at > time.monotonic():
            self._num_commands += 1
            heapq.heappush(self._scheduled, (command.at, self._num_commands, command))
            return encode(CommandReply())
        return encode(self._execute(command))

    def _check(self, command: AnySwitchCommand) -> None:
        named = [host for pair in getattr(command, "pairs", ()) for host in pair]
        if hasattr(command, "host"):
            named.append(command.host)
        if any(host >= len(self._hosts) for host in named):
            raise ValueError(f"no host {max(named)}: there are {len(self._hosts)}")

    def _execute(self, command: AnySwitchCommand) -> CommandReply:
        match command:
            case ChangeLinks():
                self._change_links(command)
            case KillHost():
                self.host_states.kill(command.host, silent=command.silent)
            case ReviveHost():
                self.host_states.revive(command.host)
            case PauseHost():
                self._pause(command.host, command.paused)
            case RegisterProcess():
                self.host_states.add_process(command.pid, command.host)
            case EndLab():
                self._ended = True
            case ResetReport():
                self._reset()
            case GetHosts():
                return CommandReply(hosts=self._entries())
            case GetReport():
                return CommandReply(report=self._report())
        return CommandReply()

    def _change_links(self, command: ChangeLinks) -> None:
        for source, target in command.pairs:
            self._channels[source][target].change(
                time.monotonic(),
                latency=command.latency,
                bandwidth=command.bandwidth,
                lost=command.lost,
            )
        self._push_all_arrivals()

    def _pause(self, host: int, paused: bool) -> None:
        self.host_states.pause(host, paused=paused)
        for other in range(len(self._hosts)):
            held = self.host_states.pauses[host] + self.host_states.pauses[other] > 0
            for a, b in ((host, other), (other, host)):
                self._channels[a][b].change(time.monotonic(), held=held)
        self._push_all_arrivals()

    def _push_all_arrivals(self) -> None:
        self._due.clear()
        for source, row in enumerate(self._channels):
            for target, channel in enumerate(row):
                self._push_arrival(source, target, channel)

    def _entries(self) -> tuple[HostEntry, ...]:
        return tuple(
            HostEntry(
                name=name,
                address=host.address,
                namespace=f"/proc/{os.getpid()}/fd/{host.namespace}",
                processes=self.host_states.count(number),
                killed=number in self.host_states.dead,
                pauses=self.host_states.pauses[number],
            )
            for number, (name, host) in enumerate(self._hosts)
        )

    def _reset(self) -> None:
        self._lateness = LatenessHistogram()
        self._strays = 0
        self._since, self._cpu = time.monotonic(), time.process_time()
        for row in self._channels:
            for channel in row:
                channel.reset_counters()

    def _report(self) -> SwitchReport:
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
        return SwitchReport(
            elapsed=elapsed,
            strays=self._strays,
            pairs=tuple(pairs),
            switch_timing=SwitchTiming(
                late_p50=self._lateness.quantile(0.5),
                late_p99=self._lateness.quantile(0.99),
                late_max=self._lateness.longest,
                busy=(time.process_time() - self._cpu) / elapsed if elapsed else 0.0,
            ),
        )


def _raise_priority() -> None:
    """Use real-time priority, so that packets go before host processes; otherwise a high nice."""
    pr_set_timerslack = 29
    ctypes.CDLL(None).prctl(pr_set_timerslack, 1)  # 1 ns; the default is 50 us
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(REAL_TIME_PRIORITY))
    except PermissionError:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, -20)


class LatenessHistogram:
    """Lateness in constant memory: each bucket is a quarter wider than the last."""

    def __init__(self) -> None:
        self.longest: Seconds = 0.0
        self._counts: Counter[int] = Counter()

    def add(self, late: Seconds) -> None:
        self.longest = max(self.longest, late)
        self._counts[0 if late <= _LEAST else math.ceil(math.log(late / _LEAST) / _GROWTH)] += 1

    def quantile(self, share: float) -> Seconds:
        """Return an upper bound of the quantile, at most 25 % too high; 0 without values."""
        counted, total = 0, self._counts.total()
        for bucket, count in sorted(self._counts.items()):
            counted += count
            if counted >= share * total:
                return min(self.longest, _LEAST * math.exp(bucket * _GROWTH))
        return 0.0
