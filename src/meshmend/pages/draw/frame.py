"""What surrounds a picture: its title above, its legend and caption below."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from meshmend.pages.draw.colours import heat
from meshmend.pages.draw.svg import (
    SOFT_INK,
    Attributes,
    Panel,
    arrow_head,
    clipped,
    document,
    label,
    line_path,
    mark,
    stacked,
    text_block,
    text_width,
    wrapped,
)

_SWATCH = 14.0
_KEY_SIZE = 12.0


@dataclass(frozen=True)
class Key:
    """One entry of a legend: a swatch in a colour, and what it means."""

    colour: str
    words: str
    kind: Literal["chip", "cross", "hatch", "line", "dash", "arrow"] = "chip"
    fill: str = "none"


def framed(panel: Panel, *, title: str, keys: Sequence[Key] = (), caption: str = "") -> str:
    """Return a panel with title, legend and caption as an SVG document."""
    return document(
        surrounded(panel, title=title, keys=keys, caption=caption),
        title=title,
        description=caption or title,
    )


def surrounded(
    panel: Panel, *, title: str = "", keys: Sequence[Key] = (), caption: str = "", size: float = 15
) -> Panel:
    """Return a panel with title, legend and caption, none of them wider than it can show."""
    width = max(panel.width, 320.0) if title and size > 13 else panel.width
    parts = []
    if title:
        parts.append(_heading(title, width, size))
    parts.append(panel)
    if keys:
        parts.append(legend(keys, width))
    if caption:
        parts.append(text_block(caption, width, size=min(12.5, size - 1), colour=SOFT_INK))
    return stacked(parts, gap=0.55 * size)


def _heading(title: str, width: float, size: float) -> Panel:
    """Return a bold title in at most two lines; a longer one is cut."""
    # Bold letters are wider than the estimate: leave an eighth of the width.
    lines = wrapped(title, 0.88 * width, size)
    words = [*lines[:1], " ".join(lines[1:])] if len(lines) > 1 else lines
    shown = [clipped(line, 0.88 * width, size) for line in words]
    step = 1.3 * size
    marks = tuple(
        label((0, (i + 0.5) * step), line, size=size).replace("<text", '<text font-weight="600"')
        for i, line in enumerate(shown)
    )
    return Panel(max(1.13 * text_width(line, size) for line in shown), step * len(shown), marks)


def legend(keys: Sequence[Key], width: float) -> Panel:
    """Return swatches with their words, in as many rows as the width asks for."""
    marks: list[str] = []
    x, y, widest = 0.0, 0.0, 0.0
    for key in keys:
        own = 1.9 * _SWATCH + text_width(key.words, _KEY_SIZE)
        if x and x + own > width:
            x, y = 0.0, y + 1.5 * _SWATCH
        marks += _swatch(key, x, y)
        marks.append(label((x + 1.7 * _SWATCH, y + 0.5 * _SWATCH), key.words, size=_KEY_SIZE))
        widest = max(widest, x + own)
        x += own + 10
    return Panel(widest, y + 1.2 * _SWATCH, tuple(marks))


def _swatch(key: Key, x: float, y: float) -> list[str]:
    side, middle = _SWATCH, y + 0.5 * _SWATCH
    if key.kind in {"line", "dash", "arrow"}:
        stroke: Attributes = {"stroke": key.colour, "stroke-width": 2.4, "fill": "none"}
        dash: Attributes = {"stroke-dasharray": "4 3"} if key.kind == "dash" else {}
        ends = [(x, middle), (x + 1.4 * side, middle)]
        marks = [mark("path", {"d": line_path(ends), **stroke, **dash})]
        if key.kind == "arrow":
            head = arrow_head((x + 1.5 * side, middle), (1, 0), 7)
            marks.append(mark("path", {"d": head, "fill": key.colour}))
        return marks
    left = x + 0.3 * side
    box: Attributes = {"width": side, "height": side, "rx": 3}
    marks = [mark("rect", {"x": left, "y": y, **box, "fill": key.fill, "stroke": key.colour})]
    lines = {
        "cross": [((0.25, 0.25), (0.75, 0.75)), ((0.25, 0.75), (0.75, 0.25))],
        "hatch": [((0, 0.5), (0.5, 0)), ((0, 1), (1, 0)), ((0.5, 1), (1, 0.5))],
    }.get(key.kind, [])
    if lines:
        data = "".join(
            line_path([(left + side * a, y + side * b), (left + side * c, y + side * d)])
            for (a, b), (c, d) in lines
        )
        marks.append(mark("path", {"d": data, "stroke": key.colour, "stroke-width": 1.4}))
    return marks


def colour_bar(low: str, high: str, words: str) -> Panel:
    """Return the heat scale with the values at its ends and what it measures."""
    size, width, height, steps = 12.0, 160.0, 12.0, 32
    start = text_width(low, size) + 6
    marks = [label((0, height / 2), low, size=size)]
    for step in range(steps):
        place: Attributes = {"x": start + step * width / steps, "y": 0, "height": height}
        # A hair wider than its share, so that no gap shows between neighbours.
        wide = width / steps + (0.5 if step < steps - 1 else 0)
        marks.append(mark("rect", {**place, "width": wide, "fill": heat(step / (steps - 1))}))
    after = start + width + 6
    tail = f"{high}  {words}"
    marks.append(label((after, height / 2), tail, size=size))
    return Panel(after + text_width(tail, size), height + 4, tuple(marks))
