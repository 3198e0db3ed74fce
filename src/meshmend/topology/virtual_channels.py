"""Deadlock-free tables: which route each pair takes, and on which virtual channel.

Routes that share a virtual channel can block each other for ever only if the channels they
hold and wait for form a cycle (Dally and Seitz 1987). So each
group of pairs goes to the first virtual channel on which its shortest routes close no cycle.
Groups that fit on none take up/down routes on the last one. `deadlock` proves the result.

A group is all pairs with the same destination and the same direction along the last axis. Routes
that only ever go up the last axis close no cycle around a hole, nor do routes that only go down
it. So on a 2-D mesh two virtual channels hold all routes but those that must step aside and come
back.

A **dependency** is a channel and the port taken after it: number `channel * n_ports + port`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.kernels import kernel
from meshmend.topology.mesh import Mesh
from meshmend.topology.tables import (
    Demand,
    demand_from_everywhere,
    shortest_ports,
    up_down_ports,
)


@dataclass(frozen=True, eq=False)
class RoutingTables:
    """A table (destinations, ranks) of ports for each virtual channel, and each source's channel.

    Source `demand.sources[i]` sends on `virtual_channel[i]`, and every rank on the way looks up
    the port in that channel's table. The tables differ only where the last one had to divert;
    entries of ranks that no source passes may be -1.
    """

    demand: Demand
    ports: tuple[NDArray[np.int8], ...]
    virtual_channel: NDArray[np.uint8]

    @property
    def n_virtual_channels(self) -> int:
        return len(self.ports)


@dataclass(frozen=True, eq=False)
class _Groups:
    """A demand in groups: `sources[ptr[g]:ptr[g + 1]]` use row `row[g]` of the tables.

    `order[i]` is the place of `sources[i]` in the demand.
    """

    row: NDArray[np.int32]
    ptr: NDArray[np.int64]
    sources: NDArray[np.int32]
    order: NDArray[np.int64]


def default_virtual_channels(mesh: Mesh) -> int:
    """Return how many virtual channels may be used: 2 on a mesh, more where axes wrap.

    On a full torus shortest routes need two virtual channels for each axis to break its ring,
    in all combinations.
    """
    n_wraps = sum(on and size > 2 for on, size in zip(mesh.wrap, mesh.shape, strict=True))
    return max(4, 1 << min(n_wraps, 7)) if n_wraps else 2


def all_pairs_tables(mesh: Mesh, *, max_virtual_channels: int | None = None) -> RoutingTables:
    """Return deadlock-free tables from every rank of a connected mesh to every rank.

    Takes ranks x ranks bytes for a table and some twenty times that while building.

    Raises:
        TopologyError: the mesh is not connected.
    """
    demand = demand_from_everywhere(np.arange(mesh.n_live), mesh.n_live)
    return routing_tables(mesh, demand, max_virtual_channels=max_virtual_channels)


def routing_tables(
    mesh: Mesh, demand: Demand, *, max_virtual_channels: int | None = None
) -> RoutingTables:
    """Return tables for a demand whose routes cannot deadlock.

    They use one virtual channel if shortest routes fit on one, else as many as first fit needs.
    All routes are shortest unless the virtual channels run out; one is enough to avoid deadlock.

    Raises:
        InputError: fewer than one virtual channel, or more than 255.
        TopologyError: a source cannot reach its destination.
    """
    limit = default_virtual_channels(mesh) if max_virtual_channels is None else max_virtual_channels
    if not 1 <= limit <= 255:
        raise InputError(f"routing_tables needs 1 to 255 virtual channels, but got {limit}")
    shortest = shortest_ports(mesh, demand)
    groups = _groups(mesh, demand)
    channel_of_group = np.zeros(len(groups.row), dtype=np.uint8)
    unplaced = np.arange(len(groups.row))
    ports: tuple[NDArray[np.int8], ...] = ()
    while len(ports) < limit and (unplaced.size or not ports):
        channel_of_group[unplaced] = len(ports)
        ports = (*ports, shortest)
        depends = _no_dependencies(mesh)
        # Reversed each time, so that the second channel begins with the other direction.
        refused = _refused(mesh, demand, groups, shortest, unplaced, depends)
        unplaced = unplaced[refused][::-1]
    if unplaced.size:
        last = np.flatnonzero(channel_of_group == limit - 1)
        ports = (*ports[:-1], _diverted(mesh, demand, groups, shortest, last))
    virtual_channel = np.empty(len(demand.sources), dtype=np.uint8)
    virtual_channel[groups.order] = np.repeat(channel_of_group, np.diff(groups.ptr))
    return RoutingTables(demand, ports, virtual_channel)


def _groups(mesh: Mesh, demand: Demand) -> _Groups:
    """Return the groups of a demand: first those up the last axis, then across it, then down.

    Where the last axis wraps, up and down mean nothing, and each destination is one group.
    """
    rows = demand.rows
    at = mesh.coordinates[:, -1].astype(np.int32)
    heading = np.sign(at[demand.sources] - at[demand.destinations][rows]).astype(np.int8)
    if mesh.wrap[-1]:
        heading[:] = 0
    order = np.concatenate([np.flatnonzero(heading == sign) for sign in (-1, 0, 1)])
    rows, heading = rows[order], heading[order]
    starts = np.flatnonzero((np.diff(rows) != 0) | (np.diff(heading) != 0)) + 1
    first = np.concatenate([np.zeros(min(1, len(rows)), dtype=np.int64), starts])
    return _Groups(rows[first], np.append(first, len(rows)), demand.sources[order], order)


def _diverted(
    mesh: Mesh,
    demand: Demand,
    groups: _Groups,
    shortest: NDArray[np.int8],
    which: NDArray[np.int64],
) -> NDArray[np.int8]:
    """Return a table on which all these groups close no cycle: up/down for some destinations.

    The dependencies of all these groups' up/down routes are entered first, so any group may use
    its up/down routes. A destination keeps its shortest routes where these close no cycle with
    them.
    """
    rows = np.unique(groups.row[which])
    ports = shortest.copy()
    ports[rows] = up_down_ports(mesh, demand.destinations[rows])
    depends = _no_dependencies(mesh)
    cyclic = _refused(mesh, demand, groups, ports, which, depends)
    assert not cyclic.any(), "up/down routes close no cycle"
    refused = _refused(mesh, demand, groups, shortest, which, depends)
    kept = np.setdiff1d(rows, groups.row[which[refused]])
    ports[kept] = shortest[kept]
    return ports


def _no_dependencies(mesh: Mesh) -> NDArray[np.bool_]:
    n_ranks, n_ports = mesh.neighbor_ranks.shape
    return np.zeros(n_ranks * n_ports * n_ports, dtype=np.bool_)


def _refused(
    mesh: Mesh,
    demand: Demand,
    groups: _Groups,
    ports: NDArray[np.int8],
    which: NDArray[np.int64],
    depends: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """Add dependencies group by group; return the groups left out because they close a cycle.

    Tries all groups at once, half as many after a failure, twice as many after a success.
    """
    added = np.empty(depends.size, dtype=np.int64)
    visited = np.full(mesh.n_live, -1)
    goals = demand.destinations[groups.row]
    arrays = (goals, groups.row, groups.ptr, groups.sources)
    refused = np.zeros(len(which), dtype=np.bool_)
    start, n_tried = 0, len(which)
    while start < len(which):
        tried = np.ascontiguousarray(which[start : start + n_tried])
        n_added = _add_groups(mesh.neighbor_ranks, arrays, ports, tried, depends, visited, added)
        if n_added == 0 or _is_acyclic(mesh.neighbor_ranks, depends):
            start, n_tried = start + len(tried), 2 * n_tried
            continue
        depends[added[:n_added]] = False
        if len(tried) == 1:
            refused[start] = True
            start += 1
        n_tried = max(1, len(tried) // 2)
        visited[:] = -1
    return refused


@kernel
def _add_groups(
    neighbors: NDArray[np.int32],
    groups: tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64], NDArray[np.int32]],
    ports: NDArray[np.int8],
    which: NDArray[np.int64],
    depends: NDArray[np.bool_],
    visited: NDArray[np.int64],
    added: NDArray[np.int64],
) -> int:
    """Set the dependencies of these groups' routes; list the new ones, return how many.

    `visited` holds, for each rank, the last group whose routes were followed through it.
    """
    n_ports = neighbors.shape[1]
    goals, rows, ptr, sources = groups
    n_added = 0
    for group in which:
        goal, row = goals[group], rows[group]
        for at in range(ptr[group], ptr[group + 1]):
            here = sources[at]
            while here != goal and visited[here] != group:
                visited[here] = group
                channel = here * n_ports + ports[row, here]
                here = neighbors[here, ports[row, here]]
                if here != goal:
                    dependency = channel * n_ports + ports[row, here]
                    if not depends[dependency]:
                        depends[dependency] = True
                        added[n_added] = dependency
                        n_added += 1
    return n_added


@kernel
def _is_acyclic(neighbors: NDArray[np.int32], depends: NDArray[np.bool_]) -> bool:
    """Whether all channels can be lined up, each before those that follow it (Kahn 1962)."""
    n_ports = neighbors.shape[1]
    n_channels = neighbors.size
    n_before = np.zeros(n_channels, dtype=np.int32)
    ready = np.empty(n_channels, dtype=np.int64)
    for channel in range(n_channels):
        first = neighbors[channel // n_ports, channel % n_ports] * n_ports
        for port in range(n_ports):
            if depends[channel * n_ports + port]:
                n_before[first + port] += 1
    n_ready = 0
    for channel in range(n_channels):
        if n_before[channel] == 0:
            ready[n_ready] = channel
            n_ready += 1
    n_lined_up = 0
    while n_lined_up < n_ready:
        channel = ready[n_lined_up]
        n_lined_up += 1
        first = neighbors[channel // n_ports, channel % n_ports] * n_ports
        for port in range(n_ports):
            if depends[channel * n_ports + port]:
                n_before[first + port] -= 1
                if n_before[first + port] == 0:
                    ready[n_ready] = first + port
                    n_ready += 1
    return n_lined_up == n_channels
