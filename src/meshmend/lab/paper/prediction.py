"""The paper's tables again: calibrated on the full-mesh columns, the others predicted.

The full-mesh share f of allreduce in a step (table 2) and the simulated time T of the full
mesh's allreduce give the compute time of a step, C = T (1 - f) / f. With the time T' on the
broken mesh, the predicted share is T' / (T' + C'). No fault-tolerant cell is used anywhere.
Only the ratio T' / T enters the shares: a wrong link bandwidth cancels where bytes rule.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from meshmend.errors import InputError
from meshmend.lab.paper.paper_tables import FAILED_REGION, PaperRow
from meshmend.planning.pricing import TREES, price
from meshmend.planning.progress import ProgressCallback, no_progress
from meshmend.planning.target import Question
from meshmend.topology.fabric import Fabric
from meshmend.topology.mesh import Mesh

Batch = Literal["per chip", "global"]
PLACES = ("middle", "left edge", "top edge", "corner", "turned")


@dataclass(frozen=True)
class Setting:
    """What the paper leaves open, decided: algorithms, place of the hole, batch, slices, links.

    `batch` is what stays the same when chips fail: each chip's (then a step computes as long as
    before, and there are more of them), or the global one (then each step computes longer).
    `place` "turned" is the middle with the failed region lying along the other axis.
    """

    fabric: Fabric
    full_algorithm: str = "row-pair"
    broken_algorithm: str = "ft-two-d"
    place: str = "middle"
    batch: Batch = "per chip"
    pipelined: bool = True


@dataclass(frozen=True)
class StepTiming:
    """How long one allreduce takes in the simulator, and in how many slices."""

    time_s: float
    slices: int
    detail: str = ""


@dataclass(frozen=True)
class Cell:
    """One number of the paper beside ours, and what it is on the full mesh."""

    printed: float
    predicted: float
    full_mesh: float

    @property
    def difference(self) -> float:
        return self.predicted - self.printed

    @property
    def relative_difference(self) -> float:
        return self.predicted / self.printed - 1

    def summary(self) -> dict[str, float]:
        """Return the cell as a JSON value."""
        return {
            "printed": self.printed,
            "predicted": self.predicted,
            "difference": self.difference,
        }


@dataclass(frozen=True)
class Prediction:
    """One row of the tables predicted under a setting."""

    row: PaperRow
    setting: Setting
    full: StepTiming
    broken: StepTiming

    @property
    def compute_s(self) -> float:
        """The compute time of a full-mesh step, calibrated: T (1 - f) / f."""
        share = self.row.full_overhead
        return self.full.time_s * (1 - share) / share

    @property
    def broken_compute_s(self) -> float:
        """The compute time of a step on the broken mesh."""
        more = self.row.full_chips / self.row.broken_chips
        return self.compute_s * (more if self.setting.batch == "global" else 1)

    @property
    def overhead(self) -> Cell:
        """The share of allreduce in a step on the broken mesh (table 2)."""
        step_s = self.broken.time_s + self.broken_compute_s
        share = self.broken.time_s / step_s
        return Cell(self.row.broken_overhead, share, self.row.full_overhead)

    @property
    def minutes(self) -> Cell:
        """The time to train on the same samples; whatever is not steps is taken to scale too."""
        full_step_s = self.full.time_s + self.compute_s
        broken_step_s = self.broken.time_s + self.broken_compute_s
        n_steps = self.row.full_chips / self.row.broken_chips
        if self.setting.batch == "global":
            n_steps = 1
        full_minutes = self.row.full_minutes
        minutes = full_minutes * n_steps * broken_step_s / full_step_s
        return Cell(self.row.broken_minutes, minutes, full_minutes)

    @property
    def efficiency(self) -> Cell:
        """The relative efficiency of table 1, from the predicted minutes."""
        predicted = self.row.efficiency_of(self.minutes.predicted)
        return Cell(self.row.relative_efficiency, predicted, full_mesh=1.0)

    def summary(self) -> dict[str, Any]:
        """Return the prediction as a JSON value."""
        return {
            "benchmark": self.row.workload.name,
            "full_chips": self.row.full_chips,
            "chips": self.row.broken_chips,
            "mesh": str(broken_mesh(self.row.shape, self.setting.place)),
            "full_allreduce_s": self.full.time_s,
            "full_slices": self.full.slices,
            "compute_s": self.compute_s,
            "allreduce_s": self.broken.time_s,
            "slices": self.broken.slices,
            "overhead": self.overhead.summary(),
            "minutes": self.minutes.summary(),
            "relative_efficiency": self.efficiency.summary(),
        }


def broken_mesh(shape: tuple[int, int], place: str) -> Mesh:
    """Return the mesh without the paper's failed region, aligned to even rows and columns.

    Raises:
        InputError: there is no such place.
    """
    if place not in PLACES:
        raise InputError(f"a place needs one of {', '.join(PLACES)}, but got {place!r}")
    height, width = FAILED_REGION[::-1] if place == "turned" else FAILED_REGION
    row, column = ((shape[0] - height) // 4 * 2, (shape[1] - width) // 4 * 2)
    if place in {"top edge", "corner"}:
        row = 0
    if place in {"left edge", "corner"}:
        column = 0
    return Mesh(shape).without(f"{height}x{width}@{row},{column}")


def predicted(
    row: PaperRow,
    setting: Setting,
    progress: ProgressCallback = no_progress,
    *,
    like: Prediction | None = None,
) -> Prediction:
    """Return a row of the tables predicted, with the best slices.

    Given a prediction to be `like`, its slices are taken for the algorithms that both run:
    close to the best, and found already.
    """
    payload, links = float(row.workload.payload_bytes), setting.fabric
    full_slices = broken_slices = None if setting.pipelined else 1
    if like is not None and setting.pipelined:
        if setting.full_algorithm == like.setting.full_algorithm:
            full_slices = like.full.slices
        if setting.broken_algorithm == like.setting.broken_algorithm:
            broken_slices = like.broken.slices
    progress(f"{row.workload.name}, {row.full_chips} chips: {setting.full_algorithm}")
    full = Question(Mesh(row.shape), payload, links)
    full_time = timing(full, setting.full_algorithm, full_slices)
    progress(f"{row.workload.name}, {row.broken_chips} chips: {setting.broken_algorithm}")
    broken = Question(broken_mesh(row.shape, setting.place), payload, links)
    broken_time = timing(broken, setting.broken_algorithm, broken_slices)
    return Prediction(row, setting, full_time, broken_time)


def best_predicted(paper: Prediction, progress: ProgressCallback = no_progress) -> Prediction:
    """Return the faster of the tree packing and a prediction that is there already."""
    trees = replace(paper.setting, broken_algorithm=TREES)
    ours = predicted(paper.row, trees, progress, like=paper)
    return min(ours, paper, key=lambda prediction: prediction.broken.time_s)


@lru_cache(maxsize=256)
def timing(question: Question, name: str, slices: int | None = None) -> StepTiming:
    """Return the simulated time of an algorithm, with the best slices unless given."""
    found = price(question, name, slices=slices)
    return StepTiming(found.time_s, found.simulation.slices, found.detail)
