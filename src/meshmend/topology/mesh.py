"""The physical mesh: which chips exist, which are alive, which links join them.

Nothing here knows about collectives. A `Mesh` is a value: two meshes with the same shape,
wrap, failed chips, failed links and slow links are equal, and either may key a cache.

A live chip's **rank** is its number in row-major order of the live chips. A chip's **port**
`2 * axis` leads down that axis, `2 * axis + 1` leads up.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import TopologyError, check_kind
from meshmend.topology.failures import (
    Block,
    Chip,
    Failure,
    Link,
    SlowLink,
    blocks_of,
    format_shape,
    parse_failure,
    parse_slow,
)
from meshmend.units import some

if TYPE_CHECKING:
    from meshmend.topology.tiles import Tiling

_WHOLE = (int, np.integer)
_Number = TypeVar("_Number", bound=np.generic)

MAX_CHIPS = 1 << 20  # beyond this the tables of ranks and links no longer fit a workstation
MAX_AXES = 32  # so many NumPy can number the chips of; more than 20 have extents of 1 among them


@dataclass(frozen=True)
class Mesh:
    """An n-D mesh, some of whose axes may wrap around, some of whose chips or links failed.

    A link has the fabric's bandwidth unless it is among the `slow` ones.

    An axis that wraps joins its last chip to its first; on an axis of one or two chips that
    would double a link or join a chip to itself, so there it adds nothing.
    """

    shape: tuple[int, ...]
    wrap: tuple[bool, ...] = ()
    failed: frozenset[Chip] = frozenset()
    failed_links: frozenset[Link] = frozenset()
    slow: frozenset[SlowLink] = frozenset()

    def __post_init__(self) -> None:
        self._check_kinds()
        if not self.shape or min(self.shape) < 1:
            raise TopologyError(
                f"Mesh needs at least one axis and positive extents, but got shape {self.shape}"
            )
        if math.prod(self.shape) > MAX_CHIPS:
            raise TopologyError(
                f"Mesh needs at most {MAX_CHIPS} chips, but got {format_shape(self.shape)}"
            )
        if len(self.shape) > MAX_AXES:
            raise TopologyError(f"Mesh needs at most {MAX_AXES} axes, but got {len(self.shape)}")
        if not self.wrap:  # one flag per axis, so that equal meshes compare equal
            object.__setattr__(self, "wrap", (False,) * len(self.shape))
        if len(self.wrap) != len(self.shape):
            raise TopologyError(
                f"Mesh needs one wrap flag per axis of {self.shape}, but got {self.wrap}"
            )
        if outside := sorted(chip for chip in self.failed if chip not in self):
            raise TopologyError(
                f"Mesh needs failed chips inside its shape {format_shape(self.shape)}, but got "
                f"{some(outside)}"
            )
        links = self.failed_links.union(each.link for each in self.slow)
        if unknown := sorted(link for link in links if not self.has_link(link)):
            raise TopologyError(
                f"Mesh {format_shape(self.shape)} has no {some(unknown)}; "
                "a link joins two neighbouring chips"
            )
        if len({each.link for each in self.slow}) < len(self.slow):
            raise TopologyError(
                f"Mesh needs one speed for each slow link, but got {some(sorted(self.slow))}"
            )
        if any(each.speed == 1 for each in self.slow):
            raise TopologyError("Mesh needs slow links to be slow; use Mesh.slowed")
        if len(self.failed) == self.n_chips:
            raise TopologyError(
                f"Mesh {format_shape(self.shape)} needs at least one live chip, but all "
                f"{self.n_chips} failed"
            )

    def _check_kinds(self) -> None:
        check_kind("Mesh", "its shape as a tuple such as (4, 4)", self.shape, tuple)
        for size in self.shape:
            check_kind("Mesh", "whole numbers as extents", size, _WHOLE)
        check_kind("Mesh", "its wrap flags as a tuple such as (True, False)", self.wrap, tuple)
        check_kind("Mesh", "its failed chips as a frozenset", self.failed, frozenset)
        for name, links, kind in (
            ("failed_links", self.failed_links, Link),
            ("slow", self.slow, SlowLink),
        ):
            check_kind("Mesh", f"{name} as a frozenset", links, frozenset)
            for link in links:
                check_kind("Mesh", f"{name} of {kind.__name__}s", link, kind)

    def __reduce__(self) -> tuple[type["Mesh"], tuple[object, ...]]:
        """Copy and pickle the fields alone: what was derived is derived again."""
        return Mesh, (self.shape, self.wrap, self.failed, self.failed_links, self.slow)

    def __contains__(self, chip: object) -> bool:
        """Whether the chip lies inside the shape, alive or not."""
        return (
            isinstance(chip, tuple)
            and len(chip) == len(self.shape)
            and all(
                isinstance(at, _WHOLE) and 0 <= at < size
                for at, size in zip(chip, self.shape, strict=True)
            )
        )

    def without(self, *failures: Failure | str) -> "Mesh":
        """Return this mesh with more failures, given as values or as `--fail` writes them."""
        chips, links = self._parts(failures)
        return replace(self, failed=self.failed | chips, failed_links=self.failed_links | links)

    def repaired(self, *failures: Failure | str) -> "Mesh":
        """Return this mesh without these failures; what was alive stays alive."""
        chips, links = self._parts(failures)
        return replace(self, failed=self.failed - chips, failed_links=self.failed_links - links)

    def _parts(self, failures: tuple[Failure | str, ...]) -> tuple[set[Chip], set[Link]]:
        """Return the chips of blocks inside the shape, and the links."""
        chips, links = set[Chip](), set[Link]()
        for failure in failures:
            part = parse_failure(failure) if isinstance(failure, str) else failure
            check_kind(
                "a failure", "a text such as '2x2@0,2', a Block or a Link", part, (Block, Link)
            )
            if isinstance(part, Link):
                links.add(part)
            else:
                self._check_inside(part)
                chips.update(part.chips())
        return chips, links

    def slowed(self, *links: SlowLink | str) -> "Mesh":
        """Return this mesh with other speeds, given as values or as `--slow` writes them.

        A speed counts instead of the one before; with 1 a link is as fast as the others.

            >>> print(Mesh((4, 4)).slowed("link:0,0-0,1=0.25"))
            4x4 slow link:0,0-0,1=0.25

        Raises:
            TopologyError: a text that cannot be read, a speed that no link has, or no such link.
        """
        parts = [parse_slow(each) if isinstance(each, str) else each for each in links]
        for part in parts:
            check_kind("a slow link", "a text such as 'link:0,0-0,1=0.25'", part, SlowLink)
        if unknown := [each.link for each in parts if not self.has_link(each.link)]:
            raise TopologyError(
                f"Mesh {format_shape(self.shape)} has no {some(unknown)}; "
                "a link joins two neighbouring chips"
            )
        speeds = {each.link: each.speed for each in (*sorted(self.slow), *parts)}
        slow = (SlowLink(link, speed) for link, speed in speeds.items() if speed != 1)
        return replace(self, slow=frozenset(slow))

    def speed_of(self, link: Link) -> float:
        """Return the speed of a link of the shape, alive or not."""
        return next((each.speed for each in self.slow if each.link == link), 1.0)

    @property
    def n_chips(self) -> int:
        """How many chips the shape has, failed ones included."""
        return int(math.prod(self.shape))  # extents may be numbers of NumPy

    @property
    def n_live(self) -> int:
        """How many chips are alive."""
        return self.n_chips - len(self.failed)

    @property
    def has_failures(self) -> bool:
        """Whether a chip or a link has failed."""
        return bool(self.failed or self.failed_links)

    @property
    def rings(self) -> tuple[bool, ...]:
        """Of each axis whether its lines are rings, if nothing failed; two chips are none."""
        return tuple(on and size > 2 for on, size in zip(self.wrap, self.shape, strict=True))

    @cached_property
    def live(self) -> tuple[Chip, ...]:
        """The live chips in row-major order: `live[rank]` is that rank's chip."""
        return tuple(map(tuple, self.coordinates.tolist()))

    @cached_property
    def rank_of(self) -> Mapping[Chip, int]:
        """The rank of each live chip."""
        return MappingProxyType({chip: rank for rank, chip in enumerate(self.live)})

    @cached_property
    def coordinates(self) -> NDArray[np.int64]:
        """The chips of all ranks as an array (ranks, axes)."""
        return _frozen(np.argwhere(self._alive))

    @cached_property
    def neighbor_ranks(self) -> NDArray[np.int32]:
        """The rank behind each port of each rank, or -1, as an array (ranks, 2 x axes)."""
        rank = np.full(self.shape, -1, dtype=np.int32)
        rank[self._alive] = np.arange(self.n_live, dtype=np.int32)
        ports = np.full((*self.shape, 2 * len(self.shape)), -1, dtype=np.int32)
        for axis, size in enumerate(self.shape):
            down, up = np.roll(rank, 1, axis), np.roll(rank, -1, axis)
            if not self.rings[axis]:
                down[_at(axis, 0)] = -1
                up[_at(axis, size - 1)] = -1
            ports[..., 2 * axis], ports[..., 2 * axis + 1] = down, up
        for link in self.failed_links:
            first, second = rank[link.first], rank[link.second]
            for one, other in ((link.first, second), (link.second, first)):
                ports[one][ports[one] == other] = -1
        return _frozen(ports[self._alive])

    @cached_property
    def links(self) -> NDArray[np.int32]:
        """The live links as pairs of ranks (links, 2), each once, smaller rank first."""
        here, port = np.nonzero(self.neighbor_ranks > np.arange(self.n_live)[:, None])
        there = self.neighbor_ranks[here, port]
        return _frozen(np.stack([here.astype(np.int32), there], axis=1))

    def live_links(self) -> tuple[Link, ...]:
        """Return the links of `links` as values."""
        return tuple(Link(self.live[one], self.live[other]) for one, other in self.links.tolist())

    @cached_property
    def port_speeds(self) -> NDArray[np.float64]:
        """The speed of the link behind each port of each rank (ranks, 2 x axes); 1 without one.

        Channel `rank * ports + port` is entry `[rank, port]`.
        """
        speeds = np.ones(self.neighbor_ranks.shape)
        for each in self.slow:
            ends = (each.link.first, each.link.second)
            if all(chip in self.rank_of for chip in ends):
                one, other = (self.rank_of[chip] for chip in ends)
                speeds[one, self.neighbor_ranks[one] == other] = each.speed
                speeds[other, self.neighbor_ranks[other] == one] = each.speed
        return _frozen(speeds)

    @cached_property
    def link_speeds(self) -> NDArray[np.float64]:
        """The speed of each link of `links`."""
        here, port = np.nonzero(self.neighbor_ranks > np.arange(self.n_live)[:, None])
        return _frozen(self.port_speeds[here, port])

    @cached_property
    def has_slow(self) -> bool:
        """Whether a live link is slower than the others."""
        return bool(self.slow) and bool(self.link_speeds.min(initial=1.0) < 1)

    def neighbors(self, chip: Chip) -> tuple[Chip, ...]:
        """Return the live chips that a live link joins to this one."""
        if chip not in self.rank_of:
            raise TopologyError(f"neighbors needs a live chip of {self}, but got {chip}")
        ranks = self.neighbor_ranks[self.rank_of[chip]]
        return tuple(self.live[rank] for rank in ranks if rank >= 0)

    def tiles(self, tile: str) -> "Tiling":
        """Return as many tiles of a shape such as `2x2` as fit on the largest connected part.

            >>> print(Mesh((4, 4)).without("0,0", "3,3").tiles("2x2"))
            3 tiles of 2x2, 2 spares

        Raises:
            TopologyError: a text that cannot be read, or no tile fits.
        """
        from meshmend.topology.tiles import tiling  # which knows meshes

        check_kind("a tile", "a text such as '2x2'", tile, str)
        return tiling(self, tile)

    def failures(self) -> tuple[Failure, ...]:
        """Return the failures as few values: blocks that cover the failed chips, then links."""
        return (*blocks_of(self.failed), *sorted(self.failed_links))

    def __str__(self) -> str:
        parts = [format_shape(self.shape)]
        if any(self.wrap):
            parts.append(f"wrap {format_wrap(self.wrap)}")
        if failures := self.failures():
            parts.append(f"less {', '.join(map(str, failures))}")
        if self.slow:
            parts.append(f"slow {', '.join(map(str, sorted(self.slow)))}")
        return " ".join(parts)

    @cached_property
    def _alive(self) -> NDArray[np.bool_]:
        alive = np.ones(self.shape, dtype=np.bool_)
        if self.failed:
            alive[tuple(np.array(sorted(self.failed)).T)] = False
        return _frozen(alive)

    def _check_inside(self, block: Block) -> None:
        if len(block.origin) != len(self.shape):
            raise TopologyError(
                f"a failure on the mesh {format_shape(self.shape)} needs {len(self.shape)} axes, "
                f"but {block} has {len(block.origin)}"
            )
        last = tuple(at + size - 1 for at, size in zip(block.origin, block.shape, strict=True))
        if block.origin not in self or last not in self:
            raise TopologyError(
                f"a failure needs to lie inside the mesh {format_shape(self.shape)}, but "
                f"{block} reaches from {block.origin} to {last}"
            )

    def has_link(self, link: Link) -> bool:
        """Whether the shape has such a link, alive or not."""
        if link.first not in self or link.second not in self:
            return False
        apart = [axis for axis in range(len(self.shape)) if link.first[axis] != link.second[axis]]
        if len(apart) != 1:
            return False
        (axis,) = apart
        step, size = link.second[axis] - link.first[axis], self.shape[axis]
        return step == 1 or (self.rings[axis] and step == size - 1)


def format_wrap(wrap: tuple[bool, ...]) -> str:
    """Return wrap flags as `--wrap` writes them: `none`, `all`, or axes such as `0,1`."""
    if not any(wrap):
        return "none"
    return "all" if all(wrap) else ",".join(str(axis) for axis, on in enumerate(wrap) if on)


def _at(axis: int, index: int) -> tuple[slice | int, ...]:
    return (*(slice(None),) * axis, index)


def _frozen(array: NDArray[_Number]) -> NDArray[_Number]:
    array.flags.writeable = False
    return array
