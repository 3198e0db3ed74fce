"""Tiles: sets of g chips that hold a replica of a model together, laid around the holes of a mesh.

A **tile** is a connected set of g live chips: a box such as 2x2, or the box turned. Where boxes do
not cover what could be covered, any connected g chips are a tile, as a last resort. A **tiling** is
a set of tiles that share no chip, as many as can be. A live chip in no tile is a **spare**: it
forwards messages and waits. Each chip of a tile has another **colour** from 0 to g - 1. Chips of
one colour, one in each tile, are twins: they hold the same part of the model and sum its gradients.

**How many tiles.** The search goes through the chips in row-major order. The first chip that is not
yet decided is left out, or a tile begins there. What the rest of the search depends on is which
later chips are taken already, so of all ways to the same set of taken chips one is kept: the
one that left out the fewest chips. If more ways than `_MOST_STEPS` allows are left, those that
left out the most are dropped, and `is_most` may be false. In general it is hard to say how many
2x2 squares fit (Fowler, Paterson and Tanimoto 1981), but around a few holes few ways are good.

**Colours that stay.** A chip's colour is its position modulo the box, so a box that is shifted by
one chip has all colours again. After a loss the mesh can then be tiled anew, and a chip that had a
part of the model still has the part that it needs: `moves` counts those that do not.

Knows nothing of collectives.
"""

import itertools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import TopologyError
from meshmend.topology.fabric import Fabric
from meshmend.topology.failures import Chip, format_shape
from meshmend.topology.graph import components, distances_from, largest_part
from meshmend.topology.mesh import Mesh
from meshmend.topology.routes import routes_for
from meshmend.topology.text import parse_tile

SPARE: Final = -1  # the colour, and the number of the tile, of a chip that is in none

# A first search with few states gives a count to beat. On a thousand chips both take half a second.
_FIRST_STATES: Final = 48
_MOST_STEPS: Final = 700_000  # of the second: states x (chips and tiles that may begin there)
# Up to these, tiles of any shape are searched for like boxes: there are 216 forms of six chips.
_MOST_CHIPS_OF_ANY_TILE: Final = 6
_MOST_CHIPS_TO_SEARCH_ANY: Final = 144

# What is better about one of two tilings with as many tiles.
_KEPT, _BOX, _UPRIGHT = 8, 2, 1

Tile = tuple[Chip, ...]  # the chip of colour 0, of colour 1, ...
_Ranks = tuple[int, ...]  # of a tile, rising
_Chain = tuple[_Ranks, "_Chain"] | None  # tiles as a linked list


@dataclass(frozen=True, eq=False)
class Moves:
    """What chips must get before a new tiling can begin: each the part of another colour.

    `targets` are the ranks that need a part, `colours` which one, and `sources` the nearest ranks
    that have it, or -1 where all that had it are lost: then it must come from a checkpoint.
    """

    mesh: Mesh
    n_colours: int
    targets: NDArray[np.int32]
    colours: NDArray[np.int32]
    sources: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def n_lost(self) -> int:
        """How many chips need a part that no live chip has."""
        return int(np.count_nonzero(self.sources < 0))

    def sent_bytes(self, state_bytes: float) -> float:
        """Return what is sent in all if the state of a replica has so many bytes."""
        return (len(self) - self.n_lost) * state_bytes / self.n_colours

    def time_s(self, state_bytes: float, fabric: Fabric) -> float:
        """Return how long the busiest link takes, and the longest way, if all is sent at once."""
        sent = self.sources >= 0
        if not sent.any():
            return 0.0
        routes = routes_for(self.mesh, self.sources[sent], self.targets[sent])
        pairs = [
            routes.pair_of(int(source), int(target))
            for source, target in zip(self.sources[sent], self.targets[sent], strict=True)
        ]
        on_channel = np.zeros(routes.n_ranks * routes.n_ports, dtype=np.int64)
        for pair in pairs:
            way = routes.channels[routes.hop_ptr[pair] : routes.hop_ptr[pair + 1]]
            on_channel[way] += 1
        part_s = state_bytes / self.n_colours / fabric.link_bandwidth_bytes_per_s
        way_s = fabric.message_overhead_s + int(routes.hops.max()) * fabric.hop_latency_s
        return int(on_channel.max()) * part_s + way_s


@dataclass(frozen=True)
class Tiling:
    """Tiles of a connected mesh that share no chip, each with its chips in order of colour.

    `is_most` says whether it is proved that no tiling has more tiles.
    """

    mesh: Mesh
    shape: tuple[int, ...]
    tiles: tuple[Tile, ...]
    is_most: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        chips = [chip for tile in self.tiles for chip in tile]
        if not self.tiles or any(len(tile) != self.n_colours for tile in self.tiles):
            raise TopologyError(
                f"Tiling needs tiles of {self.n_colours} chips, but got tiles of "
                f"{sorted({len(tile) for tile in self.tiles})}"
            )
        if len(set(chips)) != len(chips) or not self.mesh.rank_of.keys() >= set(chips):
            raise TopologyError(f"Tiling needs live chips of {self.mesh}, each in one tile")
        for tile in self.tiles:
            if not _is_connected(self.mesh.neighbor_ranks, [self.mesh.rank_of[c] for c in tile]):
                raise TopologyError(f"Tiling needs connected tiles, but got {tile}")

    @property
    def n_colours(self) -> int:
        """How many chips a tile has: as many as there are colours."""
        return math.prod(self.shape)

    @property
    def n_tiles(self) -> int:
        return len(self.tiles)

    @property
    def spares(self) -> tuple[Chip, ...]:
        """The live chips in no tile."""
        return tuple(self.mesh.live[rank] for rank in np.flatnonzero(self.colour_of < 0))

    @cached_property
    def colour_of(self) -> NDArray[np.int32]:
        """The colour of each rank, -1 of a spare."""
        return self._numbered(lambda number, colour: colour)

    @cached_property
    def tile_of(self) -> NDArray[np.int32]:
        """The number of each rank's tile, -1 of a spare."""
        return self._numbered(lambda number, colour: number)

    def _numbered(self, value: Callable[[int, int], int]) -> NDArray[np.int32]:
        values = np.full(self.mesh.n_live, SPARE, dtype=np.int32)
        for number, tile in enumerate(self.tiles):
            for colour, chip in enumerate(tile):
                values[self.mesh.rank_of[chip]] = value(number, colour)
        values.flags.writeable = False
        return values

    def __str__(self) -> str:
        tiles = "1 tile" if self.n_tiles == 1 else f"{self.n_tiles} tiles"
        n_spares = self.mesh.n_live - self.n_tiles * self.n_colours
        spares = {0: "", 1: ", 1 spare"}.get(n_spares, f", {n_spares} spares")
        return f"{tiles} of {format_shape(self.shape)}{spares}"

    def after(self, mesh: Mesh) -> "Tiling":
        """Return a tiling of the mesh as it is now, with the most tiles and the least change.

        Tiles that are whole stay. Only if another tiling has more tiles, they do not. Chips keep
        their colours where the colours of their tile allow it.

        Raises:
            TopologyError: no tile is left.
        """
        return _tiling(mesh, self.shape, before=self)

    def moves(self, before: "Tiling") -> Moves:
        """Return what chips must get if this tiling follows another: parts that they do not have.

        Twins have the same, so a chip that keeps its colour needs nothing, in whichever tile.
        """
        had = {before.mesh.live[rank]: int(colour) for rank, colour in enumerate(before.colour_of)}
        colours_before = np.array([had.get(chip, SPARE) for chip in self.mesh.live])
        targets = np.flatnonzero((self.colour_of >= 0) & (self.colour_of != colours_before))
        sources = np.full(len(targets), -1, dtype=np.int32)
        for index, target in enumerate(targets):
            hops = distances_from(self.mesh, int(target))
            holds = np.flatnonzero(colours_before == self.colour_of[target])
            if len(holds):
                sources[index] = holds[np.argmin(hops[holds])]
        return Moves(
            self.mesh,
            self.n_colours,
            targets.astype(np.int32),
            self.colour_of[targets],
            sources,
        )


def tiling(mesh: Mesh, tile: str) -> Tiling:
    """Return a tiling of the largest connected part of a mesh, with the most tiles that were found.

    Of those it takes boxes before other forms, and boxes as they are written before turned ones.

        >>> print(tiling(Mesh((8, 8)).without("1,1", "5,6"), "2x2"))
        15 tiles of 2x2, 2 spares

    Raises:
        TopologyError: a text that cannot be read, or no tile fits.
    """
    return _tiling(mesh, parse_tile(tile), before=None)


def box_colour(shape: tuple[int, ...], chip: Chip) -> int:
    """Return the colour of a chip by its position alone: that in a grid of such boxes."""
    colour = 0
    for size, at in zip(shape, chip, strict=False):
        colour = colour * size + at % size
    return colour


def box_tiling(mesh: Mesh, shape: tuple[int, ...], keep: Container[Chip] = ()) -> Tiling:
    """Return the most boxes as they are written, of all parts of a mesh; colours by position.

    So a chip has one colour, whatever else lives, and a box at any place has all of them. Of two
    tilings with as many tiles it takes that with more chips of `keep`. On a mesh whose live chips
    such boxes cover there is one tiling only: the first chip is the first one of its box.

    Raises:
        TopologyError: no box fits.
    """
    search = _Search(mesh, shape, None)
    boxes = {
        tuple(sorted(map(mesh.rank_of.__getitem__, chips))): sum(chip in keep for chip in chips)
        for chips in upright_boxes(mesh, shape)
    }
    if not boxes:
        raise TopologyError(
            f"no tile of {format_shape(shape)}, as it is written, fits {mesh}; take a smaller one, "
            "or turn it"
        )
    found = search.most_of(boxes)
    tiles = (_by_colour(mesh, shape, tile) for tile in sorted(found.tiles))
    return Tiling(mesh, shape, tuple(tiles), is_most=found.is_most)


def upright_boxes(mesh: Mesh, shape: tuple[int, ...]) -> list[Tile]:
    """Return all boxes of connected live chips as they are written; they may share chips.

    Each with its chips in order of colour. None lies across a link that wraps around.
    """
    upright = (*shape, *(1,) * len(mesh.shape))[: len(mesh.shape)]
    boxes = (_by_colour(mesh, shape, tile) for tile, turn in _boxes(mesh, shape) if turn == upright)
    return [
        chips
        for chips in boxes
        if tuple(max(ats) - min(ats) + 1 for ats in zip(*chips, strict=True)) == upright
    ]


def _by_colour(mesh: Mesh, shape: tuple[int, ...], tile: _Ranks) -> Tile:
    chips = (mesh.live[rank] for rank in tile)
    return tuple(sorted(chips, key=lambda chip: box_colour(shape, chip)))


def _tiling(mesh: Mesh, shape: tuple[int, ...], *, before: Tiling | None) -> Tiling:
    part = largest_part(mesh)
    n_colours, name = math.prod(shape), format_shape(shape)
    box = tuple(sorted((size for size in shape if size > 1), reverse=True))
    if len(box) > len(part.shape):
        raise TopologyError(
            f"a tile of {name} needs a mesh of {len(box)} axes or more, but {part} has "
            f"{len(part.shape)}; take a tile of fewer axes"
        )
    if n_colours > part.n_live:
        raise TopologyError(
            f"a tile of {name} needs {n_colours} connected live chips, but {mesh} has "
            f"{part.n_live}; take a smaller tile"
        )
    search = _Search(part, shape, before)
    found = search.most_boxes()
    if len(found.tiles) < part.n_live // n_colours:
        found = search.any_form(found)
    boxes = [tile for tile in found.tiles if tile in search.turn_of]
    turns = [search.turn_of[tile] for tile in boxes]
    upright = max(turns, key=turns.count) if turns else (*shape, *(1,) * len(part.shape))
    tiles = (
        _coloured([part.live[rank] for rank in tile], n_colours, upright, before)
        for tile in sorted(found.tiles)
    )
    is_full = len(found.tiles) == part.n_live // n_colours
    return Tiling(part, shape, tuple(tiles), is_most=found.is_most or is_full)


def _coloured(
    chips: list[Chip], n_colours: int, box: tuple[int, ...], before: Tiling | None
) -> Tile:
    """Return the chips of a tile in order of colour: those that they had, else those of the box.

    Chips whose colour is taken get what is left, in order.
    """
    by_colour: dict[int, Chip] = {}
    wishes = [(box_colour(box, chip), chip) for chip in chips]
    if before is not None:
        had = before.mesh.rank_of
        wishes[:0] = [(int(before.colour_of[had[chip]]), chip) for chip in chips if chip in had]
    placed: set[Chip] = set()
    for colour, chip in wishes:
        if colour >= 0 and colour not in by_colour and chip not in placed:
            by_colour[colour] = chip
            placed.add(chip)
    left = iter([chip for chip in chips if chip not in placed])
    return tuple(by_colour[c] if c in by_colour else next(left) for c in range(n_colours))


class _Found(NamedTuple):
    """Tiles as rising ranks, and whether no more are possible."""

    tiles: list[_Ranks]
    is_most: bool


class _Search:
    """The search for the most tiles on one connected mesh."""

    def __init__(self, mesh: Mesh, shape: tuple[int, ...], before: Tiling | None) -> None:
        self.mesh, self.size = mesh, math.prod(shape)
        self.turn_of = dict(_boxes(mesh, shape))
        upright = (*shape, *(1,) * len(mesh.shape))[: len(mesh.shape)]
        self.kept = _whole_tiles(mesh, before)
        self._goodness = {
            tile: _BOX + _UPRIGHT * (turn == upright) for tile, turn in self.turn_of.items()
        }
        for tile in self.kept:
            self._goodness[tile] = self._goodness.get(tile, 0) + _KEPT

    def most_boxes(self) -> _Found:
        """Return the most tiles that are boxes, or stay; if there is a choice, those that stay."""
        return self.most_of(self._goodness)

    def any_form(self, boxes: _Found) -> _Found:
        """Return more tiles than boxes alone, if connected chips of any form make more."""
        is_small = self.mesh.n_live <= _MOST_CHIPS_TO_SEARCH_ANY
        if self.size <= _MOST_CHIPS_OF_ANY_TILE and is_small:
            anywhere = dict.fromkeys(_connected_sets(self.mesh, self.size), 0)
            found = self.most_of(anywhere | self._goodness)
            if len(found.tiles) > len(boxes.tiles):
                return found
            boxes = _Found(boxes.tiles, found.is_most)
        else:
            boxes = _Found(boxes.tiles, False)
        taken = {rank for tile in boxes.tiles for rank in tile}
        return _Found([*boxes.tiles, *_grown_tiles(self.mesh, taken, self.size)], boxes.is_most)

    def most_of(self, tiles: dict[_Ranks, int]) -> _Found:
        """Return the most of these tiles that share no chip; whole tiles stay if that is most."""
        n_chips = self.mesh.n_live
        by_first: list[list[tuple[int, int, _Ranks]]] = [[] for _ in range(n_chips)]
        for tile in sorted(tiles):
            mask = sum(1 << (rank - tile[0]) for rank in tile)
            by_first[tile[0]].append((mask, tiles[tile], tile))
        best, is_all = _fewest_left_out(by_first, [], _FIRST_STATES, n_chips)
        assert best is not None, "all chips may be left out"
        left_out = n_chips - self.size * len(best)
        if left_out >= self.size and not is_all:
            n_states = max(_FIRST_STATES, _MOST_STEPS // (n_chips + len(tiles)))
            more, is_all = _fewest_left_out(by_first, [], n_states, left_out - self.size)
            best = more or best
        if self.kept:
            beside, _ = _fewest_left_out(by_first, self.kept, _FIRST_STATES, n_chips)
            if len(self.kept) + len(beside or []) >= len(best):
                best = [*self.kept, *(beside or [])]
        return _Found(best, is_all or n_chips - self.size * len(best) < self.size)


def _fewest_left_out(
    by_first: Sequence[Sequence[tuple[int, int, _Ranks]]],
    fixed: Iterable[_Ranks],
    n_states: int,
    most_left_out: int,
) -> tuple[list[_Ranks] | None, bool]:
    """Return the tiles with which the fewest chips are left out, and whether no way was dropped.

    `by_first[rank]` has the tiles whose first chip is that rank: their chips as bits from there on,
    how good they are, and their ranks. The chips of `fixed` are taken. Returns no tiles if more
    than `most_left_out` chips would be left out.
    """
    taken = sum(1 << rank for tile in fixed for rank in tile)
    # taken from here on -> chips left out, how bad the tiles are, and the tiles as a linked list
    states: dict[int, tuple[int, int, _Chain]] = {taken: (0, 0, None)}
    is_all = True
    for tiles in by_first:
        after: dict[int, tuple[int, int, _Chain]] = {}
        for ahead, (left_out, badness, chain) in states.items():
            if ahead & 1:
                ways = [(ahead >> 1, (left_out, badness, chain))]
            else:
                ways = [(ahead >> 1, (left_out + 1, badness, chain))]
                ways += [
                    ((ahead | mask) >> 1, (left_out, badness - goodness, (tile, chain)))
                    for mask, goodness, tile in tiles
                    if not ahead & mask
                ]
            for key, way in ways:
                if way[0] <= most_left_out and (key not in after or way[:2] < after[key][:2]):
                    after[key] = way
        if len(after) > n_states:
            is_all = False
            best = sorted(after.items(), key=lambda item: (item[1][:2], item[0]))[:n_states]
            after = dict(best)
        states = after
    if not states:
        return None, is_all
    chain = states[0][2]
    found = []
    while chain is not None:
        tile, chain = chain
        found.append(tile)
    return found, is_all


def _boxes(mesh: Mesh, shape: tuple[int, ...]) -> Iterator[tuple[_Ranks, tuple[int, ...]]]:
    """Yield each box of connected live chips as rising ranks, and how it is turned.

    Boxes may lie across the links that wrap around.
    """
    n_axes = len(mesh.shape)
    padded = (*shape, *(1,) * n_axes)[: max(n_axes, len(shape))]
    seen = set()
    turns = sorted(set(itertools.permutations(padded)), key=lambda turn: (turn != padded, turn))
    for turn in turns:
        if any(size > 1 for size in turn[n_axes:]):
            continue
        turn = turn[:n_axes]
        if any(size > whole for size, whole in zip(turn, mesh.shape, strict=True)):
            continue
        starts = (
            range(whole if wraps and whole > 2 else whole - size + 1)
            for size, whole, wraps in zip(turn, mesh.shape, mesh.wrap, strict=True)
        )
        for origin in itertools.product(*starts):
            spans = zip(origin, turn, mesh.shape, strict=True)
            chips = itertools.product(
                *([(at + step) % whole for step in range(size)] for at, size, whole in spans)
            )
            ranks = [mesh.rank_of.get(chip, -1) for chip in chips]
            tile = tuple(sorted(ranks))
            if tile[0] < 0 or tile in seen or not _is_connected(mesh.neighbor_ranks, ranks):
                continue
            seen.add(tile)
            yield tile, turn


def _whole_tiles(mesh: Mesh, before: Tiling | None) -> list[_Ranks]:
    """Return the tiles of an earlier tiling whose chips live and are connected, as rising ranks."""
    whole = []
    for tile in () if before is None else before.tiles:
        ranks = tuple(sorted(mesh.rank_of.get(chip, -1) for chip in tile))
        if ranks[0] >= 0 and _is_connected(mesh.neighbor_ranks, ranks):
            whole.append(ranks)
    return whole


def _connected_sets(mesh: Mesh, size: int) -> Iterator[_Ranks]:
    """Yield every set of so many connected chips once, as rising ranks (Wernicke 2005)."""
    beside = [{int(r) for r in row if r >= 0} for row in mesh.neighbor_ranks]

    def extended(chips: set[int], border: set[int], first: int) -> Iterator[_Ranks]:
        if len(chips) == size:
            yield tuple(sorted(chips))
            return
        border = set(border)
        near = chips.union(*(beside[rank] for rank in chips))
        while border:
            rank = border.pop()
            new = {other for other in beside[rank] if other > first and other not in near}
            yield from extended(chips | {rank}, border | new, first)

    for first in range(mesh.n_live):
        yield from extended({first}, {rank for rank in beside[first] if rank > first}, first)


def _grown_tiles(mesh: Mesh, taken: set[int], size: int) -> Iterator[_Ranks]:
    """Yield connected sets of so many chips that are not taken, until there is none.

    Each grows from a chip with few free neighbours: it would be left alone otherwise.
    """
    free = set(range(mesh.n_live)) - taken
    if not free:
        return
    rest = replace(mesh, failed=mesh.failed | {mesh.live[rank] for rank in taken})
    for part in components(rest):
        left = {mesh.rank_of[chip] for chip in part}
        while len(left) >= size:
            tile = _grown(mesh, left, size)
            left -= tile
            if len(tile) == size:
                yield tuple(sorted(tile))


def _grown(mesh: Mesh, free: set[int], size: int) -> set[int]:
    """Return a connected set of so many free chips, or fewer if there are no more beside it."""

    def free_neighbors(rank: int) -> list[int]:
        return [int(other) for other in mesh.neighbor_ranks[rank] if int(other) in free]

    tile = {min(free, key=lambda rank: (len(free_neighbors(rank)), rank))}
    while len(tile) < size:
        border = {other for rank in tile for other in free_neighbors(rank)} - tile
        if not border:
            break
        tile.add(
            min(
                border,
                key=lambda rank: (sum(other not in tile for other in free_neighbors(rank)), rank),
            )
        )
    return tile


def _is_connected(neighbors: NDArray[np.int32], ranks: Sequence[int]) -> bool:
    """Whether live links among these ranks join them all."""
    left = set(ranks)
    reached = [left.pop()]
    while reached and left:
        beside = left.intersection(neighbors[reached.pop()].tolist())
        left -= beside
        reached += beside
    return not left
