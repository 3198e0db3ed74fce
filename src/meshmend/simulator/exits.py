"""The way out of a set of chips: all of the payload leaves over its links and goes on to the rest.

Every byte position of the payload that a chip inside puts in must cross from the inside to the
outside, and then reach the chip farthest from there. Knows links and hops: `limit` turns them into
time, and `docs/design/0010-limit.md` has the proof.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshmend.simulator.packing_number import PackingNumber
from meshmend.topology.figures import mesh_figures
from meshmend.topology.graph import distances_from_any
from meshmend.topology.mesh import Mesh

_MOST_PARTS = 8  # larger parts of the binding partition that are looked at


@dataclass(frozen=True)
class Exit:
    """A set of chips, by one of them: its links, and the hops that some byte takes across it.

    `hops` counts from the chip inside that is farthest from the links, over one of them, to the
    chip outside that is farthest from them. `share` is the part of the payload that goes so far.
    """

    n_chips: int
    rank: int
    n_links: int
    hops: int
    share: float = 1.0

    def describe(self, mesh: Mesh, *, verb: str = "leaves") -> str:
        """Return in words what leaves, or with another verb enters, and how far it goes."""
        links = f"{self.n_links} link{'s' if self.n_links > 1 else ''}"
        chip = mesh.live[self.rank]
        where = f"chip {chip}" if self.n_chips == 1 else f"the {self.n_chips} chips around {chip}"
        what = "the payload" if self.share == 1 else f"{self.share:.3g} of the payload"
        return (
            f"{what} {verb} {where} over {links}, and some of it takes {self.hops} "
            f"hop{'s' if self.hops > 1 else ''}"
        )


@dataclass(frozen=True, eq=False)
class LargePart:
    """A connected set of chips: its links to the rest, and the hops on either side of them.

    `hops_inside` is the most from a chip inside to the links, that of `rank`. `hops_outside` has
    the hops of each rank outside, and -1 for those inside.
    """

    n_chips: int
    rank: int
    n_links: int
    hops_inside: int
    hops_outside: NDArray[np.int32]


def exits(packing: PackingNumber) -> tuple[Exit, ...]:
    """Return the exits worth a look: of single chips, and of larger parts of the partition.

    Of chips with equally many links it is the one with the most hops to go. One chip has none.
    """
    return _exits(packing)


@lru_cache(maxsize=64)
def _exits(packing: PackingNumber) -> tuple[Exit, ...]:
    mesh = packing.mesh
    if mesh.n_live == 1:
        return ()
    return (*_of_single_chips(mesh), *_of_parts(mesh, packing.part_of))


def _of_single_chips(mesh: Mesh) -> Iterator[Exit]:
    figures = mesh_figures(mesh)
    for degree in np.unique(figures.degrees).tolist():
        hops = np.where(figures.degrees == degree, figures.eccentricities, -1)
        rank = int(np.argmax(hops))
        yield Exit(1, rank, degree, int(hops[rank]))


def _of_parts(mesh: Mesh, part_of: NDArray[np.int32]) -> Iterator[Exit]:
    for part in large_parts(mesh, part_of):
        hops = part.hops_inside + 1 + int(part.hops_outside.max())
        yield Exit(part.n_chips, part.rank, part.n_links, hops)


def large_parts(mesh: Mesh, part_of: NDArray[np.int32]) -> Iterator[LargePart]:
    """Yield the largest parts of a partition that have two chips or more and leave some outside."""
    sizes = np.bincount(part_of)
    order = np.argsort(-sizes, kind="stable")[:_MOST_PARTS]
    ends = part_of[mesh.links]
    for part in order[(sizes[order] > 1) & (sizes[order] < mesh.n_live)]:
        crossing = mesh.links[(ends == part).sum(axis=1) == 1]
        is_inside = part_of == part
        touched = np.unique(crossing)
        to_links = distances_from_any(mesh, touched[is_inside[touched]])
        from_links = distances_from_any(mesh, touched[~is_inside[touched]])
        inside, outside = np.where(is_inside, to_links, -1), np.where(is_inside, -1, from_links)
        yield LargePart(
            n_chips=int(sizes[part]),
            rank=int(np.argmax(inside)),
            n_links=len(crossing),
            hops_inside=int(inside.max()),
            hops_outside=outside.astype(np.int32),
        )
