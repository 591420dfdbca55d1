"""Charts show every point, tell ours from the paper's, and give the same bytes every time."""

import math
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from reproduction.chart import draw_plot, make_figure
from reproduction.paper_row import Plot

LINES = Plot(
    name="lines",
    title="throughput over k",
    x="k",
    y="samples per second",
    series={"1F1B": [(1, 10.0), (2, 10.0), (3, 10.0)], "kFkB": [(1, 10.0), (2, 14.0), (3, 12.0)]},
    printed={"kFkB": [(1, 10.0), (3, 13.0)]},
)
BARS = Plot(
    name="bars",
    title="speed-up",
    x="sleep",
    y="times as fast",
    series={"all-reduce": [("equal", 1.0), ("5x", 1.0)], "age": [("equal", 1.1), ("5x", 3.0)]},
    printed={"age": [("5x", 4.0)]},
)


def texts(plot: Plot) -> set[str]:
    svg = ElementTree.fromstring(draw_plot(plot))
    return {each.text or "" for each in svg.iter("{http://www.w3.org/2000/svg}text")}


def test_lines_show_all_points_and_the_papers_are_dashed_in_the_colour_of_ours() -> None:
    (axes,) = make_figure(LINES).axes
    one, ours, printed = axes.lines
    assert [list(zip(*line.get_data(), strict=True)) for line in axes.lines] == [
        *LINES.series.values(),
        *LINES.printed.values(),
    ]
    assert (ours.get_linestyle(), printed.get_linestyle()) == ("-", "--")
    assert ours.get_color() == printed.get_color() != one.get_color()


def test_bars_have_the_heights_of_their_values_and_outlines_surround_them() -> None:
    (axes,) = make_figure(BARS).axes
    *bars, outline = axes.patches
    assert [bar.get_height() for bar in bars] == [1.0, 1.0, 1.1, 3.0]
    assert outline.get_height() == 4.0
    assert not outline.get_fill()
    places = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars)
    assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(places))
    assert outline.get_x() == bars[3].get_x()


def test_titles_axes_and_legend_are_readable_text() -> None:
    assert {"throughput over k", "k", "samples per second", "1F1B", "kFkB, printed"} <= texts(LINES)
    assert {"speed-up", "sleep", "equal", "5x", "all-reduce", "age", "printed"} <= texts(BARS)
    plot = Plot(name="x", title="x", x="x", y="y", series=BARS.series)
    assert "printed" not in texts(plot)


def test_names_are_not_read_as_formulas_or_markup() -> None:
    plot = Plot(name="x", title="<$a$ & b>", x="$k$", y="y", series={"$x_1$": [(1, 1.0)]})
    assert {"<$a$ & b>", "$k$", "$x_1$"} <= texts(plot)


def test_long_names_are_slanted_and_long_titles_wrapped() -> None:
    groups = [(f"quite-a-long-name-{place}", 1.0) for place in range(12)]
    plot = Plot(name="x", title="a word " * 20, x="x", y="y", series={"a": groups})
    (axes,) = make_figure(plot).axes
    assert {label.get_rotation() for label in axes.get_xticklabels()} == {30}
    assert {label.get_rotation() for label in make_figure(BARS).axes[0].get_xticklabels()} == {0}
    assert "\n" in axes.get_title(loc="center")


def test_a_logarithmic_plot_has_plain_numbers() -> None:
    series = {"a": [(0.01, 1.0), (100.0, 1000.0)]}
    plot = Plot(name="x", title="x", x="x", y="y", series=series, is_log=True)
    assert {"0.01", "100", "1000"} <= texts(plot)


@pytest.mark.long
def test_the_same_plot_gives_the_same_bytes_for_any_hash_seed() -> None:
    code = (
        "from tests.pure.test_chart import BARS, LINES, draw_plot;"
        "print(draw_plot(BARS) + draw_plot(LINES))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "1"},  # that of this process is random
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert other.stdout == f"{draw_plot(BARS) + draw_plot(LINES)}\n"


def test_matplotlib_is_imported_only_to_draw() -> None:
    code = "import sys, reproduction.page; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    "series",
    [
        {},
        {"a": []},
        {"a": [(1, math.nan)]},
        {"a": [(math.inf, 1.0)]},
        {str(name): [(1, 1.0)] for name in range(9)},
    ],
)
def test_a_plot_that_cannot_be_drawn_fails_an_assertion(series: dict) -> None:
    with pytest.raises(AssertionError, match="plot 'x' has"):
        draw_plot(Plot(name="x", title="x", x="x", y="y", series=series))
