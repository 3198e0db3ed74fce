"""Meshes that are images of one another, so that one plan does for all of them.

Every axis has its mirror, an axis that wraps around may also be shifted, and axes may be exchanged.
What holds of a mesh holds of its images, with other names for the chips: a torus that lost a board
is the same wherever that board was, and a square mesh has eight images of most boards.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, groupby, permutations, product
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.topology.failures import Chip, Link, SlowLink
from meshmend.topology.mesh import Mesh

_MOST_NUMBERS: Final = 1 << 23  # to compare at a time; a mesh with more is not mirrored
_MOST_ORDERS: Final = 120  # of five axes that are alike


@dataclass(frozen=True, eq=False)
class StandIn:
    """The one of all images of a mesh that stands for them; `ranks[r]` is the mesh's own name of r.

    Images of one another have equal stand-ins, unless there are too many images to look at.
    """

    mesh: Mesh
    ranks: NDArray[np.int64]
    of: Mesh

    @cached_property
    def channels(self) -> NDArray[np.int64]:
        """The mesh's own number of each channel, rank x ports + port; -1 where no link is."""
        beside = self.mesh.neighbor_ranks
        named = np.where(beside < 0, -2, self.ranks[beside])
        is_port = named[:, :, None] == self.of.neighbor_ranks[self.ranks][:, None, :]
        own = self.ranks[:, None] * beside.shape[1] + is_port.argmax(axis=2)
        return np.where(beside < 0, -1, own).reshape(-1)


@lru_cache(maxsize=64)
def stand_in(mesh: Mesh, *, same_axes: bool = False) -> StandIn:
    """Return the image of a mesh whose failures come first, or in the middle of axes that wrap.

    Shorter axes come before others.

    With `same_axes` no axes are exchanged.
    """
    orders = [tuple(range(len(mesh.shape)))] if same_axes else _orders(mesh)
    order, moves = _first_image(mesh, orders)

    def moved(chip: Chip) -> Chip:
        return tuple(int(move[chip[axis]]) for axis, move in zip(order, moves, strict=True))

    def moved_link(link: Link) -> Link:
        return Link.between(moved(link.first), moved(link.second))

    image = Mesh(
        tuple(mesh.shape[axis] for axis in order),
        tuple(mesh.wrap[axis] for axis in order),
        frozenset(map(moved, mesh.failed)),
        frozenset(map(moved_link, mesh.failed_links)),
        frozenset(SlowLink(moved_link(each.link), each.speed) for each in mesh.slow),
    )
    at = mesh.coordinates
    places = np.stack([move[at[:, axis]] for axis, move in zip(order, moves, strict=True)])
    ranks = np.argsort(np.ravel_multi_index(tuple(places), image.shape))
    ranks.flags.writeable = False
    return StandIn(image, ranks, mesh)


def _orders(mesh: Mesh) -> list[tuple[int, ...]]:
    """Return the orders of the axes with the shorter before others; one, if there are too many."""
    axes = sorted(range(len(mesh.shape)), key=_axes(mesh).__getitem__)
    alike = [tuple(each) for _, each in groupby(axes, key=_axes(mesh).__getitem__)]
    if math.prod(math.factorial(len(each)) for each in alike) > _MOST_ORDERS:
        return [tuple(axes)]
    return [tuple(chain(*each)) for each in product(*map(permutations, alike))]


def _axes(mesh: Mesh) -> list[tuple[int, bool]]:
    """Return the extent of each axis, and whether it wraps around."""
    return list(zip(mesh.shape, mesh.wrap, strict=True))


def _axis_maps(extent: int, wraps: bool) -> NDArray[np.int64]:
    """Return where each coordinate of an axis may go, the identity first: (maps, extent)."""
    at = np.arange(extent)
    shifts = np.arange(extent if wraps else 1)[:, None]
    maps = np.concatenate([(at + shifts) % extent, (at[::-1] + shifts) % extent])
    return np.unique(maps, axis=0)  # the identity is the first of these


def _n_axis_maps(extent: int, wraps: bool) -> int:
    """Return how many maps an axis has, without making them."""
    return min(extent, 2) * (extent if wraps and extent > 2 else 1)


def _first_image(
    mesh: Mesh, orders: list[tuple[int, ...]]
) -> tuple[tuple[int, ...], list[NDArray[np.int64]]]:
    """Return the order of axes, and the map of each, that bring the failures first.

    That is by their numbers, for which the last axis counts most. Along an axis that wraps around
    positions count from the middle: exchanges are half a percent faster around a hole there.
    """
    axes = [_axes(mesh)[axis] for axis in orders[0]]  # the same in all orders
    n_maps = tuple(_n_axis_maps(*each) for each in axes)
    n_broken = len(mesh.failed) + len(mesh.failed_links) + len(mesh.slow)
    n_numbers = len(orders) * math.prod(n_maps) * n_broken
    longest = max(n * extent for n, (extent, _) in zip(n_maps, axes, strict=True))
    if not n_broken or max(n_numbers, longest) > _MOST_NUMBERS:
        return orders[0], [np.arange(extent) for extent, _ in axes]
    maps = [_axis_maps(*each) for each in axes]
    places = [_places(*axis)[each] for axis, each in zip(axes, maps, strict=True)]
    numbers = np.concatenate([_numbers(mesh, order, places) for order in orders])
    left = np.arange(len(numbers))
    for column in numbers.T:
        left = left[column[left] == column[left].min()]
    order, *choice = np.unravel_index(left[0], (len(orders), *n_maps))
    return orders[order], [each[at] for each, at in zip(maps, choice, strict=True)]


def _places(extent: int, wraps: bool) -> NDArray[np.int64]:
    """Return the place of each coordinate of an axis in the order in which failures go there."""
    at = np.arange(extent)
    return np.argsort(np.argsort(abs(2 * at - extent + 1), kind="stable")) if wraps else at


def _numbers(
    mesh: Mesh, order: tuple[int, ...], maps: list[NDArray[np.int64]]
) -> NDArray[np.float64]:
    """Return what is broken, as sorted numbers, in all images: (images, numbers)."""

    def of_chips(chips: list[Chip]) -> NDArray[np.int64]:
        at = np.array(chips, dtype=np.int64).reshape(len(chips), len(order))[:, order]
        return _images(at, tuple(mesh.shape[axis] for axis in order), maps)

    def of_links(links: list[Link]) -> NDArray[np.int64]:
        one, other = (
            of_chips([each.first for each in links]),
            of_chips([each.second for each in links]),
        )
        return np.minimum(one, other) * mesh.n_chips + np.maximum(one, other)

    slow = sorted(mesh.slow)
    slow_links = of_links([each.link for each in slow])
    by_number = np.argsort(slow_links, axis=1)
    speeds = np.array([each.speed for each in slow], dtype=np.float64)[by_number]
    return np.concatenate(
        [
            np.sort(of_chips(sorted(mesh.failed)), axis=1),
            np.sort(of_links(sorted(mesh.failed_links)), axis=1),
            np.sort(slow_links, axis=1),
            speeds,
        ],
        axis=1,
    )


def _images(
    at: NDArray[np.int64], shape: tuple[int, ...], maps: list[NDArray[np.int64]]
) -> NDArray[np.int64]:
    """Return the numbers of chips in all images: (images, chips)."""
    numbers = np.zeros((1, len(at)), dtype=np.int64)
    stride = 1
    for axis, moves in enumerate(maps):
        joined = numbers[:, None] + stride * moves[:, at[:, axis]][None]
        numbers = joined.reshape(len(numbers) * len(moves), len(at))
        stride *= shape[axis]
    return numbers
