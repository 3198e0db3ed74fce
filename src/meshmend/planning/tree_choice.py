"""Which tree packing for which payload: a formula that ranks packings, and what it starts from.

Few shallow trees for short payloads, many even ones for long ones. The formula knows how deep
the trees are and how many of them the busiest link carries; the simulator has the last word.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshmend.overlay.tree_disjoint import fewest_links
from meshmend.overlay.tree_packing import TreePacking, tree_counts
from meshmend.overlay.tree_search import least_load
from meshmend.topology.fabric import Fabric
from meshmend.topology.graph import eccentricities
from meshmend.topology.mesh import Mesh

MOST_TREES = 32
MOST_SLICES = 1024
_FEW_TREES = (1, 2, 4, 8)
_SLACKS = (0, 1, 2)
_WINDOWS = (*range(1, 11), 12, 14, 16, 19, 22, 26, 31, 37, 44, 52, 62, 74, 88, 105, 126)
_N_WINDOWS = 3  # to try for a payload
_LONGEST_WINDOW = 3  # radii: trees made for shorter ones may still do, beyond that none do
_USUAL_LAG = 1.25  # hops' worth of time that one hop of urgency is worth: found by trying


@dataclass(frozen=True)
class TreeShape:
    """The parameters of a packing: with the mesh they give the same trees again.

    `depth_slack` is how much deeper than the radius the trees may be, None: as deep as even
    loads need. More `effort` searches longer. With a `window` the trees are channel-disjoint
    instead, as many as there can be, for slices that take so many hops' time to pass.
    """

    n_trees: int
    depth_slack: int | None = None
    effort: int = 1
    window: int | None = None


@dataclass(frozen=True)
class TreeFigures:
    """What the formula needs to know of a packing: depth, and trees on the busiest link.

    Of disjoint trees `load` counts those that go up the busiest channel: what comes down it
    comes later.
    """

    n_trees: int
    depth: int
    load: int


@dataclass(frozen=True)
class Pipeline:
    """How a table is pipelined: in how many slices, and the slices of lag that a hop is worth."""

    slices: int
    skew: float = 0.0


@lru_cache(maxsize=8)
def _eccentricities(mesh: Mesh) -> NDArray[np.int32]:
    return eccentricities(mesh)


def radius_of(mesh: Mesh) -> int:
    """Return the mesh's radius; those asked for last are kept."""
    return int(_eccentricities(mesh).min())


def figures_of(packing: TreePacking, *, disjoint: bool = False) -> TreeFigures:
    """Return a packing's figures, up and down together or, of disjoint trees, by themselves."""
    both_ways = round(packing.max_load * packing.n_trees)
    load = packing.most_trees_up if disjoint else both_ways
    return TreeFigures(packing.n_trees, packing.depth, load)


def likely_shapes(mesh: Mesh) -> Iterator[tuple[TreeShape, TreeFigures]]:
    """Yield packings worth a thought, with figures that they are likely to reach.

    Trees of little depth all hang from the few ranks in the middle and crowd their links: about
    one tree in as many as there are such ranks beyond what is least.
    """
    from_center = _eccentricities(mesh)
    radius = int(from_center.min())
    for n_trees in sorted({*_FEW_TREES, *tree_counts(mesh, MOST_TREES)}):
        least = least_load(mesh, n_trees)
        yield TreeShape(n_trees), TreeFigures(n_trees, radius + radius // 10 + 1, least)
        for slack in _SLACKS if n_trees > 1 else ():
            n_central = int(np.count_nonzero(from_center <= radius + slack))
            load = min(n_trees, least + n_trees // n_central)
            yield TreeShape(n_trees, slack), TreeFigures(n_trees, radius + slack, load)


def disjoint_shapes(
    mesh: Mesh, fabric: Fabric, payload_bytes: float, slices: int | None
) -> Iterator[tuple[TreeShape, TreeFigures]]:
    """Yield channel-disjoint trees for a payload, none if it is too long for them.

    That is when links are not done with what goes up until long after the rest comes down. A
    window below what the formula has makes for less depth, perhaps, with fewer slices. Windows
    come in steps, so that payloads not far apart try the same trees.
    """
    n_trees, radius = fewest_links(mesh), radius_of(mesh)
    if n_trees < 2 or not payload_bytes:
        return
    figures = TreeFigures(n_trees, radius, 1)
    n_slices = slices or likely_slices(figures, fabric, payload_bytes)
    window = max(1, _window(figures, fabric, payload_bytes, n_slices))
    if window <= _LONGEST_WINDOW * radius:
        fitting = [each for each in _WINDOWS if each <= min(window, 2 * radius)]
        for each in fitting[-_N_WINDOWS:]:
            yield TreeShape(n_trees, window=each), figures


def likely_time_s(figures: TreeFigures, fabric: Fabric, payload_bytes: float, slices: int) -> float:
    """Return about how long trees take.

    The busiest link carries `load` trees' worth of every slice; the last slice then goes up and
    down, and each hop costs latency, overhead and the slice's own bytes.
    """
    hop_s, slice_s = _paces(figures, fabric, payload_bytes, slices)
    return 2 * figures.depth * hop_s + slices * slice_s


def likely_slices(figures: TreeFigures, fabric: Fabric, payload_bytes: float) -> int:
    """Return the number of slices for which the formula is least."""
    overhead_s = fabric.message_overhead_s * figures.load
    if not overhead_s:
        return MOST_SLICES // 4 if payload_bytes and figures.load else 1
    tree_s = payload_bytes / figures.n_trees / fabric.link_bandwidth_bytes_per_s
    best = math.sqrt(2 * figures.depth * tree_s / overhead_s)
    return max(1, min(MOST_SLICES, round(best)))


def slices_within(window: int, figures: TreeFigures, fabric: Fabric, payload_bytes: float) -> int:
    """Return the number of slices for which the formula is least of those within a window.

    But not less than half of those for which it is least of all.
    """
    best = likely_slices(figures, fabric, payload_bytes)
    slices = best
    while slices > best / 2 and _window(figures, fabric, payload_bytes, slices) > window:
        slices -= 1
    return slices


def slices_to_fill(figures: TreeFigures, fabric: Fabric, payload_bytes: float, slices: int) -> int:
    """Return how many slices are under way at once, about."""
    hop_s, slice_s = _paces(figures, fabric, payload_bytes, slices)
    return math.ceil(2 * figures.depth * hop_s / slice_s) if slice_s else slices


def slice_pace_s(figures: TreeFigures, fabric: Fabric, payload_bytes: float, slices: int) -> float:
    """Return the time between slices once the pipeline is full."""
    return _paces(figures, fabric, payload_bytes, slices)[1]


def likely_skew(
    figures: TreeFigures,
    fabric: Fabric,
    payload_bytes: float,
    slices: int,
    *,
    lag: float = _USUAL_LAG,
) -> float:
    """Return the slices of lag that one hop is worth: the slices that pass in its time."""
    hop_s, slice_s = _paces(figures, fabric, payload_bytes, slices)
    return round(lag * hop_s / slice_s, 6) if slice_s else 0.0


def _window(figures: TreeFigures, fabric: Fabric, payload_bytes: float, slices: int) -> int:
    """Return how many hops take as long as all slices take to pass the busiest link."""
    hop_s, slice_s = _paces(figures, fabric, payload_bytes, slices)
    return int(slices * slice_s / hop_s)


def _paces(
    figures: TreeFigures, fabric: Fabric, payload_bytes: float, slices: int
) -> tuple[float, float]:
    """Return what one hop takes, and the time between slices on the busiest link or chip."""
    size = payload_bytes / figures.n_trees / slices
    hold_s = fabric.message_overhead_s + size / fabric.link_bandwidth_bytes_per_s
    add_s = size / (fabric.chip_bandwidth_bytes_per_s or math.inf)
    slice_s = max(figures.load * hold_s, figures.n_trees * add_s)
    return fabric.hop_latency_s + hold_s + add_s / 2, slice_s
