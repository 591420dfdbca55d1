"""Capacity for events and flows: compiled code cannot grow arrays, so they are grown before."""

from typing import Any

import numpy as np

from polyrhythm.simulate.engine.state import (
    ARRIVED,
    FLOW,
    FREE_FLOW,
    HEAP_SIZE,
    NONE,
    NUM_FLOWS,
    SPARE,
    EngineState,
    Records,
)

_HEAP = ("times", "sequences", "codes")


def free_flows(count: int, first: int = 0) -> Records:
    """Create free flows, each linked to the next free one."""
    flows = np.zeros(count, FLOW)
    flows["next_up"] = np.arange(first + 1, first + count + 1)
    flows["source"] = NONE
    return flows


def needs_more_events(state: EngineState, num_new: int) -> bool:
    """Whether an event, or `num_new` flows at one host, could overflow the heap.

    Each time that a host divides its connection again, every flow of it may get another event.
    """
    return bool(state.counts[HEAP_SIZE] + _max_new_events(state, num_new) > len(state.times))


def _max_new_events(state: EngineState, num_new: int) -> int:
    """Largest number of new events before the next check; all runs may be released."""
    return int(4 * (state.counts[NUM_FLOWS] + num_new) + len(state.runs) + SPARE)


def grow_events(state: EngineState, num_new: int) -> dict[str, Any]:
    """Return the heap without outdated events, and larger if that is not enough."""
    size = int(state.counts[HEAP_SIZE])
    codes = state.codes[:size]
    kinds, indexes, stamps = codes & 3, (codes >> 2) & 0x3FFFFFFF, codes >> 32
    is_flow = kinds == ARRIVED
    is_current = np.empty(size, bool)
    is_current[is_flow] = state.flows["version"][indexes[is_flow]] == stamps[is_flow]
    is_current[~is_flow] = state.runs["incarnation"][indexes[~is_flow]] == stamps[~is_flow]
    # A sorted array is a heap.
    order = np.flatnonzero(is_current)
    order = order[np.lexsort((state.sequences[order], state.times[order]))]
    length = len(state.times)
    while length < 2 * len(order) + _max_new_events(state, num_new):
        length *= 2
    columns = {}
    for name in _HEAP:
        column = getattr(state, name)
        columns[name] = np.zeros(length, column.dtype)
        columns[name][: len(order)] = column[order]
    state.counts[HEAP_SIZE] = len(order)
    return columns


def needs_more_flows(state: EngineState, num_new: int) -> bool:
    """Whether `num_new` more flows, and a message of each channel, do not fit."""
    needed = state.counts[NUM_FLOWS] + num_new + len(state.channels)
    return bool(needed > len(state.flows))


def grow_flows(state: EngineState, num_new: int) -> dict[str, Any]:
    count = len(state.flows)
    added = free_flows(count + num_new, first=count)
    added["next_up"][-1] = state.counts[FREE_FLOW]
    state.counts[FREE_FLOW] = count
    return {"flows": np.concatenate([state.flows, added])}
