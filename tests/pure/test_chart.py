"""Charts: every point has its place, ours are told from the paper's, bytes are the same."""

import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from reproduction.axis import figure, height, width
from reproduction.chart import draw_plot
from reproduction.claim import Plot

SVG = "{http://www.w3.org/2000/svg}"
LINES = Plot(
    name="lines",
    title="throughput over k",
    x="k",
    y="samples per second",
    series={"1F1B": [(1, 10.0), (2, 10.0), (3, 10.0)], "kFkB": [(1, 10.0), (2, 14.0), (3, 12.0)]},
    printed={"kFkB": [(1, 10.0), (3, 13.0)], "GPipe": [(3, 11.0)]},
)
BARS = Plot(
    name="bars",
    title="speed-up",
    x="",
    y="times as fast",
    series={"all-reduce": [("alike", 1.0), ("5x", 1.0)], "age": [("alike", 1.1), ("5x", 3.0)]},
    printed={"age": [("5x", 4.0)]},
)

numbers = st.floats(-1e6, 1e6).filter(lambda value: value == 0 or abs(value) > 1e-6)
words = st.one_of(st.text(max_size=20), st.floats(-100, 100))


def drawn(plot: Plot) -> ElementTree.Element:
    return ElementTree.fromstring(draw_plot(plot))


def texts(picture: ElementTree.Element) -> list[str]:
    return [each.text or "" for each in picture.iter(f"{SVG}text")]


def bars(picture: ElementTree.Element) -> list[ElementTree.Element]:
    """Those of the field: the ones that have a place of their own."""
    return [each for each in picture.iter(f"{SVG}rect") if each.get("x")]


def test_lines_have_dots_and_the_papers_have_rings_and_dashes() -> None:
    picture = drawn(LINES)
    lines = [each for each in picture.iter(f"{SVG}path") if each.get("stroke")]
    assert [each.get("class") for each in lines] == ["line", "line", "line printed"]
    assert lines[1].get("stroke") == lines[2].get("stroke") != lines[0].get("stroke")
    circles = list(picture.iter(f"{SVG}circle"))
    assert len([each for each in circles if each.get("fill")]) == 6
    assert len([each for each in circles if "ring" in each.get("class", "")]) == 3
    assert {"throughput over k", "k", "1F1B", "GPipe", "ours", "the paper's"} <= set(texts(picture))


def test_a_higher_value_lies_higher_and_a_larger_one_further_right() -> None:
    dots = [each for each in drawn(LINES).iter(f"{SVG}circle") if each.get("fill")]
    places = [(float(each.get("cx", "")), float(each.get("cy", ""))) for each in dots[3:]]
    (x1, y1), (x2, y2), (x3, y3) = places
    assert x1 < x2 < x3
    assert y2 < y3 < y1
    assert (y1 - y2) == pytest.approx(2 * (y1 - y3), abs=0.2)


def test_bars_are_as_high_as_their_values_and_outlines_stand_around_them() -> None:
    found = bars(drawn(BARS))
    heights = [float(each.get("height", "")) for each in found]
    assert len(found) == 5
    assert [value / heights[0] for value in heights] == pytest.approx([1, 1, 1.1, 3, 4], rel=0.01)
    ends = sorted((float(b.get("x", "")), float(b.get("width", ""))) for b in found[:4])
    assert all(x + wide <= other for (x, wide), (other, _) in pairwise(ends)), "none hides another"
    age, outline = found[3], found[4]
    assert outline.get("class") == "outline"
    assert float(outline.get("x", "")) < float(age.get("x", ""))
    assert float(outline.get("width", "")) > float(age.get("width", ""))


def test_without_printed_points_nobody_is_told_apart() -> None:
    plot = Plot(name="x", title="x", x="x", y="y", series=LINES.series, printed={})
    assert "the paper's" not in texts(drawn(plot))


@settings(max_examples=15)
@given(st.dictionaries(st.text(max_size=12), st.lists(st.tuples(words, numbers)), max_size=4))
def test_any_names_and_values_give_a_picture_within_its_bounds(series: dict) -> None:
    assume(any(series.values()))
    plot = Plot(name="x", title="<&>\x00", x="a\nb", y='"', series=series, printed=series)
    picture = drawn(plot)
    high = float(picture.get("height", ""))
    num_points = 2 * sum(map(len, series.values()))
    circles, rects = list(picture.iter(f"{SVG}circle")), bars(picture)
    assert len(rects) == num_points or len(circles) == num_points
    for each in circles:
        assert 0 <= float(each.get("cx", "")) <= 760
        assert 0 <= float(each.get("cy", "")) <= high
    for each in rects:
        top, tall = float(each.get("y", "")), float(each.get("height", ""))
        assert 0 <= top <= top + tall <= high


def test_words_that_have_no_room_are_slanted() -> None:
    long = [(f"quite-a-long-word-{place}", 1.0) for place in range(12)]
    plot = Plot(name="x", title="x", x="x", y="y", series={"a": long}, printed={})
    assert draw_plot(plot).count("rotate(") == 12
    assert "rotate(" not in draw_plot(BARS)


def test_the_same_plot_gives_the_same_bytes_whatever_the_hash_seed() -> None:
    code = (
        "from tests.pure.test_chart import BARS, LINES, draw_plot; import hashlib;"
        "print(hashlib.sha256((draw_plot(BARS) + draw_plot(LINES)).encode()).hexdigest())"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1


@pytest.mark.parametrize(
    "series", [{}, {"a": []}, {"a": [(1, math.nan)]}, {"a": [(math.inf, 1.0)]}]
)
def test_what_cannot_be_drawn_is_a_mistake_of_ours(series: dict) -> None:
    with pytest.raises(AssertionError, match="points"):
        draw_plot(Plot(name="x", title="x", x="x", y="y", series=series, printed={}))


@given(st.lists(numbers, min_size=1, max_size=9), st.booleans())
def test_the_height_holds_all_values_between_few_ticks(values: list, has_bars: bool) -> None:
    axis = height(values, start=300, end=0, has_bars=has_bars)
    assert all(-1e-6 <= axis.at(value) <= 300 + 1e-6 for value in values)
    assert 2 <= len(axis.ticks) <= 10
    places = [axis.at(tick) for tick in axis.ticks]
    steps = [a - b for a, b in pairwise(places)]
    assert places[0] == 300
    assert 0 < max(steps) < min(steps) * (2 if axis.is_log else 1.001)
    if has_bars:
        assert 0 in axis.ticks
        assert not axis.is_log


@given(st.lists(numbers, min_size=1, max_size=30))
def test_the_width_holds_all_values_and_its_ticks_are_among_them(values: list) -> None:
    axis = width(values, start=10, end=700, room=40)
    for value in [*values, *axis.ticks]:
        assert 10 - 1e-6 <= axis.at(value) <= 700 + 1e-6


@pytest.mark.parametrize(
    ("values", "ticks", "is_log"),
    [
        ([1, 2, 3, 4, 5, 6], (1, 2, 3, 4, 5, 6), False),
        ([1, 2, 4, 8, 16, 32, 64], (1, 2, 4, 8, 16, 32, 64), True),
        ([8, 16, 24], (8, 16, 24), False),
        (list(range(101)), (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100), False),
        ([10 ** (i / 4) for i in range(17)], None, True),
    ],
)
def test_ticks_stand_where_people_expect_them(values: list, ticks: tuple, is_log: bool) -> None:
    axis = width(values, start=0, end=680, room=40)
    assert axis.is_log is is_log
    assert axis.ticks == (ticks or (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000))


def test_ticks_by_factors_are_round() -> None:
    axis = height([1.5, 1.6, 2.0, 106.0], start=300, end=0, has_bars=False)
    assert axis.ticks == (1, 2, 5, 10, 20, 50, 100, 200)


def test_labels_of_an_axis_have_equally_many_places() -> None:
    axis = height([0.85, 1.1], start=1, end=0, has_bars=False)
    assert [axis.label(tick) for tick in axis.ticks] == [
        *("0.85", "0.90", "0.95", "1.00", "1.05", "1.10"),
    ]
    far = height([1e-5, 1.0], start=1, end=0, has_bars=False)
    assert [far.label(tick) for tick in far.ticks] == [
        "1e-05",
        "0.0001",
        "0.001",
        "0.01",
        "0.1",
        "1",
    ]


@pytest.mark.parametrize(
    ("values", "is_log"),
    [
        ([1.0, 1000.0, 1000.0], True),
        ([1.0, 999.0, 999.0], False),
        ([1.0, 2.0, 3.0, 30.0], True),
        ([1.0, 2.0, 3.0, 29.0], False),
        ([0.0, 1.0, 1e6], False),
        ([-1.0, 1.0, 1e6], False),
    ],
)
def test_lines_that_lie_far_apart_are_told_by_factors(values: list, is_log: bool) -> None:
    assert height(values, start=1, end=0, has_bars=False).is_log is is_log
    assert not height(values, start=1, end=0, has_bars=True).is_log


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1.5, "1.5"),
        (1.234, "1.23"),
        (0.01234, "0.0123"),
        (12345.6, "12,346"),
        (100, "100"),
        (-2.5, "-2.5"),
        (1e-7, "1e-07"),
        (3e12, "3e+12"),
        (99.96, "100"),
    ],
)
def test_figures_are_short_and_readable(value: float, text: str) -> None:
    assert figure(value) == text


def test_a_picture_brings_its_own_ground_for_light_and_dark() -> None:
    text = draw_plot(LINES)
    assert re.search(r'<rect class="ground" width="760"', text)
    assert "prefers-color-scheme:dark" in text
