"""What the full-mesh columns say about the links, without any fault-tolerant cell.

A share of a step fixes the ratio of allreduce to compute, so one row alone says nothing of a
link. Two rows of one benchmark with the same global batch say a little: twice the chips
compute half as long, so the shares give how much longer allreduce takes on the larger mesh.
Bytes per link hardly differ between the two; what grows is the number of hops. That growth
fixes latency against bandwidth, never the bandwidth itself.
"""

from dataclasses import dataclass
from typing import Any

from meshmend.lab.paper.paper_tables import PaperRow
from meshmend.lab.paper.prediction import timing
from meshmend.planning.pricing import Question
from meshmend.planning.progress import ProgressCallback, no_progress
from meshmend.topology.fabric import Fabric
from meshmend.topology.mesh import Mesh

_ROUNDING = 0.0005  # table 2 prints shares to a tenth of a per cent
_MAX_HOP_LATENCY_S = 8e-6
_STEPS = 5  # halvings: to a quarter of a microsecond, finer than the rounding of the shares


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
