"""The figures of a mesh: degrees, eccentricities, radius, diameter and centre, computed once.

All callers take them from `mesh_figures`, which keeps those of the 64 meshes used last. Distances
from one rank and connected parts are in `graph`. The packing number, which takes longer than all
of these, is in `simulator.packing_number`.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from meshmend.kernels import kernel
from meshmend.topology.graph import breadth_first, distances_from
from meshmend.topology.mesh import Mesh


@dataclass(frozen=True)
class MeshFigures:
    """The figures of one mesh, each computed at its first use.

    Distances are hops over live links. Where the mesh falls into parts, an eccentricity counts
    within the rank's own part, so check `is_connected` before you use radius and centre.
    """

    mesh: Mesh

    @cached_property
    def is_connected(self) -> bool:
        """Whether live links join all live chips."""
        return bool(distances_from(self.mesh, 0).min() >= 0)

    @cached_property
    def degrees(self) -> NDArray[np.int32]:
        """How many live links each rank has."""
        degrees: NDArray[np.int32] = (self.mesh.neighbor_ranks >= 0).sum(axis=1, dtype=np.int32)
        degrees.flags.writeable = False
        return degrees

    @cached_property
    def capacities(self) -> NDArray[np.float64]:
        """What the live links of each rank carry together, in links of full speed."""
        is_live = self.mesh.neighbor_ranks >= 0
        capacities: NDArray[np.float64] = np.where(is_live, self.mesh.port_speeds, 0.0).sum(axis=1)
        capacities.flags.writeable = False
        return capacities

    @cached_property
    def min_degree(self) -> int:
        """The live links of the rank that has the fewest."""
        return int(self.degrees.min())

    @cached_property
    def eccentricities(self) -> NDArray[np.int32]:
        """Each rank's hops to the rank farthest from it; takes time chips x links."""
        eccentricities: NDArray[np.int32] = _eccentricities(self.mesh.neighbor_ranks)
        eccentricities.flags.writeable = False
        return eccentricities

    @cached_property
    def radius(self) -> int:
        """The least eccentricity: some rank reaches all others in so many hops."""
        return int(self.eccentricities.min())

    @cached_property
    def diameter(self) -> int:
        """The largest eccentricity: the most hops between two ranks."""
        return int(self.eccentricities.max())

    @cached_property
    def central_rank(self) -> int:
        """The first rank of the centre."""
        return int(np.argmin(self.eccentricities))

    def ranks_within(self, hops: int) -> NDArray[np.int32]:
        """Return the ranks that reach all others in so many hops; `radius` gives the centre."""
        return np.flatnonzero(self.eccentricities <= hops).astype(np.int32)


@lru_cache(maxsize=64)
def mesh_figures(mesh: Mesh) -> MeshFigures:
    """Return the figures of a mesh; equal meshes share one value while it is cached."""
    return MeshFigures(mesh)


@kernel
def _eccentricities(neighbors: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return all eccentricities, by searches from few ranks on a mesh, from all on a torus.

    A search from one rank bounds those of all that it reaches, by the triangle inequality. The next
    one starts where the bounds leave most to find: at the rank that may have the largest, then at
    the one that may have the smallest (Takes and Kosters 2013).
    """
    n_ranks = neighbors.shape[0]
    least, most = np.zeros(n_ranks, dtype=np.int32), np.full(n_ranks, n_ranks, dtype=np.int32)
    distance, queue = np.empty(n_ranks, dtype=np.int32), np.empty(n_ranks, dtype=np.int32)
    wants_largest = True
    while True:
        start = -1
        for rank in range(n_ranks):
            if least[rank] == most[rank]:
                continue
            if start < 0 or (
                most[rank] > most[start] if wants_largest else least[rank] < least[start]
            ):
                start = rank
        if start < 0:
            return least
        reached = breadth_first(neighbors, start, distance, queue)
        farthest = distance[queue[reached - 1]]
        for rank in queue[:reached]:
            hops = distance[rank]
            least[rank] = max(least[rank], hops, farthest - hops)
            most[rank] = min(most[rank], farthest + hops)
        wants_largest = not wants_largest
