"""The tree of `exact.py`, compiled: sequences of stage types, depth first, nearest next."""

from typing import NamedTuple

import numpy as np

from polyrhythm.jit import Floats, Ints, compiled
from polyrhythm.types import Seconds

_ROUNDING = 1e-9  # relative: a gain below is none


class Choices(NamedTuple):
    """The stage types that a sequence can use."""

    types: Ints  # [type, class]: how many devices
    sync: Floats  # per type
    hops: Floats  # between types
    counts: Ints  # per class: number of devices


class _State(NamedTuple):
    """The state of the search, by stages."""

    sequence: Ints  # -1 from the current depth on
    num_tried: Ints  # types
    cost: Floats  # the hops before
    worst: Floats  # the slowest type before
    rest: Floats  # lower bound of the hops after it
    left: Ints  # per class: unused devices
    best: Ints  # the best sequence so far


def explore(
    choices: Choices, *, num_stages: int, below: Seconds, max_nodes: int
) -> tuple[Ints, bool]:
    """Return the best sequence that costs less than `below` (-1 if none), and if it is complete."""
    least = float(choices.hops.min())
    state = _State(
        sequence=np.full(num_stages, -1),
        num_tried=np.zeros(num_stages, np.int64),
        cost=np.zeros(num_stages),
        worst=np.zeros(num_stages),
        rest=np.array([least * missing if missing else 0.0 for missing in range(num_stages)][::-1]),
        left=choices.counts.copy(),
        best=np.full(num_stages, -1),
    )
    near = np.argsort(choices.hops, axis=1)
    num_nodes = _descend(choices, near, state, below, max_nodes)
    return state.best, num_nodes < max_nodes


@compiled
def _descend(choices: Choices, near: Ints, state: _State, below: float, max_nodes: int) -> int:
    """Fill in `state.best`; return the number of visited nodes, at most `max_nodes`."""
    types, sequence, left = choices.types, state.sequence, state.left
    num_types, num_classes, last = len(types), len(left), len(sequence) - 1
    best, depth, num_nodes = below, 0, 0
    while depth >= 0:
        if sequence[depth] >= 0:  # returned from below: remove this stage
            for c in range(num_classes):
                left[c] += types[sequence[depth], c]
            sequence[depth] = -1
        if state.num_tried[depth] == num_types or num_nodes >= max_nodes:
            state.num_tried[depth] = 0
            depth -= 1
            continue
        before = sequence[depth - 1] if depth > 0 else -1
        option, so_far = state.num_tried[depth], state.cost[depth]
        if before >= 0:
            option = near[before, option]
            so_far += choices.hops[before, option]
        state.num_tried[depth] += 1
        num_nodes += 1
        allowed = best * (1 - _ROUNDING) - state.rest[depth] - so_far
        if state.worst[depth] >= allowed:
            if before >= 0:
                state.num_tried[depth] = num_types  # they are sorted: all others are farther
            continue
        slowest = max(state.worst[depth], choices.sync[option])
        enough = slowest < allowed
        for c in range(num_classes):
            enough = enough and types[option, c] <= left[c]
        if not enough:
            continue
        for c in range(num_classes):
            left[c] -= types[option, c]
        sequence[depth] = option
        if depth == last:
            best = slowest + so_far
            for s in range(last + 1):
                state.best[s] = sequence[s]
        else:
            depth += 1
            state.cost[depth], state.worst[depth] = so_far, slowest
    return num_nodes
