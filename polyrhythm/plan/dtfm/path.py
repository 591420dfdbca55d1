"""Order the stages: the cheapest path through all of them, with free ends; and their pipelines.

Exact by Held-Karp up to `MAX_EXACT` stages, which takes milliseconds. Beyond, the best of
nearest-neighbour paths from every start, each improved by reversing segments and by moving segments
of up to three stages (2-opt, Or-opt) until neither helps.

Source: equation 4 of arXiv:2206.01288, "open-loop travelling salesman". Departures: the published
code has no answer for more stages than Held-Karp can do.
"""

import numpy as np

from polyrhythm.cost.dtfm import LayoutCost, PairTimes, layout_cost
from polyrhythm.jit import Floats, Ints, compiled, inlined
from polyrhythm.plan.dtfm.matching import all_hops, match_groups
from polyrhythm.types import Seconds

MAX_EXACT = 12
_ROUNDING = 1e-9  # seconds: a gain below could be found again and again


def cheapest_order(hops: Floats) -> Ints:
    """Return an order of all stages; the best one if there are at most `MAX_EXACT`."""
    num_stages = len(hops)
    if num_stages <= MAX_EXACT:
        order = np.empty(num_stages, np.int64)
        shape = 1 << num_stages, num_stages
        _held_karp(hops, np.full(shape, np.inf), np.full(shape, -1), order)
        return order
    # A round trip through a dummy stage with distance 0 to all: the rest of it is the path.
    with_nowhere = np.pad(hops, (1, 0))
    trips = []
    for start in range(num_stages):
        trip = np.array([0, *(1 + stage for stage in _nearest_first(hops, start))])
        _improve(with_nowhere, trip)
        trips.append(trip[1:] - 1)
    return min(trips, key=lambda order: path_length(hops, order))


def path_length(hops: Floats, order: Ints) -> float:
    return float(hops[order[:-1], order[1:]].sum())


def layout_of_groups(groups: Ints, times: PairTimes) -> LayoutCost:
    """Return the layout of these groups; the best one if they are ordered exactly."""
    order = cheapest_order(all_hops(groups, times.hop))
    return layout_cost(match_groups(groups, order, times.hop).tolist(), times)


def partition_cost(groups: Ints, times: PairTimes) -> Seconds:
    """Return only the cost of `layout_of_groups`."""
    sync = times.sync[groups[:, :, None], groups[:, None, :]].sum(axis=2).max()
    hops = all_hops(groups, times.hop)
    return float(sync) + path_length(hops, cheapest_order(hops))


def _nearest_first(hops: Floats, start: int) -> list[int]:
    order, left = [start], np.ones(len(hops), np.bool_)
    for _ in range(len(hops) - 1):
        left[order[-1]] = False
        order.append(int(np.where(left, hops[order[-1]], np.inf).argmin()))
    return order


@compiled
def _held_karp(hops: Floats, best: Floats, came: Ints, order: Ints) -> None:
    """Fill in `best[visited, last]`, initially inf: the cheapest path over `visited` to `last`."""
    size = len(hops)
    for visited in range(1, 1 << size):
        for last in range(size):
            rest = visited & ~(1 << last)
            if rest == 0:
                best[visited, last] = 0.0
            elif rest != visited:
                for before in range(size):
                    length = best[rest, before] + hops[before, last]
                    if length < best[visited, last]:
                        best[visited, last], came[visited, last] = length, before
    visited, last = (1 << size) - 1, 0
    for end in range(size):
        if best[visited, end] < best[visited, last]:
            last = end
    for i in range(size):
        order[i] = last
        visited, last = visited & ~(1 << last), came[visited, last]


@compiled
def _improve(hops: Floats, trip: Ints) -> None:
    """Shorten a round trip; its first stage stays in place."""
    while _reverse_pieces(hops, trip) or _move_piece(hops, trip):
        pass


@inlined
def _reverse_pieces(hops: Floats, trip: Ints) -> bool:
    """Reverse every segment for which that is shorter; return False if there was none."""
    improved = False
    for first in range(1, len(trip) - 1):
        for last in range(first + 1, len(trip)):
            before, after = trip[first - 1], trip[(last + 1) % len(trip)]
            old = hops[before, trip[first]] + hops[trip[last], after]
            new = hops[before, trip[last]] + hops[trip[first], after]
            if new < old - _ROUNDING:
                _reverse(trip, first, last)
                improved = True
    return improved


@inlined
def _move_piece(hops: Floats, trip: Ints) -> bool:
    """Move a segment of up to three stages to a better position; return False if there is none."""
    for length in range(1, 4):
        for first in range(1, len(trip) - length + 1):
            last = first + length - 1
            before, after = trip[first - 1], trip[(last + 1) % len(trip)]
            saved = hops[before, trip[first]] + hops[trip[last], after] - hops[before, after]
            for i in range(len(trip)):  # to between positions i and i + 1
                if first - 1 <= i <= last:
                    continue
                left, right = trip[i], trip[(i + 1) % len(trip)]
                straight = hops[left, trip[first]] + hops[trip[last], right]
                turned = hops[left, trip[last]] + hops[trip[first], right]
                if min(straight, turned) - hops[left, right] < saved - _ROUNDING:
                    if turned < straight:
                        _reverse(trip, first, last)
                    _shift(trip, first, last, i)
                    return True
    return False


@inlined
def _shift(trip: Ints, first: int, last: int, i: int) -> None:
    """Move the segment to between positions i and i + 1: three reversals swap two neighbours."""
    low, high = (first, i) if i > last else (i + 1, last)
    split = high - (last - first) - 1 if i > last else low + (last - first)
    _reverse(trip, low, high)
    _reverse(trip, low, split)
    _reverse(trip, split + 1, high)


@inlined
def _reverse(trip: Ints, first: int, last: int) -> None:
    while first < last:
        trip[first], trip[last] = trip[last], trip[first]
        first += 1
        last -= 1
