"""Parts of a mesh as meshes of their own.

For jobs that run on an intact part of a broken mesh and leave the rest idle there are two: the
largest box without a failure, and the mesh that is left when every row (or every column) with a
failure is dropped. For a group of some of the chips there is the smallest box around them. Knows
nothing of collectives.
"""

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import UnsupportedError
from meshmend.topology.failures import Block, Chip, Link, SlowLink
from meshmend.topology.mesh import Mesh

Range = tuple[int, int]  # from, up to


@dataclass(frozen=True, eq=False)
class IntactPart:
    """An intact mesh within a broken one: rank i of `mesh` is rank `ranks[i]` of the broken one.

    After dropped lines, neighbours in `mesh` may be several hops apart in the broken one.
    """

    mesh: Mesh
    ranks: NDArray[np.int32]
    what: str


def largest_box(mesh: Mesh) -> IntactPart:
    """Return the box of most chips that holds no failed chip and no failed link.

    Among equals the one whose first chip comes first. An axis that wraps still wraps if the box
    spans it; boxes across the wrap-around links are not tried. Time grows with the square of all
    extents but the last.
    """
    best: tuple[int, tuple[Range, ...]] = (0, ())
    for outer in itertools.product(*map(_ranges, mesh.shape[:-1])):
        n_outer = int(np.prod([stop - start for start, stop in outer], dtype=int))
        if n_outer * mesh.shape[-1] < best[0]:
            continue
        for start, stop in _clear_runs(mesh, outer):
            box = (*outer, (start, stop))
            size = n_outer * (stop - start)
            if size > best[0] or (size == best[0] and _origin(box) < _origin(best[1])):
                best = (size, box)
    spans = best[1]
    block = Block(tuple(stop - start for start, stop in spans), _origin(spans))
    wrap = tuple(
        on and size == whole
        for on, size, whole in zip(mesh.wrap, block.shape, mesh.shape, strict=True)
    )
    ranks = np.array([mesh.rank_of[chip] for chip in block.chips()], dtype=np.int32)
    return IntactPart(Mesh(block.shape, wrap), ranks, f"the intact box {block}")


def box_around(mesh: Mesh, chips: Collection[Chip]) -> Mesh:
    """Return the smallest box around some live chips as a mesh in which all others failed.

    Rank i of the box is the i-th of these chips in row-major order. An axis that wraps still wraps
    if the box spans it.
    """
    spans = [(min(along), max(along) + 1) for along in zip(*chips, strict=True)]
    shape = tuple(stop - start for start, stop in spans)
    origin = _origin(tuple(spans))

    def moved(chip: Chip) -> Chip:
        return tuple(at - start for at, start in zip(chip, origin, strict=True))

    kept = {moved(chip) for chip in chips}
    wrap = tuple(
        on and size == whole for on, size, whole in zip(mesh.wrap, shape, mesh.shape, strict=True)
    )

    def is_inside(link: Link) -> bool:
        return _within(link.first, tuple(spans)) and _within(link.second, tuple(spans))

    def moved_link(link: Link) -> Link:
        return Link(moved(link.first), moved(link.second))

    links = frozenset(moved_link(link) for link in mesh.failed_links if is_inside(link))
    slow = frozenset(
        SlowLink(moved_link(each.link), each.speed) for each in mesh.slow if is_inside(each.link)
    )
    failed = frozenset(chip for chip in itertools.product(*map(range, shape)) if chip not in kept)
    return Mesh(shape, wrap, failed, links, slow)


def without_lines(mesh: Mesh) -> IntactPart:
    """Return what is left when every line across an axis that holds a failure is dropped.

    Those are rows or columns, of the axis that keeps most chips, rows on a tie. Live chips of
    dropped lines compute nothing, but they forward: the lines that are left form one smaller mesh,
    and its neighbours across a gap are joined by routes over the broken mesh. A failed link counts
    in the line of its first chip.

    Raises:
        UnsupportedError: every line holds a failure.
    """
    kept = [len(_clear_lines(mesh, axis)) / size for axis, size in enumerate(mesh.shape)]
    axis = int(np.argmax(kept))
    lines = _clear_lines(mesh, axis)
    if not lines:
        raise UnsupportedError(
            f"drop-lines needs a line without failures, but every one of {mesh} holds one; try "
            "sub-mesh"
        )
    shape = (*mesh.shape[:axis], len(lines), *mesh.shape[axis + 1 :])
    chips = itertools.product(
        *(lines if i == axis else range(size) for i, size in enumerate(mesh.shape))
    )
    ranks = np.array([mesh.rank_of[chip] for chip in chips], dtype=np.int32)
    dropped = mesh.shape[axis] - len(lines)
    plural = "" if dropped == 1 else "s"
    name = ("row", "column")[axis] if len(shape) == 2 else "line"
    where = "" if len(shape) == 2 else f" across axis {axis}"
    return IntactPart(Mesh(shape, mesh.wrap), ranks, f"all but {dropped} {name}{plural}{where}")


def _ranges(size: int) -> list[Range]:
    return [(start, stop) for start in range(size) for stop in range(start + 1, size + 1)]


def _origin(box: tuple[Range, ...]) -> Chip:
    return tuple(start for start, _ in box)


def _clear_runs(mesh: Mesh, outer: tuple[Range, ...]) -> Iterator[Range]:
    """Yield the runs along the last axis that are free of failures over these ranges."""
    last = len(mesh.shape) - 1
    alive = np.ones(mesh.shape[-1], dtype=bool)
    breaks = np.zeros(mesh.shape[-1] + 1, dtype=bool)  # before each chip, and after the last
    for chip in mesh.failed:
        if _within(chip, outer):
            alive[chip[last]] = False
    for link in mesh.failed_links:
        if _within(link.first, outer) and _within(link.second, outer):
            if link.first[last] == link.second[last]:
                alive[link.first[last]] = False
            else:
                breaks[link.second[last]] = True
    start = 0
    for at in range(mesh.shape[-1] + 1):
        dead = at == mesh.shape[-1] or not alive[at]
        if dead or breaks[at]:
            if at > start:
                yield start, at
            start = at + 1 if dead else at


def _within(chip: Chip, outer: tuple[Range, ...]) -> bool:
    return all(start <= at < stop for at, (start, stop) in zip(chip, outer, strict=False))


def _clear_lines(mesh: Mesh, axis: int) -> list[int]:
    hit = {chip[axis] for chip in mesh.failed}
    hit |= {link.first[axis] for link in mesh.failed_links}
    return [line for line in range(mesh.shape[axis]) if line not in hit]
