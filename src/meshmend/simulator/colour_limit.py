"""The limit of the sums of a tiling: no schedule that sums every colour is faster.

Each of g colours has D/g bytes to sum over its chips, one in each tile, and all colours share the
links. The bounds are those of `limit`, for such sums:

Bandwidth. Cut the mesh into parts. A byte of a colour that p parts hold is joined by p - 1 messages
between parts, and p - 1 more bring the sum back (`limit` has the reason; parts without the colour
may pass messages on, but save none). So between the parts D/g x 2 (p - 1) bytes pass for each
colour, over 2 x cut channels. If every part is a set of whole tiles, p is the same for all colours,
and the worst such partition is that of the graph of tiles with all links between two tiles as
parallel links: `packing_number` finds it exactly. A spare has no colour. It counts to the tile to
which it has the most links, so that these are not cut.

Exit. The D/g bytes of a chip leave it over its links, and what leaves last has to reach its
farthest twin. The D bytes of a tile leave it over the links around it, and what leaves last, of
whichever colour, has to reach each twin outside, from the way that is nearest to it.

Chip. Each byte of a colour takes tiles - 1 additions, somewhere among all live chips.

That trees reach the bandwidth bound on a grid of equal tiles is shown in `docs/tiles.md`.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshmend.simulator.limit import Exit, Limit
from meshmend.topology.fabric import Fabric
from meshmend.topology.figures import mesh_figures
from meshmend.topology.graph import distances_from_any, hops_to_farthest
from meshmend.topology.packing_number import (
    CapacityLinks,
    PackingNumber,
    binding_partition,
    bracketing_partition,
    links_of_mesh,
    ports_of_links,
)
from meshmend.topology.tiles import Tiling

_N_TREES = 32  # of the first guess
_SEED = 0


def colour_limit(tiling: Tiling, fabric: Fabric, payload_bytes: float) -> Limit:
    """Return the least time in which all colours of a tiling are summed, `payload_bytes` in all."""
    packing, hops = colour_packing(tiling), _hops_to_colours(tiling)
    n_live, colours = tiling.mesh.n_live, tiling.colour_of
    own = hops[np.arange(n_live), colours][colours >= 0]
    chip_s = None
    if fabric.chip_bandwidth_bytes_per_s is not None:
        added = payload_bytes * (tiling.n_tiles - 1) / n_live
        chip_s = added / fabric.chip_bandwidth_bytes_per_s
    return Limit(
        fabric=fabric,
        payload_bytes=payload_bytes,
        packing=packing,
        bandwidth_s=payload_bytes / packing.upper / fabric.link_bandwidth_bytes_per_s,
        latency_s=int(own.max()) * fabric.hop_latency_s,
        chip_s=chip_s,
        exits=tuple(_exits(tiling, hops)) if tiling.n_tiles > 1 else (),
    )


@lru_cache(maxsize=64)
def colour_packing(tiling: Tiling) -> PackingNumber:
    """Return the most weight that trees of all colours can have, as a partition of tiles bounds it.

    Its lower end is 0: it is not known here what trees reach.
    """
    mesh, node_of = tiling.mesh, _nodes(tiling)
    every = links_of_mesh(mesh)
    ends = node_of[every.ends]
    is_between = ends[:, 0] != ends[:, 1]
    links = CapacityLinks(ends[is_between], every.capacity[is_between], every.unit)
    part_of = np.zeros(tiling.n_tiles, dtype=np.int32)
    if tiling.n_tiles > 1:
        _, start = bracketing_partition(links, tiling.n_tiles, n_trees=_N_TREES, seed=_SEED)
        ports = ports_of_links(links, tiling.n_tiles)
        part_of, _ = binding_partition(ports, links, start)
    return PackingNumber(mesh, 0.0, part_of[node_of], tiling.colour_of)


def _nodes(tiling: Tiling) -> NDArray[np.int32]:
    """Return the tile that each rank counts to; spares join the tile to which most links lead."""
    node_of: NDArray[np.int32] = tiling.tile_of.copy()
    while (left := np.flatnonzero(node_of < 0)).size:
        joined = node_of.copy()
        for rank in left:
            beside = tiling.mesh.neighbor_ranks[rank]
            tiles = node_of[beside[beside >= 0]]
            if np.any(tiles >= 0):
                joined[rank] = np.argmax(np.bincount(tiles[tiles >= 0]))
        node_of = joined
    return node_of


def _hops_to_colours(tiling: Tiling) -> NDArray[np.int32]:
    """Return each rank's hops to the farthest chip of each colour (ranks, colours)."""
    members = [np.flatnonzero(tiling.colour_of == colour) for colour in range(tiling.n_colours)]
    return hops_to_farthest(tiling.mesh, members)


def _exits(tiling: Tiling, hops: NDArray[np.int32]) -> Iterator[Exit]:
    """Yield the exits of single chips, one for each number of links, and those of all tiles."""
    mesh, colours, tile_of = tiling.mesh, tiling.colour_of, tiling.tile_of
    figures = mesh_figures(mesh)
    own = np.where(colours >= 0, hops[np.arange(mesh.n_live), colours], -1)
    for capacity in np.unique(figures.capacities[colours >= 0]).tolist():
        rank = int(np.argmax(np.where(figures.capacities == capacity, own, -1)))
        n_links, share = int(figures.degrees[rank]), 1 / tiling.n_colours
        yield Exit(1, rank, n_links, int(own[rank]), share, capacity=capacity)
    for number, tile in enumerate(tiling.tiles):
        ends = tile_of[mesh.links] == number
        crossing = ends.sum(axis=1) == 1
        outside = np.unique(mesh.links[crossing][~ends[crossing]])
        away = _hops_outside(tiling, number, outside)
        capacity, n_links = float(mesh.link_speeds[crossing].sum()), int(crossing.sum())
        yield Exit(len(tile), mesh.rank_of[tile[0]], n_links, 1 + away, capacity=capacity)


def _hops_outside(tiling: Tiling, tile: int, starts: NDArray[np.integer]) -> int:
    """Return the hops from the nearest start to the farthest chip of a colour outside a tile.

    Of the colour for which these are fewest: its bytes may be the last to leave. They may leave at
    any start, but for one chip, so it is the farthest from its nearest start, not the reverse.
    """
    away = distances_from_any(tiling.mesh, starts)
    is_outside = tiling.tile_of != tile
    return min(
        int(away[is_outside & (tiling.colour_of == colour)].max())
        for colour in range(tiling.n_colours)
    )
