"""Compute positions for a plan's picture: devices in boxes of regions, boxes in rows.

Regions are sorted by stage and fill rows in alternating direction, so that successors in a pipeline
are mostly neighbours. Devices within a region are arranged likewise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from polyrhythm.describe.cluster import Cluster
from polyrhythm.plan.plan import Plan

WIDTH, HEIGHT = 46, 26  # of a device, in pixels
_CELL_WIDTH, _CELL_HEIGHT = 66, 58  # of a device with its name and space for lines
_PADDING, _NAME = 8, 26  # inside a region's box
_GAP = 44  # between boxes
_MIN_WIDTH, _MAX_WIDTH = 640, 1400  # of the picture


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePosition:
    """One device; x and y are its centre relative to the corner of its box."""

    device: str
    region: str
    pipeline: int | None = None  # None if the plan leaves the device out
    stages: range = range(0)
    x: float = 0.0
    y: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """The box of one region."""

    name: str
    positions: tuple[DevicePosition, ...]
    width: float
    height: float
    x: float = 0.0
    y: float = 0.0


def place_devices(plan: Plan, cluster: Cluster) -> list[Box]:
    """Return a box with devices for each region, sorted by mean stage."""
    parts = {
        part.device: (number, range(part.first, part.end))
        for number, pipeline in enumerate(plan.pipelines)
        for part in pipeline.parts
    }
    regions: dict[str, list[DevicePosition]] = {}
    for device in cluster.devices:
        pipeline, stages = parts.get(device.name, (None, range(0)))
        position = DevicePosition(
            device=device.name, region=device.region, pipeline=pipeline, stages=stages
        )
        regions.setdefault(device.region, []).append(position)
    boxes = [_fill_box(name, positions) for name, positions in regions.items()]
    return sorted(boxes, key=_mean_stage)


def arrange_boxes(boxes: Sequence[Box], *, left: float, top: float) -> list[Box]:
    """Return the boxes placed in rows; every second row runs from right to left."""
    area = sum((box.width + _GAP) * (box.height + _GAP) for box in boxes)
    limit = min(_MAX_WIDTH, max(_MIN_WIDTH, 1.5 * math.sqrt(area), *(box.width for box in boxes)))
    rows: list[list[Box]] = [[]]
    for box in boxes:
        if rows[-1] and sum(other.width + _GAP for other in rows[-1]) + box.width > limit:
            rows.append([])
        rows[-1].append(box)
    placed: list[Box] = []
    for number, row in enumerate(rows):
        x = left
        for box in row if number % 2 == 0 else row[::-1]:
            placed.append(replace(box, x=x, y=top))
            x += box.width + _GAP
        top += max(box.height for box in row) + _GAP
    return placed


def _fill_box(name: str, positions: Sequence[DevicePosition]) -> Box:
    """Place devices of a pipeline next to each other, or those of a stage if stages are fewer."""
    num_pipelines = len({position.pipeline for position in positions})
    num_stages = len({position.stages for position in positions})

    def order(position: DevicePosition) -> tuple[int, ...]:
        if position.pipeline is None:
            return 1, 0, 0
        key = position.pipeline, position.stages.start
        return 0, *(key if num_pipelines < num_stages else reversed(key))

    num_columns = min(len(positions), math.ceil(math.sqrt(1.6 * len(positions))))
    inside = []
    for number, position in enumerate(sorted(positions, key=order)):
        row, column = divmod(number, num_columns)
        column = column if row % 2 == 0 else num_columns - 1 - column
        x = _PADDING + (column + 0.5) * _CELL_WIDTH
        y = _NAME + (row + 0.5) * _CELL_HEIGHT - 4
        inside.append(replace(position, x=x, y=y))
    num_rows = -(-len(positions) // num_columns)
    return Box(
        name=name,
        positions=tuple(inside),
        width=max(2 * _PADDING + num_columns * _CELL_WIDTH, 110),
        height=_NAME + num_rows * _CELL_HEIGHT + 4,
    )


def _mean_stage(box: Box) -> float:
    """Return the mean first stage of a region's devices; inf if none has a stage."""
    stages = [position.stages.start for position in box.positions if position.pipeline is not None]
    return fmean(stages) if stages else math.inf
