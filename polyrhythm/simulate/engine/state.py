"""The engine's mutable state as arrays for compiled code, and its heap of events.

A run is one device's part of one pipeline: consecutive stages, whose actions it executes one after
another. A host is a device with its connection to all others. A channel is one direction between
two runs of a pipeline; it sends messages one after another. A flow is an active transfer: a message
or a part of an average.
"""

from typing import Any, NamedTuple, cast

import numpy as np
from numba import types
from numba.experimental import structref
from numpy.typing import NDArray

from polyrhythm.jit import Floats, Ints, compiled, inlined

Records = NDArray[Any]  # of one of the types below

# Status of a run.
COMPUTING, WAKING, STARVED, SYNCING, STOPPED = range(5)  # WAKING: its message time is known
# Kinds of events on the heap.
COMPUTED, AWAKE, ARRIVED, ENDED = range(4)  # ARRIVED: the last byte of a flow; ENDED: a step
# Reasons why `advance` returns.
NOTHING, STEP_ENDED, FLOWS_ENDED, NEEDS_DRAWS, HEAP_FULL, RECORDS_FULL = range(6)
# Indexes of `EngineState.counts`.
HEAP_SIZE, SEQUENCE, FREE_FLOW, NUM_FLOWS, NUM_RECORDS, NUM_EVENTS, NUM_ACTIONS = range(7)

SPARE = 64  # entries of the heap, beyond those for each flow
NO_LIMIT = 1e17  # bytes per second, from which a host's own connection counts as unlimited
NONE = -1

RUN = np.dtype(
    [
        ("device", "i8"),
        ("before", "i8"),  # the run that sends activations here; NONE for the first
        ("after", "i8"),
        ("forward", "f8"),
        ("backward", "f8"),
        ("list", "i8"),  # index of its first action
        ("num_actions", "i8"),
        ("in_flight", "i8"),  # limit of a pipeline that is never flushed; 0 for one that is
        ("place", "i8"),  # index of its current action
        ("step", "i8"),
        ("first", "i8"),  # number of its first step, for records
        ("status", "i8"),  # COMPUTING, ...
        ("incarnation", "i8"),  # events of an earlier one are ignored
        ("since", "f8"),  # start of its status
        ("first_arrival", "f8"),  # of the first bucket that its first forward waits for
        ("last_arrival", "f8"),  # of the last bucket
        ("last_fraction", "f8"),  # of the forward that the last bucket is
        ("last_start", "f8"),  # of its last action
        ("busy", "f8"),  # total seconds of compute
        ("starved", "f8"),  # total seconds of waits for messages
        ("busy_before", "f8"),  # `busy` at the end of its last step
        ("starved_before", "f8"),
        ("waited", "f8"),  # before the current action
        ("held", "f8"),  # total seconds of waits for buckets
        ("held_before", "f8"),
    ]
)
HOST = np.dtype(
    [
        ("region", "i8"),
        ("up", "f8"),  # bytes per second to all others in total
        ("down", "f8"),
        ("is_known", "i8"),  # else averages share it, and messages have the speed of their links
        ("first_up", "i8"),  # its first flow; NONE if it has none
        ("first_down", "i8"),
        ("slow", "i8"),  # index of its first entry; the next host's entries follow
        ("pauses", "i8"),
    ]
)
CHANNEL = np.dtype(
    [
        ("source", "i8"),  # runs
        ("target", "i8"),
        ("size", "f8"),  # of a message
        ("free", "f8"),  # when the last message is sent, if nothing is shared
        ("is_busy", "i8"),
        ("head", "i8"),  # index of the first waiting message in `queues`
        ("num_waiting", "i8"),
    ]
)
FLOW = np.dtype(
    [
        ("channel", "i8"),  # or NONE
        ("microbatch", "i8"),
        ("owner", "i8"),  # of a part of an average; for a message, its sender's incarnation
        ("source", "i8"),  # devices; the target is NONE for a flow to many receivers
        ("target", "i8"),
        ("left", "f8"),  # bytes
        ("max_rate", "f8"),  # bytes per second, of its link
        ("weight", "f8"),  # number of connections that it counts as
        ("up_alone", "i8"),  # it does not share its source's uplink
        ("down_alone", "i8"),
        ("up_share", "f8"),
        ("down_share", "f8"),
        ("rate", "f8"),
        ("since", "f8"),  # start of `rate`, and the time of `left`
        ("version", "i8"),
        ("next_up", "i8"),
        ("next_down", "i8"),
    ]
)
SLOW = np.dtype(
    [
        ("start", "f8"),
        ("until", "f8"),
        ("factor", "f8"),  # nan for a probability or a trace
        ("probability", "f8"),
        ("sleep_factor", "f8"),
        ("bins", "i8"),  # index of the first bin of its trace; NONE without
        ("num_bins", "i8"),
        ("duration", "f8"),
        ("used", "i8"),  # number of draws
        ("has_ended", "i8"),  # its trace, of which the user is warned
    ]
)
RECORD = np.dtype(
    [
        ("run", "i8"),
        ("code", "i8"),  # of the action
        ("step", "i8"),
        ("start", "f8"),
        ("end", "f8"),
        ("waited", "f8"),
    ]
)


class EngineState(NamedTuple):
    runs: Records
    hosts: Records
    channels: Records
    flows: Records
    slow: Records
    records: Records
    actions: Ints  # 2 m for F m, 2 m + 1 for B m
    inbox: Floats  # [direction, run, slot]: arrival of a message; inf if not known
    queues: Ints  # [channel, slot]
    links: Floats  # [latency | bandwidth, region, region]
    sent: Floats  # [region, region] bytes
    draws: Floats  # [entry of slow, draw]
    bins: Floats  # [bin, lowest | highest]
    pauses: Floats  # [pause, from | until]
    owners: Ints  # number of active flows of each
    stack: Ints  # runs that can continue
    counts: Ints
    times: Floats  # the heap
    sequences: Ints  # order of insertion, for equal times
    codes: Ints


@structref.register
class _StateType(types.StructRef):
    """Passes all arrays to compiled code by one reference: twenty arguments would dominate."""


class _StateRef(structref.StructRefProxy):
    pass


structref.define_proxy(_StateRef, _StateType, list(EngineState._fields))  # type: ignore[no-untyped-call]


def as_struct(state: EngineState) -> EngineState:
    """Wrap the state for compiled code; the arrays are shared, not copied."""
    return cast(EngineState, _as_struct(*state))


@compiled
def _as_struct(*arrays: Records) -> Any:
    return _StateRef(*arrays)  # type: ignore[no-untyped-call]


@inlined
def push(state: EngineState, time: float, kind: int, index: int, stamp: int) -> None:
    """Add an event; `stamp` (an incarnation or a version) tells whether it is still valid."""
    counts = state.counts
    times, sequences, codes = state.times, state.sequences, state.codes
    i, sequence = counts[HEAP_SIZE], counts[SEQUENCE]
    counts[HEAP_SIZE] += 1
    counts[SEQUENCE] += 1
    while i > 0:
        parent = (i - 1) // 2
        if times[parent] <= time:  # if equal, the parent was inserted first
            break
        times[i], sequences[i], codes[i] = times[parent], sequences[parent], codes[parent]
        i = parent
    times[i], sequences[i] = time, sequence
    codes[i] = (stamp << 32) | (index << 2) | kind


@inlined
def pop(state: EngineState) -> int:
    """Remove the first event and return its code."""
    counts = state.counts
    times, sequences, codes = state.times, state.sequences, state.codes
    code = codes[0]
    last = counts[HEAP_SIZE] - 1
    counts[HEAP_SIZE] = last
    time, sequence, moved = times[last], sequences[last], codes[last]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= last:
            break
        other = child + 1
        if other < last and (
            times[other] < times[child]
            or (times[other] == times[child] and sequences[other] < sequences[child])
        ):
            child = other
        if time < times[child] or (time == times[child] and sequence < sequences[child]):
            break
        times[i], sequences[i], codes[i] = times[child], sequences[child], codes[child]
        i = child
    times[i], sequences[i], codes[i] = time, sequence, moved
    return int(code)
