"""A lower bound of DT-FM's cost over all layouts, which shows how good a plan is.

The argument, for a layout whose gradients take D (eq. 2) and a time t:

1. The hops add up to the integral over t of how many of them are slower than t. So for each t it is
   enough to say how many must be.
2. Cut the pipeline at the hops slower than t. Within a piece of `length` stages every column is a
   path over links of at most t, so it stays in one connected component of those links. All stages
   of a piece then hold the same number of devices of each component.
3. A device d whose stage holds c devices of its component, of n, sits in a piece of at most n / c
   stages. And c cannot be small if D is: c - 1 links inside of the component and the others out of
   it, the fastest of each, must not take longer than D.
4. Pieces of the stages, counted as 1 / length per stage, add up to their number. So there are at
   least the sum over devices of 1 / (longest piece for d), divided by the devices of a stage.
5. A single piece holds the same share of each component in every stage. If that is a whole number,
   it says what each device sends at least (as in 3); D must not be less. If it is not, there are
   two pieces or more.

The bound is the least over D of D plus that integral. The larger D may be, the fewer hops must be
slow, and only at times that occur in 3 and 5 does their number change: the best D is one of those.
Of a range of them the first plus the hops at the last is a bound, so that few need a look.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform

from polyrhythm.cost.dtfm import Matrix, PairTimes
from polyrhythm.types import Seconds

MAX_LEVELS = 128  # component structures considered; more give higher bounds of large clusters

_ROUNDING = 1e-9  # relative: sums in another order must not turn "equal" into "less"


def lower_bound(times: PairTimes) -> Seconds:
    """Return a lower bound in seconds for all layouts of these devices."""
    if times.num_devices == 1:
        return 0.0
    size = times.num_pipelines
    nearest = np.sort(times.sync, axis=1)[:, :size].sum(axis=1)  # the 0 for itself is among them
    least = nearest.max()
    levels = [_level(width, components, times) for width, components in _components(times.hop)]
    occurring = np.concatenate([[least], *(level.occurring() for level in levels)])
    syncs: list[Seconds] = np.unique(np.maximum(occurring, least)).tolist()

    def hops(sync: Seconds) -> Seconds:
        return sum(level.width * (level.fewest_pieces(sync) - 1) for level in levels)

    ranges = [(syncs[0] + hops(syncs[-1]), 0, len(syncs) - 1)]
    while True:
        bound, first, last = heapq.heappop(ranges)
        if first == last:
            return float(bound) * (1 - _ROUNDING)
        middle = (first + last) // 2
        heapq.heappush(ranges, (syncs[first] + hops(syncs[middle]), first, middle))
        heapq.heappush(ranges, (syncs[middle + 1] + hops(syncs[last]), middle + 1, last))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Level:
    """A range of `width` seconds of times t with the same components."""

    width: Seconds
    num_stages: int
    sends: Matrix  # [device, c - 1]: at least, with c of its component in its stage; step 3
    longest: NDArray[np.int64]  # [device, c - 1]: piece
    unbroken: Seconds  # what D is at least if there is one piece; inf if there cannot be; step 5

    def occurring(self) -> Matrix:
        """Return all D at which the number of pieces may change."""
        every: Matrix = np.append(self.sends, self.unbroken)
        finite: Matrix = every[np.isfinite(every)]
        return finite

    def fewest_pieces(self, sync: Seconds) -> int:
        sync *= 1 + _ROUNDING
        fewest_alike = (self.sends <= sync).argmax(axis=1)  # c - 1; longer pieces for smaller c
        longest = self.longest[np.arange(len(self.longest)), fewest_alike]
        size = len(longest) // self.num_stages
        pieces = int(np.ceil((1 / longest).sum() / size - _ROUNDING))
        return max(pieces, 1 if sync >= self.unbroken else 2)


def _components(hop: Matrix) -> Iterator[tuple[Seconds, NDArray[np.int64]]]:
    """Yield the width of each range of t and the component of each device, from fast to slow."""
    tree = linkage(squareform(hop, checks=False), "single")  # from fast to slow
    heights = np.unique(tree[:, 2])
    # Between two heights nothing merges. Of too many, some are left out; a range over several has
    # the components of its end, which are the largest, so that no piece is counted too often.
    kept = np.unique(np.linspace(0, len(heights) - 1, MAX_LEVELS).round().astype(int))
    component, num_merged, begin = np.arange(len(hop)), 0, 0.0
    for height in heights[kept]:
        while tree[num_merged, 2] < height:
            a, b = tree[num_merged, :2]
            component[(component == a) | (component == b)] = len(hop) + num_merged
            num_merged += 1
        yield height - begin, np.unique(component, return_inverse=True)[1]
        begin = height


def _level(width: Seconds, component: NDArray[np.int64], times: PairTimes) -> _Level:
    num_devices, size = times.num_devices, times.num_pipelines
    sizes = np.bincount(component)
    own_size = sizes[component][:, None]
    alike = component[:, None] == component[None, :]
    inside = _sums_of_fastest(times.sync, alike, size)
    outside = _sums_of_fastest(times.sync, ~alike, size - 1)
    counts = np.arange(1, size + 1)
    possible = (counts <= own_size) & (size - counts <= num_devices - own_size)
    sends = np.where(possible, inside[:, counts] + outside[:, size - counts], np.inf)
    return _Level(
        width=width,
        num_stages=times.num_stages,
        sends=sends,
        longest=np.minimum(times.num_stages, np.maximum(1, own_size // counts)),
        unbroken=_unbroken(component, sizes, times),
    )


def _unbroken(component: NDArray[np.int64], sizes: NDArray[np.int64], times: PairTimes) -> Seconds:
    """Return the least D if all stages are equal: each device uses its fastest links."""
    if (sizes % times.num_stages).any():
        return np.inf
    sends = np.zeros(times.num_devices)
    for index, share in enumerate(sizes // times.num_stages):
        fastest = np.sort(times.sync[:, component == index], axis=1)
        sends += fastest[:, :share].sum(axis=1)  # in its own component, one is the device itself
    return float(sends.max()) * (1 - _ROUNDING)


def _sums_of_fastest(sync: Matrix, of: NDArray[np.bool_], most: int) -> Matrix:
    """Return [device, n]: the sum of its n fastest links among those marked; inf if fewer."""
    marked = np.where(of, sync, np.inf)
    fastest = np.sort(np.partition(marked, min(most, len(sync) - 1), axis=1)[:, :most], axis=1)
    return np.hstack([np.zeros((len(sync), 1)), np.cumsum(fastest, axis=1)])
