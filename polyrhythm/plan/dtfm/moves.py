"""Larger moves of annealing than swapping two devices, and the choice of devices; compiled."""

import numpy as np

from polyrhythm.jit import inlined, random_below
from polyrhythm.plan.dtfm.grid import Acceptance, Grid, accept, between, swap_devices


@inlined
def swap_ends(grid: Grid, h: int, p: int, q: int, acceptance: Acceptance) -> None:
    """Swap columns p and q from stage h on: only one hop changes."""
    layout, size = grid.layout, grid.layout.shape[1]
    worst, total = 0.0, 0.0
    for i in range(size):
        j = q if i == p else p if i == q else i
        weight = grid.hop[layout[h - 1, i], layout[h, j]]
        worst = max(worst, weight)
        total += weight
    if accept(grid, acceptance, worst - grid.worst_hop[h], (total - grid.sum_hop[h]) / size):
        grid.worst_hop[h], grid.sum_hop[h] = worst, total
        for s in range(h, len(layout)):
            layout[s, p], layout[s, q] = layout[s, q], layout[s, p]
            grid.column_of[layout[s, p]], grid.column_of[layout[s, q]] = p, q


@inlined
def reverse_stages(grid: Grid, first: int, last: int, acceptance: Acceptance) -> None:
    """Reverse stages first to last: the hops within do not change."""
    first, last = min(first, last), max(first, last)
    layout, size = grid.layout, grid.layout.shape[1]
    if first == last:
        return
    before, before_sum = between(layout, grid.hop, first - 1, last)
    after, after_sum = between(layout, grid.hop, first, last + 1)
    worst_hop, sum_hop = grid.worst_hop, grid.sum_hop
    cost = before + after - worst_hop[first] - worst_hop[last + 1]
    mean = (before_sum + after_sum - sum_hop[first] - sum_hop[last + 1]) / size
    if not accept(grid, acceptance, cost, mean):
        return
    for i in range((last - first + 1) // 2):
        s, t = first + i, last - i
        grid.worst_row[s], grid.worst_row[t] = grid.worst_row[t], grid.worst_row[s]
        for p in range(size):
            layout[s, p], layout[t, p] = layout[t, p], layout[s, p]
    for i in range((last - first) // 2):
        h, k = first + 1 + i, last - i
        worst_hop[h], worst_hop[k] = worst_hop[k], worst_hop[h]
        sum_hop[h], sum_hop[k] = sum_hop[k], sum_hop[h]
    worst_hop[first], sum_hop[first] = before, before_sum
    worst_hop[last + 1], sum_hop[last + 1] = after, after_sum
    for s in range(first, last + 1):
        for p in range(size):
            grid.stage_of[layout[s, p]] = s


@inlined
def swap_runs(grid: Grid, length: int, acceptance: Acceptance) -> None:
    """Swap runs of `length` stages of two pipelines or within one; or reverse one run.

    The swaps are made one after another and undone if all together are not accepted.
    """
    num_stages, size = grid.layout.shape
    p, q = random_below(size), random_below(size)
    s, t = random_below(num_stages - length + 1), random_below(num_stages - length + 1)
    is_reversed = np.random.random() < 0.5
    if p == q and abs(s - t) < length:
        t, is_reversed = s, True  # a run cannot be swapped with itself: reverse it
    num_swaps = length // 2 if p == q and s == t else length
    before, before_mean = grid.total[0], grid.total[1]
    always = Acceptance(acceptance.blend, np.inf)
    for _ in range(2):
        for i in range(num_swaps):
            a = grid.layout[s + i, p]
            b = grid.layout[t + length - 1 - i if is_reversed else t + i, q]
            swap_devices(grid, a, b, always)
        cost, mean = grid.total[0] - before, grid.total[1] - before_mean
        if (1 - acceptance.blend) * cost + acceptance.blend * mean <= acceptance.allowed:
            return


@inlined
def slowest_column(grid: Grid, h: int) -> int:
    for p in range(grid.layout.shape[1]):
        if grid.hop[grid.layout[h - 1, p], grid.layout[h, p]] == grid.worst_hop[h]:
            return p
    return 0


@inlined
def critical_device(grid: Grid) -> int:
    """Return a device that causes a maximum: of a hop, or of the gradients."""
    h = random_below(len(grid.layout))
    if h > 0:
        return int(grid.layout[h - random_below(2), slowest_column(grid, h)])
    device = grid.layout[0, 0]
    for d in range(len(grid.rows)):
        if grid.rows[d] > grid.rows[device]:
            device = d
    return int(device)


@inlined
def random_neighbour(grid: Grid, device: int) -> int:
    """Return the device before or after a device in its pipeline."""
    s, last = grid.stage_of[device], len(grid.layout) - 1
    after = s == 0 or (s < last and np.random.random() < 0.5)
    return int(grid.layout[s + 1 if after else s - 1, grid.column_of[device]])
