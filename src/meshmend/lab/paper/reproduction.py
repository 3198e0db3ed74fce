"""Tables 1 and 2 of the paper beside ours, and what other readings of the paper would give.

`tables` writes all of it as tables, for the terminal and the page alike.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from meshmend.lab.paper.paper_tables import FAILED_REGION, PAPER_ROWS, RUN_TO_RUN, PaperRow
from meshmend.lab.paper.prediction import (
    Cell,
    Prediction,
    Setting,
    StepTiming,
    best_predicted,
    predicted,
    timing,
)
from meshmend.planning.pricing import TREES
from meshmend.planning.progress import ProgressCallback, ProgressShares, no_progress
from meshmend.planning.target import Question
from meshmend.topology.fabric import Fabric
from meshmend.topology.mesh import Mesh
from meshmend.units import format_bytes, format_time

_ROUNDING = 0.0005  # table 2 prints shares to a tenth of a per cent
_MAX_HOP_LATENCY_S = 8e-6
_STEPS = 5  # halvings: to a quarter of a microsecond, finer than the rounding of the shares
_OTHER_BANDWIDTHS = {"links of 70 GB/s": 70e9, "links of 100 GB/s": 100e9}

# What the full-mesh columns say about the links, without any fault-tolerant cell.
#
# A share of a step fixes the ratio of allreduce to compute, so one row alone says nothing of a
# link. Two rows of one benchmark with the same global batch say a little: twice the chips
# compute half as long, so the shares give how much longer allreduce takes on the larger mesh.
# Bytes per link hardly differ between the two; what grows is the number of hops. That growth
# fixes latency against bandwidth, never the bandwidth itself.


@dataclass(frozen=True)
class Links:
    """Growth of allreduce time from the smaller to the larger mesh, and the links that give it.

    `fabric` has the hop latency at which the simulated growth is the printed one, or is None
    where no latency up to 8 us gives it. `printed_low` and `printed_high` are what the
    rounding of the printed shares leaves open.
    """

    printed: float
    printed_low: float
    printed_high: float
    preset: float
    fabric: Fabric | None

    def summary(self) -> dict[str, Any]:
        """Return the calibration as a JSON value."""
        return {
            "growth_printed": self.printed,
            "growth_printed_low": self.printed_low,
            "growth_printed_high": self.printed_high,
            "growth_preset": self.preset,
            "hop_latency_s": None if self.fabric is None else self.fabric.hop_latency_s,
        }


def printed_growth(small: PaperRow, large: PaperRow, slip: float = 0.0) -> float:
    """Return the allreduce time on the larger mesh over the smaller, at equal global batch.

    `slip` is added to the larger mesh's share and taken from the smaller's.
    """
    ratios = [
        share / (1 - share) for share in (small.full_overhead - slip, large.full_overhead + slip)
    ]
    return ratios[1] / ratios[0] * small.full_chips / large.full_chips


def calibrated_links(
    small: PaperRow,
    large: PaperRow,
    fabric: Fabric,
    algorithm: str,
    progress: ProgressCallback = no_progress,
) -> Links:
    """Return the hop latency with which allreduce grows from mesh to mesh as table 2 prints.

    Halves an interval, taking it that more latency means more growth.
    """

    def growth(hop_latency_s: float) -> float:
        progress(f"links: trying {hop_latency_s * 1e6:.2f} us a hop")
        links = fabric.with_(hop_latency_s=hop_latency_s)
        times = [
            timing(
                Question(Mesh(r.shape), float(r.workload.payload_bytes), links), algorithm
            ).time_s
            for r in (small, large)
        ]
        return times[1] / times[0]

    wanted = printed_growth(small, large)
    low, high = 0.0, _MAX_HOP_LATENCY_S
    fits = growth(low) <= wanted <= growth(high)
    for _ in range(_STEPS if fits else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if growth(middle) < wanted else (low, middle)
    return Links(
        printed=wanted,
        printed_low=printed_growth(small, large, -_ROUNDING),
        printed_high=printed_growth(small, large, _ROUNDING),
        preset=growth(fabric.hop_latency_s),
        fabric=fabric.with_(hop_latency_s=round(high, 8)) if fits else None,
    )


@dataclass(frozen=True)
class Reading:
    """One way to read what the paper leaves open, and the rows that it predicts."""

    words: str
    predictions: tuple[Prediction, ...]


@dataclass(frozen=True)
class Reproduction:
    """The rows of the tables predicted: with the paper's scheme, with ours, and read otherwise.

    `full_ours` is the tree packing's time on each full mesh; it, `links` and `readings` are
    empty in a quick run.
    """

    setting: Setting
    paper: tuple[Prediction, ...]
    ours: tuple[Prediction, ...]
    full_ours: tuple[StepTiming, ...] = ()
    links: Links | None = None
    readings: tuple[Reading, ...] = ()

    def n_within_variance(self) -> tuple[int, int]:
        """Return how many of table 1's cells the paper's scheme meets to 2 %, and of how many."""
        cells = [cell for row in self.paper for cell in (row.minutes, row.efficiency)]
        return sum(map(_is_near, cells)), len(cells)

    def summary(self) -> dict[str, Any]:
        """Return everything as a JSON value."""
        setting = self.setting
        return {
            "fabric": setting.fabric.summary(),
            "method": {
                "calibrated_on": "full-mesh columns of tables 1 and 2",
                "full_algorithm": setting.full_algorithm,
                "failed_region": list(FAILED_REGION),
                "place": setting.place,
                "same_batch": setting.batch,
            },
            "payloads": {row.row.workload.name: asdict(row.row.workload) for row in self.paper},
            "paper_scheme": [row.summary() for row in self.paper],
            "best_of_ours": [
                {**row.summary(), "algorithm": row.setting.broken_algorithm} for row in self.ours
            ],
            "best_of_ours_full_mesh_s": [each.time_s for each in self.full_ours],
            "links_from_full_mesh_columns": None if self.links is None else self.links.summary(),
            "other_readings": {
                reading.words: [row.summary() for row in reading.predictions]
                for reading in self.readings
            },
            "printed_efficiency_follows": [
                {
                    "benchmark": row.row.workload.name,
                    "chips": row.row.broken_chips,
                    "printed": row.row.relative_efficiency,
                    "from_printed_times": row.row.efficiency_of_times,
                    "from_printed_overheads": row.row.efficiency_of_overheads,
                }
                for row in self.paper
            ],
            "notes": [row.row.note for row in self.paper if row.row.note],
        }


def reproduction(
    fabric: Fabric,
    rows: Sequence[PaperRow] = PAPER_ROWS,
    *,
    quick: bool = False,
    progress: ProgressCallback = no_progress,
) -> Reproduction:
    """Return the tables predicted from their full-mesh columns.

    A quick run leaves out the other readings and what our algorithm does on full meshes.
    """
    setting = Setting(fabric)
    turn = ProgressShares(progress, _n_shares(len(rows), setting, quick=quick)).in_turn()
    paper = tuple(predicted(row, setting, next(turn)) for row in rows)
    ours = tuple(best_predicted(row, next(turn)) for row in paper)
    if quick:
        return Reproduction(setting, paper, ours)
    links = _links(rows, setting, next(turn))
    readings = tuple(
        Reading(words, tuple(predicted(p.row, other, next(turn), like=p) for p in paper))
        for words, other in _other_settings(setting, links).items()
    )
    full_ours = tuple(_on_full_mesh(row, fabric, next(turn)) for row in rows)
    return Reproduction(setting, paper, ours, full_ours, links, readings)


def _n_shares(n_rows: int, setting: Setting, *, quick: bool) -> int:
    """Return how many pieces of work a reproduction has at most."""
    n_readings = len(_other_settings(setting, None)) + 1  # one more if links are calibrated
    return 2 * n_rows + (0 if quick else 1 + (n_readings + 1) * n_rows)


def _other_settings(setting: Setting, links: Links | None) -> dict[str, Setting]:
    """Return settings that differ from the one given in one point each."""
    others = {
        "full mesh runs two-d (figures 4, 5)": replace(setting, full_algorithm="two-d"),
        "same global batch": replace(setting, batch="global"),
        "hole at the left edge": replace(setting, place="left edge"),
        "hole at the top edge": replace(setting, place="top edge"),
        "hole in a corner": replace(setting, place="corner"),
        "hole turned: 2x4": replace(setting, place="turned"),
        "nothing pipelined (1 slice)": replace(setting, pipelined=False),
    }
    for words, bandwidth in _OTHER_BANDWIDTHS.items():
        fabric = setting.fabric.with_(link_bandwidth_bytes_per_s=bandwidth)
        others[words] = replace(setting, fabric=fabric)
    if links is not None and links.fabric is not None:
        words = f"hop latency {links.fabric.hop_latency_s * 1e6:.2f} us (calibrated)"
        others[words] = replace(setting, fabric=links.fabric)
    return others


def _links(rows: Sequence[PaperRow], setting: Setting, progress: ProgressCallback) -> Links | None:
    """Return links from the first two rows, if they are one benchmark on two meshes."""
    if len(rows) < 2 or rows[0].workload != rows[1].workload:
        return None
    return calibrated_links(rows[0], rows[1], setting.fabric, setting.full_algorithm, progress)


def _on_full_mesh(row: PaperRow, fabric: Fabric, progress: ProgressCallback) -> StepTiming:
    progress(f"{row.workload.name}, {row.full_chips} chips: {TREES}")
    return timing(Question(Mesh(row.shape), float(row.workload.payload_bytes), fabric), TREES)


def _is_near(cell: Cell) -> bool:
    return abs(cell.relative_difference) <= RUN_TO_RUN


# What the command prints and the page shows.


@dataclass(frozen=True)
class Table:
    """A table: words in its first column, numbers in the others; `missed` cells are (row, column).

    Those are predictions that miss what the paper printed by more than its runs vary.
    """

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    missed: frozenset[tuple[int, int]] = field(default_factory=frozenset)

    def text(self) -> str:
        """Return the table as lines, the title first."""
        lines = (self.heads, *self.rows)
        first, *widths = (max(map(len, column)) for column in zip(*lines, strict=True))
        return "\n".join(
            [self.title]
            + [
                head.ljust(first)
                + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
                for head, *cells in lines
            ]
        )


@dataclass(frozen=True)
class _Column:
    """A column of the paper's tables: its name in a prediction, and how it is written."""

    title: str
    name: str
    scale: float
    in_print: str
    ours: str

    def cell(self, row: Prediction) -> Cell:
        found: Cell = getattr(row, self.name)
        return found

    def printed(self, row: Prediction) -> str:
        """Return what the paper printed, with a star where that is odd."""
        star = "*" if row.row.note and self.name == "efficiency" else ""
        return f"{self.scale * self.cell(row).printed:{self.in_print}}{star}"

    def predicted(self, row: Prediction) -> str:
        return f"{self.scale * self.cell(row).predicted:{self.ours}}"

    def difference(self, row: Prediction) -> str:
        return f"{self.scale * self.cell(row).difference:+{self.ours}}"


_COLUMNS = (
    _Column("Table 2: allreduce, % of a step", "overhead", 100.0, ".1f", ".2f"),
    _Column("Table 1: minutes to train", "minutes", 1.0, ".2f", ".3f"),
    _Column("Table 1: relative efficiency", "efficiency", 1.0, ".3g", ".3f"),
)


def tables(result: Reproduction) -> Iterator[Table]:
    """Yield all tables of a reproduction, the calibration first."""
    scheme = result.setting.broken_algorithm
    yield Table(
        f"Calibrated on the full-mesh columns, which run {result.setting.full_algorithm}",
        ("benchmark", "chips", "payload", "allreduce", "slices", "of a step", "so compute"),
        tuple(
            (
                *_named(row, row.row.full_chips),
                format_bytes(row.row.workload.payload_bytes),
                format_time(row.full.time_s),
                str(row.full.slices),
                f"{row.row.full_overhead:.1%}",
                format_time(row.compute_s),
            )
            for row in result.paper
        ),
    )
    yield Table(
        "Allreduce on the fault-tolerant mesh, simulated",
        ("benchmark", "chips", scheme, "slices", "best of ours"),
        tuple(
            (
                *_named(row),
                f"{row.broken.time_s * 1e3:.2f} ms",
                str(row.broken.slices),
                f"{our.broken.time_s * 1e3:.2f} ms {our.setting.broken_algorithm}",
            )
            for row, our in zip(result.paper, result.ours, strict=True)
        ),
    )
    yield from (_compared(result, column) for column in _COLUMNS)
    yield Table(
        "Relative efficiency by the paper's own figures",
        ("benchmark", "chips", "printed", "by its times", "by table 2"),
        tuple(
            (
                *_named(row),
                f"{row.row.relative_efficiency:.3g}",
                f"{row.row.efficiency_of_times:.3f}",
                f"{row.row.efficiency_of_overheads:.3f}",
            )
            for row in result.paper
        ),
    )
    if result.readings:
        yield from (_read_otherwise(result, column) for column in (_COLUMNS[0], _COLUMNS[2]))
        yield _holes(result)


def _named(row: Prediction, chips: int | None = None) -> tuple[str, str]:
    return row.row.workload.name, str(row.row.broken_chips if chips is None else chips)


def _compared(result: Reproduction, column: _Column) -> Table:
    """Return a column of the paper's tables beside ours."""
    rows = tuple(
        (
            *_named(row),
            f"{column.scale * column.cell(row).full_mesh:{column.in_print}}",
            column.printed(row),
            column.predicted(row),
            column.difference(row),
            column.predicted(our),
            column.difference(our),
        )
        for row, our in zip(result.paper, result.ours, strict=True)
    )
    scheme, difference = result.setting.broken_algorithm, "difference"
    heads = ("benchmark", "chips", "full mesh", "printed", scheme, difference)
    missed = [
        (at, heads.index(difference))
        for at, row in enumerate(result.paper)
        if column.name != "overhead" and not _is_near(column.cell(row))
    ]
    return Table(column.title, (*heads, "best of ours", difference), rows, frozenset(missed))


def _read_otherwise(result: Reproduction, column: _Column) -> Table:
    """Return what a column becomes with each other reading, one changed thing a row."""
    readings = [("as above", result.paper), *((r.words, r.predictions) for r in result.readings)]
    return Table(
        f"{column.title}, other readings",
        ("", *(" ".join(_named(row)) for row in result.paper)),
        (
            ("printed", *map(column.printed, result.paper)),
            *((words, *map(column.predicted, rows)) for words, rows in readings),
        ),
    )


def _holes(result: Reproduction) -> Table:
    return Table(
        "What the hole costs our own allreduce",
        ("benchmark", "chips", "full mesh", "broken mesh", "the hole costs", "packing"),
        tuple(
            (
                *_named(row),
                format_time(full.time_s),
                format_time(row.broken.time_s),
                f"{row.broken.time_s / full.time_s - 1:+.1%}",
                row.broken.detail,
            )
            for row, full in zip(result.ours, result.full_ours, strict=True)
        ),
    )


def remarks(result: Reproduction) -> list[str]:
    """Return how many cells are met, and what is odd about rows, as sentences."""
    within, cells = result.n_within_variance()
    met = f"{within} of {cells} cells of table 1 lie within the {RUN_TO_RUN:.0%} by which the "
    odd = [row.row for row in result.paper if row.row.note]
    return [
        f"{met}paper's runs vary.",
        *(f"* {row.workload.name} on {row.full_chips} chips: {row.note}" for row in odd),
    ]


def links_words(result: Reproduction) -> str:
    """Return what the full-mesh columns say about the links; empty if nothing."""
    links = result.links
    if links is None:
        return ""
    return (
        "From the smaller to the larger full mesh the printed shares imply that the first "
        f"benchmark's allreduce takes {links.printed:.3f} times as long ({links.printed_low:.3f} "
        f"to {links.printed_high:.3f} by rounding), if the global batch is the same; "
        f"{result.setting.fabric.name} gives {links.preset:.3f}. The calibrated hop latency is the "
        "one that gives the printed growth."
    )
