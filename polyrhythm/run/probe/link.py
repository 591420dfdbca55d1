"""One direction between two processes: its latency and bandwidth, measured with gloo messages.

Latency is half a round trip of a few bytes: the clocks of two machines do not agree well enough
to measure one direction. Bandwidth is that of a stream of messages whose receives are posted ahead,
from the arrival of the first to that of the last, without latency and request. Streams grow until
they last longer than a round trip, and are repeated until TCP no longer speeds up.

Every wait has a timeout. A process that loses a peer writes the peer's rank into the job's store
and aborts its process group, so that processes waiting for it notice at once, read the store, and
name the process that was lost first. The store may be lost as well: calls to it run in a thread,
with a timeout.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from polyrhythm.describe.sample import Sample
from polyrhythm.errors import PeerError, peer_errors
from polyrhythm.run.comm.process_groups import abort, connect_pairs, new_nccl_group, run_bounded
from polyrhythm.types import Bytes, BytesPerSecond, Seconds

if TYPE_CHECKING:
    from polyrhythm.run.probe.probe import ProbeEffort

# Tags of messages. PING, PONG and STREAM are the first of many, one per message.
NUMBER, LENGTH, CONTENT, SIZE, PING, PONG, STREAM = 1, 2, 3, 4, 10_000, 20_000, 30_000
_STORE_TIMEOUT: Seconds = 2.0  # for another process's loss to reach the store
_LOST = "polyrhythm/probe/lost/"
_NUM_AHEAD = 2  # receives of echoes posted ahead; also the smallest number of echoes
_NUM_PIECES = 5  # messages of a stream; the arrival of the first starts the clock
_SMALLEST: Bytes = 16 << 10
_LARGEST: Bytes = 32 << 20
_STEADY_RATIO = 1.15  # above it, compared to earlier streams, TCP is still speeding up
_MAX_GROWTH = 16
_MIN_STREAMS = 3  # measured even after the timeout: TCP may stall in one, after a packet loss
_NCCL_BYTES: Bytes = 64 << 20  # of a message: a millisecond even over NVLink
T = TypeVar("T")
_logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class PeerChannel:
    """Messages of one process to and from the others; raises PeerErrors that name the lost one."""

    rank: int
    world_size: int
    timeout: Seconds  # for one message, by default
    names: list[str] = field(init=False)  # of all processes, by rank, once known

    def __post_init__(self) -> None:
        self.names = [f"rank {rank}" for rank in range(self.world_size)]

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def start_send(self, tensor: Tensor, to: int, *, tag: int, action: str) -> Any:
        with self._waiting(to, action):
            return dist.isend(tensor, to, tag=tag)

    def start_receive(self, tensor: Tensor, sender: int, *, tag: int, action: str) -> Any:
        """Post a receive, best before the send: gloo sends only after the receive is posted."""
        with self._waiting(sender, action):
            return dist.irecv(tensor, sender, tag=tag)

    def finish(self, work: Any, peer: int, *, action: str, timeout: Seconds | None = None) -> None:
        """Wait for a send or a receive; raises PeerError."""
        remaining = max(1e-3, self.timeout if timeout is None else timeout)
        with self._waiting(peer, action):
            work.wait(timedelta(seconds=remaining))

    def finish_all(
        self, works: list[Any], peer: int, *, action: str, timeout: Seconds
    ) -> list[Seconds]:
        """Wait for all within `timeout`; return the times at which each finished."""
        deadline, times = time.monotonic() + timeout, []
        for work in works:
            self.finish(work, peer, action=action, timeout=deadline - time.monotonic())
            times.append(time.perf_counter())
        return times

    def send(
        self, tensor: Tensor, to: int, *, tag: int, action: str, timeout: Seconds | None = None
    ) -> None:
        work = self.start_send(tensor, to, tag=tag, action=action)
        self.finish(work, to, action=action, timeout=timeout)

    def receive(
        self, tensor: Tensor, sender: int, *, tag: int, action: str, timeout: Seconds | None = None
    ) -> None:
        work = self.start_receive(tensor, sender, tag=tag, action=action)
        self.finish(work, sender, action=action, timeout=timeout)

    def send_bytes(self, message: bytes, to: int, *, action: str, timeout: Seconds) -> None:
        content = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        for tensor, tag in ((torch.tensor([len(content)]), LENGTH), (content, CONTENT)):
            self.send(tensor, to, tag=tag, action=action, timeout=timeout)

    def receive_bytes(self, sender: int, *, action: str, timeout: Seconds) -> bytes:
        length = torch.zeros(1, dtype=torch.int64)
        self.receive(length, sender, tag=LENGTH, action=action, timeout=timeout)
        content = torch.zeros(int(length), dtype=torch.uint8)
        self.receive(content, sender, tag=CONTENT, action=action, timeout=timeout)
        return content.numpy().tobytes()

    def barrier(self, action: str, timeout: Seconds) -> None:
        """Wait for all processes. Rank 0 collects the messages, so that it can name a lost one."""
        message = torch.zeros(1)
        if self.rank > 0:
            self.send(message, 0, tag=NUMBER, action=action, timeout=timeout)
            self.receive(message, 0, tag=NUMBER, action=action, timeout=timeout)
            return
        # All concurrently: one after the other, each would take a round trip.
        deadline, messages = time.monotonic() + timeout, torch.zeros(self.world_size, 1)
        receives = [
            (rank, self.start_receive(messages[rank], rank, tag=NUMBER, action=action))
            for rank in self.others
        ]
        for rank, work in receives:
            self.finish(work, rank, action=action, timeout=deadline - time.monotonic())
        sends = [
            (rank, self.start_send(message, rank, tag=NUMBER, action=action))
            for rank in self.others
        ]
        for rank, work in sends:
            self.finish(work, rank, action=action, timeout=timeout)

    @contextmanager
    def _waiting(self, peer: int, action: str) -> Iterator[None]:
        try:
            with peer_errors(self.names[peer], action):
                yield
        except PeerError as error:
            culprit = self._first_lost(peer)
            cause = error.cause if culprit == peer else f"{self.names[peer]} has lost it"
            raise PeerError(
                self.names[culprit], action=action, waited=error.waited, cause=cause
            ) from None

    def _first_lost(self, peer: int) -> int:
        """Follow the losses reported in the store from `peer` to the first lost process."""
        store, culprit, seen = _get_default_store(), peer, {self.rank, peer}
        _call_with_timeout(
            lambda: store.set(f"{_LOST}{self.rank}", str(peer)), timeout=_STORE_TIMEOUT
        )
        assert dist.group.WORLD is not None, "the process group is initialised"
        abort(dist.group.WORLD)
        while (
            reported := _call_with_timeout(
                partial(_reported_loss, store, culprit), timeout=2 * _STORE_TIMEOUT
            )
        ) is not None:
            if reported in seen:
                break
            culprit = reported
            seen.add(culprit)
        if self.rank == 0:
            time.sleep(_STORE_TIMEOUT)  # rank 0 may host the store, which the others read
        return culprit


def _reported_loss(store: Any, rank: int) -> int | None:
    """Return the rank that process `rank` has lost; None if it reports none in time."""
    key, deadline = f"{_LOST}{rank}", time.monotonic() + _STORE_TIMEOUT
    while not store.check([key]):
        if time.monotonic() > deadline:
            return None
        time.sleep(0.05)
    return int(store.get(key))


def _call_with_timeout(call: Callable[[], T], *, timeout: Seconds) -> T | None:
    """Return the store's answer; None if the store is lost or does not answer.

    The store's own timeouts do not cover a server that was stopped. The thread that waits for it
    stays blocked outside of Python, and does not keep the interpreter from exiting.
    """
    answers: queue.SimpleQueue[T | None] = queue.SimpleQueue()

    def wait() -> None:
        try:
            answers.put(call())
        except RuntimeError:  # rank 0 is lost, and the store with it
            answers.put(None)

    threading.Thread(target=wait, name="store call", daemon=True).start()
    try:
        return answers.get(timeout=timeout)
    except queue.Empty:
        return None


def as_source(channel: PeerChannel, target: int, effort: "ProbeEffort") -> Sample:
    """Measure the one-way latency in seconds from this process to `target`."""
    latency = _ping(channel, target, effort)
    _send_streams(channel, target)
    return latency


def as_target(channel: PeerChannel, source: int, effort: "ProbeEffort") -> Sample:
    """Measure the bandwidth in bytes per second from `source` to this process."""
    _echo(channel, source)
    return _receive_streams(channel, source, effort)


def measure_nccl(
    channel: PeerChannel, source: int, target: int, device: torch.device, effort: "ProbeEffort"
) -> Sample | None:
    """Measure a pair over NCCL, called by both: latency on the source, bandwidth on the target.

    None, with a warning, if NCCL does not connect them.
    """
    pair, is_source = sorted((source, target)), channel.rank == source
    peer, found = pair.index(target if is_source else source), list[float]()
    action = f"NCCL between {channel.names[source]} and {channel.names[target]}"
    group = new_nccl_group(pair, "a probe", timeout=effort.timeout)
    assert group is not None, "it is used"

    def measure() -> None:
        torch.cuda.set_device(device)  # of this thread
        latencies = _nccl_round_trips(group, peer, device, effort.repeat, is_source=is_source)
        rates = _nccl_streams(group, peer, device, effort.repeat, is_source=is_source)
        found.extend(latencies if is_source else rates)

    try:
        connect_pairs(group, [peer], device, timeout=effort.timeout)
        run_bounded(measure, timeout=effort.timeout, action=action)
    except PeerError as error:  # a process that is lost is noticed after this round
        _logger.warning("%s is not measured: %s", action, error.cause)
        return None
    finally:
        abort(group)
    return Sample.of(found)


def _nccl_round_trips(
    group: dist.ProcessGroup, peer: int, device: torch.device, repeat: int, *, is_source: bool
) -> list[Seconds]:
    message, times = torch.zeros(8, dtype=torch.uint8, device=device), list[Seconds]()
    for _ in range(1 + repeat):  # the first one waits for the other process
        start = time.perf_counter()
        for sends in (is_source, not is_source):
            _pass_message(group, message, peer, sends=sends)
        torch.cuda.current_stream(device).synchronize()
        times.append((time.perf_counter() - start) / 2)
    return times[1:]


def _nccl_streams(
    group: dist.ProcessGroup, peer: int, device: torch.device, repeat: int, *, is_source: bool
) -> list[BytesPerSecond]:
    piece, rates = torch.zeros(_NCCL_BYTES, dtype=torch.uint8, device=device), list[float]()
    for _ in range(repeat):
        events = list[torch.cuda.Event]()
        for _ in range(_NUM_PIECES):
            _pass_message(group, piece, peer, sends=is_source)
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record(torch.cuda.current_stream(device))
        events[-1].synchronize()
        seconds = events[0].elapsed_time(events[-1]) / 1e3
        rates.append((_NUM_PIECES - 1) * _NCCL_BYTES / seconds)
    return rates


def _pass_message(group: dist.ProcessGroup, message: Tensor, peer: int, *, sends: bool) -> None:
    """Send or receive in the order of the current stream."""
    (group.send if sends else group.recv)([message], peer, 0).wait()


def _ping(channel: PeerChannel, target: int, effort: "ProbeEffort") -> Sample:
    """Each ping contains whether one more follows, for the receiver to post its receive ahead."""
    action = f"the round trip to {channel.names[target]}"
    # The first echo waits for the target to start, and does not count.
    num_echoes = 1 + max(10, 2 * effort.repeat)
    deadline, times = time.monotonic() + effort.pair_timeout / 2, list[Seconds]()
    echoes = [
        _receive_number(channel, target, PONG + number, action) for number in range(_NUM_AHEAD)
    ]
    for number, (_, echo) in enumerate(echoes):  # the list grows in the loop
        is_more = len(echoes) < num_echoes and time.monotonic() < deadline
        message = torch.tensor([int(is_more)])
        start = time.perf_counter()
        ping = channel.start_send(message, target, tag=PING + number, action=action)
        channel.finish(echo, target, action=action)
        times.append(time.perf_counter() - start)
        channel.finish(ping, target, action=action)
        if is_more:
            echoes.append(_receive_number(channel, target, PONG + len(echoes), action))
    return Sample.of([each / 2 for each in times[1:]])


def _echo(channel: PeerChannel, source: int) -> None:
    action = f"the round trip from {channel.names[source]}"
    pings = [
        _receive_number(channel, source, PING + number, action) for number in range(_NUM_AHEAD)
    ]
    for number, (is_more, ping) in enumerate(pings):  # the list grows in the loop
        channel.finish(ping, source, action=action)
        # The echo is timed: everything else comes after it.
        echo = channel.start_send(
            torch.ones_like(is_more), source, tag=PONG + number, action=action
        )
        if is_more:
            pings.append(_receive_number(channel, source, PING + len(pings), action))
        channel.finish(echo, source, action=action)


def _receive_number(channel: PeerChannel, sender: int, tag: int, action: str) -> tuple[Tensor, Any]:
    number = torch.zeros(1, dtype=torch.int64)
    return number, channel.start_receive(number, sender, tag=tag, action=action)


def _send_streams(channel: PeerChannel, target: int) -> None:
    """Send streams of the sizes that the target requests; size 0 ends them."""
    action = f"the bandwidth to {channel.names[target]}"
    # Not zeros: some networks compress data.
    pattern = torch.randint(256, (1 << 20,), dtype=torch.uint8)
    while size := _receive_size(channel, target, action):
        piece = pattern.repeat(-(-size // len(pattern)))[:size]
        sends = [
            channel.start_send(piece, target, tag=STREAM + number, action=action)
            for number in range(_NUM_PIECES)
        ]
        channel.finish_all(sends, target, action=action, timeout=channel.timeout)


def _receive_size(channel: PeerChannel, target: int, action: str) -> Bytes:
    size = torch.zeros(1, dtype=torch.int64)
    channel.receive(size, target, tag=SIZE, action=action)
    return int(size)


def _receive_streams(channel: PeerChannel, source: int, effort: "ProbeEffort") -> Sample:
    deadline = time.monotonic() + effort.pair_timeout
    size, rates = _SMALLEST, list[BytesPerSecond]()
    while True:
        waited, duration = _receive_stream(channel, source, size)
        is_late = time.monotonic() > deadline
        min_duration = min(max(effort.seconds, waited), effort.longest_stream)
        if duration < min_duration and size < _LARGEST and not is_late:
            growth = min(_MAX_GROWTH, max(2.0, 1.2 * min_duration / duration))
            size = min(_LARGEST, int(size * growth))
            rates.clear()
            continue
        rates.append((_NUM_PIECES - 1) * size / duration)
        last = rates[-effort.repeat :]
        is_steady = len(last) == effort.repeat and last[-1] <= _STEADY_RATIO * last[0]
        if is_steady or (is_late and len(last) >= min(_MIN_STREAMS, effort.repeat)):
            _request_stream(channel, source, 0)
            return Sample.of(last)


def _receive_stream(channel: PeerChannel, source: int, size: Bytes) -> tuple[Seconds, Seconds]:
    """Return the times from the request to the first piece, and from the first to the last.

    The former is slightly more than a round trip.
    """
    action = f"the bandwidth from {channel.names[source]}"
    piece = torch.empty(size, dtype=torch.uint8)  # shared by all receives: contents are not read
    receives = [
        channel.start_receive(piece, source, tag=STREAM + number, action=action)
        for number in range(_NUM_PIECES)
    ]
    deadline, start = time.monotonic() + channel.timeout, time.perf_counter()
    _request_stream(channel, source, size)
    arrivals = channel.finish_all(
        receives, source, action=action, timeout=deadline - time.monotonic()
    )
    return arrivals[0] - start, max(1e-9, arrivals[-1] - arrivals[0])


def _request_stream(channel: PeerChannel, source: int, size: Bytes) -> None:
    action = f"the bandwidth from {channel.names[source]}"
    channel.send(torch.tensor([size]), source, tag=SIZE, action=action)
