"""Layouts made in one go: near devices side by side, dealt as pipelines, as stages, or in between.

Average linkage puts devices in a row in which near ones are close. The row is cut into runs of
`depth` devices, each of which is `depth` consecutive stages of one pipeline; when all pipelines
have theirs, the next `depth` stages follow. With depth 1 a stage is a stretch of the row, so
gradients travel short ways; with all stages a pipeline is, so activations do; divisors lie in
between. Which is best depends on what is sent, so all are offered.

Near is meant in two ways, which make two rows: by the link between two devices, or also by how
alike their links to all others are. The second one finds regions where a link out of a region is
as fast as those inside.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import pdist, squareform

from polyrhythm.cost.dtfm import Matrix, PairTimes


def construct_layouts(times: PairTimes) -> Iterator[NDArray[np.int64]]:
    """For both rows, one layout for each number of stages that a run can have."""
    num_stages, num_pipelines = times.num_stages, times.num_pipelines
    for row in _near_rows(times.hop):
        for depth in range(1, num_stages + 1):
            if num_stages % depth == 0:
                runs = row.reshape(num_stages // depth, num_pipelines, depth)
                layout = runs.transpose(0, 2, 1).reshape(num_stages, num_pipelines)
                yield np.ascontiguousarray(layout)  # compiled code is for such arrays only


def nearest(distances: Matrix, count: int) -> NDArray[np.int64]:
    """The `count` nearest others of each device, nearest first; all others if they are fewer."""
    apart = np.where(np.eye(len(distances), dtype=bool), np.inf, distances)
    count = min(count, len(distances) - 1)
    return np.argsort(apart, axis=1, kind="stable")[:, :count].astype(np.int64)


def _near_rows(hop: Matrix) -> Iterator[NDArray[np.int64]]:
    """All devices in a row, near ones close to one another."""
    if len(hop) == 1:
        yield np.zeros(1, np.int64)
        return
    links = squareform(hop, checks=False)
    # The two entries of a pair itself say nothing about the others, but cancel: both have a 0
    # where the other has their link, so that they add the link again.
    unlike = pdist(hop, "cityblock") / len(hop)
    for distances in (links, links + unlike):
        yield leaves_list(linkage(distances, "average")).astype(np.int64)
