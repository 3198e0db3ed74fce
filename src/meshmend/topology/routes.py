"""Routes: the paths of a set of pairs of ranks, as arrays.

Proofs, the simulator and the drawings read paths from here; `tables` chooses them. A **channel** is
a directed link: `rank * n_ports + port`. **Stretch** is how much longer routes are than the
shortest live path.
"""

from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError, VerificationError
from meshmend.kernels import kernel, plain_kernel
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh
from meshmend.topology.tables import (
    Demand,
    RoutingTables,
    demand_of,
    routing_tables,
    shortest_ports,
    table_hops,
)


@dataclass(frozen=True, eq=False, repr=False)
class Routes:
    """One path for each of some pairs of ranks, sorted by source, then by destination.

    The pairs of source s are `pair_ptr[s]:pair_ptr[s + 1]`; pair p leads to `dst[p]` over
    `channels[hop_ptr[p]:hop_ptr[p + 1]]`, all of it on `virtual_channel[p]`. `speeds` has the
    speed of each channel; None: all are equal.
    """

    n_ranks: int
    n_ports: int
    pair_ptr: NDArray[np.int64]
    dst: NDArray[np.int32]
    hop_ptr: NDArray[np.int64]
    channels: NDArray[np.int32]
    virtual_channel: NDArray[np.uint8]
    n_virtual_channels: int
    speeds: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        n_pairs = len(self.dst)
        if len(self.pair_ptr) != self.n_ranks + 1 or len(self.virtual_channel) != n_pairs:
            raise InputError(
                f"Routes need {self.n_ranks + 1} starts of sources and {n_pairs} virtual channels, "
                f"but got {len(self.pair_ptr)} and {len(self.virtual_channel)}"
            )
        for name, ptr, stop in (
            ("pair_ptr", self.pair_ptr, n_pairs),
            ("hop_ptr", self.hop_ptr, len(self.channels)),
        ):
            if ptr[0] != 0 or ptr[-1] != stop or np.any(np.diff(ptr) < 0):
                raise InputError(f"Routes need {name} to rise from 0 to {stop}")
        if len(self.hop_ptr) != n_pairs + 1 or np.any(np.diff(self.hop_ptr) < 1):
            raise InputError(f"Routes need at least one hop for each of their {n_pairs} pairs")
        if np.any(self.virtual_channel >= self.n_virtual_channels):
            raise InputError(f"Routes need virtual channels below {self.n_virtual_channels}")
        columns = (self.pair_ptr, self.dst, self.hop_ptr, self.channels, self.virtual_channel)
        for column in columns:
            column.flags.writeable = False

    def __repr__(self) -> str:
        return (
            f"<Routes: {self.n_pairs} pairs of {self.n_ranks} ranks, at most {self.max_hops} hops>"
        )

    @property
    def n_pairs(self) -> int:
        return len(self.dst)

    @property
    def src(self) -> NDArray[np.int32]:
        """The source of each pair."""
        return np.repeat(np.arange(self.n_ranks, dtype=np.int32), np.diff(self.pair_ptr))

    @property
    def hops(self) -> NDArray[np.int64]:
        """The number of hops of each pair."""
        return np.diff(self.hop_ptr)

    @property
    def max_hops(self) -> int:
        return int(self.hops.max(initial=0))

    def pair_of(self, src: int, dst: int) -> int:
        """Return the number of a pair of ranks.

        Raises:
            InputError: there is no route for this pair.
        """
        if 0 <= src < self.n_ranks:
            start, stop = self.pair_ptr[src], self.pair_ptr[src + 1]
            pair = int(start + np.searchsorted(self.dst[start:stop], dst))
            if pair < stop and self.dst[pair] == dst:
                return pair
        raise InputError(
            f"Routes of {self.n_pairs} pairs have none from rank {src} to rank {dst}; "
            "name the pair in routes_for"
        )

    def pairs_of(self, src: NDArray[np.integer], dst: NDArray[np.integer]) -> NDArray[np.int32]:
        """Return the number of each of many pairs of ranks, -1 where there is no route."""
        pairs: NDArray[np.int32] = _pairs_of(src, dst, self.pair_ptr, self.dst)
        return pairs

    def path(self, mesh: Mesh, src: int, dst: int) -> tuple[Chip, ...]:
        """Return the chips on the way from one rank to another, both ends included."""
        pair = self.pair_of(src, dst)
        channels = self.channels[self.hop_ptr[pair] : self.hop_ptr[pair + 1]]
        ranks = [src, *mesh.neighbor_ranks.reshape(-1)[channels]]
        return tuple(mesh.live[rank] for rank in ranks)


@kernel
def _pairs_of(src, dst, pair_ptr, pair_dst):  # type: ignore[no-untyped-def]
    """Do what `Routes.pairs_of` says."""
    pairs = np.full(len(src), -1, dtype=np.int32)
    for row in range(len(src)):
        low, stop = pair_ptr[src[row]], pair_ptr[np.int64(src[row]) + 1]
        high = stop
        while low < high:
            middle = (low + high) // 2
            if pair_dst[middle] < dst[row]:
                low = middle + 1
            else:
                high = middle
        if low < stop and pair_dst[low] == dst[row]:
            pairs[row] = low
    return pairs


def routes_for(
    mesh: Mesh,
    src: NDArray[np.integer],
    dst: NDArray[np.integer],
    *,
    max_virtual_channels: int | None = None,
) -> Routes:
    """Return routes for pairs of ranks, which cannot deadlock; a pair may be named repeatedly.

    Neighbours use the link between them. Every route is a shortest live path unless the virtual
    channels run out. If their number is not given, a mesh has 2 and a torus 4 or more.

    Raises:
        InputError: a rank that does not exist, or that is paired with itself.
        TopologyError: a source cannot reach its destination.
    """
    _check_pairs(mesh, src, dst)
    pairs = np.unique(np.asarray(src, dtype=np.int64) * mesh.n_live + dst)
    sources, goals = (part.astype(np.int32) for part in np.divmod(pairs, mesh.n_live))
    by_goal = np.argsort(goals, kind="stable")
    demand = demand_of(sources[by_goal], goals[by_goal])
    tables = routing_tables(mesh, demand, max_virtual_channels=max_virtual_channels)
    virtual_channel = np.empty(len(goals), dtype=np.uint8)
    virtual_channel[by_goal] = tables.virtual_channel
    hop_ptr, channels = _paths(mesh, tables, sources, goals, virtual_channel)
    return Routes(
        n_ranks=mesh.n_live,
        n_ports=mesh.neighbor_ranks.shape[1],
        pair_ptr=np.searchsorted(sources, np.arange(mesh.n_live + 1)),
        dst=goals,
        hop_ptr=hop_ptr,
        channels=channels,
        virtual_channel=virtual_channel,
        n_virtual_channels=tables.n_virtual_channels,
        speeds=mesh.port_speeds.reshape(-1) if mesh.has_slow else None,
    )


def _check_pairs(mesh: Mesh, src: NDArray[np.integer], dst: NDArray[np.integer]) -> None:
    if src.shape != dst.shape or src.ndim != 1:
        raise InputError(
            f"routes_for needs two flat arrays of one length, but got {src.shape} and {dst.shape}"
        )
    for ranks in (src, dst):
        if np.any(outside := (ranks < 0) | (ranks >= mesh.n_live)):
            raise InputError(
                f"routes_for needs ranks below {mesh.n_live} of {mesh}, but got "
                f"{ranks[np.argmax(outside)]}"
            )
    if np.any(same := src == dst):
        raise InputError(
            f"routes_for needs pairs of different ranks, but got rank {src[np.argmax(same)]} twice"
        )


def _paths(
    mesh: Mesh,
    tables: RoutingTables,
    sources: NDArray[np.int32],
    goals: NDArray[np.int32],
    virtual_channel: NDArray[np.uint8],
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return `hop_ptr` and `channels` of the paths that the tables give these pairs."""
    ports, rows = tables.ports[0], np.searchsorted(tables.demand.destinations, goals)
    if tables.ports[-1] is not ports:  # only the last table may differ: append it to the first
        rows += len(ports) * (virtual_channel == tables.n_virtual_channels - 1)
        ports = np.concatenate([ports, tables.ports[-1]])
    hop_ptr = np.zeros(len(goals) + 1, dtype=np.int64)
    channels = np.empty(0, dtype=np.int32)
    n_hops = _walk(mesh.neighbor_ranks, ports, rows, sources, hop_ptr, channels)
    channels = np.empty(n_hops, dtype=np.int32)
    _walk(mesh.neighbor_ranks, ports, rows, sources, hop_ptr, channels)
    return hop_ptr, channels


@kernel
def _walk(
    neighbors: NDArray[np.int32],
    ports: NDArray[np.int8],
    rows: NDArray[np.int64],
    sources: NDArray[np.int32],
    hop_ptr: NDArray[np.int64],
    channels: NDArray[np.int32],
) -> int:
    """Follow the ports from each source until they end; write channels as far as there is room."""
    n_ports = neighbors.shape[1]
    n_hops = 0
    for pair in range(len(rows)):
        here = sources[pair]
        port = ports[rows[pair], here]
        while port >= 0:
            if n_hops < len(channels):
                channels[n_hops] = here * n_ports + port
            n_hops += 1
            here = neighbors[here, port]
            port = ports[rows[pair], here]
        hop_ptr[pair + 1] = n_hops
    return n_hops


def check_paths(mesh: Mesh, routes: Routes) -> None:
    """Prove that each path leads from its source to its destination over live links.

    Raises:
        VerificationError: a path that does not, with the chips at the break.
    """
    heads = mesh.neighbor_ranks.reshape(-1)
    if (routes.n_ranks, routes.n_ranks * routes.n_ports) != (mesh.n_live, heads.size):
        raise VerificationError(
            f"these routes are for {routes.n_ranks} ranks of {routes.n_ports} ports, but "
            f"{mesh} has {mesh.n_live} of {mesh.neighbor_ranks.shape[1]}"
        )
    pair, hop = _first_broken(
        heads, routes.src, routes.dst, routes.hop_ptr, routes.channels, routes.n_ports
    )
    if pair < 0:
        return
    if hop < 0:
        last = routes.channels[routes.hop_ptr[pair] : routes.hop_ptr[pair + 1]][-1:]
        arrived = heads[last[0]] if len(last) else routes.src[pair]
        _raise_broken(mesh, routes, pair, f"ends at {mesh.live[arrived]}")
    channel = int(routes.channels[hop])
    if not 0 <= channel < heads.size:
        raise VerificationError(f"no channel {channel} in {mesh}")
    _raise_broken(mesh, routes, pair, f"breaks at {mesh.live[channel // routes.n_ports]}")


@plain_kernel
def _first_broken(heads, src, dst, hop_ptr, channels, n_ports):  # type: ignore[no-untyped-def]
    """Return the first pair whose path breaks and the hop where, or -1 if it leads elsewhere.

    (-1, -1) if no path is broken. A table of arrays would take six times as much memory as paths.
    """
    for pair in range(len(dst)):
        here = src[pair]
        for hop in range(hop_ptr[pair], hop_ptr[pair + 1]):
            channel = channels[hop]
            if channel < 0 or channel >= len(heads) or channel // n_ports != here:
                return pair, hop
            here = heads[channel]
            if here < 0:
                return pair, hop
        if here != dst[pair]:
            return pair, -1
    return -1, -1


def _raise_broken(mesh: Mesh, routes: Routes, pair: int, how: str) -> NoReturn:
    ends = mesh.live[routes.src[pair]], mesh.live[routes.dst[pair]]
    raise VerificationError(
        f"a route needs live links all the way, but the one from {ends[0]} to {ends[1]} {how}"
    )


@dataclass(frozen=True)
class Stretch:
    """Hops divided by those of a shortest live path: the mean over all pairs, and the worst."""

    mean: float
    max: float


def stretch_of(mesh: Mesh, routes: Routes) -> Stretch:
    """Return the stretch of routes; without pairs it is 1."""
    by_goal = np.argsort(routes.dst, kind="stable")
    demand = demand_of(routes.src[by_goal], routes.dst[by_goal])
    return _stretch(routes.hops[by_goal], _shortest_hops(mesh, demand))


def table_stretch(mesh: Mesh, tables: RoutingTables) -> Stretch:
    """Return the stretch of the tables' routes from each source of their demand."""
    demand, shortest = tables.demand, _shortest_hops(mesh, tables.demand)
    hops = np.empty_like(shortest)
    for number, ports in enumerate(tables.ports):
        uses_it = tables.virtual_channel == number
        table = table_hops(mesh, demand.destinations, ports)
        hops[uses_it] = table[demand.rows[uses_it], demand.sources[uses_it]]
    return _stretch(hops[shortest > 0], shortest[shortest > 0])


def _shortest_hops(mesh: Mesh, demand: Demand) -> NDArray[np.int32]:
    hops = table_hops(mesh, demand.destinations, shortest_ports(mesh, demand))
    return hops[demand.rows, demand.sources]


def _stretch(hops: NDArray[np.integer], shortest: NDArray[np.integer]) -> Stretch:
    if not hops.size:
        return Stretch(1.0, 1.0)
    ratio = hops / shortest
    return Stretch(float(ratio.mean()), float(ratio.max()))
