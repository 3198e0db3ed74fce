"""Next-hop tables: the port on which each rank forwards messages for a destination.

A table depends on the destination alone, so a real network can be programmed from it. Two
kinds are built here. **Shortest** tables follow a shortest live path, the last axis (X) first:
on a full mesh that is dimension order (figure 1), at a hole they step aside, walk along its
border and come back (figure 2). **Up/down** tables climb towards a central root, then descend:
longer, but never in a circle. `virtual_channels` decides which destination gets which kind.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import TopologyError
from meshmend.kernels import kernel
from meshmend.topology.figures import mesh_figures
from meshmend.topology.graph import breadth_first
from meshmend.topology.mesh import Mesh


@dataclass(frozen=True, eq=False)
class Demand:
    """Which ranks send to which: destination k receives from `sources[ptr[k]:ptr[k + 1]]`.

    Destinations are distinct, and so are the sources of each. A destination may be among its own
    sources; that pair needs no route.
    """

    destinations: NDArray[np.int32]
    ptr: NDArray[np.int64]
    sources: NDArray[np.int32]

    @property
    def n_destinations(self) -> int:
        return len(self.destinations)

    @property
    def rows(self) -> NDArray[np.int32]:
        """The number of each source's destination."""
        return np.repeat(np.arange(self.n_destinations, dtype=np.int32), np.diff(self.ptr))


def demand_of(src: NDArray[np.int32], dst: NDArray[np.int32]) -> Demand:
    """Return the demand of these pairs of ranks: distinct, and sorted by destination."""
    destinations, first = np.unique(dst, return_index=True)
    ptr = np.append(first, len(dst)).astype(np.int64)
    return Demand(destinations, ptr, np.ascontiguousarray(src))


def demand_from_everywhere(destinations: NDArray[np.integer], n_ranks: int) -> Demand:
    """Return the demand in which every rank sends to each of these destinations."""
    n_destinations = len(destinations)
    return Demand(
        destinations=np.array(destinations, dtype=np.int32),
        ptr=np.arange(n_destinations + 1, dtype=np.int64) * n_ranks,
        sources=np.tile(np.arange(n_ranks, dtype=np.int32), n_destinations),
    )


def next_ports(mesh: Mesh, destinations: NDArray[np.integer]) -> NDArray[np.int8]:
    """Return the shortest tables (destinations, ranks); the destination's own entry is -1.

    Raises:
        TopologyError: a rank cannot reach a destination.
    """
    return shortest_ports(mesh, demand_from_everywhere(destinations, mesh.n_live))


def shortest_ports(mesh: Mesh, demand: Demand) -> NDArray[np.int8]:
    """Return tables (destinations, ranks) that lead each source on a shortest live path.

    Among the neighbours one hop nearer, the last axis is taken first and, on a torus where both
    ways round are equally short, upwards. Each search ends as soon as it has met the sources,
    so ranks farther away are left at -1.

    Raises:
        TopologyError: a source cannot reach its destination.
    """
    ports = _no_ports(mesh, demand.n_destinations)
    _fill_shortest(mesh.neighbor_ranks, demand.destinations, demand.ptr, demand.sources, ports)
    rows = demand.rows
    goal = demand.destinations[rows]
    unreachable = (ports[rows, demand.sources] < 0) & (goal != demand.sources)
    if unreachable.any():
        at = int(np.argmax(unreachable))
        raise TopologyError(
            f"routes need a connected mesh, but {mesh} has no way from "
            f"{mesh.live[demand.sources[at]]} to {mesh.live[goal[at]]}; "
            "route on topology.graph.largest_part(mesh)"
        )
    return ports


@kernel
def _fill_shortest(
    neighbors: NDArray[np.int32],
    destinations: NDArray[np.int32],
    ptr: NDArray[np.int64],
    sources: NDArray[np.int32],
    ports: NDArray[np.int8],
) -> None:
    n_ranks, n_ports = neighbors.shape
    # Hops from the destination plus 1, so that 0 is a rank not met and the destination has 1.
    distance = np.zeros(n_ranks, dtype=np.int64)
    queue = np.empty(n_ranks, dtype=np.int64)
    source_of = np.zeros(n_ranks, dtype=np.int64)
    for row in range(len(destinations)):
        for at in range(ptr[row], ptr[row + 1]):
            source_of[sources[at]] = row + 1
        missing = ptr[row + 1] - ptr[row]
        distance[destinations[row]] = 1
        queue[0] = destinations[row]
        head, tail = 0, 1
        while head < tail and missing > 0:
            here = queue[head]
            head += 1
            for port in range(n_ports):
                there = neighbors[here, port]
                if there >= 0 and distance[there] == 0:
                    distance[there] = distance[here] + 1
                    queue[tail] = there
                    tail += 1
                    if source_of[there] == row + 1:
                        missing -= 1
        for at in range(1, tail):
            here = queue[at]
            for port in range(n_ports - 1, -1, -1):  # the last axis has the highest ports
                there = neighbors[here, port]
                if there >= 0 and distance[there] == distance[here] - 1:
                    ports[row, here] = port
                    break
        for at in range(tail):
            distance[queue[at]] = 0


def _no_ports(mesh: Mesh, n_destinations: int) -> NDArray[np.int8]:
    return np.full((n_destinations, mesh.n_live), -1, dtype=np.int8)


def up_down_order(mesh: Mesh) -> NDArray[np.int32]:
    """Return the ranks of a connected mesh in breadth-first order from a most central one."""
    root = mesh_figures(mesh).central_rank
    distance, order = np.empty((2, mesh.n_live), dtype=np.int32)
    breadth_first(mesh.neighbor_ranks, root, distance, order)
    return order


def up_down_ports(mesh: Mesh, destinations: NDArray[np.integer]) -> NDArray[np.int8]:
    """Return tables (destinations, ranks) whose routes never go up again once they went down.

    A hop is up when it leads to a rank earlier in `up_down_order`. Where hops down alone reach
    the destination the fewest of them are taken, else the hop up after which the way is
    shortest. No set of such routes has a cycle of waiting channels (Schroeder et al., Autonet:
    up*/down* routing). The mesh must be connected.
    """
    ports = _no_ports(mesh, len(destinations))
    goals = np.array(destinations, dtype=np.int32)
    _fill_up_down(mesh.neighbor_ranks, up_down_order(mesh), goals, ports)
    return ports


@kernel
def _fill_up_down(
    neighbors: NDArray[np.int32],
    order: NDArray[np.int32],
    destinations: NDArray[np.int32],
    ports: NDArray[np.int8],
) -> None:
    n_ranks, n_ports = neighbors.shape
    position = np.empty(n_ranks, dtype=np.int32)
    for at in range(n_ranks):
        position[order[at]] = at
    hops = np.empty(n_ranks, dtype=np.int32)
    for row in range(len(destinations)):
        hops[:] = -1
        hops[destinations[row]] = 0
        # First pass, backwards: ranks that get there by going down only. Second pass, forwards:
        # the other ranks, which must go up first.
        start = position[destinations[row]]
        for step in range(start + n_ranks):
            going_down = step < start
            at = start - 1 - step if going_down else step - start
            here = order[at]
            if hops[here] >= 0:
                continue
            nearest = -1
            for port in range(n_ports - 1, -1, -1):
                there = neighbors[here, port]
                if there < 0 or hops[there] < 0 or (position[there] > at) != going_down:
                    continue
                if nearest < 0 or hops[there] < nearest:
                    nearest = hops[there]
                    ports[row, here] = port
            if nearest >= 0:
                hops[here] = nearest + 1


@kernel
def _fill_hops(
    neighbors: NDArray[np.int32],
    destinations: NDArray[np.int32],
    ports: NDArray[np.int8],
    hops: NDArray[np.int32],
) -> None:
    n_ranks = neighbors.shape[0]
    path = np.empty(n_ranks, dtype=np.int32)
    for row in range(len(destinations)):
        hops[row, destinations[row]] = 0
        for start in range(n_ranks):
            here, steps = start, 0
            while hops[row, here] < 0 and ports[row, here] >= 0 and steps < n_ranks:
                path[steps] = here
                steps += 1
                here = neighbors[here, ports[row, here]]
            if hops[row, here] >= 0:
                for back in range(steps):
                    hops[row, path[back]] = hops[row, here] + steps - back


def table_hops(
    mesh: Mesh, destinations: NDArray[np.integer], ports: NDArray[np.int8]
) -> NDArray[np.int32]:
    """Return the hops (destinations, ranks) that tables take, -1 where they do not arrive."""
    hops = np.full(ports.shape, -1, dtype=np.int32)
    _fill_hops(mesh.neighbor_ranks, np.array(destinations, dtype=np.int32), ports, hops)
    return hops
