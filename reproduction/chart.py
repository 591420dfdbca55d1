"""A plot as a picture: ours beside what the paper prints, as the text of an SVG file.

Over numbers, ours are lines with dots, the paper's dashed ones with rings. Over words, ours are
bars, and the paper's are outlines around them: where an outline is filled to its edge, both agree.
A method has one colour in both. The picture has a ground of its own, light or dark as the reader
likes it. The same plot gives the same bytes.
"""

import colorsys
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from reproduction.axis import Axis, height, width
from reproduction.claim import Plot

_WIDTH, _HEIGHT = 760, 300  # of the picture, and of the field that the axes frame
_LEFT, _RIGHT = 76, _WIDTH - 24  # where the field begins and ends
_LETTER = 7.2  # width of one, a little more than most are
_ROW = 18
_WIDEST_TITLE = 76  # letters
_MANY = 30  # points of a line that need no dots
_SLANT = 35  # degrees, of words that have no room side by side
_STYLE = """\
text{font:12px system-ui,sans-serif;fill:#3c4043}.title{font-size:15px;font-weight:600}
.ground{fill:#fff}.title{fill:#202124}.grid{stroke:#e4e6e9}.axis{stroke:#80868b}
.line{fill:none;stroke-width:2}.printed{fill:none;stroke-dasharray:5 3}.ring{stroke-width:1.5}
.outline{fill:none;stroke:#202124;stroke-dasharray:4 2}
@media(prefers-color-scheme:dark){text{fill:#bdc1c6}.title{fill:#e8eaed}
.ground{fill:#1b1c1f}.grid{stroke:#34363a}.outline{stroke:#f1f3f4}}"""
# Far apart for most eyes, and clear on light and on dark ground.
_COLOURS = (
    *("#3f7fd9", "#e0792f", "#2e9f6b", "#c94f8c", "#8b6ad6", "#b8921f", "#1f9fb0", "#c4524a"),
)

_Points = Sequence[tuple[float | str, float]]


def draw_plot(plot: Plot) -> str:
    """Lines if all that is along the axis are numbers, else bars."""
    points = [point for line in _all_lines(plot) for point in line]
    assert points, f"plot {plot.name!r} has no points"
    numbers = [value for point in points for value in point if not isinstance(value, str)]
    assert all(map(math.isfinite, numbers)), f"plot {plot.name!r} has points that lie nowhere"
    has_bars = any(isinstance(x, str) for x, _ in points)
    title = textwrap.wrap(plot.title, _WIDEST_TITLE)
    under = 28 + 20 * len(title)
    legend = list(_legend(plot, has_bars, top=under))
    top = under + _ROW * (1 + legend[-1].row) + 24
    up = height([y for _, y in points], start=top + _HEIGHT, end=top, has_bars=has_bars)
    parts, below = _bars(plot, up) if has_bars else _lines(plot, up)
    bottom = up.start + below + 20
    size = f'width="{_WIDTH}" height="{bottom + 16:.0f}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
            f'viewBox="0 0 {_WIDTH} {bottom + 16:.0f}" role="img">',
            f"<title>{_plain(plot.title)}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="ground" {size} rx="6"/>',
            *(_text(20, 28 + 20 * n, line, 'class="title"') for n, line in enumerate(title)),
            *(entry.drawn() for entry in legend),
            _text(20, top - 14, plot.y),
            *_grid(up),
            *parts,
            _text((_LEFT + _RIGHT) / 2, bottom, plot.x, 'text-anchor="middle"'),
            "</svg>",
            "",
        ]
    )


def _grid(up: Axis) -> Iterator[str]:
    for tick in up.ticks:
        y, kind = up.at(tick), "axis" if tick in (0, up.low) else "grid"
        yield f'<path class="{kind}" d="M{_LEFT} {y:.1f}H{_RIGHT}"/>'
        yield _text(_LEFT - 8, y + 4, up.label(tick), 'text-anchor="end"')


@dataclass(frozen=True, slots=True)
class _Entry:
    """Of the legend: a mark and what it stands for."""

    x: float
    top: float
    row: int
    mark: str
    name: str

    def drawn(self) -> str:
        y = self.top + 4 + _ROW * self.row
        mark = f'<g transform="translate({self.x:.1f} {y - 5:.1f})">{self.mark}</g>'
        return mark + _text(self.x + 24, y, self.name)


def _legend(plot: Plot, has_bars: bool, top: float) -> Iterator[_Entry]:
    """Methods in their colours, then how ours and the paper's are told apart."""
    marks = [
        (f'<rect y="-5" width="18" height="10" rx="2" fill="{colour}"/>', name)
        for name, colour in _colours(plot).items()
    ]
    if any(plot.printed.values()):
        where = 'y="-5" width="18" height="10"' if has_bars else 'd="M0 0H18"'
        ours = (
            f'<rect {where} fill="#80868b"/>' if has_bars else f'<path class="line axis" {where}/>'
        )
        paper = f'<rect class="outline" {where}/>'
        if not has_bars:
            paper = f'<path class="line axis printed" {where}/>'
        marks += [(ours, "ours"), (paper, "the paper's")]
    x, row = 20.0, 0
    for mark, name in marks:
        room = 24 + _LETTER * len(name) + 16
        if x > 20 and x + room > _RIGHT:
            x, row = 20.0, row + 1
        yield _Entry(x, top, row, mark, name)
        x += room


def _lines(plot: Plot, up: Axis) -> tuple[list[str], float]:
    """What is drawn, and how far it reaches below the axis."""
    numbers = [float(x) for line in _all_lines(plot) for x, _ in line]
    along = width(numbers, start=_LEFT + 12, end=_RIGHT - 12, room=44)
    parts = []
    for tick in along.ticks:
        x = along.at(tick)
        parts.append(f'<path class="axis" d="M{x:.1f} {up.start:.1f}v5"/>')
        parts.append(_text(x, up.start + 20, along.label(tick), 'text-anchor="middle"'))
    colours = _colours(plot)
    for is_ours, lines in ((True, plot.series), (False, plot.printed)):
        for name, points in lines.items():
            places = [(along.at(float(x)), up.at(y)) for x, y in points]
            parts += _line(places, colours[name], is_ours)
    return parts, 24


def _line(places: Sequence[tuple[float, float]], colour: str, is_ours: bool) -> Iterator[str]:
    if len(places) > 1:
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        kind = "line" if is_ours else "line printed"
        yield f'<path class="{kind}" d="M{path}" stroke="{colour}"/>'
    if len(places) <= _MANY:
        look = (
            f'r="3" fill="{colour}"' if is_ours else f'class="ground ring" r="4" stroke="{colour}"'
        )
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" {look}/>' for x, y in places)


def _bars(plot: Plot, up: Axis) -> tuple[list[str], float]:
    """What is drawn, and how far it reaches below the axis."""
    words = list(dict.fromkeys(_word(x) for line in _all_lines(plot) for x, _ in line))
    colours = _colours(plot)
    room = (_RIGHT - _LEFT) / len(words)
    bar = min(46.0, 0.8 * room / len(colours))
    foot = up.at(0)
    parts = []
    for is_ours, lines in ((True, plot.series), (False, plot.printed)):
        for name, points in lines.items():
            for x, y in points:
                middle = _LEFT + room * (words.index(_word(x)) + 0.5)
                left = middle + bar * (list(colours).index(name) - len(colours) / 2)
                gap = min(3.0, 0.15 * bar) if is_ours else min(1.0, 0.05 * bar)
                top = up.at(y)
                look = f'fill="{colours[name]}"' if is_ours else 'class="outline"'
                parts.append(
                    f'<rect x="{left + gap:.1f}" y="{min(top, foot):.1f}" '
                    f'width="{bar - 2 * gap:.1f}" height="{abs(foot - top):.1f}" {look}/>'
                )
    labels, below = _labels(words, room, up.start)
    return parts + labels, below


def _labels(words: Sequence[str], room: float, top: float) -> tuple[list[str], float]:
    """Under the bars, in lines where they fit, else slanted."""
    most = max(1, int((room - 6) / _LETTER))
    folded = [textwrap.wrap(word, most, break_long_words=False) or [""] for word in words]
    middles = [_LEFT + room * (place + 0.5) for place in range(len(words))]
    if max(len(line) for lines in folded for line in lines) <= most:
        drawn = [
            _text(middle, top + 18 + 15 * row, line, 'text-anchor="middle"')
            for middle, lines in zip(middles, folded, strict=True)
            for row, line in enumerate(lines)
        ]
        return drawn, 9 + 15 * max(map(len, folded))
    drawn = [
        _text(
            0,
            0,
            word,
            f'text-anchor="end" transform="translate({x + 4:.1f} {top + 16:.1f}) '
            f'rotate({-_SLANT})"',
        )
        for x, word in zip(middles, words, strict=True)
    ]
    longest = _LETTER * max(map(len, words))
    return drawn, 14 + longest * math.sin(math.radians(_SLANT))


def _all_lines(plot: Plot) -> list[_Points]:
    return [*plot.series.values(), *plot.printed.values()]


def _word(x: float | str) -> str:
    return x if isinstance(x, str) else f"{x:g}"


def _colours(plot: Plot) -> Mapping[str, str]:
    names = dict.fromkeys([*plot.series, *plot.printed])
    return {name: _colour(place) for place, name in enumerate(names)}


def _colour(place: int) -> str:
    """Past the chosen ones, golden steps around the circle of hues."""
    if place < len(_COLOURS):
        return _COLOURS[place]
    red, green, blue = colorsys.hls_to_rgb(place * (math.sqrt(5) - 1) / 2 % 1, 0.5, 0.5)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def _text(x: float, y: float, content: str, look: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{_plain(content)}</text>'.replace(" >", ">")


def _plain(text: str) -> str:
    """What a name may hold and XML may not, such as control characters, is replaced."""
    return escape(
        "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    )
