"""Rings of a 2-D mesh: through all live chips (figures 3 and 8), and over pairs of lines (6, 7, 9).

A pair of rows or columns without failed chips forms a full **blue** ring: along one line, back
along the other. A pair that holds failed chips is broken: its live chips are **yellow**, form rings
of 2x2 blocks, and each has a blue **partner** in its own column that adds its contribution and
returns the result. Across the blue rings, chips at the same position form the rings of the second
phase; their routes go around failed chips.

Knows shapes, not data: which chip comes after which, not what is sent.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from meshmend.errors import UnsupportedError
from meshmend.topology.failures import Chip, Link
from meshmend.topology.graph import distances_from
from meshmend.topology.mesh import Mesh

Ring = tuple[Chip, ...]  # each chip sends to the next, the last to the first

AXIS_NAMES = ("rows", "columns")

Block2x2 = tuple[int, int]  # the block of chips (2 i, 2 j) to (2 i + 1, 2 j + 1)

# Where a walk around the block tree goes from each corner of a block: out of the block when a
# tree edge leads there, else on to the next corner, clockwise. Keys are (row % 2, col % 2).
_OUTWARD = {(0, 0): (-1, 0), (0, 1): (0, 1), (1, 1): (1, 0), (1, 0): (0, -1)}
_CLOCKWISE = {(0, 0): (0, 1), (0, 1): (1, 0), (1, 1): (0, -1), (1, 0): (-1, 0)}


def hamiltonian_ring(mesh: Mesh) -> Ring:
    """Return a ring through every live chip, each hop over one live link.

    It is the first of three that avoids the failed links: the snake of figure 3, the same with rows
    and columns exchanged, and the walk around the live 2x2 blocks of figure 8.

    Raises:
        UnsupportedError: the mesh is not 2-D, both sides are odd, a failed region is not made of
            aligned 2x2 blocks, or failed links leave none of the three.
    """
    need_two_axes(mesh, "ring-1d")
    if all(size % 2 for size in mesh.shape):
        raise UnsupportedError(
            f"ring-1d needs an even side, but got {mesh.shape[0]}x{mesh.shape[1]}: no ring of "
            "neighbours passes all chips of an odd by odd mesh"
        )
    refused = crossed = ""
    for build in (snake_ring, _transposed_snake_ring, block_ring):
        try:
            ring = build(mesh)
        except UnsupportedError as error:
            refused = str(error)
            continue
        if not (dead := _dead_hop(mesh, ring)):
            return ring
        crossed = f"ring-1d needs live links, but its ring crosses {Link.between(*dead)}"
    raise UnsupportedError(crossed or refused)


def snake_ring(mesh: Mesh) -> Ring:
    """Return the ring of figure 3 on a full mesh: column 0 is the way back, a snake fills the rest.

    Raises:
        UnsupportedError: chips failed, the number of rows is odd, or there is one column only.
    """
    rows, cols = mesh.shape
    if mesh.failed:
        raise UnsupportedError(f"the snake of ring-1d needs a full mesh, but got {mesh}")
    if rows % 2 or (cols < 2 and rows > 2):
        raise UnsupportedError(
            f"the snake of ring-1d needs even rows and two columns, but got {rows}x{cols}"
        )
    snake = [
        (row, col)
        for row in range(rows)
        for col in (range(1, cols) if row % 2 == 0 else range(cols - 1, 0, -1))
    ]
    return (*snake, *((row, 0) for row in reversed(range(rows))))


def _transposed_snake_ring(mesh: Mesh) -> Ring:
    rows, cols = mesh.shape
    if mesh.failed:
        raise UnsupportedError(f"the snake of ring-1d needs a full mesh, but got {mesh}")
    return tuple((row, col) for col, row in snake_ring(Mesh((cols, rows))))


def block_ring(mesh: Mesh) -> Ring:
    """Return a ring through every live chip of a 2-D mesh that lost whole aligned 2x2 blocks.

    Walks once around a spanning tree of the live blocks, as one walks around a hedge, so it
    takes time linear in the chips.

    Raises:
        UnsupportedError: a side is odd, a block is half dead, or live blocks are cut off.
    """
    tree = _spanning_tree(live_blocks(mesh, "ring-1d"))
    first = mesh.live[0]
    ring = [first]
    while (chip := _after(ring[-1], tree)) != first:
        ring.append(chip)
    if len(ring) != mesh.n_live:
        raise UnsupportedError(
            f"ring-1d needs the live 2x2 blocks connected, but only {len(ring)} of "
            f"{mesh.n_live} chips are reached from {first}"
        )
    return tuple(ring)


def live_blocks(mesh: Mesh, who: str) -> frozenset[Block2x2]:
    """Return the aligned 2x2 blocks that are alive, where no block is half dead.

    Raises:
        UnsupportedError: a side is odd, or a block is half dead.
    """
    if any(size % 2 for size in mesh.shape):
        raise UnsupportedError(
            f"{who} needs even sides to split the mesh into 2x2 blocks, but got "
            f"{mesh.shape[0]}x{mesh.shape[1]}"
        )
    dead = {(row // 2, col // 2) for row, col in mesh.failed}
    for block in sorted(dead):
        if alive := [chip for chip in _block_chips(block) if chip not in mesh.failed]:
            raise UnsupportedError(
                f"{who} needs failed regions made of whole 2x2 blocks on even rows and columns, "
                f"but the block at ({2 * block[0]}, {2 * block[1]}) still has {alive} alive; "
                "fail them too"
            )
    rows, cols = mesh.shape
    blocks = ((i, j) for i in range(rows // 2) for j in range(cols // 2))
    return frozenset(block for block in blocks if block not in dead)


def folded(n: int) -> tuple[int, ...]:
    """Return 0, 2, 4, ..., 5, 3, 1: the ring over a line of n whose hops are at most 2 long.

    Closing the ring 0, 1, ..., n-1 by one hop back loads every link alike, but that hop is
    n - 1 long, and a ring is as slow as its longest hop.
    """
    return (*range(0, n, 2), *reversed(range(1, n, 2)))


def line_rings(mesh: Mesh, axis: int) -> tuple[Ring, ...]:
    """Return one ring per line of a full 2-D mesh along an axis (figure 4).

    Along an axis that wraps the ring is the line itself; elsewhere it is folded.

    Raises:
        UnsupportedError: the mesh is not 2-D, or chips failed.
    """
    need_two_axes(mesh, "two-d")
    if mesh.failed:
        raise UnsupportedError(f"two-d needs a full mesh, but got {mesh}")
    size = mesh.shape[axis]
    order = range(size) if mesh.wrap[axis] else folded(size)
    lines = range(mesh.shape[1 - axis])
    return tuple(tuple((line, at) if axis else (at, line) for at in order) for line in lines)


def need_two_axes(mesh: Mesh, who: str) -> None:
    """Raise UnsupportedError unless the mesh is 2-D."""
    if len(mesh.shape) != 2:
        raise UnsupportedError(f"{who} needs a 2-D mesh, but got {len(mesh.shape)} axes: {mesh}")


def hops(ring: Ring) -> Iterator[tuple[Chip, Chip]]:
    """Yield each chip of a ring with the one after it."""
    return zip(ring, (*ring[1:], ring[0]), strict=True)


def _dead_hop(mesh: Mesh, ring: Ring) -> tuple[Chip, Chip] | None:
    if not mesh.failed_links:
        return None
    return next((hop for hop in hops(ring) if hop[1] not in mesh.neighbors(hop[0])), None)


def _block_chips(block: Block2x2) -> tuple[Chip, ...]:
    row, col = 2 * block[0], 2 * block[1]
    return (row, col), (row, col + 1), (row + 1, col), (row + 1, col + 1)


def _spanning_tree(blocks: frozenset[Block2x2]) -> frozenset[tuple[Block2x2, Block2x2]]:
    """Return the tree edges in both directions; rows hang off the first column like a comb."""
    first = min(blocks)
    seen, queue, edges = {first}, deque([first]), set()
    while queue:
        i, j = here = queue.popleft()
        for there in ((i + 1, j), (i - 1, j), (i, j + 1), (i, j - 1)):
            if there in blocks and there not in seen:
                seen.add(there)
                queue.append(there)
                edges |= {(here, there), (there, here)}
    return frozenset(edges)


def _after(chip: Chip, tree: frozenset[tuple[Block2x2, Block2x2]]) -> Chip:
    row, col = chip
    corner, block = (row % 2, col % 2), (row // 2, col // 2)
    down, right = _OUTWARD[corner]
    if (block, (block[0] + down, block[1] + right)) not in tree:
        down, right = _CLOCKWISE[corner]
    return row + down, col + right


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
