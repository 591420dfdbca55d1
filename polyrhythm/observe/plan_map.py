"""Where everything of a plan's picture stands: devices in regions, and regions beside one another.

Regions come in the order of their stages, row by row, to and fro: whoever follows in a pipeline is
mostly beside. So do devices within a region.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from polyrhythm.describe.cluster import Cluster
from polyrhythm.plan.plan import Plan

WIDTH, HEIGHT = 46, 26  # of a device, in pixels
_CELL_WIDTH, _CELL_HEIGHT = 66, 58  # of a device with its name and room for lines
_PADDING, _NAME = 8, 26  # inside a region's box
_GAP = 44  # between boxes
_NARROWEST, _WIDEST = 640, 1400  # of the whole


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePosition:
    """One device; x and y are its centre, from the corner of its box."""

    device: str
    region: str
    pipeline: int | None = None  # none if it is left out
    stages: range = range(0)
    x: float = 0.0
    y: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One region."""

    name: str
    places: tuple[DevicePosition, ...]
    width: float
    height: float
    x: float = 0.0
    y: float = 0.0


def place_devices(plan: Plan, cluster: Cluster) -> list[Box]:
    """A box for each region with its devices in it, in the order of their stages."""
    parts = {
        part.device: (number, range(part.first, part.end))
        for number, pipeline in enumerate(plan.pipelines)
        for part in pipeline.parts
    }
    regions: dict[str, list[DevicePosition]] = {}
    for device in cluster.devices:
        pipeline, stages = parts.get(device.name, (None, range(0)))
        place = DevicePosition(
            device=device.name, region=device.region, pipeline=pipeline, stages=stages
        )
        regions.setdefault(device.region, []).append(place)
    boxes = [_filled(name, places) for name, places in regions.items()]
    return sorted(boxes, key=_mean_stage)


def arrange_boxes(boxes: Sequence[Box], *, left: float, top: float) -> list[Box]:
    """The same boxes in rows, every other row from right to left."""
    area = sum((box.width + _GAP) * (box.height + _GAP) for box in boxes)
    limit = min(_WIDEST, max(_NARROWEST, 1.5 * math.sqrt(area), *(box.width for box in boxes)))
    rows: list[list[Box]] = [[]]
    for box in boxes:
        if rows[-1] and sum(each.width + _GAP for each in rows[-1]) + box.width > limit:
            rows.append([])
        rows[-1].append(box)
    found: list[Box] = []
    for number, row in enumerate(rows):
        x = left
        for box in row if number % 2 == 0 else row[::-1]:
            found.append(replace(box, x=x, y=top))
            x += box.width + _GAP
        top += max(box.height for box in row) + _GAP
    return found


def _filled(name: str, places: Sequence[DevicePosition]) -> Box:
    """Those of one pipeline, or of one stage, beside one another, whichever are more."""
    num_pipelines = len({place.pipeline for place in places})
    num_stages = len({place.stages for place in places})

    def order(place: DevicePosition) -> tuple[int, ...]:
        if place.pipeline is None:
            return 1, 0, 0
        ends = place.pipeline, place.stages.start
        return 0, *(ends if num_pipelines < num_stages else reversed(ends))

    num_columns = math.ceil(math.sqrt(1.6 * len(places)))
    num_columns = min(len(places), num_columns)
    inside = []
    for number, place in enumerate(sorted(places, key=order)):
        row, column = divmod(number, num_columns)
        column = column if row % 2 == 0 else num_columns - 1 - column
        x = _PADDING + (column + 0.5) * _CELL_WIDTH
        y = _NAME + (row + 0.5) * _CELL_HEIGHT - 4
        inside.append(replace(place, x=x, y=y))
    num_rows = -(-len(places) // num_columns)
    return Box(
        name=name,
        places=tuple(inside),
        width=max(2 * _PADDING + num_columns * _CELL_WIDTH, 110),
        height=_NAME + num_rows * _CELL_HEIGHT + 4,
    )


def _mean_stage(box: Box) -> float:
    """Regions without any come last."""
    stages = [place.stages.start for place in box.places if place.pipeline is not None]
    return fmean(stages) if stages else math.inf
