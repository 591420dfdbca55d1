"""Find the provably best layout, if devices are of few classes.

With few classes there are few types of stage (`classes.py`). A depth-first search appends one type
after another and backtracks when its lower bound - the slowest stage so far, the hops so far, and
the cheapest hop for each that is missing - is no better than the best known layout. With a good
initial layout it ends at once or within seconds.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyrhythm.cost.dtfm import LayoutCost, Matrix, PairTimes
from polyrhythm.plan.dtfm.classes import (
    DeviceClasses,
    assign_devices,
    device_classes,
    num_stage_types,
    stage_types,
    type_sync,
)
from polyrhythm.types import Seconds

MAX_TYPES = 200
MAX_NODES = 20_000_000  # of the search tree: about a second


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactResult:
    """The result of an exact search below a known cost."""

    better: LayoutCost | None
    complete: bool  # True: no layout is better than `better`, or than the known one


def search_exactly(
    times: PairTimes, *, below: Seconds = np.inf, max_nodes: int = MAX_NODES
) -> ExactResult:
    """Search for the best layout that costs less than `below`; stop if there are too many types."""
    from polyrhythm.plan.dtfm.exact_tree import Choices, explore  # compiled: imported when needed
    from polyrhythm.plan.dtfm.group_layout import layout_of_groups

    classes = device_classes(times)
    if num_stage_types(classes.counts, times.num_pipelines) > MAX_TYPES:
        return ExactResult(better=None, complete=False)
    types = stage_types(classes.counts, times.num_pipelines)
    hops = _type_hops(types, classes, times.num_pipelines)
    choices = Choices(types, type_sync(types, classes), hops, classes.counts)
    sequence, complete = explore(
        choices, num_stages=times.num_stages, below=below, max_nodes=max_nodes
    )
    if sequence[0] < 0:
        return ExactResult(better=None, complete=complete)
    return ExactResult(
        better=layout_of_groups(assign_devices(types[sequence], classes), times), complete=complete
    )


def _type_hops(types: NDArray[np.int64], classes: DeviceClasses, size: int) -> Matrix:
    """Eq. 3 for each two types; inf for a type of which there cannot be two stages."""
    from polyrhythm.plan.dtfm.matching import all_hops, bottleneck

    every_class = np.arange(len(classes.counts))
    groups = np.array([np.repeat(every_class, counts) for counts in types]).reshape(-1, size)
    hops = all_hops(groups, classes.hop)
    for index, group in enumerate(groups):
        twice = (2 * types[index] <= classes.counts).all()
        within = classes.hop[np.ix_(group, group)]
        hops[index, index] = bottleneck(within)[0] if twice else np.inf
    return hops
