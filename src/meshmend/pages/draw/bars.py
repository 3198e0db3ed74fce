"""Horizontal bars, one a name: a value, its spread, a mark for what was predicted, and a limit.

Knows numbers and text only; how a number is written is the caller's to say.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshmend.errors import InputError
from meshmend.pages.draw.colours import FAINT, LIMIT, LIVE_EDGE, RED, series
from meshmend.pages.draw.frame import Key, framed
from meshmend.pages.draw.svg import (
    INK,
    SOFT_INK,
    Attributes,
    Panel,
    label,
    line_path,
    mark,
    text_width,
)
from meshmend.pages.draw.ticks import ticks_around

_WIDTH, _STEP, _THICK = 460.0, 34.0, 18.0
_SIZE = 12.0
_TICK_SIZE = 11.0


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
        marks += _bar(bar, number, lambda value: left + value / span * _WIDTH, top, write)
    keys = [Key(INK, "least and most measured", "line")]
    if any(bar.predicted is not None for bar in bars):
        keys.append(Key(RED, "predicted by simulation", "line"))
    if limit is not None:
        x = left + limit / span * _WIDTH
        line: Attributes = {"class": "limit", "d": line_path([(x, top - 4), (x, bottom)])}
        look: Attributes = {"stroke": LIMIT, "stroke-width": 2, "stroke-dasharray": "7 4"}
        marks.append(mark("path", {**line, **look, "fill": "none"}))
        keys.append(Key(LIMIT, "limit", "dash"))
    panel = Panel(left + _WIDTH + right, bottom + 44, tuple(marks))
    return framed(panel, title=title, keys=keys, caption=caption)


def _axis(
    ticks: Sequence[float],
    span: float,
    place: tuple[float, float, float],
    words: str,
    write: Callable[[float], str],
) -> list[str]:
    left, top, bottom = place
    room = max(text_width(write(tick), _TICK_SIZE) for tick in ticks) + 14
    stride = max(1, math.ceil(len(ticks) * room / _WIDTH))
    marks, data = [], []
    for tick in ticks[::stride]:
        x = left + tick / span * _WIDTH
        data.append(line_path([(x, top), (x, bottom)]))
        at = (x, bottom + 13)
        marks.append(label(at, write(tick), size=_TICK_SIZE, anchor="middle", colour=SOFT_INK))
    grid = mark("path", {"class": "grid", "d": "".join(data), "stroke": FAINT, "fill": "none"})
    frame = line_path([(left, top), (left, bottom)])
    edge = mark("path", {"class": "axes", "d": frame, "stroke": LIVE_EDGE, "fill": "none"})
    name = label((left + _WIDTH / 2, bottom + 32), words, anchor="middle")
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
