"""The packing number of a mesh: how many spanning trees its links carry at the same time.

A fractional packing gives each spanning tree a weight so that the trees on any one link weigh its
speed or less together. The packing number is the largest possible weight of all trees. It is also
the least (cut links) / (parts - 1) over all partitions of the chips, where each cut link counts as
much as its speed. So a packing bounds it from below and a partition from above. Knows no bytes and
no seconds: `limit` turns it into time.

**Exactly**, up to some thousand links. By Tutte and Nash-Williams (1961) it is a minimum over
partitions, and Newton's method finds it: for a guess `ratio`, take the partition that maximises
`ratio x parts - cut links`; if it beats the trivial partition of one part, its own quotient is a
smaller guess, else the guess is the answer (Cunningham 1985).

The inner maximum is a Dilworth truncation, and greedy solves it with one flow a rank. Think of each
link as a unit of water that stands at either of its ends or is split between them. Ranks join one
after another. A rank that joins takes the water of its links to earlier ranks, lets as much of it
run off into free room as can, keeps the rest, and brings new room for `ratio`. The ranks that its
water could still reach but that have no room left form a tight set; tight sets that meet are one
part. In the end the free room of all ranks is `ratio x parts - cut`.

All in whole numbers: a link of capacity 1 is `denominator` of water, new room is `numerator`.
Where links are slow, a capacity is a speed in millionths, rounded up so that the bound stays true.

**As a bracket**, in time linear in the links, for huge meshes. Trees give the lower end. Each tree
is a minimum spanning tree by the load that the trees before it put on the links (greedy tree
packing, Thorup 2007); K trees whose fullest link is in `load` of them pack K / load. Partitions
give the upper end. Links that every tree needs end with the highest loads, so without them the
graph falls into parts that bind.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import TopologyError
from meshmend.kernels import kernel
from meshmend.topology.failures import Chip
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh

_MILLION = 1_000_000


@dataclass(frozen=True, eq=False)
class CapacityLinks:
    """Links between nodes, and what each carries, in whole numbers of 1 / `unit` of a full link."""

    ends: NDArray[np.int32]  # (links, 2)
    capacity: NDArray[np.int64]
    unit: int

    def __post_init__(self) -> None:
        self.ends.flags.writeable = False  # as a mesh's are: or kernels are compiled once more

    def cut(self, part_of: NDArray[np.int32]) -> int:
        """Return the capacity of all links between two parts."""
        is_cut = part_of[self.ends[:, 0]] != part_of[self.ends[:, 1]]
        return int(self.capacity[is_cut].sum())


def links_of_mesh(mesh: Mesh) -> CapacityLinks:
    """Return the live links of a mesh with their capacities: 1 each if none is slow."""
    if not mesh.has_slow:
        return CapacityLinks(mesh.links, np.ones(len(mesh.links), dtype=np.int64), 1)
    return CapacityLinks(mesh.links, _millionths(mesh.link_speeds), _MILLION)


def _millionths(speeds: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.ceil(speeds * _MILLION - 1e-6).astype(np.int64)


def bracketing_partition(
    links: CapacityLinks, n_ranks: int, *, n_trees: int, seed: int
) -> tuple[float, NDArray[np.int32]]:
    """Return the weight that these trees pack, and a partition whose quotient no packing exceeds.

    `links` join two or more ranks to one connected part.
    """
    n_on_link = _tree_loads(links, n_ranks, n_trees, seed)
    load = n_on_link * links.unit / links.capacity
    busiest = np.flatnonzero(load >= load.max() * (1 - 1e-12))
    packed = min(  # exactly, because it must not exceed a quotient that is as large
        Fraction(n_trees * int(links.capacity[link]), links.unit * int(n_on_link[link]))
        for link in busiest
    )
    return float(packed), _best_threshold_partition(links, n_ranks, load)


def quotient(part_of: NDArray[np.int32], links: CapacityLinks) -> Fraction:
    """Return (cut links) / (parts - 1) of a partition into parts 0, 1, ..., at least two."""
    return Fraction(links.cut(part_of), links.unit * int(part_of.max()))


def colour_quotient(
    part_of: NDArray[np.int32], links: CapacityLinks, colours: NDArray[np.int32]
) -> float:
    """Return (cut links) / (parts with a colour - 1), the latter as the mean over all colours."""
    n_cut = links.cut(part_of) / links.unit
    n_colours = int(colours.max()) + 1
    pairs = np.unique(np.stack([colours, part_of])[:, colours >= 0], axis=1)
    n_joins = pairs.shape[1] - n_colours
    return n_cut * n_colours / n_joins if n_joins else np.inf


def _tree_loads(links: CapacityLinks, n_ranks: int, n_trees: int, seed: int) -> NDArray[np.int32]:
    """Return how many of the trees, grown one after another, use each link.

    Each takes links that carry little for their capacity.
    """
    random = np.random.default_rng(seed)
    speed = links.capacity / links.unit
    load: NDArray[np.int32] = np.zeros(len(speed), dtype=np.int32)
    leader = np.empty(n_ranks, dtype=np.int32)
    for _ in range(n_trees):
        order = np.argsort((load + random.random(len(speed))) / speed)  # ties fall at random
        leader[:] = np.arange(n_ranks)
        _grow_forest(links.ends, order, leader, load)
    return load


def _best_threshold_partition(
    links: CapacityLinks, n_ranks: int, load: NDArray[np.float64]
) -> NDArray[np.int32]:
    """Return the best partition among: one rank alone, and what links of low load hold together."""
    degree = np.zeros(n_ranks, dtype=np.int64)
    np.add.at(degree, links.ends, links.capacity[:, None])
    alone = int(degree.argmin())
    best: NDArray[np.int32] = (np.arange(n_ranks) == alone).astype(np.int32)
    best_quotient = Fraction(int(degree[alone]))  # of capacities, in units
    order = np.argsort(load, kind="stable")
    bounds = np.searchsorted(load[order], np.unique(load))
    leader: NDArray[np.int32] = np.arange(n_ranks, dtype=np.int32)
    unused = np.zeros(len(load), dtype=np.int32)
    for start, stop in zip((0, *bounds[:-1]), bounds, strict=True):
        _grow_forest(links.ends, order[start:stop], leader, unused)
        n_parts, n_cut = _count_parts(links.ends, links.capacity, leader)
        if n_parts == 1:
            break
        if Fraction(n_cut, n_parts - 1) < best_quotient:
            best_quotient = Fraction(n_cut, n_parts - 1)
            best = np.unique(leader, return_inverse=True)[1].astype(np.int32)
    return best


@kernel
def _grow_forest(
    links: NDArray[np.int32],
    order: NDArray[np.int64],
    leader: NDArray[np.int32],
    load: NDArray[np.int32],
) -> None:
    """Join the parts that the links join, in order, and add one to the load of links that do."""
    for link in order:
        one, other = find_leader(leader, links[link, 0]), find_leader(leader, links[link, 1])
        if one != other:
            leader[max(one, other)] = min(one, other)
            load[link] += 1


@kernel
def _count_parts(
    links: NDArray[np.int32], capacity: NDArray[np.int64], leader: NDArray[np.int32]
) -> tuple[int, int]:
    """Return how many parts there are and what links between them carry; `leader` ends flat."""
    n_parts, n_cut = 0, 0
    for rank in range(len(leader)):
        leader[rank] = find_leader(leader, rank)
        n_parts += leader[rank] == rank
    for link in range(len(links)):
        if leader[links[link, 0]] != leader[links[link, 1]]:
            n_cut += capacity[link]
    return n_parts, n_cut


@kernel
def find_leader(leader: NDArray[np.int32], rank: int) -> int:
    """Return the smallest rank of a rank's part, and shorten the way to it."""
    while leader[rank] != rank:
        leader[rank] = leader[leader[rank]]
        rank = leader[rank]
    return rank


@dataclass(frozen=True, eq=False)
class PortTable:
    """A graph whose nodes have ports: the node behind each port, and that node's port back, or -1.

    Two nodes may be joined by several links. `capacity` is that of the link behind each port.
    """

    neighbors: NDArray[np.int32]
    back: NDArray[np.int32]
    capacity: NDArray[np.int64]

    def __post_init__(self) -> None:
        self.neighbors.flags.writeable = False  # as a mesh's are: or kernels are compiled once more


def ports_of_mesh(mesh: Mesh) -> PortTable:
    """Return the ports of a mesh: they come in pairs, down and up an axis."""
    ports = np.arange(mesh.neighbor_ranks.shape[1], dtype=np.int32) ^ 1
    capacity = np.ones(mesh.neighbor_ranks.shape, dtype=np.int64)
    if mesh.has_slow:
        capacity = _millionths(mesh.port_speeds)
    return PortTable(mesh.neighbor_ranks, np.tile(ports, (mesh.n_live, 1)), capacity)


def ports_of_links(links: CapacityLinks, n_nodes: int) -> PortTable:
    """Return the ports of any graph, one for each end of a link."""
    degree = np.bincount(links.ends.ravel(), minlength=n_nodes)
    neighbors = np.full((n_nodes, int(degree.max(initial=0))), -1, dtype=np.int32)
    back, used = np.full_like(neighbors, -1), np.zeros(n_nodes, dtype=np.int64)
    capacity = np.zeros(neighbors.shape, dtype=np.int64)
    for (one, other), size in zip(links.ends.tolist(), links.capacity.tolist(), strict=True):
        here, there = used[one], used[other]
        neighbors[one, here], neighbors[other, there] = other, one
        back[one, here], back[other, there] = there, here
        capacity[one, here] = capacity[other, there] = size
        used[one] += 1
        used[other] += 1
    return PortTable(neighbors, back, capacity)


def binding_partition(
    ports: PortTable, links: CapacityLinks, start: NDArray[np.int32]
) -> tuple[NDArray[np.int32], int]:
    """Return the part of each node in a partition that binds, and how many guesses it took.

    The graph is connected and has two nodes or more; `start` is any partition of them into
    parts 0, 1, ...: the first guess is its quotient. A guess takes one flow a node; from the
    partition of the bracket there are rarely more than two.
    """
    part_of, n_guesses = start, 0
    least = int(links.capacity.min())  # no connected graph has less than its slowest link
    while (guess := quotient(part_of, links) * links.unit) > least:
        n_guesses += 1
        leader, room = _best_partition(
            ports.neighbors, ports.back, ports.capacity, guess.numerator, guess.denominator
        )
        if room == guess.numerator:  # no partition beats the trivial one
            break
        part_of = np.unique(leader, return_inverse=True)[1].astype(np.int32)
    return part_of, n_guesses


@kernel
def _best_partition(
    neighbors: NDArray[np.int32],
    back: NDArray[np.int32],
    capacity: NDArray[np.int64],
    numerator: int,
    denominator: int,
) -> tuple[NDArray[np.int32], int]:
    """Return the smallest rank of each rank's part, and the free room of all ranks."""
    n_ranks, n_ports = neighbors.shape
    water = np.zeros((n_ranks, n_ports), dtype=np.int64)  # of the link behind a port, at this end
    room = np.zeros(n_ranks, dtype=np.int64)
    leader = np.arange(n_ranks).astype(np.int32)
    came_by = np.empty(n_ranks, dtype=np.int32)
    queue = np.empty(n_ranks, dtype=np.int32)
    seen = np.zeros(n_ranks, dtype=np.int64)  # the number of the last search that came here
    search = 0
    for rank in range(n_ranks):
        for port in range(n_ports):
            if 0 <= neighbors[rank, port] < rank:
                water[rank, port] = denominator * capacity[rank, port]
        while True:
            search += 1
            seen[rank] = search
            queue[0] = rank
            free, n_reached = _find_room(neighbors, back, water, room, queue, came_by, seen)
            if free < 0:
                break
            _run_off(neighbors, back, water, room, came_by, rank, free)
        room[rank] = numerator
        for at in range(1, n_reached):
            _join(leader, rank, queue[at])
    for rank in range(n_ranks):
        leader[rank] = find_leader(leader, rank)
    return leader, room.sum()


@kernel
def _find_room(
    neighbors: NDArray[np.int32],
    back: NDArray[np.int32],
    water: NDArray[np.int64],
    room: NDArray[np.int64],
    queue: NDArray[np.int32],
    came_by: NDArray[np.int32],
    seen: NDArray[np.int64],
) -> tuple[int, int]:
    """Return the nearest rank with room that water of `queue[0]` can reach, or -1, and how many
    ranks the search saw; they are in `queue`, and `came_by` has their ports on the way back.
    """
    search = seen[queue[0]]
    head, tail = 0, 1
    while head < tail:
        here = queue[head]
        head += 1
        for port in range(neighbors.shape[1]):
            if water[here, port] > 0:
                there = neighbors[here, port]
                if seen[there] != search:
                    seen[there] = search
                    came_by[there] = back[here, port]
                    if room[there] > 0:
                        return there, tail
                    queue[tail] = there
                    tail += 1
    return -1, tail


@kernel
def _run_off(
    neighbors: NDArray[np.int32],
    back: NDArray[np.int32],
    water: NDArray[np.int64],
    room: NDArray[np.int64],
    came_by: NDArray[np.int32],
    start: int,
    free: int,
) -> None:
    """Move as much water as fits along the way that `came_by` remembers, to the room at its end."""
    amount = room[free]
    here = free
    while here != start:
        port = came_by[here]
        before = neighbors[here, port]
        amount = min(amount, water[before, back[here, port]])
        here = before
    room[free] -= amount
    here = free
    while here != start:
        port = came_by[here]
        before = neighbors[here, port]
        water[here, port] += amount
        water[before, back[here, port]] -= amount
        here = before


@kernel
def _join(leader: NDArray[np.int32], one: int, other: int) -> None:
    one, other = find_leader(leader, one), find_leader(leader, other)
    leader[max(one, other)] = min(one, other)


EXACT_CHIPS = 1 << 14  # 128x128 takes seconds; time grows with the square of the chips
_SMALL_CHIPS = 1 << 10  # up to here a poor first guess costs less than many trees
_SEED = 0


@dataclass(frozen=True, eq=False)
class PackingNumber:
    """A bracket of a mesh's packing number and the partition that proves its upper end.

    `part_of[rank]` numbers the parts from 0 on. One chip needs no link: then there is one part,
    and both ends are infinite. With `colours`, one for each rank or -1, trees join the ranks of one
    colour, and each colour has an equal part of the weight: then a tree crosses into as many parts
    as have its colour, less one.
    """

    mesh: Mesh
    lower: float
    part_of: NDArray[np.int32]
    colours: NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        if len(self.part_of) != self.mesh.n_live:
            raise TopologyError(
                f"PackingNumber needs a part for each of {self.mesh.n_live} live chips, but got "
                f"{len(self.part_of)}"
            )
        assert self.lower <= self.upper, "a packing beats a cut"
        self.part_of.flags.writeable = False

    @cached_property
    def upper(self) -> float:
        """The quotient (cut links) / (parts - 1) of the partition."""
        if self.colours is not None:
            return colour_quotient(self.part_of, links_of_mesh(self.mesh), self.colours)
        if self.n_parts == 1:
            return np.inf
        return float(quotient(self.part_of, links_of_mesh(self.mesh)))

    @property
    def exact(self) -> bool:
        """Whether both ends of the bracket are one number."""
        return self.lower == self.upper

    @cached_property
    def n_parts(self) -> int:
        """How many parts the partition has."""
        return int(self.part_of.max()) + 1

    @cached_property
    def cut_links(self) -> NDArray[np.int32]:
        """The links between parts, as pairs of ranks: the bottleneck."""
        ends = self.part_of[self.mesh.links]
        cut: NDArray[np.int32] = self.mesh.links[ends[:, 0] != ends[:, 1]]
        return cut

    def describe(self) -> str:
        """Return in words which links bind: `the 2 links of corner (0, 0), 1 of them slow`."""
        ends = self.part_of[self.mesh.links]
        is_slow = (ends[:, 0] != ends[:, 1]) & (self.mesh.link_speeds < 1)
        n_slow = int(np.count_nonzero(is_slow))
        return self._binding_links() + (f", {n_slow} of them slow" if n_slow else "")

    def _binding_links(self) -> str:
        n_cut, n_live = len(self.cut_links), self.mesh.n_live
        if self.n_parts == 1:
            return "no link: there is one chip"
        if self.n_parts == n_live:
            return f"all {n_cut} links over {n_live} chips" if n_live > 2 else "the only link"
        if self.colours is not None:
            return f"the {n_cut} links between {self.n_parts} parts of one tile or more"
        sizes = np.bincount(self.part_of)
        apart = self.mesh.coordinates[self.part_of != sizes.argmax()]
        links = f"the {n_cut} links" if n_cut > 1 else "the only link"
        if len(apart) == 1:
            return f"{links} of {self._chip_in_words(tuple(apart[0].tolist()))}"
        if n_cut == self.n_parts - 1 > 1:
            return f"{n_cut} links that have no way around, between {self.n_parts} parts"
        box = f"{_chip(apart.min(axis=0))} to {_chip(apart.max(axis=0))}"
        if self.n_parts == 2:
            return f"{links} around {len(apart)} chips from {box}"
        if len(apart) == self.n_parts - 1:
            return f"{links} that touch {len(apart)} chips from {box}"
        return f"{links} between {self.n_parts} parts, the largest of {sizes.max()} chips"

    def _chip_in_words(self, chip: Chip) -> str:
        axes = zip(chip, self.mesh.shape, self.mesh.wrap, strict=True)
        is_corner = len(chip) > 1 and all(
            at in {0, size - 1} and not wraps for at, size, wraps in axes
        )
        return f"{'corner' if is_corner else 'chip'} {chip}"


def packing_number(mesh: Mesh) -> PackingNumber:
    """Return the packing number of a connected mesh, exact up to `EXACT_CHIPS` live chips.

    For more chips it is the bracket of `packing_bracket`.

    Raises:
        TopologyError: the live chips are not connected.
    """
    return exact_packing_number(mesh) if mesh.n_live <= EXACT_CHIPS else packing_bracket(mesh)


@lru_cache(maxsize=64)
def exact_packing_number(mesh: Mesh) -> PackingNumber:
    """Return the packing number of a connected mesh, of any size, with both ends equal.

    The time grows with the square of the chips: 32x32 in milliseconds, 128x128 in seconds.

    Raises:
        TopologyError: the live chips are not connected.
    """
    is_small = mesh.n_live <= _SMALL_CHIPS
    start = packing_bracket(mesh, n_trees=32) if is_small else packing_bracket(mesh)
    if start.n_parts == 1:
        return start
    links = links_of_mesh(mesh)
    part_of, _ = binding_partition(ports_of_mesh(mesh), links, start.part_of)
    return PackingNumber(mesh, float(quotient(part_of, links)), part_of)


@lru_cache(maxsize=64)
def packing_bracket(mesh: Mesh, *, n_trees: int = 256) -> PackingNumber:
    """Return a bracket whose lower end `n_trees` trees reach, in time linear in links x trees.

    Twice the trees about halve the gap.

    Raises:
        TopologyError: the live chips are not connected, or `n_trees` is below one.
    """
    if n_trees < 1:
        raise TopologyError(f"packing_bracket needs at least one tree, but got {n_trees}")
    if not mesh_figures(mesh).is_connected:
        raise TopologyError(
            f"the packing number needs connected chips, but {mesh} has chips cut off; "
            "take largest_part(mesh) first"
        )
    if mesh.n_live == 1:
        return PackingNumber(mesh, np.inf, np.zeros(1, dtype=np.int32))
    links = links_of_mesh(mesh)
    lower, part_of = bracketing_partition(links, mesh.n_live, n_trees=n_trees, seed=_SEED)
    return PackingNumber(mesh, lower, part_of)


def _chip(coordinates: NDArray[np.int64]) -> Chip:
    return tuple(coordinates.tolist())
