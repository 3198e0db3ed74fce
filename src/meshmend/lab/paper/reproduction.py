"""Tables 1 and 2 of the paper beside ours, and what other readings of the paper would give."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshmend.lab.paper.paper_tables import FAILED_REGION, PAPER_ROWS, RUN_TO_RUN, PaperRow
from meshmend.lab.paper.prediction import (
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
        return sum(abs(cell.relative_difference) <= RUN_TO_RUN for cell in cells), len(cells)

    def summary(self) -> dict[str, Any]:
        """Return everything as a JSON value."""
        setting = self.setting
        return {
            "fabric": asdict(setting.fabric),
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
