"""Meshes that are mirror images or shifts of one another, so that one plan does for all of them.

Every axis has its mirror; an axis that wraps around may also be shifted. What holds of a mesh holds
of its images, with other names for the chips: a torus that lost a board is the same wherever that
board was, and a mesh without wraps has four images of most boards.

Axes are not exchanged for one another: routes go along them in their order.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.topology.failures import Chip, Link
from meshmend.topology.mesh import Mesh

_MOST_NUMBERS: Final = 1 << 23  # to compare at a time; a mesh with more stands for itself


@dataclass(frozen=True, eq=False)
class StandIn:
    """The one of all images of a mesh that stands for them; `ranks[r]` is the mesh's own name of r.

    Images of one another have equal stand-ins. A mesh with slow links stands for itself.
    """

    mesh: Mesh
    ranks: NDArray[np.int64]


def stand_in(mesh: Mesh) -> StandIn:
    """Return the image of a mesh whose failures come first."""
    maps = [_axis_maps(*axis) for axis in zip(mesh.shape, mesh.wrap, strict=True)]
    choice = _first_image(mesh, maps)
    moves = [each[at] for each, at in zip(maps, choice, strict=True)]

    def moved(chip: Chip) -> Chip:
        return tuple(int(move[at]) for move, at in zip(moves, chip, strict=True))

    image = replace(
        mesh,
        failed=frozenset(map(moved, mesh.failed)),
        failed_links=frozenset(
            Link.between(moved(link.first), moved(link.second)) for link in mesh.failed_links
        ),
    )
    ranks = np.empty(mesh.n_live, dtype=np.int64)
    for rank, chip in enumerate(mesh.live):
        ranks[image.rank_of[moved(chip)]] = rank
    return StandIn(image, ranks)


def _axis_maps(extent: int, wraps: bool) -> NDArray[np.int64]:
    """Return where each coordinate of an axis may go, the identity first: (maps, extent)."""
    at = np.arange(extent)
    shifts = np.arange(extent if wraps else 1)[:, None]
    maps = np.concatenate([(at + shifts) % extent, (at[::-1] + shifts) % extent])
    return np.unique(maps, axis=0)  # the identity is the first of these


def _first_image(mesh: Mesh, maps: list[NDArray[np.int64]]) -> tuple[int, ...]:
    """Return the map of each axis that brings the failures first, in the order of their numbers."""
    n_maps = tuple(map(len, maps))
    n_failures = len(mesh.failed) + len(mesh.failed_links)
    is_alone = bool(mesh.slow) or math.prod(n_maps) * n_failures > _MOST_NUMBERS
    if not n_failures or is_alone:
        return (0,) * len(maps)
    chips = _images(sorted(mesh.failed), mesh.shape, maps)
    links = sorted(mesh.failed_links)
    ends = [_images([getattr(link, end) for link in links], mesh.shape, maps)
            for end in ("first", "second")]  # fmt: skip
    joined = np.minimum(*ends) * mesh.n_chips + np.maximum(*ends)
    numbers = np.concatenate([np.sort(chips, axis=1), np.sort(joined, axis=1)], axis=1)
    left = np.arange(len(numbers))
    for column in numbers.T:
        left = left[column[left] == column[left].min()]
    return tuple(int(at) for at in np.unravel_index(left[0], n_maps))


def _images(
    chips: list[Chip], shape: tuple[int, ...], maps: list[NDArray[np.int64]]
) -> NDArray[np.int64]:
    """Return the numbers of chips, in row-major order, in all images: (images, chips)."""
    at = np.array(chips, dtype=np.int64).reshape(len(chips), len(shape))
    numbers = np.zeros((1, len(chips)), dtype=np.int64)
    for axis, moves in enumerate(maps):
        moved = moves[:, at[:, axis]]
        joined = numbers[:, None] * shape[axis] + moved[None]
        numbers = joined.reshape(len(numbers) * len(moves), len(chips))
    return numbers
