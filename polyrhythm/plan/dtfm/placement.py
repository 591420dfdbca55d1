"""Place devices on stages and pipelines: a good layout by DT-FM's cost, with a lower bound.

A portfolio, cheapest first, that ends as soon as the lower bound is met: constructed layouts; the
exact search, if devices are of few classes; then rounds of annealing, from constructed layouts,
from random ones, and from the best so far. Each round ends with the best matching and the best
order of its groups. Each part alone fails somewhere: construction if regions have unequal sizes or
links differ within a region, annealing if only many devices together can improve the layout.

The result depends only on the times, the seed and the effort, never on a clock: two machines with
the same numbers make the same plan.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from polyrhythm.cost.dtfm import LayoutCost, PairTimes
from polyrhythm.errors import PlanError
from polyrhythm.plan.construction import construct_layouts, nearest
from polyrhythm.plan.dtfm.bound import lower_bound
from polyrhythm.plan.dtfm.exact import search_exactly
from polyrhythm.types import Seconds

_PROVEN = 1e-6  # relative: a gap below is rounding, and the layout is the best one
_NUM_NEAR = 8  # devices that annealing brings next to one another
_EXACT_NODES = 2_000_000  # a tenth of a second


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchEffort:
    """The length of annealing: a move takes a microsecond with 64 devices, two with 512."""

    num_rounds: int = 6
    num_moves: int = 150_000  # per round, for up to 64 devices; grows with the square root beyond

    def __post_init__(self) -> None:
        if self.num_rounds < 0 or self.num_moves < 1:
            raise PlanError(
                f"{self.num_rounds} rounds of {self.num_moves} moves",
                expected="0 rounds or more, of at least one move",
                fix="use 6 rounds of 150000 moves; more find more",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    cost: LayoutCost
    bound: Seconds  # no layout is faster
    why: str  # the method that found it

    @property
    def gap(self) -> float:
        """The fraction of the time that another layout could save at most."""
        return max(0.0, 1 - self.bound / self.cost.total) if self.cost.total else 0.0

    @property
    def proven(self) -> bool:
        """Whether this is provably the best layout."""
        return self.gap <= _PROVEN


def place(
    times: PairTimes,
    *,
    seed: int = 0,
    effort: SearchEffort | None = None,
    on_better: Callable[[Placement], None] = lambda _: None,
) -> Placement:
    """Search for the cheapest layout, calling `on_better` with each improvement."""
    from polyrhythm.plan.dtfm.path import layout_of_groups  # compiled: imported when needed

    effort = effort or SearchEffort()
    made = sorted(
        (layout_of_groups(layout, times) for layout in construct_layouts(times)),
        key=lambda cost: cost.total,
    )
    best = Placement(cost=made[0], bound=lower_bound(times), why="construction")
    on_better(best)
    if not best.proven:
        best = _exact(times, best, on_better)
    rng = np.random.default_rng(seed)
    for index in range(effort.num_rounds):
        if best.proven:
            break
        this = _ROUNDS[min(index, len(_ROUNDS) - 1)]
        starts = {"best": best.cost, "made": made[0], "second": made[min(1, len(made) - 1)]}
        cost = _annealed(times, starts.get(this.start), this, effort, rng)
        if cost.total < best.cost.total:
            best = replace(best, cost=cost, why="annealing")
            on_better(best)
    return best


class _Round(NamedTuple):
    """The parameters of one round; temperatures are fractions of the cost of a stage."""

    start: str
    hot: float
    cold: float
    blend_hot: float
    blend_cold: float


# Tuned on DT-FM's five clusters with unequal links: several rounds from a constructed layout find
# different local minima, and cooler rounds then improve the best of them.
_ROUNDS = (
    _Round("made", 0.10, 0.005, 0.5, 0.05),
    _Round("made", 0.10, 0.005, 0.5, 0.05),
    _Round("second", 0.10, 0.005, 0.5, 0.05),
    _Round("scratch", 0.07, 0.003, 0.9, 0.05),
    _Round("best", 0.03, 0.004, 0.5, 0.05),
)


def _exact(times: PairTimes, best: Placement, on_better: Callable[[Placement], None]) -> Placement:
    found = search_exactly(times, below=best.cost.total, max_nodes=_EXACT_NODES)
    if found.better is not None:
        best = replace(best, cost=found.better, why="exact search")
        on_better(best)
    return replace(best, bound=best.cost.total) if found.complete else best


def _annealed(
    times: PairTimes,
    start: LayoutCost | None,
    this: _Round,
    effort: SearchEffort,
    rng: np.random.Generator,
) -> LayoutCost:
    from polyrhythm.jit import seed
    from polyrhythm.plan.dtfm.anneal import AnnealingSchedule, anneal
    from polyrhythm.plan.dtfm.path import layout_of_groups

    if start is None:
        shape = times.num_stages, times.num_pipelines
        start = layout_of_groups(rng.permutation(times.num_devices).reshape(shape), times)
    layout = np.array(start.layout)
    scale = start.total / times.num_stages
    seed(int(rng.integers(2**31)))
    schedule = AnnealingSchedule(
        int(effort.num_moves * max(1.0, (times.num_devices / 64) ** 0.5)),
        this.hot * scale,
        this.cold * scale,
        this.blend_hot,
        this.blend_cold,
    )
    anneal(layout, times.sync, times.hop, nearest(times.hop, _NUM_NEAR), schedule)
    return layout_of_groups(layout, times)
