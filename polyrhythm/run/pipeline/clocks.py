"""Measure the clock offset and the latency between neighbouring stages by a few pings.

As in NTP, the quickest of several round trips is the least disturbed, and its middle is taken as
the time at which the other clock was read. Clocks drift, so the measurement is repeated.
"""

import time
from typing import NamedTuple

import torch
from torch import Tensor

from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.run.comm.process_groups import receive, send
from polyrhythm.run.pipeline.transport import Connections
from polyrhythm.types import Seconds

_NUM_PINGS = 3
_TAG = 2**21  # above the tags of batch headers


class ClockOffset(NamedTuple):
    """The clock offset and latency between a stage and the next one."""

    latency: Seconds  # half the quickest round trip
    offset: Seconds  # the next stage's clock minus this one's


def measure_offsets(connections: Connections) -> tuple[ClockOffset | None, ClockOffset | None]:
    """Measure the previous and the next stage; all stages call this together, between steps.

    Links that start at an even stage come first, all at once; then the others.
    """
    before: ClockOffset | None = None
    after: ClockOffset | None = None
    for parity in (0, 1):
        if connections.stage % 2 == parity and connections.stage < connections.num_stages - 1:
            after = _ping(connections, connections.stage + 1)
        elif connections.stage % 2 != parity and connections.stage > 0:
            before = _pong(connections, connections.stage - 1)
    return before, after


def clock_offsets(
    connections: Connections, before: ClockOffset | None, after: ClockOffset | None
) -> dict[str, Seconds]:
    """Return by name how far the clocks of the neighbours are ahead of this stage's."""
    offsets = {}
    if before is not None:
        offsets[connections.name(connections.stage - 1)] = -before.offset
    if after is not None:
        offsets[connections.name(connections.stage + 1)] = after.offset
    return offsets


def _ping(connections: Connections, other: int) -> ClockOffset:
    trips = []
    for _ in range(_NUM_PINGS):
        start = time.perf_counter()
        _send(connections, other, torch.zeros(2, dtype=torch.float64))
        remote_time = _receive(connections, other)[0].item()
        end = time.perf_counter()
        trips.append(ClockOffset((end - start) / 2, remote_time - (start + end) / 2))
    quickest = min(trips)
    _send(connections, other, torch.tensor(quickest, dtype=torch.float64))
    return quickest


def _pong(connections: Connections, other: int) -> ClockOffset:
    for _ in range(_NUM_PINGS):
        _receive(connections, other)
        now = [time.perf_counter(), 0.0]
        _send(connections, other, torch.tensor(now, dtype=torch.float64))
    return ClockOffset(*_receive(connections, other).tolist())


def _send(connections: Connections, other: int, message: Tensor) -> None:
    with peer_errors(connections.name(other), "comparing clocks"):
        send(connections.control, message, other, tag=_TAG)


def _receive(connections: Connections, other: int) -> Tensor:
    message = torch.zeros(2, dtype=torch.float64)
    with peer_errors(connections.name(other), "comparing clocks"):
        receive(connections.control, message, other, tag=_TAG)
    return message
