"""Regions and the ways of their sums: for payloads that take about as long as their hops.

A tree sums all chips at one root and sends the total back: twice the hops to the farthest chip. In
`flood` every chip hears from every other: once the hops, but n - 1 payloads. In between a few
**regions** each sum at a **centre** of their own, and every chip gets the sums of all regions: as
many hops as a region is deep and the mesh is wide, and a payload for each region.

A chunk has centres of its own, so that together chunks load all links alike. The ways are shortest
ways, those on which the fewest messages are late (`trees/ways.py`). Ways of any length up to
the longest, which would load links more evenly, were up to 7 % slower: messages met.

Knows nothing of bytes and seconds.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.topology.graph import all_distances
from meshmend.topology.mesh import Mesh
from meshmend.trees.ways import Ways

Ranks = NDArray[np.int32]

_DRAWS: Final = 8  # of centres for a chunk; 2 take 0.7 % longer on average, 30 as long


@dataclass(frozen=True, eq=False)
class RegionTrees:
    """The centres of each chunk's regions (chunks, regions), and the ways to and from them.

    In each chunk `joins` (chunks, ranks) is to whom a rank sends its sum, and `sources` (chunks,
    regions, ranks) from whom it gets a region's. Both are -1 at centres. `hops_in` and `hops_out`
    count the hops of these ways.
    """

    centres: Ranks
    joins: Ranks
    hops_in: Ranks
    sources: Ranks
    hops_out: Ranks


def region_trees(mesh: Mesh, *, n_regions: int, n_chunks: int) -> RegionTrees:
    """Return regions of a connected mesh for each chunk. Deterministic.

    A rank belongs to the region whose centre is nearest.
    """
    hops = all_distances(mesh)
    centres = _drawn_centres(hops, n_regions, n_chunks)
    hops_out = hops[centres]
    hops_in = hops_out.min(axis=1)
    ways = Ways(mesh)
    joins, _ = ways.to(hops_in)
    # All chunks of a region, then those of the next, as they are handed on.
    by_region = hops_out.transpose(1, 0, 2).reshape(-1, mesh.n_live)
    sources, _ = ways.back(by_region)
    by_chunk = sources.reshape(n_regions, n_chunks, mesh.n_live).transpose(1, 0, 2)
    return RegionTrees(centres, joins, hops_in, by_chunk, hops_out)


def _drawn_centres(hops: Ranks, n_regions: int, n_chunks: int) -> Ranks:
    """Return centres far apart for each chunk: of a few draws the one with the smallest regions.

    The first centre is another rank in each chunk, every other is as far as can be from all before.
    """
    rng, n_ranks = np.random.default_rng(0), len(hops)
    centres = np.empty((n_chunks, n_regions), dtype=np.int32)
    centres[:, 0] = np.resize(rng.permutation(n_ranks), n_chunks)
    for chunk in range(n_chunks):
        smallest = (np.inf, np.inf)
        for _ in range(_DRAWS):
            drawn, near = [int(centres[chunk, 0])], hops[centres[chunk, 0]]
            while len(drawn) < n_regions:
                drawn.append(int(np.argmax(near + rng.random(n_ranks))))
                near = np.minimum(near, hops[drawn[-1]])
            if (size := (float(near.max()), float(near.mean()))) < smallest:
                centres[chunk], smallest = drawn, size
    return centres
