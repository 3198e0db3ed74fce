"""A formula for the time of trees, which ranks packings before anything is simulated.

Few shallow trees suit short payloads; many trees with even loads suit long payloads. The formula
knows how deep the trees are and how many of them the busiest link carries. It is off by up to 15 %,
so the simulator decides. It knows no mesh and no packing.
"""

import math
from dataclasses import dataclass

from meshmend.topology.fabric import Fabric

MOST_SLICES = 1024  # the most that `benchmarks/trees.py` has used is 652


@dataclass(frozen=True)
class TreeFigures:
    """What the formula needs to know of a packing: depth, and trees on the busiest link.

    For disjoint trees, `load` counts only those that go up the busiest channel: data comes down
    later.
    """

    n_trees: int
    depth: int
    load: int


@dataclass(frozen=True)
class Pipeline:
    """How a schedule is pipelined: in how many slices, and how links choose between them.

    A row's delay is `skew` slices for each hop by which it is nearer to the end of its chain than
    the farthest row (`schedule/priority.py`). With a `stagger` of 1, chunks of a slice follow
    one another, the last one slice after the first.
    """

    slices: int
    skew: float = 0.0
    stagger: float = 0.0


@dataclass(frozen=True)
class TreeFormula:
    """The time of trees with these figures for a payload, as a function of the number of slices."""

    figures: TreeFigures
    fabric: Fabric
    payload_bytes: float

    def time_s(self, slices: int) -> float:
        """Return about how long the trees take.

        The busiest link carries `load` trees' worth of every slice. Then the last slice goes up
        and down, and each hop costs latency, overhead and the slice's own bytes.
        """
        hop_s, interval_s = self._hop_and_interval_s(slices)
        return 2 * self.figures.depth * hop_s + slices * interval_s

    def best_slices(self) -> int:
        """Return the number of slices with the least time."""
        overhead_s = self.fabric.message_overhead_s * self.figures.load
        if not overhead_s:
            return MOST_SLICES // 4 if self.payload_bytes and self.figures.load else 1
        tree_bytes = self.payload_bytes / self.figures.n_trees
        tree_s = tree_bytes / self.fabric.link_bandwidth_bytes_per_s
        best = math.sqrt(2 * self.figures.depth * tree_s / overhead_s)
        return max(1, min(MOST_SLICES, round(best)))

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
        """Return what one hop takes, and the time between slices on the busiest link or chip."""
        size = self.payload_bytes / self.figures.n_trees / slices
        hold_s = self.fabric.message_overhead_s + size / self.fabric.link_bandwidth_bytes_per_s
        add_s = size / (self.fabric.chip_bandwidth_bytes_per_s or math.inf)
        interval_s = max(self.figures.load * hold_s, self.figures.n_trees * add_s)
        return self.fabric.hop_latency_s + hold_s + add_s / 2, interval_s


@dataclass(frozen=True)
class PipelineRequest:
    """A payload to be summed on a fabric, in `slices` slices (None: any number)."""

    fabric: Fabric
    payload_bytes: float
    slices: int | None = None

    def formula(self, figures: TreeFigures) -> TreeFormula:
        """Return the formula of trees with these figures."""
        return TreeFormula(figures, self.fabric, self.payload_bytes)

    def likely_s(self, figures: TreeFigures) -> float:
        """Return about how long these trees take, in the requested or the best number of slices."""
        formula = self.formula(figures)
        return formula.time_s(self.slices or formula.best_slices())
