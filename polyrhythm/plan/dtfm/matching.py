"""Bottleneck matching, compiled: pair two groups so that the slowest pair is as fast as possible.

Rows are matched one after another, along the alternating path whose slowest pair is fastest
(Dijkstra, with a maximum for the sum). After each row the matching of the rows so far is the best
one, by Berge's theorem. That is cubic in the size of a group, so a search calls it on finished
groups and not per move.

Source: equation 3 of arXiv:2206.01288. Departures: the published code deletes the slowest pairs one
by one and solves an assignment problem after each; it returns the matching after the last feasible
one, which may be worse than the cost that it reports.
"""

from typing import NamedTuple

import numpy as np

from polyrhythm.jit import Flags, Floats, Ints, compiled, inlined


def bottleneck(weights: Floats) -> tuple[float, Ints]:
    """Return the smallest possible largest weight, and the column of each row."""
    work = _work(len(weights))
    return _paired(weights, work), work.column_of


def all_hops(groups: Ints, hop: Floats) -> Floats:
    """Return the hop between any two groups; row i of `groups` holds the devices of group i."""
    num_groups, size = groups.shape
    hops = np.zeros((num_groups, num_groups))
    _fill_hops(groups, hop, hops, np.empty((size, size)), _work(size))
    return hops


def match_groups(groups: Ints, order: Ints, hop: Floats) -> Ints:
    """Return the groups in this order, each sorted so that columns are pipelines."""
    layout = [groups[order[0]]]
    for index in order[1:]:
        weights = hop[np.ix_(layout[-1], groups[index])]
        layout.append(groups[index][bottleneck(weights)[1]])
    return np.array(layout)


class _Work(NamedTuple):
    """Working arrays of a matching; -1 for a free row or column."""

    column_of: Ints
    row_of: Ints
    height: Floats  # per column: the slowest pair on the path to it
    via: Ints  # and the row before it on that path
    done: Flags


def _work(size: int) -> _Work:
    column_of, row_of, via = np.empty((3, size), np.int64)
    return _Work(column_of, row_of, np.empty(size), via, np.empty(size, np.bool_))


@compiled
def _fill_hops(groups: Ints, hop: Floats, hops: Floats, weights: Floats, work: _Work) -> None:
    size = len(weights)
    for i in range(len(groups)):
        for j in range(i):
            for p in range(size):
                for q in range(size):
                    weights[p, q] = hop[groups[i, p], groups[j, q]]
            hops[i, j] = hops[j, i] = _paired(weights, work)


@compiled
def _paired(weights: Floats, work: _Work) -> float:
    worst = 0.0
    for i in range(len(weights)):
        work.column_of[i] = work.row_of[i] = -1
    for start in range(len(weights)):
        column = _lowest_free(weights, start, work)
        worst = max(worst, work.height[column])
        while column >= 0:  # augment along the path
            row = work.via[column]
            work.row_of[column] = row
            work.column_of[row], column = column, work.column_of[row]
    return worst


@inlined
def _lowest_free(weights: Floats, start: int, work: _Work) -> int:
    """Return the free column with the lowest path from row `start`."""
    size, height, via, done = len(weights), work.height, work.via, work.done
    for c in range(size):
        height[c], via[c], done[c] = weights[start, c], start, False
    while True:
        column = -1
        for c in range(size):
            if not done[c] and (column < 0 or height[c] < height[column]):
                column = c
        done[column] = True
        row = work.row_of[column]
        if row < 0:
            return column
        for c in range(size):
            slowest = max(height[column], weights[row, c])
            if not done[c] and slowest < height[c]:
                height[c], via[c] = slowest, row
