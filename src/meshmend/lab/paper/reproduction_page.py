"""The reproduction as one HTML page: tables, charts and the paper's figures, nothing to fetch."""

from collections.abc import Callable
from html import escape

from meshmend.lab.paper.paper_figures import paper_figures
from meshmend.lab.paper.paper_tables import RUN_TO_RUN, PaperRow
from meshmend.lab.paper.prediction import Cell, broken_mesh
from meshmend.lab.paper.reproduction import Reproduction
from meshmend.lab.paper.reproduction_charts import efficiencies_svg, overheads_svg
from meshmend.pages.draw.page import card, page, table
from meshmend.units import format_bytes, format_time

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
_FULL_MESH: dict[str, Callable[[PaperRow], str]] = {
    "overhead": lambda row: f"{100 * row.full_overhead:.1f}",
    "minutes": lambda row: f"{row.full_minutes:.2f}",
    "efficiency": lambda row: "1",
}
# How a cell is written: times what, as the paper prints it, and as we do.
_FORMATS = {
    "overhead": (100.0, ".1f", ".2f"),
    "minutes": (1.0, ".2f", ".3f"),
    "efficiency": (1.0, ".3g", ".3f"),
}
_WIDE_FIGURES = ("figure-05", "figure-09", "figure-10")


def reproduction_page(result: Reproduction) -> str:
    """Return a complete HTML document that loads nothing from anywhere."""
    parts = [
        f"<h1>{_TITLE}</h1>",
        _method(result),
        _calibration(result),
        "<h2>Predicted</h2>",
        card(overheads_svg(result), look="chart"),
        _compared(result, "Table 2: allreduce on the fault-tolerant mesh, % of a step", "overhead"),
        _compared(result, "Table 1: minutes to train on the fault-tolerant mesh", "minutes"),
        _compared(result, "Table 1: relative efficiency", "efficiency"),
        _notes(result),
        _own_consistency(result),
        card(efficiencies_svg(result), look="chart"),
        *([_readings(result)] if result.readings else []),
        _figures(),
    ]
    return page(_TITLE, parts, style=_STYLE, dark=False)


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


def _calibration(result: Reproduction) -> str:
    heads = ("Benchmark", "chips", "payload", "allreduce", "slices", "of a step", "so compute")
    rows = [
        (
            row.row.workload.name,
            str(row.row.full_chips),
            format_bytes(row.row.workload.payload_bytes),
            format_time(row.full.time_s),
            str(row.full.slices),
            f"{row.row.full_overhead:.1%}",
            format_time(row.compute_s),
        )
        for row in result.paper
    ]
    caption = f"Calibrated on the full mesh ({escape(result.setting.full_algorithm)})"
    return card(table(heads, rows, caption=caption))


def _compared(result: Reproduction, caption: str, name: str) -> str:
    """Return one column of a table beside ours; in table 1, misses by more than 2 % are red."""
    scheme = escape(result.setting.broken_algorithm)
    heads = ["Benchmark", "chips", "full mesh", "printed", scheme, "difference"]
    heads += ["best of ours", "difference"]
    scale, printed, ours = _FORMATS[name]

    def difference(cell: Cell) -> str:
        return f"{scale * cell.difference:+{ours}}".replace("-", "−")

    rows = []
    for row, our in zip(result.paper, result.ours, strict=True):
        cell, best = getattr(row, name), getattr(our, name)
        missed = name != "overhead" and not _is_near(cell)
        star = "*" if row.row.note and name == "efficiency" else ""
        rows.append(
            (
                row.row.workload.name,
                str(row.row.broken_chips),
                _FULL_MESH[name](row.row),
                f"{scale * cell.printed:{printed}}{star}",
                f"{scale * cell.predicted:{ours}}",
                f'<span class="bad">{difference(cell)}</span>' if missed else difference(cell),
                f"{scale * best.predicted:{ours}}",
                difference(best),
            )
        )
    return card(table(heads, rows, caption=caption))


def _is_near(cell: Cell) -> bool:
    return abs(cell.relative_difference) <= RUN_TO_RUN


def _notes(result: Reproduction) -> str:
    within, cells = result.n_within_variance()
    words = [
        f"{within} of {cells} cells of table 1 lie within the {RUN_TO_RUN:.0%} by which the "
        "paper's runs vary; the others are red."
    ]
    words += [
        f"* {row.row.workload.name} on {row.row.full_chips} chips: {row.row.note}"
        for row in result.paper
        if row.row.note
    ]
    return "".join(f"<p>{escape(each)}</p>" for each in words)


def _own_consistency(result: Reproduction) -> str:
    heads = ("Benchmark", "chips", "printed", "by its own times", "by its table 2")
    rows = [
        (
            row.row.workload.name,
            str(row.row.broken_chips),
            f"{row.row.relative_efficiency:.3g}",
            f"{row.row.efficiency_of_times:.3f}",
            f"{row.row.efficiency_of_overheads:.3f}",
        )
        for row in result.paper
    ]
    return card(table(heads, rows, caption="Relative efficiency by the paper's own figures"))


def _readings(result: Reproduction) -> str:
    heads = ["", *(f"{row.row.workload.name} {row.row.broken_chips}" for row in result.paper)]
    tables = []
    for caption, name in (
        ("Table 2: allreduce, % of a step", "overhead"),
        ("Table 1: relative efficiency", "efficiency"),
    ):
        scale, in_print, ours = _FORMATS[name]
        rows = [
            (
                "printed",
                *(f"{scale * getattr(row, name).printed:{in_print}}" for row in result.paper),
            )
        ]
        readings = [
            ("as above", result.paper),
            *((r.words, r.predictions) for r in result.readings),
        ]
        for words, predictions in readings:
            values = (f"{scale * getattr(row, name).predicted:{ours}}" for row in predictions)
            rows.append((escape(words), *values))
        tables.append(card(table(heads, rows, caption=caption)))
    return (
        "<h2>Other readings of what the paper leaves open</h2>"
        "<p>Each row changes one thing and predicts again, with the slices found above where the "
        f"algorithm is the same.{_links_words(result)}</p>" + "".join(tables) + _our_holes(result)
    )


def _links_words(result: Reproduction) -> str:
    links = result.links
    if links is None:
        return ""
    return (
        f" From the smaller to the larger full mesh the printed shares imply that ResNet-50's "
        f"allreduce takes {links.printed:.3f} times as long ({links.printed_low:.3f} to "
        f"{links.printed_high:.3f} by rounding), if the global batch is the same; "
        f"{escape(result.setting.fabric.name)} gives {links.preset:.3f}. The calibrated hop "
        "latency is the one that gives the printed growth."
    )


def _our_holes(result: Reproduction) -> str:
    heads = ("Benchmark", "chips", "full mesh", "broken mesh", "the hole costs", "packing")
    rows = [
        (
            row.row.workload.name,
            str(row.row.broken_chips),
            format_time(full.time_s),
            format_time(row.broken.time_s),
            f"{row.broken.time_s / full.time_s - 1:+.1%}",
            escape(row.broken.detail),
        )
        for row, full in zip(result.ours, result.full_ours, strict=True)
    ]
    return card(table(heads, rows, caption="What the hole costs our own allreduce"))


def _figures() -> str:
    cards = []
    for name, svg in paper_figures().items():
        cards.append(card(svg, look="wide" if name.startswith(_WIDE_FIGURES) else ""))
    return f'<h2>The paper\'s figures, drawn again</h2><div class="grid">{"".join(cards)}</div>'
