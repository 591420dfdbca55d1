"""Latency and bandwidth of one direction between two processes, measured with gloo messages.

Latency is half a round trip of a few bytes: the clocks of two machines do not agree well enough
to measure one direction. Bandwidth is that of a stream of messages whose receives are posted ahead,
from the arrival of the first to that of the last, without latency and request. Streams grow until
they last longer than a round trip, and are repeated until TCP no longer speeds up.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyrhythm.describe.sample import Sample
from polyrhythm.run.probe.channel import PING, PONG, SIZE, STREAM, PeerChannel
from polyrhythm.run.probe.effort import ProbeEffort
from polyrhythm.types import Bytes, BytesPerSecond, Seconds

_NUM_AHEAD = 2  # receives of echoes posted ahead; also the smallest number of echoes
_NUM_PIECES = 5  # messages of a stream; the arrival of the first starts the clock
_SMALLEST: Bytes = 16 << 10
_LARGEST: Bytes = 32 << 20
_STEADY_RATIO = 1.15  # above it, compared to earlier streams, TCP is still speeding up
_MAX_GROWTH = 16
_MIN_STREAMS = 3  # measured even after the timeout: TCP may stall in one, after a packet loss


def as_source(channel: PeerChannel, target: int, effort: ProbeEffort) -> Sample:
    """Measure the one-way latency in seconds from this process to `target`."""
    latency = _ping(channel, target, effort)
    _send_streams(channel, target)
    return latency


def as_target(channel: PeerChannel, source: int, effort: ProbeEffort) -> Sample:
    """Measure the bandwidth in bytes per second from `source` to this process."""
    _echo(channel, source)
    return _receive_streams(channel, source, effort)


def _ping(channel: PeerChannel, target: int, effort: ProbeEffort) -> Sample:
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
    channel.receive(size, target, tag=SIZE, action=action, timeout=channel.timeout)
    return int(size)


def _receive_streams(channel: PeerChannel, source: int, effort: ProbeEffort) -> Sample:
    deadline = time.monotonic() + effort.pair_timeout
    size, rates = _SMALLEST, list[BytesPerSecond]()
    while True:
        stream = _receive_stream(channel, source, size)
        is_late = time.monotonic() > deadline
        min_duration = min(max(effort.seconds, stream.waited), effort.longest_stream)
        if stream.duration < min_duration and size < _LARGEST and not is_late:
            growth = min(_MAX_GROWTH, max(2.0, 1.2 * min_duration / stream.duration))
            size = min(_LARGEST, int(size * growth))
            rates.clear()
            continue
        rates.append(stream.rate)
        last = rates[-effort.repeat :]
        is_steady = len(last) == effort.repeat and last[-1] <= _STEADY_RATIO * last[0]
        if is_steady or (is_late and len(last) >= min(_MIN_STREAMS, effort.repeat)):
            _request_stream(channel, source, 0)
            return Sample.of(last)


@dataclass(frozen=True, slots=True)
class _Stream:
    waited: Seconds  # from the request to the first piece: slightly more than a round trip
    duration: Seconds  # from the first piece to the last
    rate: BytesPerSecond


def _receive_stream(channel: PeerChannel, source: int, size: Bytes) -> _Stream:
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
    duration = max(1e-9, arrivals[-1] - arrivals[0])
    return _Stream(arrivals[0] - start, duration, (_NUM_PIECES - 1) * size / duration)


def _request_stream(channel: PeerChannel, source: int, size: Bytes) -> None:
    action = f"the bandwidth from {channel.names[source]}"
    channel.send(torch.tensor([size]), source, tag=SIZE, action=action, timeout=channel.timeout)
