"""Which tree packing for which payload: candidates in the order in which to try them.

Few shallow trees for short payloads, many even ones for long ones. A formula ranks them; the
simulator has the last word.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from meshmend.overlay.tree_packing import tree_counts
from meshmend.simulate.packing_number import packing_number
from meshmend.topology.fabric import Fabric
from meshmend.topology.graph import radius
from meshmend.topology.mesh import Mesh

MOST_TREES = 64
_FEW_TREES = (1, 2, 3, 4)
_MAX_SLICES = 512


@dataclass(frozen=True)
class TreeShape:
    """The parameters of a packing: how many trees, and how much deeper than the radius at most
    (None: as deep as even loads need)."""

    n_trees: int
    depth_slack: int | None = None


def tree_shapes(
    mesh: Mesh, fabric: Fabric, payload_bytes: float
) -> Iterator[tuple[TreeShape, int]]:
    """Yield packings worth a try with the slices that fit them, best guess first."""
    least_load = 1 / packing_number(mesh).upper if mesh.n_live > 1 else 0.0
    depth = radius(mesh)
    counts = sorted({*_FEW_TREES, *tree_counts(mesh, MOST_TREES)})
    guesses = []
    for n_trees in counts:
        load = math.ceil(n_trees * least_load - 1e-9)
        for slack, deeper in ((None, depth + depth // 8 + 1), (0, depth)):
            if slack == 0 and n_trees > _FEW_TREES[-1]:
                continue  # even loads do not fit into the least depth
            shape = TreeShape(n_trees, slack)
            guesses.append((*guess(deeper, load, n_trees, fabric, payload_bytes), shape))
    for _, slices, shape in sorted(guesses, key=lambda each: each[0]):
        yield shape, slices


def guess(
    depth: int, load: int, n_trees: int, fabric: Fabric, payload_bytes: float
) -> tuple[float, int]:
    """Return about how long trees take with the best number of slices, and that number.

    The last slice leaves when the busiest link has carried `load` trees' worth of all slices,
    and then goes up and down: each hop costs latency, overhead and the slice's own bytes.
    """
    overhead_s = fabric.message_overhead_s
    tree_s = payload_bytes / n_trees / fabric.link_bandwidth_bytes_per_s

    def time_s(slices: int) -> float:
        message_s = overhead_s + tree_s / slices
        return 2 * depth * (fabric.hop_latency_s + message_s) + load * slices * message_s

    if overhead_s and load:
        best = math.sqrt(2 * depth * tree_s / (load * overhead_s))
    else:
        best = float(_MAX_SLICES)
    nearby = {max(1, min(_MAX_SLICES, round(best * factor))) for factor in (0.9, 1.0, 1.1)}
    slices = min(sorted(nearby), key=time_s)
    return time_s(slices), slices
