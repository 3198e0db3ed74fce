"""Curves in one chart: logarithmic or linear axes, round ticks, a name at the end of each curve.

Knows numbers and text only; how a number is written is the caller's to say.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshmend.errors import InputError
from meshmend.pages.draw.colours import FAINT, LIMIT, LIVE_EDGE, SERIES, series
from meshmend.pages.draw.frame import framed
from meshmend.pages.draw.svg import (
    BACKGROUND,
    SOFT_INK,
    Attributes,
    Panel,
    Point,
    label,
    line_path,
    mark,
    text_width,
)
from meshmend.pages.draw.ticks import decades_around, ticks_around

_WIDTH, _HEIGHT = 560.0, 360.0
_TICK_SIZE = 11.0
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
    left = max(text_width(y.write(tick), _TICK_SIZE) for tick in down.ticks) + 10
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
    room = max(text_width(axis.write(tick), _TICK_SIZE) for tick in ticks) + 12
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
            label((x, bottom + 13), words, size=_TICK_SIZE, anchor="middle", colour=SOFT_INK)
        )
    for tick in down.ticks:
        y = bottom - down.at(tick)
        data.append(line_path([(left, y), (left + _WIDTH, y)]))
        words = down.axis.write(tick)
        marks.append(label((left - 6, y), words, size=_TICK_SIZE, anchor="end", colour=SOFT_INK))
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
