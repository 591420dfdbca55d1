"""Anneal a layout by the estimated step time, compiled: two microseconds per move.

Moves: swap two devices, at random or so that near ones become neighbours; swap two pipelines from
some stage on; reverse a run of stages. As in DT-FM's cost (`dtfm/anneal.py`) maxima guide a search
poorly, so means are blended in at high temperatures.
"""

import math

import numpy as np

from polyrhythm.jit import Ints, compiled, random_below
from polyrhythm.plan.layout_kernel import (
    LayoutPrices,
    LayoutState,
    column_times,
    device_at,
    make_state,
    put,
    row_times,
    values,
)

_ROUNDING = 1e-12
_SUFFIXES, _ROWS = 0.30, 0.04  # fractions of moves; the others swap two devices
_GUIDED = 0.5  # of those: to where a near device is


@compiled
def _swap(state: LayoutState, prices: LayoutPrices, a: int, b: int) -> None:
    """Swap the devices of positions a and b, counted by stage, then idle devices."""
    num_columns = state.layout.shape[1]
    num_places = state.layout.size
    first, second = device_at(state, a), device_at(state, b)
    put(state, a, second)
    put(state, b, first)
    for i in range(2):
        place = b if i else a
        if place < num_places:
            s, p = place // num_columns, place % num_columns
            if i == 0 or p != a % num_columns or a >= num_places:
                column_times(state, prices, p)
            if i == 0 or s != a // num_columns:
                row_times(state, prices, s)


@compiled
def _swap_suffix(state: LayoutState, prices: LayoutPrices, s: int, p: int, q: int) -> None:
    """Swap columns p and q from stage s on; rows keep their members."""
    num_columns = state.layout.shape[1]
    for t in range(s, len(state.layout)):
        a, b = state.layout[t, p], state.layout[t, q]
        put(state, t * num_columns + p, b)
        put(state, t * num_columns + q, a)
    column_times(state, prices, p)
    column_times(state, prices, q)


@compiled
def _reverse_rows(state: LayoutState, prices: LayoutPrices, s: int, t: int) -> None:
    """Reverse the order of stages s to t."""
    num_columns = state.layout.shape[1]
    for i in range((t - s + 1) // 2):
        for p in range(num_columns):
            a, b = state.layout[s + i, p], state.layout[t - i, p]
            put(state, (s + i) * num_columns + p, b)
            put(state, (t - i) * num_columns + p, a)
    for p in range(num_columns):
        column_times(state, prices, p)
    for r in range(s, t + 1):
        row_times(state, prices, r)


@compiled
def order_rows(layout: Ints, idle: Ints, prices: LayoutPrices) -> float:
    """Reverse runs of stages and move single stages, while that improves the value."""
    state = make_state(layout, idle, prices)
    best = values(state, prices)[0]
    num_stages, better = len(layout), True
    while better:
        better = False
        for s in range(num_stages):
            for t in range(s + 1, num_stages):
                # Reverse a run; or move a stage to the other end of a run, by two reversals.
                for kind in range(3):
                    _reverse_rows(state, prices, s, t)
                    if kind == 1:
                        _reverse_rows(state, prices, s, t - 1)
                    elif kind == 2:
                        _reverse_rows(state, prices, s + 1, t)
                    value = values(state, prices)[0]
                    if value < best - _ROUNDING:
                        best, better = value, True
                        continue
                    if kind == 1:
                        _reverse_rows(state, prices, s, t - 1)
                    elif kind == 2:
                        _reverse_rows(state, prices, s + 1, t)
                    _reverse_rows(state, prices, s, t)
    return float(best)


@compiled
def anneal_step(
    layout: Ints,
    idle: Ints,
    prices: LayoutPrices,
    near: Ints,
    num_moves: int,
    hot: float,
    cold: float,
) -> float:
    """Improve `layout` and `idle` in place; return the value, never worse than at the start.

    Temperatures are in the unit of the value; `near[d]` lists devices near d.
    """
    num_stages, num_columns = layout.shape
    num_places = num_stages * num_columns + len(idle)
    state = make_state(layout, idle, prices)
    value, mean = values(state, prices)
    best = value
    best_where = np.empty(num_places, np.int64)
    _copy(state.where, best_where)
    cooling = math.log(cold / hot)
    for move in range(num_moves):
        progress = move / num_moves
        temperature, blend = hot * math.exp(cooling * progress), 0.6 * (1 - progress)
        allowed = -temperature * math.log(1.0 - np.random.random())
        kind = np.random.random()
        a, b, h = 0, 0, 0
        if kind < _SUFFIXES and num_stages > 1 and num_columns > 1:
            h = 1 + random_below(num_stages - 1)
            a, b = random_below(num_columns), random_below(num_columns)
            _swap_suffix(state, prices, h, a, b)
        elif kind < _SUFFIXES + _ROWS and num_stages > 1:
            a, b = random_below(num_stages), random_below(num_stages)
            a, b = min(a, b), max(a, b)
            _reverse_rows(state, prices, a, b)
        else:
            kind = 1.0
            a, b = random_below(num_places), random_below(num_places)
            if np.random.random() < _GUIDED:
                # Next to the device of place a, in its row or its column, comes one near to it.
                device = device_at(state, a)
                b = state.where[near[device, random_below(near.shape[1])]]
                if a < layout.size:
                    s, p = a // num_columns, a % num_columns
                    if num_stages > 1 and (num_columns == 1 or np.random.random() < 0.5):
                        s = s + 1 if s == 0 or (s < num_stages - 1 and random_below(2)) else s - 1
                    else:
                        p = random_below(num_columns)
                    a = s * num_columns + p
            _swap(state, prices, a, b)
        new_value, new_mean = values(state, prices)
        if (1 - blend) * (new_value - value) + blend * (new_mean - mean) <= allowed:
            value, mean = new_value, new_mean
            if value < best - _ROUNDING:
                best = value
                _copy(state.where, best_where)
        elif kind < _SUFFIXES and num_stages > 1 and num_columns > 1:
            _swap_suffix(state, prices, h, a, b)
        elif kind < _SUFFIXES + _ROWS and num_stages > 1:
            _reverse_rows(state, prices, a, b)
        else:
            _swap(state, prices, a, b)
    for device in range(num_places):
        put(state, best_where[device], device)
    return float(best)


@compiled
def _copy(source: Ints, target: Ints) -> None:
    for i in range(len(source)):
        target[i] = source[i]
