"""Estimate a step's time, compiled: per pipeline and per stage, so that moves are cheap.

A layout has one row of devices per stage and one column per pipeline; the other devices are idle. A
column takes the sum of its devices and links for the first micro-batch, and its slowest device or
link for each further one. Rows synchronise their gradients. Micro-batches are assigned to columns
by speed, or evenly. The state has the numbers of each column and row; a move (`layout_anneal.py`)
recomputes only the columns and rows that it touches.
"""

from typing import NamedTuple

import numpy as np

from polyrhythm.jit import Floats, Ints, compiled

_NEVER = 1e-12  # seconds: smallest period, to avoid a division by 0


class LayoutPrices(NamedTuple):
    """The parts of a step that do not depend on the layout.

    Tables with named rows: Numba takes seconds more to compile for each array argument.
    """

    stages: Floats  # [WORK, ACTIVATION or SHARE, stage]
    devices: Floats  # [SLOWNESS, SENDS or RENT, device]
    pairs: Floats  # [ROUND_TRIP, ... or USES_UPLINK, device, device]
    over: Floats  # [stage, device]: penalty in seconds for missing memory
    num_microbatches: float  # of all columns
    num_peers: float  # peers that a member of a row serves at a time
    by_price: bool  # anneal the price of a step instead of its time
    even: bool  # the same number of micro-batches for each column
    concurrent: bool  # a member of a row serves all peers at once, not one after the other


WORK, ACTIVATION, SHARE = 0, 1, 2
# seconds of a micro-batch at speed 1; bytes to the next stage; bytes to each replica, per
# reduce-scatter or all-gather
SLOWNESS, SENDS, RENT = 0, 1, 2  # 1 / speed; seconds per byte to all others; price per second
ROUND_TRIP, BUSY, BOTH, EGRESS = 0, 1, 2, 3
# sum of both latencies; seconds per byte of the slower direction; of both; price per byte of both
AVERAGE_TRIP, AVERAGE_BUSY, USES_UPLINK = 4, 5, 6
# the first two of averages, which may use another backend; 1 if they share the sender's uplink


class LayoutState(NamedTuple):
    layout: Ints  # [stage, column]
    idle: Ints
    where: Ints  # [device]: its position, counted by stage; idle devices come after all stages
    columns: Floats  # [FIRST, PERIOD or SENT, column]
    rows: Floats  # [SYNC, MEAN or SENT, stage]


FIRST, PERIOD = 0, 1  # seconds of a column's first micro-batch, and of each further one
SYNC, MEAN = 0, 1  # seconds of a row's slowest member, and of its mean one
SENT = 2  # egress price: of a micro-batch (columns), of a step's gradients (rows)


@compiled
def column_times(state: LayoutState, prices: LayoutPrices, p: int) -> None:
    first, period, sent = 0.0, 0.0, 0.0
    layout = state.layout
    for s in range(len(layout)):
        d = layout[s, p]
        work = prices.stages[WORK, s] * prices.devices[SLOWNESS, d]
        first += work + prices.over[s, d]
        period = max(period, work)
        if s > 0:
            before, size = layout[s - 1, p], prices.stages[ACTIVATION, s - 1]
            first += prices.pairs[ROUND_TRIP, before, d] + size * prices.pairs[BOTH, before, d]
            period = max(period, size * prices.pairs[BUSY, before, d])
            sent += size * prices.pairs[EGRESS, before, d]
    columns = state.columns
    columns[FIRST, p], columns[PERIOD, p], columns[SENT, p] = first, period, sent


@compiled
def row_times(state: LayoutState, prices: LayoutPrices, s: int) -> None:
    size, share = state.layout.shape[1], prices.stages[SHARE, s]
    worst, total, sent = 0.0, 0.0, 0.0
    trips = 2.0 if prices.concurrent else 1.0  # both latencies, for reduce-scatter and all-gather
    for i in range(size):
        a = state.layout[s, i]
        slowest, total_time, num_on_uplink = 0.0, 0.0, 0.0
        for j in range(size):
            if i != j:
                b = state.layout[s, j]
                # Reduce-scatter and all-gather use both directions, so the slower one counts.
                one = trips * prices.pairs[AVERAGE_TRIP, a, b]
                one += 2 * share * prices.pairs[AVERAGE_BUSY, a, b]
                num_on_uplink += prices.pairs[USES_UPLINK, a, b]
                slowest = max(slowest, one)
                total_time += one
                # Each pair is visited twice: reduce-scatter and all-gather.
                sent += share * prices.pairs[EGRESS, a, b]
        if prices.concurrent:
            num_peers = prices.num_peers * (num_on_uplink / max(size - 1, 1))
            total_time = max(slowest, 2 * share * num_peers * prices.devices[SENDS, a])
        worst = max(worst, total_time)
        total += total_time
    sent *= prices.num_peers / max(size - 1, 1)  # a part of them, in groups
    rows = state.rows
    rows[SYNC, s], rows[MEAN, s], rows[SENT, s] = worst, total / size, sent


@compiled
def values(state: LayoutState, prices: LayoutPrices) -> tuple[float, float]:
    """Return the annealed value, time or price of a step, and the same with means for maxima."""
    step, mean = step_times(state, prices)
    if not prices.by_price:
        return step, mean
    rent, sent = 0.0, 0.0
    for s in range(len(state.layout)):
        sent += state.rows[SENT, s]
        for p in range(state.layout.shape[1]):
            rent += prices.devices[RENT, state.layout[s, p]]
    for p in range(state.layout.shape[1]):
        sent += state.columns[SENT, p] * prices.num_microbatches / state.layout.shape[1]
    return step * rent + sent, mean * rent + sent


@compiled
def step_times(state: LayoutState, prices: LayoutPrices) -> tuple[float, float]:
    """Return the step time, and the same with means instead of maxima."""
    num_columns = state.layout.shape[1]
    slowest_first, mean_first, rate, mean_period = 0.0, 0.0, 0.0, 0.0
    worst_column = 0.0
    each = prices.num_microbatches / num_columns - 1
    for p in range(num_columns):
        slowest_first = max(slowest_first, state.columns[FIRST, p])
        mean_first += state.columns[FIRST, p] / num_columns
        rate += 1 / max(state.columns[PERIOD, p], _NEVER)
        mean_period += state.columns[PERIOD, p] / num_columns
        worst_column = max(worst_column, state.columns[FIRST, p] + each * state.columns[PERIOD, p])
    worst_sync, mean_sync = 0.0, 0.0
    for s in range(len(state.layout)):
        worst_sync = max(worst_sync, state.rows[SYNC, s])
        mean_sync += state.rows[MEAN, s] / len(state.layout)
    columns = worst_column
    if not prices.even:
        columns = slowest_first + max(prices.num_microbatches - num_columns, 0.0) / rate
    return columns + worst_sync, mean_first + each * mean_period + mean_sync


@compiled
def device_at(state: LayoutState, place: int) -> int:
    num_columns = state.layout.shape[1]
    if place < state.layout.size:
        return int(state.layout[place // num_columns, place % num_columns])
    return int(state.idle[place - state.layout.size])


@compiled
def put(state: LayoutState, place: int, device: int) -> None:
    num_columns = state.layout.shape[1]
    state.where[device] = place
    if place < state.layout.size:
        state.layout[place // num_columns, place % num_columns] = device
    else:
        state.idle[place - state.layout.size] = device


@compiled
def make_state(layout: Ints, idle: Ints, prices: LayoutPrices) -> LayoutState:
    num_stages, num_columns = layout.shape
    state = LayoutState(
        layout,
        idle,
        np.zeros(layout.size + len(idle), np.int64),
        np.zeros((3, num_columns)),
        np.zeros((3, num_stages)),
    )
    for place in range(len(state.where)):
        state.where[device_at(state, place)] = place
    for p in range(num_columns):
        column_times(state, prices, p)
    for s in range(num_stages):
        row_times(state, prices, s)
    return state
