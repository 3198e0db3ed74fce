"""Charts: curves on logarithmic or linear axes, horizontal bars, and wide strips over one axis.

Nothing here knows of meshes, only numbers and text; how a number is written is the caller's to
say.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.pages.draw.svg import (
    BACKGROUND,
    FAINT,
    INK,
    LIMIT,
    LIVE_EDGE,
    RED,
    SERIES,
    SOFT_INK,
    Attributes,
    Key,
    Panel,
    Point,
    framed,
    group,
    label,
    line_path,
    mark,
    series,
    text_width,
)

_MOST_AROUND = 8


def ticks_inside(low: float, high: float, n_most: int) -> list[float]:
    """Return at most `n_most` multiples of 1, 2 or 5 times a power of ten inside a range."""
    step = _step((high - low) or 1.0, n_most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [step * k for k in range(first, last + 1)]


def ticks_around(low: float, high: float) -> list[float]:
    """Return round numbers around a range, three to eight steps apart by 1, 2 or 5."""
    if low == high:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    step = _step(high - low, _MOST_AROUND)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * k for k in range(first, max(last, first + 1) + 1)]


def decades_around(low: float, high: float) -> list[float]:
    """Return the decades around a range, with 2 and 5 between them where it is short."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)
    if last - first > 3:
        return [10.0**k for k in range(first, last + 1)]
    steps = [float(f"{m}e{k}") for k in range(first, last + 1) for m in (1, 2, 5)]
    start = max(i for i, step in enumerate(steps) if step <= low * (1 + 1e-9) or i == 0)
    stop = next((i for i, s in enumerate(steps) if s >= high * (1 - 1e-9)), len(steps) - 1)
    return steps[start : max(stop, start + 1) + 1]


def _step(span: float, n_most: int) -> float:
    """Return the least of 1, 2 or 5 times a power of ten of which `n_most` cover a span."""
    unit = 10.0 ** math.floor(math.log10(span / n_most))
    return next(unit * m for m in (1, 2, 5, 10, 20) if span / (unit * m) <= n_most - 1)


_BARS_WIDTH, _STEP, _THICK = 460.0, 34.0, 18.0
_SIZE = 12.0


@dataclass(frozen=True)
class MeasuredBar:
    """One bar from zero to `value`, with the least and the most that were measured."""

    name: str
    value: float
    low: float
    high: float
    predicted: float | None = None

    def __post_init__(self) -> None:
        values = [self.low, self.value, self.high, self.predicted or 0.0]
        if not (all(map(math.isfinite, values)) and 0 <= self.low <= self.value <= self.high):
            raise InputError(
                f"MeasuredBar {self.name!r} needs 0 <= low <= value <= high, but got {values}"
            )


def bars_svg(
    bars: Sequence[MeasuredBar],
    *,
    words: str,
    write: Callable[[float], str],
    limit: float | None = None,
    title: str,
    caption: str = "",
) -> str:
    """Return the bars as an SVG document: one `bar` each, and a `limit` line where there is one.

    Raises:
        InputError: no bar.
    """
    if not bars:
        raise InputError("bars_svg needs at least one bar, but got none")
    most = max([limit or 0.0, *(max(bar.high, bar.predicted or 0.0) for bar in bars)]) or 1.0
    ticks = ticks_around(0.0, most)
    span = max(most, ticks[-1])
    left = max(text_width(bar.name, _SIZE) for bar in bars) + 12
    right = max(text_width(write(bar.value), _SIZE) for bar in bars) + 14
    top, bottom = 6.0, 6.0 + _STEP * len(bars)
    marks = _axis(ticks, span, (left, top, bottom), words, write)
    for number, bar in enumerate(bars):
        marks += _bar(bar, number, lambda value: left + value / span * _BARS_WIDTH, top, write)
    keys = [Key(INK, "least and most measured", "line")]
    if any(bar.predicted is not None for bar in bars):
        keys.append(Key(RED, "predicted by simulation", "line"))
    if limit is not None:
        x = left + limit / span * _BARS_WIDTH
        line: Attributes = {"class": "limit", "d": line_path([(x, top - 4), (x, bottom)])}
        look: Attributes = {"stroke": LIMIT, "stroke-width": 2, "stroke-dasharray": "7 4"}
        marks.append(mark("path", {**line, **look, "fill": "none"}))
        keys.append(Key(LIMIT, "limit", "dash"))
    panel = Panel(left + _BARS_WIDTH + right, bottom + 44, tuple(marks))
    return framed(panel, title=title, keys=keys, caption=caption)


def _axis(
    ticks: Sequence[float],
    span: float,
    place: tuple[float, float, float],
    words: str,
    write: Callable[[float], str],
) -> list[str]:
    left, top, bottom = place
    room = max(text_width(write(tick), TICK_SIZE) for tick in ticks) + 14
    stride = max(1, math.ceil(len(ticks) * room / _BARS_WIDTH))
    marks, data = [], []
    for tick in ticks[::stride]:
        x = left + tick / span * _BARS_WIDTH
        data.append(line_path([(x, top), (x, bottom)]))
        at = (x, bottom + 13)
        marks.append(label(at, write(tick), size=TICK_SIZE, anchor="middle", colour=SOFT_INK))
    grid = mark("path", {"class": "grid", "d": "".join(data), "stroke": FAINT, "fill": "none"})
    frame = line_path([(left, top), (left, bottom)])
    edge = mark("path", {"class": "axes", "d": frame, "stroke": LIVE_EDGE, "fill": "none"})
    name = label((left + _BARS_WIDTH / 2, bottom + 32), words, anchor="middle")
    return [grid, *marks, edge, name]


def _bar(
    bar: MeasuredBar,
    number: int,
    at: Callable[[float], float],
    top: float,
    write: Callable[[float], str],
) -> list[str]:
    middle = top + (number + 0.5) * _STEP
    box: Attributes = {"x": at(0), "y": middle - _THICK / 2, "height": _THICK, "rx": 2}
    wide = max(0.5, at(bar.value) - at(0))
    marks = [
        label((at(0) - 8, middle), bar.name, size=_SIZE, anchor="end"),
        mark("rect", {"class": "bar", **box, "width": wide, "fill": series(number)}),
    ]
    reach = line_path([(at(bar.low), middle), (at(bar.high), middle)])
    marks.append(mark("path", {"class": "spread", "d": reach, "stroke": INK, "stroke-width": 1.6}))
    end = bar.high
    if bar.predicted is not None:
        x, half = at(bar.predicted), 0.5 * _THICK + 4
        line: Attributes = {
            "class": "predicted",
            "d": line_path([(x, middle - half), (x, middle + half)]),
        }
        marks.append(mark("path", {**line, "stroke": RED, "stroke-width": 2.6}))
        end = max(end, bar.predicted)
    marks.append(label((at(end) + 7, middle), write(bar.value), size=_SIZE))
    return marks


Floats = NDArray[np.float64]

LEFT, WIDTH, RIGHT = 76.0, 976.0, 20.0
TICK_SIZE = 11.0
ON_COLOUR = "#fffffe"  # not quite the white of the ground, so that a dark page can tell them apart
_FLAG = 8.0
_MANY_FLAGS = 20  # more than this are drawn fainter, so that they do not hide the curves


@dataclass(frozen=True)
class Span:
    """A range of values laid over a length; an empty range is widened to one."""

    low: float
    high: float
    length: float = WIDTH

    def at(self, value: float) -> float:
        """Return where a value lies, from 0 to `length`."""
        return (value - self.low) / ((self.high - self.low) or 1.0) * self.length


@dataclass(frozen=True)
class Flag:
    """A vertical line through all strips at `x`, with a number on top and words on hover."""

    x: float
    number: int
    colour: str
    words: str


def decimated(x: Floats, y: Floats, n_most: int) -> tuple[Floats, Floats]:
    """Return at most `n_most` of the points, in order, with the peaks of every stretch kept.

    Both ends stay, and each of the equal stretches between keeps its lowest and its highest.
    """
    if len(x) <= n_most:
        return x, y
    bounds = np.linspace(0, len(x), (n_most - 2) // 2 + 1).astype(np.int64)
    keep = {0, len(x) - 1}
    for low, high in pairwise(bounds):
        keep |= {int(low + y[low:high].argmin()), int(low + y[low:high].argmax())}
    chosen = np.array(sorted(keep))
    return x[chosen], y[chosen]


def curve(x: Floats, y: Floats, look: Attributes) -> str:
    """Return points as one line with one decimal, or as one dot where there is one point."""
    if len(x) == 1:
        return mark("circle", {"cx": x[0], "cy": y[0], "r": 3, "fill": look["stroke"]})
    data = "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x, y, strict=True))
    return mark("path", {"class": "curve", "d": "M" + data, "fill": "none", **look})


def staircase(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Return the points of a line that keeps each y until the next x."""
    return np.repeat(x, 2)[1:], np.repeat(y, 2)[:-1]


def value_axis(span: Span, top: float, title: str, ticks: Sequence[float] = ()) -> list[str]:
    """Return the grid lines and numbers of a strip, round ones if none are given, and its title."""
    marks, data = [label((LEFT, top - 12), title, size=12, colour=INK)], []
    for tick in ticks or ticks_inside(span.low, span.high, max(3, int(span.length / 26))):
        y = top + span.length - span.at(tick)
        data.append(line_path([(LEFT, y), (LEFT + WIDTH, y)]))
        words = f"{tick:,.10g}"
        marks.append(label((LEFT - 8, y), words, size=TICK_SIZE, anchor="end", colour=SOFT_INK))
    grid = mark("path", {"class": "grid", "d": "".join(data), "stroke": FAINT, "fill": "none"})
    return [grid, *marks]


def across_axis(span: Span, bottom: float, title: str, write: Callable[[float], str]) -> list[str]:
    """Return the horizontal axis below the strips: its line, ticks, numbers and title."""
    marks, data = [], [line_path([(LEFT, bottom), (LEFT + WIDTH, bottom)])]
    ticks = ticks_inside(span.low, span.high, 12)
    for tick in ticks:
        x = LEFT + span.at(tick)
        data.append(line_path([(x, bottom), (x, bottom + 5)]))
        size = TICK_SIZE
        marks.append(
            label((x, bottom + 14), write(tick), size=size, anchor="middle", colour=SOFT_INK)
        )
    look: Attributes = {"stroke": LIVE_EDGE, "fill": "none"}
    marks.append(label((LEFT + WIDTH / 2, bottom + 33), title, anchor="middle"))
    return [mark("path", {"class": "axes", "d": "".join(data), **look}), *marks]


def flags(own: Sequence[Flag], top: float, bottom: float) -> list[str]:
    """Return the flags as dashed lines; a number that would touch the one before is left out."""
    marks, taken = [], -math.inf
    faint = 0.4 if len(own) > _MANY_FLAGS else 1.0
    for flag in sorted(own, key=lambda flag: flag.x):
        x = LEFT + flag.x
        look: Attributes = {"class": "flag", "stroke": flag.colour, "stroke-dasharray": "4 3"}
        own_marks = [
            mark("title", {}, f"{flag.number}. {flag.words}"),
            mark("path", {**look, "d": line_path([(x, top), (x, bottom)]), "opacity": faint}),
        ]
        words = str(flag.number)
        reach = max(_FLAG, text_width(words, 10) / 2 + 3)
        if x - reach >= taken:
            place: Attributes = {"x": x - reach, "y": top - 2 * _FLAG, "width": 2 * reach}
            own_marks.append(
                mark("rect", {**place, "height": 2 * _FLAG, "rx": _FLAG, "fill": flag.colour})
            )
            own_marks.append(
                label((x, top - _FLAG), words, size=10, anchor="middle", colour=ON_COLOUR)
            )
            taken = x + reach
        marks.append(group(own_marks, {}))
    return marks


def box(low: float, high: float, y: float, height: float, look: Attributes) -> str:
    """Return a rectangle between two places along the strip, at least a hair wide."""
    place: Attributes = {"x": LEFT + low, "y": y, "width": max(0.8, high - low), "height": height}
    return mark("rect", {**place, **look})


_WIDTH, _HEIGHT = 560.0, 360.0
_NAME_SIZE = 12.0
_NAME_GAP = 16.0
_MANY_POINTS = 40


def plain(value: float) -> str:
    """Return a number in at most four digits."""
    return f"{value:.4g}"


@dataclass(frozen=True)
class Axis:
    """One axis: what it measures, whether it is logarithmic, and how its numbers are written."""

    words: str
    log: bool = True
    write: Callable[[float], str] = plain


@dataclass(frozen=True)
class Series:
    """One curve: its name, its points, whether it is dashed, and its colour, if it has its own."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False
    colour: str = ""

    def __post_init__(self) -> None:
        if not len(self.x) or len(self.x) != len(self.y):
            raise InputError(
                f"Series {self.name!r} needs as many x as y and at least one, but got "
                f"{len(self.x)} and {len(self.y)}"
            )
        if not all(map(math.isfinite, [*self.x, *self.y])):
            raise InputError(f"Series {self.name!r} needs finite numbers")


def limit_series(x: Sequence[float], y: Sequence[float]) -> Series:
    """Return the curve of the physical limit, which looks the same in every chart."""
    return Series("limit", x, y, dashed=True, colour=LIMIT)


@dataclass(frozen=True)
class _Scale:
    """One axis laid out: its ticks, and where a value lies from 0 to `length`."""

    axis: Axis
    low: float
    high: float
    ticks: tuple[float, ...]
    length: float

    def at(self, value: float) -> float:
        bend = math.log10 if self.axis.log else float
        low, high = bend(self.low), bend(self.high)
        return (bend(value) - low) / (high - low) * self.length


def chart_svg(
    curves: Sequence[Series], *, x: Axis, y: Axis, title: str = "", caption: str = ""
) -> str:
    """Return the curves as an SVG document, one `curve` line and one name for each.

    Raises:
        InputError: no curve, or a value that is not positive on a logarithmic axis.
    """
    if not curves:
        raise InputError("chart_svg needs at least one series, but got none")
    across = _scale(x, [value for curve in curves for value in curve.x], _WIDTH)
    down = _scale(y, [value for curve in curves for value in curve.y], _HEIGHT)
    left = max(text_width(y.write(tick), TICK_SIZE) for tick in down.ticks) + 10
    names = _NAME_SIZE + 34 + max(text_width(curve.name, _NAME_SIZE) for curve in curves)
    top, bottom = 26.0, 46.0
    marks = _axes(across, down, (left, top))
    for index, curve in enumerate(curves):
        points = [
            (left + across.at(a), top + _HEIGHT - down.at(b))
            for a, b in zip(curve.x, curve.y, strict=True)
        ]
        marks += _curve(curve, points, index)
    marks += _names(curves, across, down, (left, top))
    tall = top + max(_HEIGHT + bottom, _NAME_GAP * len(curves))
    panel = Panel(left + _WIDTH + names, tall, tuple(marks))
    return framed(panel, title=title or f"{y.words} against {x.words}", caption=caption)


def _scale(axis: Axis, values: Sequence[float], length: float) -> _Scale:
    if axis.log and min(values) <= 0:
        raise InputError(
            f"the logarithmic axis {axis.words!r} needs positive values, but got {min(values)}"
        )
    around = decades_around if axis.log else ticks_around
    ticks = around(min(values), max(values))
    low, high = min(ticks[0], *values), max(ticks[-1], *values)
    room = max(text_width(axis.write(tick), TICK_SIZE) for tick in ticks) + 12
    n_shown = max(2, int(length / room))
    stride = math.ceil(len(ticks) / n_shown)
    return _Scale(axis, low, high, tuple(ticks[::stride]), length)


def _axes(across: _Scale, down: _Scale, corner: Point) -> list[str]:
    """Draw grid lines at the ticks, their numbers, and what the axes measure."""
    left, top = corner
    bottom, data, marks = top + _HEIGHT, [], []
    for tick in across.ticks:
        x = left + across.at(tick)
        data.append(line_path([(x, top), (x, bottom)]))
        words = across.axis.write(tick)
        marks.append(
            label((x, bottom + 13), words, size=TICK_SIZE, anchor="middle", colour=SOFT_INK)
        )
    for tick in down.ticks:
        y = bottom - down.at(tick)
        data.append(line_path([(left, y), (left + _WIDTH, y)]))
        words = down.axis.write(tick)
        marks.append(label((left - 6, y), words, size=TICK_SIZE, anchor="end", colour=SOFT_INK))
    grid = mark("path", {"class": "grid", "d": "".join(data), "stroke": FAINT, "fill": "none"})
    frame = line_path([(left, top), (left, bottom), (left + _WIDTH, bottom)])
    marks.append(mark("path", {"class": "axes", "d": frame, "stroke": LIVE_EDGE, "fill": "none"}))
    marks.append(label((left + _WIDTH / 2, bottom + 34), across.axis.words, anchor="middle"))
    marks.append(label((0, 8), down.axis.words))
    return [grid, *marks]


def _curve(curve: Series, points: Sequence[Point], index: int) -> list[str]:
    """Draw a line with its points; a line whose colour was used before is dotted, points hollow."""
    colour, is_again = curve.colour or series(index), not curve.colour and index >= len(SERIES)
    look: Attributes = {"stroke": colour, "stroke-width": 2.2, "fill": "none"}
    dash: Attributes = {"stroke-dasharray": "7 4"} if curve.dashed else {}
    if is_again and not curve.dashed:
        dash = {"stroke-dasharray": "2 3.5", "stroke-linecap": "round"}
    line: Attributes = {"class": "curve", "d": line_path(points), "stroke-linejoin": "round"}
    marks = [mark("path", {**line, **look, **dash})]
    if len(points) <= _MANY_POINTS and not curve.dashed:
        dots: Attributes = {"r": 2.6, "fill": colour}
        if is_again:
            dots = {"r": 2.6, "fill": BACKGROUND, "stroke": colour, "stroke-width": 1.4}
        marks += [mark("circle", {"class": "point", "cx": x, "cy": y, **dots}) for x, y in points]
    return marks


def _names(curves: Sequence[Series], across: _Scale, down: _Scale, corner: Point) -> list[str]:
    """Write each curve's name right of its last point, pushed apart where they would touch."""
    left, top = corner
    ends = [(left + across.at(c.x[-1]), top + _HEIGHT - down.at(c.y[-1])) for c in curves]
    heights = spread([y for _, y in ends], gap=_NAME_GAP, low=top, high=top + _HEIGHT)
    marks = []
    for index, (curve, (x, y), height) in enumerate(zip(curves, ends, heights, strict=True)):
        start, colour = left + _WIDTH + 22, curve.colour or series(index)
        leader = [(x + 4, y), (left + _WIDTH + 4, y), (start - 4, height)]
        line: Attributes = {"class": "leader", "d": line_path(leader), "fill": "none"}
        look: Attributes = {"stroke-width": 0.9, "opacity": 0.8, "stroke-dasharray": "1.5 3"}
        marks.append(mark("path", {**line, "stroke": colour, **look}))
        marks.append(label((start, height), curve.name, size=_NAME_SIZE, colour=colour))
    return marks


def spread(places: Sequence[float], *, gap: float, low: float, high: float) -> list[float]:
    """Return the places moved as little as a sweep can, in the same order and `gap` apart.

    They stay between `low` and `high` where there is room for all; else they overflow `high`.
    """
    order = sorted(range(len(places)), key=lambda i: (places[i], i))
    moved = [0.0] * len(places)
    floor = low
    for i in order:
        moved[i] = max(places[i], floor)
        floor = moved[i] + gap
    ceiling = max(high, low + gap * (len(places) - 1))
    for i in reversed(order):
        moved[i] = min(moved[i], ceiling)
        ceiling = moved[i] - gap
    return moved
