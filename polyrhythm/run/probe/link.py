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
from polyrhythm.run.probe.effort import Effort
from polyrhythm.run.probe.talk import PING, PONG, SIZE, STREAM, Talk
from polyrhythm.types import Bytes, BytesPerSecond, Seconds

_AHEAD = 2  # echoes that are asked for before they are sent: the least of them that there are
_PIECES = 5  # of a stream; the first one's arrival starts the clock
_SMALLEST: Bytes = 16 << 10
_LARGEST: Bytes = 32 << 20
_STEADY = 1.15  # more than so many times as fast as some streams before: TCP is still finding out
_MOST_GROWTH = 16
_ENOUGH = 3  # streams that are measured however long it takes: TCP may stall in one, after a loss


def as_source(talk: Talk, target: int, effort: Effort) -> Sample:
    """The latency in seconds, one way, of what this process sends to `target`."""
    latency = _ask_echoes(talk, target, effort)
    _send_streams(talk, target)
    return latency


def as_target(talk: Talk, source: int, effort: Effort) -> Sample:
    """The bandwidth in bytes per second of what `source` sends to this process."""
    _echo(talk, source)
    return _receive_streams(talk, source, effort)


def _ask_echoes(talk: Talk, target: int, effort: Effort) -> Sample:
    """A ping says whether one more comes after those asked for: that must happen ahead of them."""
    action = f"the round trip to {talk.names[target]}"
    # The first one tells that the target is there, and does not count.
    num_echoes = 1 + max(10, 2 * effort.repeat)
    gives_up, times = time.monotonic() + effort.patience / 2, list[Seconds]()
    echoes = [_ask_number(talk, target, PONG + number, action) for number in range(_AHEAD)]
    for number, (_, echo) in enumerate(echoes):  # which grow meanwhile
        is_more = len(echoes) < num_echoes and time.monotonic() < gives_up
        word = torch.tensor([int(is_more)])
        began = time.perf_counter()
        ping = talk.start_send(word, target, tag=PING + number, action=action)
        talk.finish(echo, target, action=action)
        times.append(time.perf_counter() - began)
        talk.finish(ping, target, action=action)
        if is_more:
            echoes.append(_ask_number(talk, target, PONG + len(echoes), action))
    return Sample.of([each / 2 for each in times[1:]])


def _echo(talk: Talk, source: int) -> None:
    action = f"the round trip from {talk.names[source]}"
    pings = [_ask_number(talk, source, PING + number, action) for number in range(_AHEAD)]
    for number, (is_more, ping) in enumerate(pings):  # which grow meanwhile
        talk.finish(ping, source, action=action)
        # It is the echo that is timed: what is left to do comes after it.
        echo = talk.start_send(torch.ones_like(is_more), source, tag=PONG + number, action=action)
        if is_more:
            pings.append(_ask_number(talk, source, PING + len(pings), action))
        talk.finish(echo, source, action=action)


def _ask_number(talk: Talk, sender: int, tag: int, action: str) -> tuple[Tensor, Any]:
    number = torch.zeros(1, dtype=torch.int64)
    return number, talk.start_receive(number, sender, tag=tag, action=action)


def _send_streams(talk: Talk, target: int) -> None:
    """As many as the target asks for, of the size that it says; 0 is the end."""
    action = f"the bandwidth to {talk.names[target]}"
    # Not zeros: some networks compress what they carry.
    pattern = torch.randint(256, (1 << 20,), dtype=torch.uint8)
    while size := _asked_size(talk, target, action):
        piece = pattern.repeat(-(-size // len(pattern)))[:size]
        sends = [
            talk.start_send(piece, target, tag=STREAM + number, action=action)
            for number in range(_PIECES)
        ]
        talk.finish_all(sends, target, action=action, within=talk.deadline)


def _asked_size(talk: Talk, target: int, action: str) -> Bytes:
    size = torch.zeros(1, dtype=torch.int64)
    talk.receive(size, target, tag=SIZE, action=action, within=talk.deadline)
    return int(size)


def _receive_streams(talk: Talk, source: int, effort: Effort) -> Sample:
    gives_up = time.monotonic() + effort.patience
    size, rates = _SMALLEST, list[BytesPerSecond]()
    while True:
        stream = _stream(talk, source, size)
        is_late = time.monotonic() > gives_up
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
            _ask_for(talk, source, 0)
            return Sample.of(last)


@dataclass(frozen=True, slots=True)
class _Stream:
    waited: Seconds  # from asking for it to its first piece: a round trip and a little more
    lasted: Seconds  # from its first piece to its last
    rate: BytesPerSecond


def _stream(talk: Talk, source: int, size: Bytes) -> _Stream:
    action = f"the bandwidth from {talk.names[source]}"
    piece = torch.empty(size, dtype=torch.uint8)  # one for all: nobody looks at what came
    asked = [
        talk.start_receive(piece, source, tag=STREAM + number, action=action)
        for number in range(_PIECES)
    ]
    ends, began = time.monotonic() + talk.deadline, time.perf_counter()
    _ask_for(talk, source, size)
    arrivals = talk.finish_all(asked, source, action=action, within=ends - time.monotonic())
    lasted = max(1e-9, arrivals[-1] - arrivals[0])
    return _Stream(arrivals[0] - began, lasted, (_PIECES - 1) * size / lasted)


def _ask_for(talk: Talk, source: int, size: Bytes) -> None:
    action = f"the bandwidth from {talk.names[source]}"
    talk.send(torch.tensor([size]), source, tag=SIZE, action=action, within=talk.deadline)
