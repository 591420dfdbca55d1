"""Draw a plot as SVG with matplotlib: our values, and the printed ones of the paper.

Line charts show ours as solid lines with dots and the paper's as dashed lines with rings. Bar
charts show ours as bars and the paper's as dashed outlines. A method has one colour in both.
The same plot gives the same bytes: fixed ids, no date, text as text.
"""

import io
import math
import textwrap
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from reproduction.paper_row import Plot, Points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#3f7fd9", "#e0792f", "#2e9f6b", "#c94f8c", "#8b6ad6", "#b8921f", "#1f9fb0", "#c4524a")
_INK = "#202124"
_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#80868b",
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "figure.constrained_layout.use": True,
    "figure.figsize": (8.0, 4.2),  # inches
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "font.size": 9,
    "grid.color": "#e4e6e9",
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: small, searchable files
    "svg.hashsalt": "polyrhythm",  # without it, ids are random
    "text.parse_math": False,
}
_TITLE_LINE, _LABEL_LINE = 80, 104  # characters that fit into the width of the picture
_MAX_DOTTED = 30  # points of a line; longer lines have no dots
_MAX_TICKS = 10  # distinct x values that get a tick each


def draw_plot(plot: Plot) -> str:
    """Return the text of an SVG file."""
    from matplotlib import style  # needed for development only, so imported here

    text = io.StringIO()
    with style.context(["default", _STYLE]):
        # A field that is None is left out: a date or a version would change the bytes.
        unwanted = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        make_figure(plot).savefig(text, format="svg", metadata={**unwanted, "Title": plot.title})
    return text.getvalue()


def make_figure(plot: Plot) -> "Figure":
    """Make a bar chart if an x value is a name, otherwise a line chart."""
    from matplotlib.figure import Figure

    points = [point for line in _all_lines(plot) for point in line]
    assert points, f"plot {plot.name!r} has no points"
    numbers = [value for point in points for value in point if not isinstance(value, str)]
    assert all(map(math.isfinite, numbers)), f"plot {plot.name!r} has infinite or missing points"
    names = dict.fromkeys([*plot.series, *plot.printed])
    assert len(names) <= len(_COLOURS), f"plot {plot.name!r} has more lines than colours"
    colours = dict(zip(names, _COLOURS, strict=False))
    figure = Figure()
    axes = figure.add_subplot()
    draw = _draw_bars if any(isinstance(x, str) for x, _ in points) else _draw_lines
    draw(axes, plot, colours)
    axes.set(title=textwrap.fill(plot.title, _TITLE_LINE), xlabel=plot.x, ylabel=plot.y)
    longest = max(len(label) for label in axes.get_legend_handles_labels()[1])
    num_columns = max(2, min(5, _LABEL_LINE // (longest + 6)))
    figure.legend(loc="outside lower center", ncols=num_columns)
    return figure


def _draw_lines(axes: "Axes", plot: Plot, colours: Mapping[str, str]) -> None:
    def draw(line: Points, **look: Any) -> None:
        axes.plot([x for x, _ in line], [y for _, y in line], **look)

    for index, (name, line) in enumerate(plot.series.items()):
        width = 1.5 + 2.5 * (1 - (index + 1) / len(plot.series))  # equal lines: both are visible
        dots = {"marker": "o", "markersize": 5} if len(line) <= _MAX_DOTTED else {}
        draw(line, label=name, color=colours[name], linewidth=width, **dots)
    rings = {"linestyle": "--", "marker": "o", "markersize": 9, "markerfacecolor": "none"}
    for name, line in plot.printed.items():
        draw(line, label=f"{name}, printed", color=colours[name], **rings)
    if plot.is_log:
        axes.set(xscale="log", yscale="log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        return
    values = sorted({float(x) for line in _all_lines(plot) for x, _ in line})
    if len(values) <= _MAX_TICKS:
        axes.set_xticks(values)
    low, high = axes.get_ylim()
    if 0 < low < high / 3:  # 0 costs little space
        axes.set_ylim(bottom=0)


def _draw_bars(axes: "Axes", plot: Plot, colours: Mapping[str, str]) -> None:
    groups = list(dict.fromkeys(str(x) for line in _all_lines(plot) for x, _ in line))
    in_groups = Counter(str(x) for line in plot.series.values() for x, _ in line)
    num_slots = len(colours) if max(in_groups.values()) > 1 else 1
    width = 0.8 / num_slots  # a fifth of the axis is left between groups

    def draw(name: str, line: Points, **look: Any) -> None:
        shift = width * (list(colours).index(name) % num_slots - (num_slots - 1) / 2)
        places = [groups.index(str(x)) + shift for x, _ in line]
        axes.bar(places, [y for _, y in line], width, **look)

    for name, line in plot.series.items():
        draw(name, line, label=name, color=colours[name], edgecolor="white", linewidth=0.5)
    for index, (name, line) in enumerate(plot.printed.items()):
        label = "_" if index else "printed"  # one entry in the legend for all
        draw(name, line, label=label, fill=False, edgecolor=_INK, linestyle="--")
    axes.set_xticks(range(len(groups)), groups)
    if sum(map(len, groups)) > _LABEL_LINE:
        for tick in axes.get_xticklabels():
            tick.set(rotation=30, ha="right", rotation_mode="anchor")


def _all_lines(plot: Plot) -> list[Points]:
    return [*plot.series.values(), *plot.printed.values()]
