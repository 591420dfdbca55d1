"""A layout with sums and maxima, compiled: annealing prices a move by what it changes.

The grid stores per device the sync time within its stage; per stage the maximum of that; per hop
the slowest column and the sum over columns. Two totals follow: the cost (`cost/dtfm.py`), and the
same with means for maxima. The elementary move swaps two devices, in time linear in a stage.
"""

from typing import NamedTuple

import numpy as np

from polyrhythm.jit import Floats, Ints, inlined


class Grid(NamedTuple):
    """A layout with its sums. Hop h leads into stage h; hop 0 and the last are unused."""

    sync: Floats
    hop: Floats
    layout: Ints  # [stage, column]
    stage_of: Ints
    column_of: Ints
    rows: Floats  # per device: eq. 2's sum
    worst_row: Floats  # per stage
    worst_hop: Floats  # per hop
    sum_hop: Floats
    total: Floats  # the cost, and the cost with means


class Acceptance(NamedTuple):
    """The cost that a move may have: `allowed` is drawn before, so the decision is one test."""

    blend: float
    allowed: float


def make_grid(layout: Ints, sync: Floats, hop: Floats) -> Grid:
    """Return the grid of a layout, which is not copied: moves change it in place."""
    num_stages, size = layout.shape
    stage_of, column_of = np.empty((2, num_stages * size), np.int64)
    stage_of[layout], column_of[layout] = np.indices(layout.shape)
    rows = np.empty(num_stages * size)
    rows[layout] = sync[layout[:, :, None], layout[:, None, :]].sum(axis=2)
    worst_row = rows[layout].max(axis=1)
    worst_hop, sum_hop = np.zeros((2, num_stages + 1))
    hops = hop[layout[:-1], layout[1:]]
    worst_hop[1:-1], sum_hop[1:-1] = hops.max(axis=1), hops.sum(axis=1)
    total = np.array([worst_row.max() + worst_hop.sum(), rows.mean() + sum_hop.sum() / size])
    return Grid(sync, hop, layout, stage_of, column_of, rows, worst_row, worst_hop, sum_hop, total)


@inlined
def between(layout: Ints, hop: Floats, s: int, t: int) -> tuple[float, float]:
    """Return the worst column and the sum over columns between two stages; 0 beyond the ends."""
    worst, total = 0.0, 0.0
    if s >= 0 and t < len(layout):
        for p in range(layout.shape[1]):
            weight = hop[layout[s, p], layout[t, p]]
            worst = max(worst, weight)
            total += weight
    return worst, total


@inlined
def accept(grid: Grid, acceptance: Acceptance, cost: float, mean: float) -> bool:
    """Return whether a change of both totals is accepted; if so, update them."""
    if (1 - acceptance.blend) * cost + acceptance.blend * mean > acceptance.allowed:
        return False
    grid.total[0] += cost
    grid.total[1] += mean
    return True


@inlined
def swap_devices(grid: Grid, a: int, b: int, acceptance: Acceptance) -> None:
    layout, rows, size = grid.layout, grid.rows, grid.layout.shape[1]
    s, t = grid.stage_of[a], grid.stage_of[b]
    p, q = grid.column_of[a], grid.column_of[b]
    layout[s, p], layout[t, q] = b, a
    cost, mean = 0.0, 0.0
    for i in range(4):
        h = _touched(s, t, i)
        if h >= 0:
            worst, total = between(layout, grid.hop, h - 1, h)
            cost += worst - grid.worst_hop[h]
            mean += (total - grid.sum_hop[h]) / size
    worst_s, worst_t = grid.worst_row[s], grid.worst_row[t]
    row_a, row_b = rows[a], rows[b]
    if s != t:
        worst_s, row_b, change_s = _exchanged(grid, s, a, b)
        worst_t, row_a, change_t = _exchanged(grid, t, b, a)
        before, after = 0.0, max(worst_s, worst_t)
        for i in range(len(layout)):
            before = max(before, grid.worst_row[i])
            if i != s and i != t:
                after = max(after, grid.worst_row[i])
        cost += after - before
        mean += (change_s + change_t) / len(rows)
    if not accept(grid, acceptance, cost, mean):
        layout[s, p], layout[t, q] = a, b
        return
    grid.stage_of[a], grid.column_of[a] = t, q
    grid.stage_of[b], grid.column_of[b] = s, p
    for i in range(4):
        h = _touched(s, t, i)
        if h >= 0:
            grid.worst_hop[h], grid.sum_hop[h] = between(layout, grid.hop, h - 1, h)
    if s != t:
        for i in range(size):
            d, e = layout[s, i], layout[t, i]
            rows[d] += grid.sync[b, d] - grid.sync[a, d]
            rows[e] += grid.sync[a, e] - grid.sync[b, e]
        rows[a], rows[b] = row_a, row_b
        grid.worst_row[s], grid.worst_row[t] = worst_s, worst_t


@inlined
def _touched(s: int, t: int, i: int) -> int:
    """Return the i-th hop around two stages; -1 for a repeated one."""
    h = (s, s + 1, t, t + 1)[i]
    if (i == 2 and (t == s or t == s + 1)) or (i == 3 and (t == s or t + 1 == s)):
        return -1
    return int(h)


@inlined
def _exchanged(grid: Grid, s: int, gone: int, come: int) -> tuple[float, float, float]:
    """Return stage s after a swap: its worst row, the new device's row, and the total change."""
    worst, row_come, change = 0.0, 0.0, 0.0
    for i in range(grid.layout.shape[1]):
        d = grid.layout[s, i]
        if d != come:
            less, more = grid.sync[gone, d], grid.sync[come, d]  # symmetric; rows lie together
            row_come += more
            worst = max(worst, grid.rows[d] - less + more)
            change += 2 * (more - less)
    return max(worst, row_come), row_come, change
