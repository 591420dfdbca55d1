"""Turn groups into a layout: the best order of stages, and the best pipelines through them."""

import numpy as np
from numpy.typing import NDArray

from polyrhythm.cost.dtfm import LayoutCost, PairTimes, layout_cost
from polyrhythm.plan.dtfm.matching import all_hops, match_groups
from polyrhythm.plan.dtfm.path import cheapest_order, path_length
from polyrhythm.types import Seconds


def layout_of_groups(groups: NDArray[np.int64], times: PairTimes) -> LayoutCost:
    """Return the layout of these groups; the best one if `path` can order them exactly."""
    order = cheapest_order(all_hops(groups, times.hop))
    return layout_cost(match_groups(groups, order, times.hop).tolist(), times)


def partition_cost(groups: NDArray[np.int64], times: PairTimes) -> Seconds:
    """Return only the cost of `layout_of_groups`."""
    sync = times.sync[groups[:, :, None], groups[:, None, :]].sum(axis=2).max()
    hops = all_hops(groups, times.hop)
    return float(sync) + path_length(hops, cheapest_order(hops))
