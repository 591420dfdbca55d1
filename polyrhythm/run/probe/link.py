"""One direction between two processes: its latency and its bandwidth, as gloo's messages have them.

Latency is half a round trip of a few bytes: the clocks of two machines do not agree well enough
for one way alone. Bandwidth is that of a stream of messages that were asked for ahead, from the
arrival of the first to that of the last: neither latency nor the way to ask is in it. Streams grow
until they last longer than a round trip, and are repeated until TCP carries them no faster.
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

_AHEAD = 2  # echoes that are asked for before they are sent: the least of them that there are
_PIECES = 5  # of a stream; the first one's arrival starts the clock
_SMALLEST: Bytes = 16 << 10
_LARGEST: Bytes = 32 << 20
_STEADY = 1.15  # more than so many times as fast as some streams before: TCP is still finding out
_MOST_GROWTH = 16
_ENOUGH = 3  # streams that are measured however long it takes: TCP may stall in one, after a loss


def as_source(channel: PeerChannel, target: int, effort: ProbeEffort) -> Sample:
    """The latency in seconds, one way, of what this process sends to `target`."""
    latency = _ask_echoes(channel, target, effort)
    _send_streams(channel, target)
    return latency


def as_target(channel: PeerChannel, source: int, effort: ProbeEffort) -> Sample:
    """The bandwidth in bytes per second of what `source` sends to this process."""
    _echo(channel, source)
    return _receive_streams(channel, source, effort)


def _ask_echoes(channel: PeerChannel, target: int, effort: ProbeEffort) -> Sample:
    """A ping says whether one more comes after those asked for: that must happen ahead of them."""
    action = f"the round trip to {channel.names[target]}"
    # The first one tells that the target is there, and does not count.
    num_echoes = 1 + max(10, 2 * effort.repeat)
    deadline, times = time.monotonic() + effort.pair_timeout / 2, list[Seconds]()
    echoes = [_ask_number(channel, target, PONG + number, action) for number in range(_AHEAD)]
    for number, (_, echo) in enumerate(echoes):  # which grow meanwhile
        is_more = len(echoes) < num_echoes and time.monotonic() < deadline
        message = torch.tensor([int(is_more)])
        began = time.perf_counter()
        ping = channel.start_send(message, target, tag=PING + number, action=action)
        channel.finish(echo, target, action=action)
        times.append(time.perf_counter() - began)
        channel.finish(ping, target, action=action)
        if is_more:
            echoes.append(_ask_number(channel, target, PONG + len(echoes), action))
    return Sample.of([each / 2 for each in times[1:]])


def _echo(channel: PeerChannel, source: int) -> None:
    action = f"the round trip from {channel.names[source]}"
    pings = [_ask_number(channel, source, PING + number, action) for number in range(_AHEAD)]
    for number, (is_more, ping) in enumerate(pings):  # which grow meanwhile
        channel.finish(ping, source, action=action)
        # It is the echo that is timed: what is left to do comes after it.
        echo = channel.start_send(
            torch.ones_like(is_more), source, tag=PONG + number, action=action
        )
        if is_more:
            pings.append(_ask_number(channel, source, PING + len(pings), action))
        channel.finish(echo, source, action=action)


def _ask_number(channel: PeerChannel, sender: int, tag: int, action: str) -> tuple[Tensor, Any]:
    number = torch.zeros(1, dtype=torch.int64)
    return number, channel.start_receive(number, sender, tag=tag, action=action)


def _send_streams(channel: PeerChannel, target: int) -> None:
    """As many as the target asks for, of the size that it says; 0 is the end."""
    action = f"the bandwidth to {channel.names[target]}"
    # Not zeros: some networks compress what they carry.
    pattern = torch.randint(256, (1 << 20,), dtype=torch.uint8)
    while size := _asked_size(channel, target, action):
        piece = pattern.repeat(-(-size // len(pattern)))[:size]
        sends = [
            channel.start_send(piece, target, tag=STREAM + number, action=action)
            for number in range(_PIECES)
        ]
        channel.finish_all(sends, target, action=action, timeout=channel.timeout)


def _asked_size(channel: PeerChannel, target: int, action: str) -> Bytes:
    size = torch.zeros(1, dtype=torch.int64)
    channel.receive(size, target, tag=SIZE, action=action, timeout=channel.timeout)
    return int(size)


def _receive_streams(channel: PeerChannel, source: int, effort: ProbeEffort) -> Sample:
    deadline = time.monotonic() + effort.pair_timeout
    size, rates = _SMALLEST, list[BytesPerSecond]()
    while True:
        stream = _stream(channel, source, size)
        is_late = time.monotonic() > deadline
        enough = min(max(effort.seconds, stream.waited), effort.longest_stream)
        if stream.lasted < enough and size < _LARGEST and not is_late:
            growth = min(_MOST_GROWTH, max(2.0, 1.2 * enough / stream.lasted))
            size = min(_LARGEST, int(size * growth))
            rates.clear()
            continue
        rates.append(stream.rate)
        last = rates[-effort.repeat :]
        is_steady = len(last) == effort.repeat and last[-1] <= _STEADY * last[0]
        if is_steady or (is_late and len(last) >= min(_ENOUGH, effort.repeat)):
            _ask_for(channel, source, 0)
            return Sample.of(last)


@dataclass(frozen=True, slots=True)
class _Stream:
    waited: Seconds  # from asking for it to its first piece: a round trip and a little more
    lasted: Seconds  # from its first piece to its last
    rate: BytesPerSecond


def _stream(channel: PeerChannel, source: int, size: Bytes) -> _Stream:
    action = f"the bandwidth from {channel.names[source]}"
    piece = torch.empty(size, dtype=torch.uint8)  # one for all: nobody looks at what came
    asked = [
        channel.start_receive(piece, source, tag=STREAM + number, action=action)
        for number in range(_PIECES)
    ]
    deadline, began = time.monotonic() + channel.timeout, time.perf_counter()
    _ask_for(channel, source, size)
    arrivals = channel.finish_all(asked, source, action=action, timeout=deadline - time.monotonic())
    lasted = max(1e-9, arrivals[-1] - arrivals[0])
    return _Stream(arrivals[0] - began, lasted, (_PIECES - 1) * size / lasted)


def _ask_for(channel: PeerChannel, source: int, size: Bytes) -> None:
    action = f"the bandwidth from {channel.names[source]}"
    channel.send(torch.tensor([size]), source, tag=SIZE, action=action, timeout=channel.timeout)
