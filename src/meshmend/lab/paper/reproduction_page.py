"""The reproduction as one HTML page: tables, charts and the paper's figures, nothing to fetch."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from meshmend.lab.paper.paper_figures import paper_figures
from meshmend.lab.paper.paper_tables import RUN_TO_RUN
from meshmend.lab.paper.prediction import broken_mesh
from meshmend.lab.paper.reproduction import (
    Reproduction,
    Table,
    links_words,
    remarks,
    tables,
)
from meshmend.pages.draw.page import card, page, table
from meshmend.pages.draw.svg import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    LINK,
    LIVE_EDGE,
    SOFT_INK,
    Attributes,
    Key,
    Panel,
    Point,
    framed,
    label,
    line_path,
    mark,
)

_WIDTH = 960.0
_BARS_HEIGHT = 240.0
_LANE = 46.0
_LEFT = 120.0
_TITLE = "The paper's tables, predicted from their full-mesh columns"
_STYLE = """
caption { text-align: left; font-weight: 600; padding: 2px 0 8px; }
th, td { white-space: nowrap; }
th { vertical-align: bottom; }
td:first-child, th:first-child { padding-left: 0; }
.bad { font-weight: 600; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(440px, 1fr)); gap: 14px; }
.grid .card { margin: 0; display: flex; align-items: flex-start; justify-content: center; }
.wide { grid-column: 1 / -1; }
"""
_WIDE_FIGURES = ("figure-05", "figure-09", "figure-10")


def reproduction_page(result: Reproduction) -> str:
    """Return a complete HTML document that loads nothing from anywhere."""
    calibration, simulated, *compared = map(_table, tables(result))
    own_consistency, *readings = compared[3:]
    missed = "".join(f"<p>{escape(words)}</p>" for words in remarks(result))
    parts = [
        f"<h1>{_TITLE}</h1>",
        _method(result),
        calibration,
        "<h2>Predicted</h2>",
        card(overheads_svg(result), look="chart"),
        simulated,
        *compared[:3],
        f"{missed}<p>Differences of the other cells are red.</p>",
        own_consistency,
        card(efficiencies_svg(result), look="chart"),
        *([_READINGS, f"<p>{escape(links_words(result))}</p>", *readings] if readings else []),
        _figures(),
    ]
    return page(_TITLE, parts, style=_STYLE, dark=False)


_READINGS = (
    "<h2>Other readings of what the paper leaves open</h2>"
    "<p>Each row changes one thing and predicts again, with the slices found above where the "
    "algorithm is the same.</p>"
)


def _table(shown: Table) -> str:
    def written(row: int, column: int, cell: str) -> str:
        text = escape(cell.replace("-", "−", 1) if cell.startswith("-") else cell)
        return f'<span class="bad">{text}</span>' if (row, column) in shown.missed else text

    rows = [
        [written(at, column, cell) for column, cell in enumerate(cells)]
        for at, cells in enumerate(shown.rows)
    ]
    return card(table([*map(escape, shown.heads)], rows, caption=escape(shown.title)))


def _method(result: Reproduction) -> str:
    setting = result.setting
    shapes = dict.fromkeys(row.row.shape for row in result.paper)
    holes = " and ".join(str(broken_mesh(shape, setting.place)) for shape in shapes)
    return (
        '<p class="soft">S. Kumar and N. Jouppi, “Highly Available Data Parallel ML training on '
        "Mesh Networks”, tables 1 and 2.</p>"
        "<p>Table 2 prints which share <i>f</i> of a step allreduce takes on the full mesh. With "
        f"the simulated time <i>T</i> of {escape(setting.full_algorithm)} there, a step computes "
        "for <i>C</i> = <i>T</i> (1 − <i>f</i>) / <i>f</i>. On the broken mesh the simulated time "
        "<i>T′</i> then gives the share <i>T′</i> / (<i>T′</i> + <i>C</i>). "
        "No cell of the fault-tolerant columns enters a prediction.</p>"
        f"<p>Links: {escape(str(setting.fabric))}. Broken meshes: {escape(holes)}. The batch "
        f"{escape(setting.batch)} and the number of samples stay as they are; what is not steps "
        "is taken to scale with them.</p>"
    )


def _figures() -> str:
    cards = []
    for name, svg in paper_figures().items():
        cards.append(card(svg, look="wide" if name.startswith(_WIDE_FIGURES) else ""))
    return f'<h2>The paper\'s figures, drawn again</h2><div class="grid">{"".join(cards)}</div>'


# Two charts: shares of a step as bars, relative efficiencies as dots.


def overheads_svg(result: Reproduction) -> str:
    """Return table 2 as groups of bars: printed on the full mesh, printed, predicted, ours."""
    groups = [
        (
            f"{row.row.workload.name}, {row.row.full_chips} → {row.row.broken_chips}",
            (
                row.row.full_overhead,
                row.overhead.printed,
                row.overhead.predicted,
                our.overhead.predicted,
            ),
        )
        for row, our in zip(result.paper, result.ours, strict=True)
    ]
    scheme, best = _names(result)
    colours = (LINK, INK, BLUE, GREEN)
    words = (
        "full mesh, printed (calibrated on)",
        "fault-tolerant mesh, printed",
        f"predicted, {scheme}",
        f"predicted, {best}",
    )
    return framed(
        _bars(groups, colours),
        title="Table 2: allreduce, per cent of a step",
        keys=[Key(c, w, fill=c) for c, w in zip(colours, words, strict=True)],
        caption="Grey bars are the only ones that the prediction knows.",
    )


def efficiencies_svg(result: Reproduction) -> str:
    """Return table 1's relative efficiencies as dots, with the paper's run-to-run variance."""
    lanes = [
        _Lane(
            f"{row.row.workload.name} {row.row.broken_chips}",
            row.efficiency.printed,
            row.row.efficiency_of_times,
            row.efficiency.predicted,
            our.efficiency.predicted,
            [reading.predictions[i].efficiency.predicted for reading in result.readings],
        )
        for i, (row, our) in enumerate(zip(result.paper, result.ours, strict=True))
    ]
    scheme, best = _names(result)
    keys = [
        Key(INK, f"printed, ± {RUN_TO_RUN:.0%}", fill=INK),
        Key(INK, "from the printed times", fill="#ffffff"),
        Key(BLUE, f"predicted, {scheme}", fill=BLUE),
        Key(GREEN, f"predicted, {best}", fill=GREEN),
    ]
    if result.readings:
        keys.insert(3, Key(FAINT, f"{scheme}, other readings", fill=FAINT))
    return framed(
        _dots(lanes),
        title="Table 1: relative efficiency of the fault-tolerant mesh",
        keys=keys,
        caption="(full time x full chips) / (fault-tolerant time x its chips). The full mesh runs "
        f"{result.setting.full_algorithm} throughout, so our algorithm can be above 1.",
    )


def _names(result: Reproduction) -> tuple[str, str]:
    best = dict.fromkeys(our.setting.broken_algorithm for our in result.ours)
    return result.setting.broken_algorithm, " or ".join(best)


def _bars(groups: Sequence[tuple[str, Sequence[float]]], colours: Sequence[str]) -> Panel:
    """Return groups of bars on a grid of whole per cents, each with its value on top."""
    top = max(value for _, values in groups for value in values) * 1.08
    left, step = 34.0, (_WIDTH - 34.0) / len(groups)
    bar = min(44.0, 0.8 * step / len(colours))
    marks = []
    for percent in range(0, int(100 * top) + 1, 2):
        y = _BARS_HEIGHT * (1 - percent / 100 / top)
        line = line_path([(left, y), (_WIDTH, y)])
        marks.append(mark("path", {"d": line, "stroke": FAINT}))
        marks.append(label((left - 6, y), f"{percent} %", size=11, anchor="end", colour=SOFT_INK))
    for group, (words, values) in enumerate(groups):
        middle = left + (group + 0.5) * step
        start = middle - 0.5 * bar * len(values)
        for i, (value, colour) in enumerate(zip(values, colours, strict=True)):
            height = _BARS_HEIGHT * value / top
            x, y = start + i * bar, _BARS_HEIGHT - height
            box = {"x": x + 1.5, "y": y, "width": bar - 3, "height": height, "rx": 2.0}
            marks.append(mark("rect", {"class": "bar", "fill": colour, **box}))
            number = f"{100 * value:.1f}"
            marks.append(label((x + bar / 2, y - 8), number, size=11, anchor="middle"))
        marks.append(label((middle, _BARS_HEIGHT + 16), words, anchor="middle"))
    return Panel(_WIDTH, _BARS_HEIGHT + 30, tuple(marks))


@dataclass(frozen=True)
class _Lane:
    words: str
    printed: float
    from_times: float
    predicted: float
    ours: float
    others: Sequence[float]


def _dots(lanes: Sequence[_Lane]) -> Panel:
    """Return one lane a row of the table, its values on a common axis."""
    values = [
        value
        for lane in lanes
        for value in (*_whisker(lane), lane.from_times, lane.predicted, lane.ours, *lane.others)
    ]
    low, high = min(values) - 0.005, max(values) + 0.005
    height = _LANE * len(lanes)

    def at(value: float) -> float:
        return _LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT)

    marks = []
    for hundredth in range(int(50 * low) * 2 + 2, int(100 * high) + 1, 2):
        x = at(hundredth / 100)
        stroke = LIVE_EDGE if hundredth == 100 else FAINT
        marks.append(mark("path", {"d": line_path([(x, 0), (x, height)]), "stroke": stroke}))
        text = f"{hundredth / 100:.2f}"
        marks.append(label((x, height + 13), text, size=11, anchor="middle", colour=SOFT_INK))
    for i, lane in enumerate(lanes):
        y = (i + 0.5) * _LANE
        marks.append(label((_LEFT - 12, y), lane.words, anchor="end"))
        upper, lower = y - 8, y + 8
        if lane.others:
            ends = at(min(lane.others)), at(max(lane.others))
            band = {"x": ends[0], "y": lower - 6, "width": ends[1] - ends[0], "height": 12.0}
            marks.append(mark("rect", {"class": "band", "fill": FAINT, "rx": 6, **band}))
        whisker = line_path([(at(end), upper) for end in _whisker(lane)])
        marks.append(mark("path", {"d": whisker, "stroke": INK, "stroke-width": 1.4}))
        marks.append(_dot((at(lane.from_times), upper), INK, "#ffffff"))
        marks.append(_dot((at(lane.printed), upper), INK, INK))
        marks.append(_dot((at(lane.predicted), lower), BLUE, BLUE))
        marks.append(_dot((at(lane.ours), lower), GREEN, GREEN))
    return Panel(_WIDTH + 12, height + 26, tuple(marks))


def _whisker(lane: _Lane) -> tuple[float, float]:
    return lane.printed * (1 - RUN_TO_RUN), lane.printed * (1 + RUN_TO_RUN)


def _dot(at: Point, colour: str, fill: str) -> str:
    look: Attributes = {"r": 4.6, "fill": fill, "stroke": colour, "stroke-width": 1.6}
    return mark("circle", {"class": "dot", "cx": at[0], "cy": at[1], **look})
