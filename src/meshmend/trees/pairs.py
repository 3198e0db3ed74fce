"""Rings over pairs of rows or columns, with and without a hole (figures 6, 7, 9).

A pair of lines without failed chips forms a full **blue** ring: along one line, back along the
other. A pair that holds failed chips is broken: its live chips are **yellow**, form rings of
2x2 blocks, and each has a blue **partner** in its own column that adds its contribution and
returns the result. Across the blue rings, chips at the same position form the rings of the
second phase; their routes go around failed chips.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from meshmend.errors import UnsupportedError
from meshmend.topology.failures import Chip
from meshmend.topology.graph import distances_from
from meshmend.topology.mesh import Mesh
from meshmend.trees.rings import Ring, folded, live_blocks, need_two_axes

AXIS_NAMES = ("rows", "columns")


@dataclass(frozen=True)
class PairLayout:
    """Blue and yellow rings of a mesh whose lines along one axis are paired.

    `axis` is 0 when rows are paired and 1 when columns are. All blue rings have one length, and
    position p of each lies in the same column (row) and on the same side of its pair.
    `across[p]` is the second-phase ring over the blue chips at position p.
    """

    axis: int
    blue: tuple[Ring, ...]
    yellow: tuple[Ring, ...]
    partner: Mapping[Chip, Chip]
    across: tuple[Ring, ...]


def row_pair_layout(mesh: Mesh) -> PairLayout:
    """Return the blue rings of a full mesh (figures 6 and 7): rows paired, or else columns.

    Raises:
        UnsupportedError: the mesh is not 2-D, chips failed, or both sides are odd.
    """
    need_two_axes(mesh, "row-pair")
    if mesh.failed:
        raise UnsupportedError(f"row-pair needs a full mesh, but got {mesh}")
    return _full_layout(mesh, "row-pair")


def fault_tolerant_layout(mesh: Mesh) -> PairLayout:
    """Return blue and yellow rings that hold every live chip once (figure 9).

    Pairs rows or columns, whichever has fewer broken pairs; rows on a tie.

    Raises:
        UnsupportedError: the mesh is not 2-D, the failed chips are not whole aligned 2x2 blocks,
            or every pair of rows and every pair of columns is broken.
    """
    need_two_axes(mesh, "ft-two-d")
    if not mesh.failed:
        return _full_layout(mesh, "ft-two-d")
    live_blocks(mesh, "ft-two-d")
    broken = [frozenset(chip[axis] // 2 for chip in mesh.failed) for axis in (0, 1)]
    axes = [axis for axis in (0, 1) if len(broken[axis]) < mesh.shape[axis] // 2]
    if not axes:
        raise UnsupportedError(
            f"ft-two-d needs a pair of rows or columns without failed chips, but on {mesh} "
            "every pair is broken"
        )
    axis = min(axes, key=lambda axis: len(broken[axis]))
    return _layout(mesh, axis, broken=broken[axis])


def _full_layout(mesh: Mesh, who: str) -> PairLayout:
    for axis in (0, 1):
        if mesh.shape[axis] % 2 == 0:
            return _layout(mesh, axis, broken=frozenset())
    raise UnsupportedError(
        f"{who} needs an even number of rows or columns, but got {mesh.shape[0]}x{mesh.shape[1]}"
    )


def _layout(mesh: Mesh, axis: int, *, broken: frozenset[int]) -> PairLayout:
    """Return the layout of pairs of lines along `axis`; `broken` numbers the pairs with a hole."""
    n_lines, length = mesh.shape[axis], mesh.shape[1 - axis]

    def chip(line: int, at: int) -> Chip:
        return (line, at) if axis == 0 else (at, line)

    intact = [pair for pair in range(n_lines // 2) if pair not in broken]
    blue = tuple(
        tuple(
            [chip(2 * pair, at) for at in range(length)]
            + [chip(2 * pair + 1, at) for at in reversed(range(length))]
        )
        for pair in intact
    )
    yellow = tuple(
        tuple(chip(2 * pair + i, at + j) for i, j in ((0, 0), (0, 1), (1, 1), (1, 0)))
        for pair in sorted(broken)
        for at in range(0, length, 2)
        if chip(2 * pair, at) not in mesh.failed
    )
    order = range(len(blue)) if mesh.wrap[axis] else folded(len(blue))
    across = tuple(tuple(blue[ring][at] for ring in order) for at in range(2 * length))
    return PairLayout(axis, blue, yellow, _partners(mesh, axis, yellow, intact), across)


def _partners(
    mesh: Mesh, axis: int, yellow: tuple[Ring, ...], intact: list[int]
) -> Mapping[Chip, Chip]:
    """Give each yellow chip the nearest blue chip of its own column (row, when columns pair)."""
    partner = {}
    for chip in (chip for ring in yellow for chip in ring):
        line = chip[axis]
        above = [2 * pair + 1 for pair in intact if 2 * pair + 1 < line]
        below = [2 * pair for pair in intact if 2 * pair > line]
        candidates = [
            (near, chip[1]) if axis == 0 else (chip[0], near) for near in (*above[-1:], *below[:1])
        ]
        hops = distances_from(mesh, mesh.rank_of[chip])
        partner[chip] = min(candidates, key=lambda other: (hops[mesh.rank_of[other]], other))
    return MappingProxyType(partner)
