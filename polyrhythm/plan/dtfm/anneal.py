"""Simulated annealing of a layout, compiled: half a microsecond per move for 64 devices.

The cost is a maximum plus maxima, so most moves do not change it. Therefore the annealed value is a
blend of the cost and of the same with means for maxima; the weight of the means falls with the
temperature. Moves: swap two devices, at random or so that near ones become neighbours; swap the
ends of two pipelines, which pairs two stages differently; reverse a run of stages. Each takes time
linear in a stage, and none needs a matching: columns are part of the layout.
"""

import math
from typing import NamedTuple

import numpy as np

from polyrhythm.jit import Floats, Ints, compiled, random_below
from polyrhythm.plan.dtfm.grid import Acceptance, Grid, make_grid, swap_devices
from polyrhythm.plan.dtfm.moves import (
    critical_device,
    random_neighbour,
    reverse_stages,
    slowest_column,
    swap_ends,
    swap_runs,
)

_ENDS, _REVERSALS, _RUNS = 0.40, 0.03, 0.10  # fractions of moves; the others swap two devices
_GUIDED = 0.5  # of those: to where a near device is
_CRITICAL = 0.5  # of all moves: start with a device that decides the cost
_ROUNDING = 1e-9  # seconds


class AnnealingSchedule(NamedTuple):
    num_moves: int
    hot: float  # temperature at the start, seconds
    cold: float  # and at the end
    blend_hot: float  # share of the means at the start
    blend_cold: float


def anneal(
    layout: Ints, sync: Floats, hop: Floats, near: Ints, schedule: AnnealingSchedule
) -> float:
    """Improve `layout` in place and return its cost, never worse than at the start.

    `near[d]` lists devices near d, `hop` is symmetric.
    """
    best_layout = layout.copy()
    best = _anneal(make_grid(layout, sync, hop), best_layout, near, schedule)
    layout[:] = best_layout
    return best


@compiled
def _anneal(grid: Grid, best_layout: Ints, near: Ints, schedule: AnnealingSchedule) -> float:
    num_stages, size = grid.layout.shape
    best = grid.total[0]
    cooling = math.log(schedule.cold / schedule.hot)
    for move in range(schedule.num_moves):
        progress = move / schedule.num_moves
        temperature = schedule.hot * math.exp(cooling * progress)
        acceptance = Acceptance(
            schedule.blend_hot + (schedule.blend_cold - schedule.blend_hot) * progress,
            -temperature * math.log(1.0 - np.random.random()),
        )
        kind = np.random.random()
        if kind < _ENDS and num_stages > 1:
            h = 1 + random_below(num_stages - 1)
            p, q = random_below(size), random_below(size)
            if np.random.random() < _CRITICAL:
                p = slowest_column(grid, h)
            swap_ends(grid, h, p, q, acceptance)
        elif kind < _ENDS + _REVERSALS and num_stages > 2:
            reverse_stages(grid, random_below(num_stages), random_below(num_stages), acceptance)
        elif kind < _ENDS + _REVERSALS + _RUNS and num_stages > 3:
            length = 2 + random_below(num_stages // 2 - 1)
            swap_runs(grid, length, acceptance)
        else:
            a, b = random_below(num_stages * size), random_below(num_stages * size)
            if np.random.random() < _CRITICAL:
                a = critical_device(grid)
            if np.random.random() < _GUIDED and num_stages > 1:
                b = random_neighbour(grid, a)
                a = near[a, random_below(near.shape[1])]
            swap_devices(grid, a, b, acceptance)
        if grid.total[0] < best - _ROUNDING:
            best = grid.total[0]
            for s in range(num_stages):
                for p in range(size):
                    best_layout[s, p] = grid.layout[s, p]
    return float(best)
