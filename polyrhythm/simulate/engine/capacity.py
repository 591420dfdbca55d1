"""Room for events and flows: compiled code looks for none, so there has to be enough beforehand."""

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
    """Each leads to the next one that is free."""
    flows = np.zeros(count, FLOW)
    flows["next_up"] = np.arange(first + 1, first + count + 1)
    flows["source"] = NONE
    return flows


def needs_more_events(state: EngineState, num_new: int) -> bool:
    """Whether an event, or beginning so many flows at one host, could find no room.

    Each time that a host deals its connection anew, every flow of it may get another event.
    """
    return bool(state.counts[HEAP_SIZE] + _max_new_events(state, num_new) > len(state.times))


def _max_new_events(state: EngineState, num_new: int) -> int:
    """And all runs may be released before the next look."""
    return int(4 * (state.counts[NUM_FLOWS] + num_new) + len(state.runs) + SPARE)


def grow_events(state: EngineState, num_new: int) -> dict[str, Any]:
    """The heap without events that count no more, and longer if that does not help."""
    size = int(state.counts[HEAP_SIZE])
    codes = state.codes[:size]
    kinds, indexes, stamps = codes & 3, (codes >> 2) & 0x3FFFFFFF, codes >> 32
    is_flow = kinds == ARRIVED
    counts = np.empty(size, bool)
    counts[is_flow] = state.flows["version"][indexes[is_flow]] == stamps[is_flow]
    counts[~is_flow] = state.runs["incarnation"][indexes[~is_flow]] == stamps[~is_flow]
    # What is sorted is a heap.
    order = np.flatnonzero(counts)
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
    """Whether there are none for so many more, and for a message of each channel."""
    needed = state.counts[NUM_FLOWS] + num_new + len(state.channels)
    return bool(needed > len(state.flows))


def grow_flows(state: EngineState, num_new: int) -> dict[str, Any]:
    count = len(state.flows)
    added = free_flows(count + num_new, first=count)
    added["next_up"][-1] = state.counts[FREE_FLOW]
    state.counts[FREE_FLOW] = count
    return {"flows": np.concatenate([state.flows, added])}
