"""All that changes while actions and messages are simulated, as arrays for compiled code; its heap.

A run is what one device does of one pipeline: stages in a row, whose actions it executes one after
the other. A host is the device with its connection to all others. A channel is one direction
between two runs of a pipeline: messages leave it one after the other. A flow is bytes on their way
now, a message or a part of an average.
"""

from typing import Any, NamedTuple, cast

import numpy as np
from numba import types
from numba.experimental import structref
from numpy.typing import NDArray

from polyrhythm.compiled import Floats, Ints, compiled, inlined

Records = NDArray[Any]  # of one of the types below

# What a run is at.
COMPUTING, WAKING, STARVED, SYNCING, STOPPED = range(5)  # WAKES: its message comes at a known time
# What happens: kinds of events on the heap.
COMPUTED, AWAKE, ARRIVED, ENDED = range(4)  # ARRIVED: the last byte of a flow; ENDED: a step
# Why `advance` returns.
NOTHING, STEP_ENDED, FLOWS_ENDED, NEEDS_DRAWS, HEAP_FULL, RECORDS_FULL = range(6)
# Places in `EngineState.counts`.
HEAP_SIZE, SEQUENCE, FREE_FLOW, NUM_FLOWS, NUM_RECORDS, NUM_EVENTS, NUM_ACTIONS = range(7)

SPARE = 64  # places on the heap, beyond those for each flow
NO_LIMIT = 1e17  # bytes per second: above, a host's own connection is not worth looking at
NONE = -1

RUN = np.dtype(
    [
        ("device", "i8"),
        ("before", "i8"),  # the run that sends activations here; NONE for the first
        ("after", "i8"),
        ("forward", "f8"),
        ("backward", "f8"),
        ("list", "i8"),  # where its actions begin
        ("num_actions", "i8"),
        ("in_flight", "i8"),  # of a pipeline that is never flushed; 0 for one that is
        ("place", "i8"),  # in its actions
        ("step", "i8"),
        ("first", "i8"),  # number of the one that it began with, for people
        ("status", "i8"),  # COMPUTES, ...
        ("incarnation", "i8"),  # events of an earlier one do not count
        ("since", "f8"),  # it has been at that
        ("first_arrival", "f8"),  # the bucket that its first forward begins with
        ("last_arrival", "f8"),  # the one that it ends with,
        ("last_fraction", "f8"),  # which is this part of it
        ("last_began", "f8"),  # its last action of a step
        ("busy", "f8"),  # seconds of compute, in all
        ("starved", "f8"),  # seconds of waiting for messages, in all
        ("busy_before", "f8"),  # the same up to the end of its last step
        ("starved_before", "f8"),
        ("waited", "f8"),  # before the action it is at
        ("held", "f8"),  # seconds of waiting for buckets, in all
        ("held_before", "f8"),
    ]
)
HOST = np.dtype(
    [
        ("region", "i8"),
        ("up", "f8"),  # bytes per second to all others together
        ("down", "f8"),
        ("is_known", "i8"),  # else averages share it, but messages are as fast as their links
        ("first_up", "i8"),  # of its flows; NONE without
        ("first_down", "i8"),
        ("slow", "i8"),  # where its entries begin; those of the next host are behind them
        ("pauses", "i8"),
    ]
)
CHANNEL = np.dtype(
    [
        ("source", "i8"),  # runs
        ("target", "i8"),
        ("size", "f8"),  # of a message
        ("free", "f8"),  # when the last message is out, where nothing is shared
        ("is_busy", "i8"),
        ("head", "i8"),  # messages that wait, in `queues`
        ("num_waiting", "i8"),
    ]
)
FLOW = np.dtype(
    [
        ("channel", "i8"),  # or NONE
        ("microbatch", "i8"),
        ("owner", "i8"),  # of one that is no message; of a message, the life of its sender
        ("source", "i8"),  # devices; the target is NONE for one that goes to many
        ("target", "i8"),
        ("left", "f8"),  # bytes
        ("max_rate", "f8"),  # bytes per second, by its link
        ("weight", "f8"),  # how many connections it stands for
        ("up_alone", "i8"),  # shares nothing at its source
        ("down_alone", "i8"),
        ("up_share", "f8"),
        ("down_share", "f8"),
        ("rate", "f8"),
        ("since", "f8"),  # `left` and `rate` hold
        ("version", "i8"),
        ("next_up", "i8"),
        ("next_down", "i8"),
    ]
)
SLOW = np.dtype(
    [
        ("start", "f8"),
        ("until", "f8"),
        ("factor", "f8"),  # nan for one of the other two ways
        ("probability", "f8"),
        ("sleep_factor", "f8"),
        ("bins", "i8"),  # where those of its trace begin; NONE without
        ("num_bins", "i8"),
        ("duration", "f8"),
        ("used", "i8"),  # draws
        ("has_ended", "i8"),  # its trace, which somebody is to be told
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
    inbox: Floats  # [direction, run, place]: when a message is there; inf for not yet
    queues: Ints  # [channel, place]
    links: Floats  # [latency | bandwidth, region, region]
    sent: Floats  # [region, region] bytes
    draws: Floats  # [entry of slow, draw]
    bins: Floats  # [bin, lowest | highest]
    pauses: Floats  # [pause, from | until]
    owners: Ints  # flows that each still waits for
    stack: Ints  # runs that can go on
    counts: Ints
    times: Floats  # the heap
    sequences: Ints  # of equal times, what was said first comes first
    codes: Ints


@structref.register
class _StateType(types.StructRef):
    """Compiled code gets all arrays by one reference: to hand on twenty takes longer than work."""


class _StateRef(structref.StructRefProxy):
    pass


structref.define_proxy(_StateRef, _StateType, list(EngineState._fields))  # type: ignore[no-untyped-call]


def as_struct(state: EngineState) -> EngineState:
    """The same for compiled code; it sees the arrays themselves."""
    return cast(EngineState, _as_struct(*state))


@compiled
def _as_struct(
    runs: Records,
    hosts: Records,
    channels: Records,
    flows: Records,
    slow: Records,
    records: Records,
    actions: Ints,
    inbox: Floats,
    queues: Ints,
    links: Floats,
    sent: Floats,
    draws: Floats,
    bins: Floats,
    pauses: Floats,
    owners: Ints,
    stack: Ints,
    counts: Ints,
    times: Floats,
    sequences: Ints,
    codes: Ints,
) -> Any:
    return _StateRef(  # type: ignore[no-untyped-call]
        runs,
        hosts,
        channels,
        flows,
        slow,
        records,
        actions,
        inbox,
        queues,
        links,
        sent,
        draws,
        bins,
        pauses,
        owners,
        stack,
        counts,
        times,
        sequences,
        codes,
    )


@inlined
def push(state: EngineState, time: float, kind: int, index: int, stamp: int) -> None:
    """`stamp` tells whether it still counts when it comes."""
    counts = state.counts
    times, sequences, codes = state.times, state.sequences, state.codes
    place, sequence = counts[HEAP_SIZE], counts[SEQUENCE]
    counts[HEAP_SIZE] += 1
    counts[SEQUENCE] += 1
    while place > 0:
        above = (place - 1) // 2
        if times[above] <= time:  # and if equal, it was said before
            break
        times[place], sequences[place], codes[place] = times[above], sequences[above], codes[above]
        place = above
    times[place], sequences[place] = time, sequence
    codes[place] = (stamp << 32) | (index << 2) | kind


@inlined
def pop(state: EngineState) -> int:
    """Take off the first; its code."""
    counts = state.counts
    times, sequences, codes = state.times, state.sequences, state.codes
    code = codes[0]
    last = counts[HEAP_SIZE] - 1
    counts[HEAP_SIZE] = last
    time, sequence, moved = times[last], sequences[last], codes[last]
    place = 0
    while True:
        below = 2 * place + 1
        if below >= last:
            break
        other = below + 1
        if other < last and (
            times[other] < times[below]
            or (times[other] == times[below] and sequences[other] < sequences[below])
        ):
            below = other
        if time < times[below] or (time == times[below] and sequence < sequences[below]):
            break
        times[place], sequences[place], codes[place] = times[below], sequences[below], codes[below]
        place = below
    times[place], sequences[place], codes[place] = time, sequence, moved
    return int(code)
