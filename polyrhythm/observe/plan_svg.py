"""Draw a plan as SVG: regions as boxes, pipelines as lines through their devices, and groups.

Devices of the same stage, which average together, have the same tint and number. A table below the
map has one row for each such group (one column, if there are many pipelines and few stages). It is
also the legend: its headers show the tint of each stage and the colour of each pipeline.
"""

import colorsys
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.sax.saxutils import escape, quoteattr

from polyrhythm.describe.cluster import Cluster
from polyrhythm.observe.plan_map import (
    HEIGHT,
    WIDTH,
    Box,
    DevicePosition,
    arrange_boxes,
    place_devices,
)
from polyrhythm.observe.plan_table import degrees, in_seconds
from polyrhythm.plan.plan import Plan

_MARGIN = 24
_TOP = 94  # title and explanation
_LETTER = 0.62  # width of a letter relative to its size, rounded up
_ROW = 26
_HEAD = 128  # of a row of the table
_MAX_LETTERS = 18  # of a name in the table
_MAX_COLUMNS = 10
_LONG, _ROUND = 1.6 * WIDTH, 2 * HEIGHT  # length from which lines are curved, and by how much
_GREY, _INK, _LINE = "#9aa0a6", "#202124", "#dadce0"


def draw_plan(plan: Plan, cluster: Cluster) -> str:
    """Return the picture as SVG text; every pipeline of the plan must name its devices."""
    assert all(pipeline.devices for pipeline in plan.pipelines), "a plan to draw has devices"
    boxes = arrange_boxes(place_devices(plan, cluster), left=_MARGIN, top=_TOP)
    bottom = max(box.y + box.height for box in boxes) + 2 * _MARGIN
    table = _Table.of(plan, bottom)
    width = max(*(box.x + box.width for box in boxes), _MARGIN + table.width, 760) + _MARGIN
    parts = [*_title(plan), *map(_box, boxes)]  # later parts are drawn on top
    positions = {position.device: (position, box) for box in boxes for position in box.positions}
    for number, pipeline in enumerate(plan.pipelines):
        points = [_centre(*positions[part.device]) for part in pipeline.parts]
        parts += _line(points, number, plan.num_pipelines)
    parts += map(_name, boxes)
    parts += [_device(position, box, plan) for box in boxes for position in box.positions]
    parts += table.draw(plan)
    height = table.top + table.height + _MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif" fill="{_INK}">'
    )
    back = f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>'
    return "\n".join([head, back, *parts, "</svg>", ""])


def _title(plan: Plan) -> Iterator[str]:
    names = " on ".join(_shortened(name, 24) for name in (plan.model, plan.cluster) if name)
    shape = degrees(plan)
    yield _text(_MARGIN, 34, f"{names}: {shape}" if names else shape, 17, bold=True)
    if plan.predicted is not None:
        step, bound = in_seconds(plan.predicted.step), in_seconds(plan.predicted.bound)
        yield _text(_MARGIN, 54, f"a step takes {step}; no plan takes less than {bound}", 12)
    legend = "a box is a region, a line a pipeline, a tint and its number a stage"
    dashed = "; dashed devices are left out" if plan.left_out else ""
    yield _text(_MARGIN, 74, legend + dashed, 12)


def _box(box: Box) -> str:
    return (
        f'<rect class="region" x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" '
        f'height="{box.height:.1f}" rx="8" fill="#f8f9fa" stroke="{_LINE}"/>'
    )


def _name(box: Box) -> str:
    name = _shortened(box.name, int((box.width - 20) / (12 * _LETTER)))
    return _text(box.x + 10, box.y + 18, name, 12, bold=True, halo=True, title=box.name)


def _device(position: DevicePosition, box: Box, plan: Plan) -> str:
    """Draw a device with its stages inside and its name below, without the region's prefix."""
    x, y = _centre(position, box)
    if position.pipeline is None:
        label, fill, edge = "", "white", f'stroke="{_GREY}" stroke-dasharray="4 3"'
        about = f"{position.device}: left out"
    else:
        last = position.stages.stop - 1
        label = str(last) if len(position.stages) == 1 else f"{position.stages.start}-{last}"
        fill = _tint(position.stages.start, plan.num_stages)
        edge = f'stroke="{_colour(position.pipeline)}" stroke-width="3"'
        about = f"{position.device}: stage {label} of pipeline {position.pipeline}"
    name = position.device.removeprefix(f"{box.name}/")
    ink = _GREY if position.pipeline is None else _INK
    return (
        f'<g class="device"><title>{_plain(about)}</title>'
        f'<rect x="{x - WIDTH / 2:.1f}" y="{y - HEIGHT / 2:.1f}" width="{WIDTH}" '
        f'height="{HEIGHT}" rx="6" fill="{fill}" {edge}/>'
        + _text(x, y + 5, label, 13, middle=True, bold=True)
        + _text(
            x, y + HEIGHT / 2 + 13, _shortened(name, 10), 10, middle=True, halo=True, colour=ink
        )
        + "</g>"
    )


def _line(points: Sequence[tuple[float, float]], number: int, num_pipelines: int) -> Iterator[str]:
    """Draw a pipeline; long lines curve around devices, differently for each pipeline."""
    side = 1 if number % 2 else -1
    path = [f"M {points[0][0]:.1f} {points[0][1]:.1f}"]
    for (x, y), (to_x, to_y) in pairwise(points):
        length = math.hypot(to_x - x, to_y - y)
        spread = min(60, 0.1 * length) * number / num_pipelines
        bend = side * (_ROUND + spread) if length > _LONG else 0.0
        middle_x = (x + to_x) / 2 - bend * (to_y - y) / length
        middle_y = (y + to_y) / 2 + bend * (to_x - x) / length
        path.append(f"Q {middle_x:.1f} {middle_y:.1f} {to_x:.1f} {to_y:.1f}")
    if len(points) > 1:
        yield (
            f'<path class="pipeline" d="{" ".join(path)}" fill="none" '
            f'stroke="{_colour(number)}" stroke-width="2.5" stroke-opacity="0.75"/>'
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """The table of stages x pipelines, or of pipelines x stages if `is_transposed`."""

    top: float
    column: float  # width of a column
    num_rows: int
    num_columns: int
    is_transposed: bool  # pipelines are rows

    @classmethod
    def of(cls, plan: Plan, top: float) -> "_Table":
        names = [device for pipeline in plan.pipelines for device in pipeline.devices]
        longest = min(_MAX_LETTERS, max(map(len, names)))
        shape = plan.num_stages, plan.num_pipelines
        is_transposed = plan.num_pipelines > max(_MAX_COLUMNS, plan.num_stages)
        num_rows, num_columns = reversed(shape) if is_transposed else shape
        return cls(
            top=top,
            column=max(_HEAD, longest * 11 * _LETTER + 16),
            num_rows=num_rows,
            num_columns=num_columns,
            is_transposed=is_transposed,
        )

    @property
    def width(self) -> float:
        return _HEAD + self.num_columns * self.column

    @property
    def height(self) -> float:
        return _ROW * (self.num_rows + 1) + 28

    def draw(self, plan: Plan) -> Iterator[str]:
        line = "column" if self.is_transposed else "row"
        caption = f"the devices of a {line} average with one another"
        caption = caption if plan.num_pipelines > 1 else "stages and their devices"
        yield _text(_MARGIN, self.top, caption, 13)
        for stage in range(plan.num_stages):
            layers = plan.layers(stage)
            last = f"-{layers.stop - 1}" if len(layers) > 1 else ""
            head = f"{stage}: layer{'s' if last else ''} {layers.start}{last}"
            size = _ROW * (plan.num_pipelines + 1), self.column
            if not self.is_transposed:
                size = _ROW, _HEAD + self.column * plan.num_pipelines
            x, y = self._corner(stage, -1)
            yield (
                f'<rect class="group" x="{x:.1f}" y="{y + 2:.1f}" width="{size[1] - 2:.1f}" '
                f'height="{size[0] - 4:.1f}" rx="4" fill="{_tint(stage, plan.num_stages)}"/>'
            )
            yield _text(x + 6, y + 17, head, 11, bold=True)
        for number, pipeline in enumerate(plan.pipelines):
            x, y = self._corner(-1, number)
            work = f"{pipeline.num_microbatches or 'any'} micro-batches"
            about = f"pipeline {number}: {work}, {pipeline.schedule}"
            width = (_HEAD if self.is_transposed else self.column) - 16
            line = f"M {x + 4:.1f} {y + 22:.1f} h {width}"
            yield f'<path d="{line}" stroke="{_colour(number)}" stroke-width="3"/>'
            yield _text(x + 6, y + 16, f"p{number}", 11, bold=True, title=about)
            yield _text(x + 32, y + 16, work, 9)
            for stage, device in enumerate(pipeline.devices):
                x, y = self._corner(stage, number)
                name = _shortened(device, _MAX_LETTERS)
                yield _text(x + 6, y + 17, name, 11, title=device)

    def _corner(self, stage: int, pipeline: int) -> tuple[float, float]:
        """Return the corner of a cell; an index of -1 is a header."""
        row, column = (pipeline, stage) if self.is_transposed else (stage, pipeline)
        x = _MARGIN + (0 if column < 0 else _HEAD + column * self.column)
        return x, self.top + 12 + (row + 1) * _ROW


def _centre(position: DevicePosition, box: Box) -> tuple[float, float]:
    return box.x + position.x, box.y + position.y


def _text(
    x: float,
    y: float,
    content: str,
    size: int,
    *,
    bold: bool = False,
    middle: bool = False,
    halo: bool = False,
    colour: str = "",
    title: str = "",
) -> str:
    style = (' font-weight="bold"' if bold else "") + (' text-anchor="middle"' if middle else "")
    style += f" fill={quoteattr(colour)}" if colour else ""
    style += ' stroke="white" stroke-width="3" paint-order="stroke"' if halo else ""
    about = f"<title>{_plain(title)}</title>" if title else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}"{style}>{about}{_plain(content)}</text>'
    )


def _plain(text: str) -> str:
    """Escape a text for XML and replace characters that XML forbids, such as control characters."""
    return escape(
        "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    )


def _shortened(name: str, limit: int) -> str:
    """Shorten a name at its start, since names differ at their ends."""
    return name if len(name) <= limit else "\N{HORIZONTAL ELLIPSIS}" + name[len(name) - limit + 1 :]


def _tint(stage: int, num_stages: int) -> str:
    return _hex(0.85 * stage / num_stages, 0.86, 0.75)


def _colour(pipeline: int) -> str:
    """Return a colour by golden-ratio steps of hue: consecutive pipelines always differ clearly."""
    return _hex((0.58 + pipeline * (math.sqrt(5) - 1) / 2) % 1, 0.42, 0.72)


def _hex(hue: float, lightness: float, saturation: float) -> str:
    red, green, blue = colorsys.hls_to_rgb(hue, lightness, saturation)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"
