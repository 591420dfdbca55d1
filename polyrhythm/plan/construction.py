"""Construct layouts directly: near devices next to each other, as pipelines, stages, or between.

Average linkage sorts devices into a row in which near ones are close. The row is split into runs of
`depth` devices, each of which is `depth` consecutive stages of one pipeline; when all pipelines
have such a run, the next `depth` stages follow. With depth 1 a stage is a stretch of the row, so
gradients use short links; with all stages a pipeline is, so activations do; other divisors are in
between. Which is best depends on the traffic, so all are tried.

Two distances make two rows: the link between two devices, or also how similar their links to all
others are. The second one finds regions even if a link out of a region is as fast as those inside.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import pdist, squareform

from polyrhythm.cost.dtfm import Matrix, PairTimes


def construct_layouts(times: PairTimes) -> Iterator[NDArray[np.int64]]:
    """Yield one layout for each of both rows and each possible depth."""
    num_stages, num_pipelines = times.num_stages, times.num_pipelines
    for row in _near_rows(times.hop):
        for depth in range(1, num_stages + 1):
            if num_stages % depth == 0:
                runs = row.reshape(num_stages // depth, num_pipelines, depth)
                layout = runs.transpose(0, 2, 1).reshape(num_stages, num_pipelines)
                yield np.ascontiguousarray(layout)  # compiled code takes only contiguous arrays


def nearest(distances: Matrix, count: int) -> NDArray[np.int64]:
    """Return the `count` nearest other devices of each device, nearest first, or all if fewer."""
    apart = np.where(np.eye(len(distances), dtype=bool), np.inf, distances)
    count = min(count, len(distances) - 1)
    return np.argsort(apart, axis=1, kind="stable")[:, :count].astype(np.int64)


def _near_rows(hop: Matrix) -> Iterator[NDArray[np.int64]]:
    """Yield rows of all devices in which near ones are close to one another."""
    if len(hop) == 1:
        yield np.zeros(1, np.int64)
        return
    links = squareform(hop, checks=False)
    # The two entries of a pair itself say nothing about the others, but cancel: both have a 0
    # where the other has their link, so that they add the link again.
    unlike = pdist(hop, "cityblock") / len(hop)
    for distances in (links, links + unlike):
        yield leaves_list(linkage(distances, "average")).astype(np.int64)
