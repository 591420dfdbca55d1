"""Small clusters to plan for, and the cost of their best layouts by brute force."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import combinations, pairwise, permutations

import numpy as np
from hypothesis import strategies as st

from polyrhythm.cost.dtfm import PairTimes


@st.composite
def small_times(draw: st.DrawFn, *, max_devices: int = 8) -> PairTimes:
    """Draw up to 8 devices with links that all differ, or of few values, so that many are equal."""
    shapes = [(s, p) for s in range(1, 9) for p in range(1, 9) if 2 <= s * p <= max_devices]
    num_stages, num_pipelines = draw(st.sampled_from(shapes))
    num_devices = num_stages * num_pipelines
    value = draw(st.sampled_from([st.floats(0.01, 10), st.sampled_from([0.5, 1.0, 4.0])]))
    pairs = list(combinations(range(num_devices), 2))
    times = []
    for _ in range(2):
        weights = np.zeros((num_devices, num_devices))
        for (a, b), weight in zip(
            pairs, draw(st.lists(value, min_size=len(pairs), max_size=len(pairs))), strict=True
        ):
            weights[a, b] = weights[b, a] = weight
        times.append(weights)
    return PairTimes(sync=times[0], hop=times[1], num_stages=num_stages)


def brute_force(times: PairTimes) -> float:
    """Return the cost of the best of all layouts, by definition."""
    cost = slow_cost(times)
    return min(cost(groups) for groups in _partitions(range(times.num_devices), times))


def slow_cost(times: PairTimes) -> Callable[[Sequence[tuple[int, ...]]], float]:
    """Equations 1 to 4 as they are printed: every order, every matching."""
    sync_of: list[list[float]] = times.sync.tolist()
    hop_of: list[list[float]] = times.hop.tolist()

    @cache
    def sync(group: tuple[int, ...]) -> float:
        return max(sum(sync_of[d][e] for e in group if e != d) for d in group)

    @cache
    def hop(a: tuple[int, ...], b: tuple[int, ...]) -> float:
        return min(
            max(hop_of[d][e] for d, e in zip(a, other, strict=True)) for other in permutations(b)
        )

    def cost(groups: Sequence[tuple[int, ...]]) -> float:
        paths = (
            sum(hop(a, b) for a, b in pairwise(order))
            for order in permutations(groups)
            if order[0] <= order[-1]  # the other half is the same the other way round
        )
        return max(map(sync, groups)) + min(paths)

    return cost


def _partitions(devices: Sequence[int], times: PairTimes) -> Iterator[list[tuple[int, ...]]]:
    """Yield all partitions into groups of one size; each group has the first device left."""
    first, *rest = devices
    for others in combinations(rest, times.num_pipelines - 1):
        group = (first, *others)
        left = [device for device in rest if device not in others]
        if not left:
            yield [group]
        else:
            yield from ([group, *more] for more in _partitions(left, times))
