"""Next-hop tables: the port on which each rank forwards messages for a destination.

A table depends on the destination alone, so a real network can be programmed from it. Two
kinds are built here. **Shortest** tables follow a shortest live path, the last axis (X) first:
on a full mesh that is dimension order (figure 1), at a hole they step aside, walk along its
border and come back (figure 2). `routing_tables` builds them on the mesh's stand-in, whose last
axis is the longest. **Up/down** tables climb towards a central root, then descend:
longer, but never in a circle.

`routing_tables` decides which pair takes which kind, and on which virtual channel. Routes that
share a virtual channel can block each other for ever only if the channels they hold and wait for
form a cycle (Dally and Seitz 1987). So each group of pairs goes to the first virtual channel on
which its shortest routes close no cycle. Groups that fit on none take up/down routes on the last
one. `deadlock` proves the result.

A group is all pairs with the same destination and the same direction along the last axis. Routes
that only ever go up the last axis close no cycle around a hole, nor do routes that only go down
it. So on a 2-D mesh two virtual channels hold all routes but those that must step aside and come
back.

A **dependency** is a channel and the port taken after it: number `channel * n_ports + port`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError, TopologyError
from meshmend.kernels import kernel
from meshmend.topology.figures import mesh_figures
from meshmend.topology.graph import breadth_first
from meshmend.topology.mesh import Mesh
from meshmend.topology.symmetry import stand_in


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


def default_virtual_channels(mesh: Mesh) -> int:
    """Return how many virtual channels may be used: 2 on a mesh, more where axes wrap.

    On a full torus shortest routes need two virtual channels for each axis to break its ring,
    in all combinations.
    """
    n_wraps = sum(mesh.rings)
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
    They are made on the mesh's stand-in: images of a mesh have images of its routes.

    Raises:
        InputError: fewer than one virtual channel, or more than 255.
        TopologyError: a source cannot reach its destination.
    """
    like = stand_in(mesh)
    if like.mesh == mesh:
        return _tables(mesh, demand, max_virtual_channels)
    names = np.argsort(like.ranks)
    goals, sources = names[demand.destinations], names[demand.sources]
    order = np.lexsort((sources, goals[demand.rows]))
    asked = demand_of(sources[order].astype(np.int32), goals[demand.rows][order].astype(np.int32))
    try:
        found = _tables(like.mesh, asked, max_virtual_channels)
    except TopologyError:
        shortest_ports(mesh, demand)  # says the same of this mesh's chips
        raise
    own_port = like.channels.reshape(mesh.n_live, -1) % mesh.neighbor_ranks.shape[1]
    rank = np.arange(mesh.n_live)

    def renamed(ports: NDArray[np.int8]) -> NDArray[np.int8]:
        named = np.where(ports < 0, -1, own_port[rank, ports]).astype(np.int8)
        return np.ascontiguousarray(named[np.searchsorted(asked.destinations, goals)][:, names])

    shortest = renamed(found.ports[0])
    is_other = found.ports[-1] is not found.ports[0]  # only the last table may differ
    last = renamed(found.ports[-1]) if is_other else shortest
    virtual_channel = np.empty_like(found.virtual_channel)
    virtual_channel[order] = found.virtual_channel
    return RoutingTables(demand, (*(shortest,) * (len(found.ports) - 1), last), virtual_channel)


def _tables(mesh: Mesh, demand: Demand, max_virtual_channels: int | None) -> RoutingTables:
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


def table_hops(
    mesh: Mesh, destinations: NDArray[np.integer], ports: NDArray[np.int8]
) -> NDArray[np.int32]:
    """Return the hops (destinations, ranks) that tables take, -1 where they do not arrive."""
    hops = np.full(ports.shape, -1, dtype=np.int32)
    _fill_hops(mesh.neighbor_ranks, np.array(destinations, dtype=np.int32), ports, hops)
    return hops


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
