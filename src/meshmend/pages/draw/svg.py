"""SVG in plain text: colours, marks, panels that compose, and the finished document.

A **mark** is the text of one SVG element; a **panel** is a box of marks that can be put beside
or above others. Nothing here knows of meshes. No mark carries an id or a style sheet: pictures
in one notebook page share those, and would change each other.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal
from xml.sax.saxutils import escape, quoteattr

# Told apart by colour-blind readers, and readable on white: Okabe and Ito's palette (2008),
# darkened where thin lines asked for it. The heat darkens steadily, so it survives a print in grey.
RED: Final = "#c8321e"
BLUE: Final = "#0064a8"
AMBER: Final = "#b26a00"
GREEN: Final = "#00785a"
PURPLE: Final = "#a6457c"
LIMIT: Final = "#1f2933"  # the physical limit, in every chart; no series has this colour

FAILED_FILL: Final = "#f3b6ab"
STRANDED_FILL: Final = "#dde1e6"
LIVE_FILL: Final = "#e9eef4"
LIVE_EDGE: Final = "#8c9bab"
LINK: Final = "#b6c0cb"
FAINT: Final = "#e3e8ee"
BLUE_FILL: Final = "#cfe3f5"
YELLOW_FILL: Final = "#fbe38e"

SERIES: Final = (BLUE, "#d55e00", GREEN, PURPLE, "#3a9bd9", "#8a6d00", "#444b54", "#7a5cc0")

_HEAT = (
    (222, 233, 244),
    (150, 196, 226),
    (72, 142, 205),
    (98, 84, 178),
    (122, 36, 120),
    (70, 4, 46),
)


def series(index: int) -> str:
    """Return the colour of the index-th ring, route or curve; they repeat after eight."""
    return SERIES[index % len(SERIES)]


def heat(share: float) -> str:
    """Return the colour of a share from 0 (light) to 1 (dark)."""
    at = min(max(share, 0.0), 1.0) * (len(_HEAT) - 1)
    low = min(int(at), len(_HEAT) - 2)
    return _blend(_HEAT[low], _HEAT[low + 1], at - low)


def lighter(colour: str, share: float) -> str:
    """Return a colour moved by a share from 0 to 1 towards white."""
    parts = (int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16))
    return _blend(parts, (255, 255, 255), share)


def _blend(one: tuple[int, int, int], other: tuple[int, int, int], share: float) -> str:
    return "#" + "".join(
        f"{round(a + share * (b - a)):02x}" for a, b in zip(one, other, strict=True)
    )


Point = tuple[float, float]
Attributes = Mapping[str, str | float]

BACKGROUND = "#ffffff"
INK = "#1f2933"
SOFT_INK = "#616e7c"
FONT = "Helvetica, Arial, DejaVu Sans, sans-serif"
# Estimated advance of a sans-serif letter over its font size; generous, so that text fits.
_LETTER = 0.56
_MAX_SHOWN_WIDTH = 1200


@dataclass(frozen=True)
class Panel:
    """A box of marks whose coordinates run from (0, 0) to (width, height)."""

    width: float
    height: float
    marks: tuple[str, ...] = ()

    def plus(self, marks: Iterable[str]) -> "Panel":
        """Return this panel with more marks on top."""
        return Panel(self.width, self.height, (*self.marks, *marks))


def number(value: float) -> str:
    """Return a coordinate with at most two decimals and no trailing zeros."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in {"-0", ""} else text


def mark(tag: str, attributes: Attributes, text: str | None = None) -> str:
    """Return one element; attribute values and text are escaped, numbers kept short."""
    words = _written(attributes)
    return f"<{tag}{words}/>" if text is None else f"<{tag}{words}>{escape(text)}</{tag}>"


def group(marks: Iterable[str], attributes: Attributes) -> str:
    """Return a `g` element around marks."""
    return f"<g{_written(attributes)}>{''.join(marks)}</g>"


def _written(attributes: Attributes) -> str:
    return "".join(
        f" {name}={quoteattr(value if isinstance(value, str) else number(value))}"
        for name, value in attributes.items()
    )


def label(
    at: Point, words: str, *, size: float = 12, anchor: str = "start", colour: str = INK
) -> str:
    """Return text whose vertical middle lies at a point."""
    return mark(
        "text",
        # The baseline is set by hand: not every viewer knows dominant-baseline.
        {
            "x": at[0],
            "y": at[1] + 0.35 * size,
            "font-size": size,
            "text-anchor": anchor,
            "fill": colour,
        },
        words,
    )


def text_width(words: str, size: float) -> float:
    """Return an upper estimate of the width of a text."""
    return _LETTER * size * len(words)


def clipped(words: str, width: float, size: float) -> str:
    """Return the text, cut with an ellipsis where it would be wider than `width`."""
    room = max(1, int(width / (_LETTER * size)))
    return words if len(words) <= room else words[: room - 1].rstrip() + "…"


def wrapped(words: str, width: float, size: float) -> list[str]:
    """Return the text broken at spaces into lines that fit `width`."""
    lines = [""]
    for word in words.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and text_width(longer, size) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def text_block(words: str, width: float, *, size: float = 12, colour: str = INK) -> Panel:
    """Return a panel of wrapped text, left-aligned."""
    lines = wrapped(words, width, size)
    step = 1.4 * size
    marks = tuple(
        label((0, (i + 0.5) * step), line, size=size, colour=colour) for i, line in enumerate(lines)
    )
    return Panel(max(text_width(line, size) for line in lines), step * len(lines), marks)


def line_path(points: Sequence[Point], *, radius: float = 0, closed: bool = False) -> str:
    """Return path data through the points, its corners rounded by at most `radius`."""
    around = [*points[-1:], *points, *points[:1]] if closed else list(points)
    triples = zip(around, around[1:], around[2:], strict=False)
    corners = [_corner(before, here, after, radius) for before, here, after in triples]
    if not closed:
        corners = [(points[0],) * 3, *corners, (points[-1],) * 3]
    data = [f"M{_pair(corners[0][2])}"]
    for enter, corner, leave in corners[1:] + (corners[:1] if closed else []):
        data.append(f"L{_pair(enter)}")
        if enter != leave:
            data.append(f"Q{_pair(corner)} {_pair(leave)}")
    return "".join(data) + ("Z" if closed else "")


def _corner(before: Point, corner: Point, after: Point, radius: float) -> tuple[Point, ...]:
    """Return where a rounded corner begins, its control point, and where it ends."""
    reach = min(radius, math.dist(before, corner) / 2, math.dist(corner, after) / 2)
    return towards(corner, before, reach), corner, towards(corner, after, reach)


def towards(start: Point, goal: Point, distance: float) -> Point:
    """Return the point at a distance from `start` on the way to `goal`."""
    whole = math.dist(start, goal)
    share = distance / whole if whole else 0
    return start[0] + share * (goal[0] - start[0]), start[1] + share * (goal[1] - start[1])


def _pair(point: Point) -> str:
    return f"{number(point[0])} {number(point[1])}"


def arrow_head(tip: Point, direction: Point, size: float) -> str:
    """Return path data of a triangle whose tip looks along a direction."""
    length = math.hypot(*direction) or 1
    ux, uy = direction[0] / length * size, direction[1] / length * size
    to_wing = -ux - 0.55 * uy, -uy + 0.55 * ux
    to_other = 1.1 * uy, -1.1 * ux
    return f"M{_pair(tip)}l{_pair(to_wing)}l{_pair(to_other)}z"


def moved(panel: Panel, x: float, y: float) -> str:
    """Return the marks of a panel shifted, as one mark."""
    return group(panel.marks, {"transform": f"translate({number(x)} {number(y)})"})


def beside(panels: Sequence[Panel], *, gap: float = 24) -> Panel:
    """Return panels side by side, their tops aligned."""
    lefts = [sum(p.width for p in panels[:i]) + gap * i for i in range(len(panels))]
    return Panel(
        lefts[-1] + panels[-1].width,
        max(panel.height for panel in panels),
        tuple(moved(panel, left, 0) for panel, left in zip(panels, lefts, strict=True)),
    )


def stacked(panels: Sequence[Panel], *, gap: float = 8, centred: bool = False) -> Panel:
    """Return panels below each other, their left sides or their middles aligned."""
    width = max(panel.width for panel in panels)
    tops = [sum(p.height for p in panels[:i]) + gap * i for i in range(len(panels))]
    return Panel(
        width,
        tops[-1] + panels[-1].height,
        tuple(
            moved(panel, (width - panel.width) / 2 if centred else 0, top)
            for panel, top in zip(panels, tops, strict=True)
        ),
    )


def tiled(panels: Sequence[Panel], n_columns: int, *, gap: float = 24) -> Panel:
    """Return panels in rows of `n_columns`."""
    rows = [panels[i : i + n_columns] for i in range(0, len(panels), n_columns)]
    return stacked([beside(row, gap=gap) for row in rows], gap=gap)


def document(panel: Panel, *, title: str, description: str, padding: float = 16) -> str:
    """Return a panel as a complete SVG document on a light background."""
    width, height = panel.width + 2 * padding, panel.height + 2 * padding
    shown = min(1, _MAX_SHOWN_WIDTH / width)
    head = mark(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {number(width)} {number(height)}",
            "width": shown * width,
            "height": shown * height,
            "role": "img",
            "aria-label": title,
            "font-family": FONT,
            "style": "max-width:100%;height:auto",
        },
    )
    ground: Attributes = {"width": width, "height": height, "fill": BACKGROUND, "rx": 6}
    return "\n".join(
        [
            head.removesuffix("/>") + ">",
            mark("title", {}, title),
            mark("desc", {}, description),
            mark("rect", {"class": "background", "x": 0, "y": 0, **ground}),
            moved(panel, padding, padding),
            "</svg>\n",
        ]
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


def legend(keys: Sequence[Key], width: float, *, room_for: float = _KEY_SIZE) -> Panel:
    """Return swatches with their words, in as many rows as the width asks for.

    There is room for letters of another size, which a page may have on a phone.
    """
    marks: list[str] = []
    x, y, widest = 0.0, 0.0, 0.0
    for key in keys:
        own = 1.9 * _SWATCH + text_width(key.words, room_for)
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


def colour_bar(most: str, words: str) -> Panel:
    """Return the heat scale from zero to a value, and what it measures."""
    size, width, height, steps = 12.0, 160.0, 12.0, 32
    start = text_width("0", size) + 6
    marks = [label((0, height / 2), "0", size=size)]
    for step in range(steps):
        place: Attributes = {"x": start + step * width / steps, "y": 0, "height": height}
        # A hair wider than its share, so that no gap shows between neighbours.
        wide = width / steps + (0.5 if step < steps - 1 else 0)
        marks.append(mark("rect", {**place, "width": wide, "fill": heat(step / (steps - 1))}))
    after = start + width + 6
    tail = f"{most}  {words}"
    marks.append(label((after, height / 2), tail, size=size))
    return Panel(after + text_width(tail, size), height + 4, tuple(marks))
