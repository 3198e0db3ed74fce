"""The physical limit: no schedule of a collective on this mesh and fabric is faster.

Five bounds; the limit is the largest of those that hold for the collective.
`docs/design/0010-limit.md` has the proofs for an allreduce, `0011-owners.md` for the others.

Bandwidth (allreduce, sharded update). Cut the mesh into parts, and follow one byte of the result.
Until a first part holds the sum of all, messages between parts must have joined them all: parts - 1
at least. Every other part must then still receive that sum or the rest of it: parts - 1 more. (It
is the one-way gossip problem, Harary and Schwenk 1974; bytes are added and moved, not coded.)
Between the parts there are 2 x cut channels of bandwidth B, so D (parts - 1) / (cut x B) seconds
pass, and the worst partition gives D / (packing number x B). Where the packing number is known only
as a bracket, its upper end is used, so the bound stays true. The last message pays one overhead and
takes one hop to arrive. Here and below, a slow link counts as the part of a link that its speed is.

Exit. All D bytes of a chip leave it over its links, and what leaves last still has to reach the
chip farthest away: D / (links x B) + overhead + hops x hop latency. To reach several chips so far
away it must leave in more messages, or some overheads earlier, so that others can hand it on. The
same holds for a set of chips and the links around it (`Exit`). In a reduce-scatter a part leaves
only if another chip owns it, and goes no farther than to its owner; an all-gather is that
backwards, and the bound is named entry (`owner_exits`). In a sharded update it goes on from there,
as an updated weight, to the chip farthest from the owner. Owners that are far away bind by hops,
and all owners together bind by bytes, so each number of hops is a bound of its own.

All-to-all. Nothing is added, so no packing bounds it. `pair_cut` bounds its bandwidth, and it has
the exits of a reduce-scatter: a chip's block for another goes as far as that one.

Chip (not for an all-gather or an all-to-all). Each byte of the result takes n - 1 additions
somewhere among n chips that add at most C bytes a second each: D (n - 1) / (n x C), even if they
share the work evenly, after the first message has arrived.

Update (sharded update). An owner cannot begin before a message from the chip farthest away is
there. It updates its share, and the last of it goes back to that chip.

Messages. On one channel they arrive one overhead apart, so in that time a chip of k links hears at
most k times as much as any chip knew before: what it knows grows by 1 + k. A chip that hears from
all n takes log n of these overheads at least, and a hop (`n_rounds`). It binds where overhead is
much longer than a hop.

The two bounds that were the limit before, of bandwidth and of hops without overhead, are still
there: `bandwidth_s` and `latency_s`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.kernels import kernel
from meshmend.schedule.table import Collective
from meshmend.topology.fabric import Fabric
from meshmend.topology.figures import MeshFigures, mesh_figures
from meshmend.topology.graph import breadth_first, distances_from, distances_from_any
from meshmend.topology.mesh import Mesh
from meshmend.topology.packing_number import PackingNumber, packing_number
from meshmend.topology.pair_cut import pair_cut
from meshmend.units import format_bytes, format_time

Shares = NDArray[np.float64]  # what part of the payload each rank owns; together 1

_HALVES = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)

_MOST_LOOKED_AT = 16  # chips with equal links that are as far from some other
_HOPS_LOOKED_AT = 8  # of the most: chips nearer are more, but each hop less must be made up for
_MOST_PARTS = 8  # larger parts of the binding partition that are looked at


@dataclass(frozen=True)
class Exit:
    """A set of chips, by one of them: its links, and the hops that some byte takes across it.

    `hops` counts from the chip inside that is farthest from the links, over one of them, to the
    chip outside that is farthest from them. `share` is the part of the payload that goes so far.
    `capacity` is what the links carry together, in links of full speed. `n_far` chips are so many
    hops away or more, and all of that part goes to each of them.
    """

    n_chips: int
    rank: int
    n_links: int
    hops: int
    share: float = 1.0
    n_far: int = 1
    capacity: float = field(kw_only=True)

    def describe(self, mesh: Mesh, *, verb: str = "leaves") -> str:
        """Return in words what leaves, or with another verb enters, and how far it goes."""
        links = f"{self.n_links} link{'s' if self.n_links > 1 else ''}"
        if self.capacity < self.n_links:
            links += f" of {self.capacity:.3g} links' bandwidth"
        chip = mesh.live[self.rank]
        where = f"chip {chip}" if self.n_chips == 1 else f"the {self.n_chips} chips around {chip}"
        what = "the payload" if self.share == 1 else f"{self.share:.3g} of the payload"
        whom = f" to each of {self.n_far} chips" if self.n_far > 1 else ""
        return (
            f"{what} {verb} {where} over {links}, and some of it takes {self.hops} "
            f"hop{'s' if self.hops > 1 else ''}{whom}"
        )


@dataclass(frozen=True, eq=False)
class Limit:
    """The least time of a collective of `payload_bytes`: the largest of its bounds.

    `bandwidth_s` is the time of the busiest links alone, `latency_s` that of the longest way for
    an empty message without overhead. `chip_s` is the time of the additions alone, or None where
    the fabric does not limit the chips or nothing is added. `update_s` is the bound by the update,
    or None if nothing is updated.
    """

    fabric: Fabric
    payload_bytes: float
    packing: PackingNumber
    bandwidth_s: float
    latency_s: float
    chip_s: float | None
    update_s: float | None = None
    collective: Collective = Collective.ALLREDUCE
    exits: tuple[Exit, ...] = field(default=(), repr=False)
    rounds: tuple[int, ...] = ()  # of messages, for each time that all chips hear from all

    @property
    def time_s(self) -> float:
        """No schedule of the collective is faster than this."""
        return max(self.bounds_s().values())

    @property
    def kind(self) -> str:
        """Which bound binds: `bandwidth`, `exit` or `entry`, `update`, `chip` or `messages`."""
        bounds = self.bounds_s()
        return max(bounds, key=lambda kind: bounds[kind])

    @property
    def bandwidth_or_latency_s(self) -> float:
        """The larger of the two bounds that leave out overhead: bandwidth, and hops."""
        return max(self.bandwidth_s, self.latency_s)

    @property
    def exit(self) -> Exit | None:
        """The exit with the largest bound; None for one chip."""
        return max(self.exits, key=self._exit_s, default=None)

    def bounds_s(self) -> dict[str, float]:
        """Return the bounds by kind."""
        way, first_s = self.exit, self.fabric.message_overhead_s + self.fabric.hop_latency_s
        bounds = {} if self.update_s is None else {"update": self.update_s}
        if way is None:
            return {"bandwidth": 0.0} | bounds
        bounds = {self._exit_kind: self._exit_s(way)} | bounds
        if self.collective not in _HALVES:
            bounds = {"bandwidth": self.bandwidth_s + first_s} | bounds
        if self.rounds:
            bounds["messages"] = (
                sum(self.rounds) * self.fabric.message_overhead_s
                + len(self.rounds) * self.fabric.hop_latency_s
            )
        return bounds if self.chip_s is None else bounds | {"chip": self.chip_s + first_s}

    def describe(self) -> str:
        """Return the limit in one line: the time, on what fabric, and what binds."""
        packing = self.packing
        verb = "enters" if self._exit_kind == "entry" else "leaves"
        reasons = {
            "bandwidth": pair_cut(packing.mesh).describe()
            if self.collective is Collective.ALL_TO_ALL
            else f"packing number {packing.upper:.4g}, bound by {packing.describe()}",
            self._exit_kind: self.exit.describe(packing.mesh, verb=verb) if self.exit else "",
            "chip": "the additions of all chips",
            "messages": f"{sum(self.rounds)} messages one after another, so that all chips hear "
            "from all",
            "update": "an owner hears from all chips, updates its share, and all hear from it",
        }
        return (
            f"at least {format_time(self.time_s)} for {format_bytes(self.payload_bytes)} on "
            f"{self.fabric.name}, by {self.kind}: {reasons[self.kind]}"
        )

    @property
    def _exit_kind(self) -> str:
        return "entry" if self.collective is Collective.ALL_GATHER else "exit"

    def _exit_s(self, way: Exit) -> float:
        bandwidth = way.capacity * self.fabric.link_bandwidth_bytes_per_s
        bytes_s = way.share * self.payload_bytes / bandwidth
        overhead_s = self.fabric.message_overhead_s
        sent_s = overhead_s + bytes_s
        if way.n_far > 1:
            most_links = int(mesh_figures(self.packing.mesh).degrees.max())
            sent_s = _heard_s(way, most_links, bytes_s, overhead_s)
        return sent_s + way.hops * self.fabric.hop_latency_s


def _heard_s(way: Exit, most_links: int, bytes_s: float, overhead_s: float) -> float:
    """Return the time beyond the hops until each of `n_far` chips has all that leaves.

    `bytes_s` is the time of the bytes if each left once. But a message that leaves only n
    overheads before the end reaches (1 + most_links)^n chips at most.
    """
    n_reached, n_in_all, n_messages = 1, 0, 0
    left_s, sent_s = way.n_far * bytes_s, overhead_s
    while n_in_all < way.n_far:
        n_in_all += way.n_links * n_reached
        n_messages += 1
        n_reached *= 1 + most_links
    n_reached = 1
    while n_reached < way.n_far and left_s > n_reached * overhead_s:
        left_s -= n_reached * overhead_s
        sent_s += overhead_s
        n_reached *= 1 + most_links
    return max(n_messages * overhead_s, sent_s + left_s / min(n_reached, way.n_far))


def limit(
    mesh: Mesh,
    fabric: Fabric,
    payload_bytes: float,
    collective: Collective = Collective.ALLREDUCE,
    *,
    shares: Shares | None = None,
) -> Limit:
    """Return the least time that any schedule of a collective takes on a connected mesh.

    `shares` says what part of the payload each rank owns; without it all own an equal part. An
    allreduce needs no owners, so there they change nothing.

    Raises:
        TopologyError: the live chips are not connected.
        InputError: a payload that is negative or not finite.
    """
    if not (math.isfinite(payload_bytes) and payload_bytes >= 0):
        raise InputError(f"limit needs a payload of zero bytes or more, but got {payload_bytes}")
    collective = Collective(collective)  # a name is equal to its collective, but not the same
    packing, figures = packing_number(mesh), mesh_figures(mesh)
    owned = np.full(mesh.n_live, 1 / mesh.n_live) if shares is None else shares
    is_updated = collective is Collective.SHARDED_UPDATE
    is_sum = collective in (Collective.ALLREDUCE, Collective.SHARDED_UPDATE)
    ways: tuple[Exit, ...] = exits(packing) if is_sum else ()
    if collective is not Collective.ALLREDUCE:
        ways += owner_exits(packing, shares, is_updated=is_updated)
    busiest = 1 / packing.upper
    if collective in _HALVES and mesh.n_live > 1:
        busiest = float(np.max((1 - owned) / figures.capacities))
    if collective is Collective.ALL_TO_ALL:
        busiest = pair_cut(mesh).blocks / mesh.n_live
    there_and_back = 2 if is_updated else 1
    return Limit(
        fabric=fabric,
        payload_bytes=payload_bytes,
        packing=packing,
        bandwidth_s=busiest * payload_bytes / fabric.link_bandwidth_bytes_per_s,
        latency_s=there_and_back * figures.diameter * fabric.hop_latency_s,
        chip_s=_chip_s(mesh, fabric, payload_bytes, collective),
        update_s=_update_s(figures, fabric, payload_bytes * owned) if is_updated else None,
        collective=collective,
        exits=ways,
        rounds=rounds_of(mesh, collective, owned),
    )


def rounds_of(mesh: Mesh, collective: Collective, owned: Shares | None = None) -> tuple[int, ...]:
    """Return after how many messages, one after another, a chip can have heard from all others.

    In an all-gather it hears from the owners. In a sharded update owners hear from all, then all
    from the owners.
    """
    n_owners = mesh.n_live if owned is None else int(np.count_nonzero(owned))
    to_owners, from_owners = _n_rounds(mesh, mesh.n_live), _n_rounds(mesh, n_owners)
    if collective is Collective.SHARDED_UPDATE:
        return (to_owners, from_owners)
    return (from_owners,) if collective is Collective.ALL_GATHER else (to_owners,)


def _n_rounds(mesh: Mesh, n_heard: int) -> int:
    """Return how often what a chip knows has to grow; the last time at a chip of few links."""
    if n_heard == 1:
        return 0
    figures, n_rounds, n_known = mesh_figures(mesh), 1, 1 + mesh_figures(mesh).min_degree
    while n_known < n_heard:
        n_known *= 1 + int(figures.degrees.max())
        n_rounds += 1
    return n_rounds


def _chip_s(
    mesh: Mesh, fabric: Fabric, payload_bytes: float, collective: Collective
) -> float | None:
    chip_bandwidth = fabric.chip_bandwidth_bytes_per_s
    if chip_bandwidth is None or collective in (Collective.ALL_GATHER, Collective.ALL_TO_ALL):
        return None
    return payload_bytes * (mesh.n_live - 1) / mesh.n_live / chip_bandwidth


def _update_s(figures: MeshFigures, fabric: Fabric, owned_bytes: Shares) -> float:
    """Return the bound by the owner that ends last: hops to it, its update, and hops from it."""
    update_s = owned_bytes / (fabric.update_bytes_per_s or math.inf)
    if len(owned_bytes) == 1:
        return float(update_s[0])
    way_s = fabric.message_overhead_s + figures.eccentricities * fabric.hop_latency_s
    return float(np.max(np.where(owned_bytes > 0, 2 * way_s + update_s, 0.0)))


@dataclass(frozen=True, eq=False)
class LargePart:
    """A connected set of chips: its links to the rest, and the hops on either side of them.

    `hops_inside` is the most from a chip inside to the links, that of `rank`. `hops_outside` has
    the hops of each rank outside, and -1 for those inside.
    """

    n_chips: int
    rank: int
    n_links: int
    capacity: float
    hops_inside: int
    hops_outside: NDArray[np.int32]


@lru_cache(maxsize=64)
def exits(packing: PackingNumber) -> tuple[Exit, ...]:
    """Return the exits worth a look: of single chips, and of larger parts of the partition.

    Of chips whose links carry as much it is the one with the most hops to go. One chip has none.
    """
    mesh = packing.mesh
    if mesh.n_live == 1:
        return ()
    return (*_exits_of_chips(mesh), *_exits_of_parts(mesh, packing.part_of))


def _exits_of_chips(mesh: Mesh) -> Iterator[Exit]:
    """Yield for each capacity of links how many chips are so far from one of those farthest out."""
    figures = mesh_figures(mesh)
    for capacity in np.unique(figures.capacities).tolist():
        hops = np.where(figures.capacities == capacity, figures.eccentricities, -1)
        farthest_out = np.flatnonzero(hops == hops.max())[:_MOST_LOOKED_AT]
        counts = [np.bincount(distances_from(mesh, rank)) for rank in farthest_out]
        n_far = np.cumsum(np.stack(counts)[:, ::-1], axis=1)[:, ::-1]
        for away in range(int(hops.max()), max(0, int(hops.max()) - _HOPS_LOOKED_AT), -1):
            rank, n = farthest_out[np.argmax(n_far[:, away])], int(n_far[:, away].max())
            yield Exit(1, int(rank), int(figures.degrees[rank]), away, n_far=n, capacity=capacity)


def _exits_of_parts(mesh: Mesh, part_of: NDArray[np.int32]) -> Iterator[Exit]:
    for part in large_parts(mesh, part_of):
        hops = part.hops_inside + 1 + int(part.hops_outside.max())
        yield Exit(part.n_chips, part.rank, part.n_links, hops, capacity=part.capacity)


def large_parts(mesh: Mesh, part_of: NDArray[np.int32]) -> Iterator[LargePart]:
    """Yield the largest parts of a partition that have two chips or more and leave some outside."""
    sizes = np.bincount(part_of)
    order = np.argsort(-sizes, kind="stable")[:_MOST_PARTS]
    ends = part_of[mesh.links]
    for part in order[(sizes[order] > 1) & (sizes[order] < mesh.n_live)]:
        is_crossing = (ends == part).sum(axis=1) == 1
        crossing = mesh.links[is_crossing]
        is_inside = part_of == part
        touched = np.unique(crossing)
        to_links = distances_from_any(mesh, touched[is_inside[touched]])
        from_links = distances_from_any(mesh, touched[~is_inside[touched]])
        inside, outside = np.where(is_inside, to_links, -1), np.where(is_inside, -1, from_links)
        yield LargePart(
            n_chips=int(sizes[part]),
            rank=int(np.argmax(inside)),
            n_links=len(crossing),
            capacity=float(mesh.link_speeds[is_crossing].sum()),
            hops_inside=int(inside.max()),
            hops_outside=outside.astype(np.int32),
        )


def owner_exits(
    packing: PackingNumber, shares: Shares | None, *, is_updated: bool
) -> tuple[Exit, ...]:
    """Return the exits of single chips and, of a half, those of large parts as well.

    Without shares every rank owns an equal one. With `is_updated` the owners send on what they get.
    """
    if shares is None:
        return _exits_to_equal_owners(packing, is_updated)
    return tuple(_owner_exits(packing, shares, is_updated))


@lru_cache(maxsize=64)
def _exits_to_equal_owners(packing: PackingNumber, is_updated: bool) -> tuple[Exit, ...]:
    n_ranks = packing.mesh.n_live
    return tuple(_owner_exits(packing, np.full(n_ranks, 1 / n_ranks), is_updated))


def _owner_exits(packing: PackingNumber, shares: Shares, is_updated: bool) -> Iterator[Exit]:
    mesh = packing.mesh
    if mesh.n_live == 1:
        return
    yield from _owner_exits_of_chips(mesh, shares, is_updated)
    if not is_updated:
        yield from _owner_exits_of_parts(packing, shares)


def _owner_exits_of_chips(mesh: Mesh, shares: Shares, is_updated: bool) -> Iterator[Exit]:
    """Yield for each capacity of links and hops the chip from which most has to go so far."""
    figures = mesh_figures(mesh)
    capacities, which = np.unique(figures.capacities, return_inverse=True)
    most, ranks = _most_by_hops(
        mesh.neighbor_ranks, which.reshape(-1), figures.eccentricities, shares, is_updated
    )
    for kind, hops in np.argwhere(most > 0).tolist():
        share, rank = float(most[kind, hops]), int(ranks[kind, hops])
        capacity, n_links = float(capacities[kind]), int(figures.degrees[rank])
        yield Exit(1, rank, n_links, hops, min(share, 1.0), capacity=capacity)


def _owner_exits_of_parts(packing: PackingNumber, shares: Shares) -> Iterator[Exit]:
    """Yield what leaves a large part, for the owners outside at each distance from its links."""
    for part in large_parts(packing.mesh, packing.part_of):
        for hops_outside in np.unique(part.hops_outside[part.hops_outside >= 0]).tolist():
            share = float(shares[part.hops_outside >= hops_outside].sum())
            hops = part.hops_inside + 1 + hops_outside
            n_links, capacity = part.n_links, part.capacity
            yield Exit(part.n_chips, part.rank, n_links, hops, min(share, 1.0), capacity=capacity)


@kernel
def _most_by_hops(neighbors, kinds, eccentricities, shares, is_updated):  # type: ignore[no-untyped-def]
    """Return, by kind of chip and hops, the largest share that goes so many hops, and its chip."""
    n_ranks = len(shares)
    most_hops = 2 * eccentricities.max() + 1
    most = np.zeros((kinds.max() + 1, most_hops))
    best = np.zeros((kinds.max() + 1, most_hops), dtype=np.int32)
    distance, order = np.empty(n_ranks, dtype=np.int32), np.empty(n_ranks, dtype=np.int32)
    exactly = np.empty(most_hops)
    for rank in range(n_ranks):
        breadth_first(neighbors, rank, distance, order)
        exactly[:] = 0.0
        for owner in range(n_ranks):
            if is_updated:
                exactly[distance[owner] + eccentricities[owner]] += shares[owner]
            elif owner != rank:
                exactly[distance[owner]] += shares[owner]
        share = 0.0
        for hops in range(most_hops - 1, 0, -1):
            share += exactly[hops]
            if share > most[kinds[rank], hops]:
                most[kinds[rank], hops] = share
                best[kinds[rank], hops] = rank
    return most, best
