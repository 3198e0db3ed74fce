"""Wide strips that share one horizontal axis: curves, lanes of boxes, and flags through all.

A strip is a list of marks between `top` and `top + height`; x is the same in all of them. Knows
numbers and text only.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from meshmend.pages.draw.colours import FAINT, LIVE_EDGE
from meshmend.pages.draw.svg import (
    INK,
    SOFT_INK,
    Attributes,
    group,
    label,
    line_path,
    mark,
    text_width,
)
from meshmend.pages.draw.ticks import ticks_inside

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
