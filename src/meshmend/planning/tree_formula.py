"""A formula for the time of trees, which ranks packings before anything is simulated.

Few shallow trees suit short payloads; many trees with even loads suit long payloads. The formula
knows how deep the trees are and how many of them the busiest link carries. It is off by up to 15 %,
so the simulator decides. It knows no mesh and no packing.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshmend.schedule.priority import delay_slices
from meshmend.schedule.table import Schedule
from meshmend.topology.fabric import Fabric

MOST_SLICES = 1024  # the most that `benchmarks/trees.py` has used is 652
_NUMBERS_OF_SLICES = sorted({round(2 ** (step / 8)) for step in range(81)})
_ROUNDING = 1e-9
# Trees from everywhere: 6x16 as a torus less a link at 5.6 MB takes as long as its hops and 0.3
# times as long as its bytes.
SPREAD_OVERLAP = 0.7


@dataclass(frozen=True)
class TreeFigures:
    """What the formula needs to know of a packing: depth, and trees on the busiest link.

    For disjoint trees, `load` counts only those that go up the busiest channel: data comes down
    later. For trees whose leaves fill gaps it is the pace that they need. With roots all over the
    mesh links are busy while the first slice is on its way: an `overlap` is how much of the shorter
    of hops and bytes is then saved. The `depth` of trees whose sums meet is half of their hops, of
    which so many are `passed` without stopping.
    """

    n_trees: int
    depth: float
    load: float
    overlap: float = 0.0
    passed: int = 0


@dataclass(frozen=True)
class Pipeline:
    """How a schedule is pipelined: in how many slices, and how links choose between them.

    A row's delay is `skew` slices for each hop by which it is nearer to the end of its chain than
    the farthest row (`schedule/priority.py`). With a `stagger` of 1, chunks of a slice follow
    one another, the last one slice after the first. With `leaves_last`, rows that nothing
    follows go when nothing else waits.
    """

    slices: int
    skew: float = 0.0
    stagger: float = 0.0
    leaves_last: bool = False

    def delays(self, schedule: Schedule, remaining: NDArray[np.int32]) -> NDArray[np.float64]:
        """Return the delay of each row of a schedule, from the hops that must follow it."""
        return delay_slices(
            remaining,
            self.skew,
            starts=schedule.cuts[schedule.lo],
            stagger=self.stagger,
            leaves_last=self.leaves_last,
        )


@dataclass(frozen=True)
class TreeFormula:
    """The time of trees with these figures for a payload, as a function of the number of slices."""

    figures: TreeFigures
    fabric: Fabric
    payload_bytes: float
    n_ranks: int = 1  # that share the processors of the fabric, if it has any

    def time_s(self, slices: int) -> float:
        """Return about how long the trees take.

        The busiest link carries `load` trees' worth of every slice. Then the last slice goes up
        and down, and each hop costs latency, overhead and the slice's own bytes.
        """
        hop_s, interval_s = self._hop_and_interval_s(slices)
        not_stopping_s = self.figures.passed * (hop_s - self.fabric.hop_latency_s)
        way_s = 2 * self.figures.depth * hop_s - not_stopping_s
        busy_s = slices * interval_s
        return way_s + busy_s - self.figures.overlap * min(way_s, busy_s)

    def best_slices(self) -> int:
        """Return the number of slices with the least time."""
        if self.fabric.processors is not None:
            return min(_NUMBERS_OF_SLICES, key=self.time_s)
        overhead_s = self.fabric.message_overhead_s * self.figures.load
        if not overhead_s:
            return MOST_SLICES // 4 if self.payload_bytes and self.figures.load else 1
        tree_bytes = self.payload_bytes / self.figures.n_trees
        tree_s = tree_bytes / self.fabric.link_bandwidth_bytes_per_s
        stops = 2 * self.figures.depth - self.figures.passed
        best = math.sqrt(stops * tree_s / overhead_s)
        return max(1, min(MOST_SLICES, round(best)))

    def aligned_slices(self, slices: int) -> int:
        """Return the largest number of slices with as many messages in a hop's latency as these.

        A message then arrives when the channel of its next hop is about to be free. One slice more,
        and it arrives just after the channel began with another one.
        """
        fabric, tree_bytes = self.fabric, self.payload_bytes / self.figures.n_trees
        hold_s = self._hop_and_interval_s(slices)[0] - fabric.hop_latency_s
        n_meanwhile = math.ceil(fabric.hop_latency_s / hold_s - _ROUNDING) if hold_s else 0
        if n_meanwhile == 0:
            return slices
        bytes_s = fabric.hop_latency_s / n_meanwhile - fabric.message_overhead_s
        if bytes_s <= 0:
            return slices
        most = tree_bytes / fabric.link_bandwidth_bytes_per_s / bytes_s
        return max(slices, min(MOST_SLICES, math.floor(most + _ROUNDING)))

    def slices_within(self, window: int) -> int:
        """Return the largest number of slices, up to the best, that passes within a window.

        It is never less than half of the best number, even if that takes longer than the window.
        """
        best = self.best_slices()
        slices = best
        while slices > best / 2 and self.window_hops(slices) > window:
            slices -= 1
        return slices

    def slices_in_flight(self, slices: int) -> int:
        """Return about how many slices are under way at once."""
        hop_s, interval_s = self._hop_and_interval_s(slices)
        return math.ceil(2 * self.figures.depth * hop_s / interval_s) if interval_s else slices

    def gap(self, slices: int) -> float:
        """Return how long the last slice's way takes, as a part of the time of all slices."""
        hop_s, interval_s = self._hop_and_interval_s(slices)
        return 2 * self.figures.depth * hop_s / (slices * interval_s) if interval_s else math.inf

    def slice_interval_s(self, slices: int) -> float:
        """Return the time between slices once the pipeline is full."""
        return self._hop_and_interval_s(slices)[1]

    def window_hops(self, slices: int) -> int:
        """Return the time in which all slices pass the busiest link, counted in hops."""
        hop_s, interval_s = self._hop_and_interval_s(slices)
        return int(slices * interval_s / hop_s)

    def pipeline(self, slices: int, delay_hops_per_hop: float) -> Pipeline:
        """Return a pipeline whose delay per hop takes the time of `delay_hops_per_hop` hops."""
        slices = max(1, slices)
        hop_s, interval_s = self._hop_and_interval_s(slices)
        skew = round(delay_hops_per_hop * hop_s / interval_s, 6) if interval_s else 0.0
        return Pipeline(slices, skew)

    def _hop_and_interval_s(self, slices: int) -> tuple[float, float]:
        """Return what one hop takes, and the time between slices of what is busiest.

        That is a link, a chip, or all processors together: each message of a slice, one up and one
        down each tree for every rank but the root, takes one at both ends.
        """
        size = self.payload_bytes / self.figures.n_trees / slices
        hold_s = self.fabric.message_overhead_s + size / self.fabric.link_bandwidth_bytes_per_s
        add_s = size / (self.fabric.chip_bandwidth_bytes_per_s or math.inf)
        interval_s = max(self.figures.load * hold_s, self.figures.n_trees * add_s)
        hop_s = self.fabric.hop_latency_s + hold_s + add_s / 2
        if (processors := self.fabric.processors) is not None:
            work_s = 2 * (processors.message_s + size / processors.bytes_per_s)
            n_messages = 2 * (self.n_ranks - 1) * self.figures.n_trees
            interval_s = max(interval_s, n_messages * work_s / min(processors.n, self.n_ranks))
            hop_s += work_s
        return hop_s, interval_s


@dataclass(frozen=True)
class PipelineRequest:
    """A payload to be summed by ranks on a fabric, in `slices` slices (None: any number)."""

    fabric: Fabric
    payload_bytes: float
    n_ranks: int
    slices: int | None = None

    def formula(self, figures: TreeFigures) -> TreeFormula:
        """Return the formula of trees with these figures."""
        return TreeFormula(figures, self.fabric, self.payload_bytes, self.n_ranks)

    def likely_s(self, figures: TreeFigures) -> float:
        """Return about how long these trees take, in the requested or the best number of slices."""
        formula = self.formula(figures)
        return formula.time_s(self.slices or formula.best_slices())
