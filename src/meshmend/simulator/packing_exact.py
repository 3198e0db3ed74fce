"""The partition of a graph that binds its spanning-tree packing number, found exactly.

The packing number is the least (cut links) / (parts - 1) over all partitions of the ranks
(Tutte 1961, Nash-Williams 1961). Newton's method finds it: for a guess `ratio`, take the
partition that maximises `ratio x parts - cut links`; if it beats the trivial partition of one
part, its own quotient is a smaller guess, else the guess is the answer (Cunningham 1985).

The inner maximum is a Dilworth truncation, and greedy solves it with one flow a rank. Think of
each link as a unit of water that stands at either of its ends or is split between them. Ranks
join one after another. A rank that joins takes the water of its links to earlier ranks, lets as
much of it run off into free room as can, keeps the rest, and brings new room for `ratio`. The
ranks that its water could still reach but that have no room left form a tight set; tight
sets that meet are one part. In the end the free room of all ranks is `ratio x parts - cut`.

All in whole numbers: one link is `denominator` of water, new room is `numerator`.
"""

import numpy as np
from numpy.typing import NDArray

from meshmend.kernels import kernel
from meshmend.simulator.packing_trees import find_leader, quotient
from meshmend.topology.mesh import Mesh

# Ports come in pairs, down and up an axis: the other end of a link sees it behind `port ^ 1`.


def binding_partition(mesh: Mesh, start: NDArray[np.int32]) -> tuple[NDArray[np.int32], int]:
    """Return the part of each rank in a partition that binds, and how many guesses it took.

    The mesh is connected and has two chips or more; `start` is any partition of its ranks into
    parts 0, 1, ...: the first guess is its quotient. A guess takes one flow a rank; from the
    partition of `packing_trees` there are rarely more than two.
    """
    part_of, n_guesses = start, 0
    while (guess := quotient(part_of, mesh.links)) > 1:  # no connected mesh has less than 1
        n_guesses += 1
        leader, room = _best_partition(mesh.neighbor_ranks, guess.numerator, guess.denominator)
        if room == guess.numerator:  # no partition beats the trivial one
            break
        part_of = np.unique(leader, return_inverse=True)[1].astype(np.int32)
    return part_of, n_guesses


@kernel
def _best_partition(
    neighbors: NDArray[np.int32], numerator: int, denominator: int
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
                water[rank, port] = denominator
        while True:
            search += 1
            seen[rank] = search
            queue[0] = rank
            free, n_reached = _find_room(neighbors, water, room, queue, came_by, seen)
            if free < 0:
                break
            _run_off(neighbors, water, room, came_by, rank, free)
        room[rank] = numerator
        for at in range(1, n_reached):
            _join(leader, rank, queue[at])
    for rank in range(n_ranks):
        leader[rank] = find_leader(leader, rank)
    return leader, room.sum()


@kernel
def _find_room(
    neighbors: NDArray[np.int32],
    water: NDArray[np.int64],
    room: NDArray[np.int64],
    queue: NDArray[np.int32],
    came_by: NDArray[np.int32],
    seen: NDArray[np.int64],
) -> tuple[int, int]:
    """Return the nearest rank with room that water of `queue[0]` can reach, or -1, and how many
    ranks the search saw; they are in `queue`, and `came_by` has the ports to them.
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
                    came_by[there] = port
                    if room[there] > 0:
                        return there, tail
                    queue[tail] = there
                    tail += 1
    return -1, tail


@kernel
def _run_off(
    neighbors: NDArray[np.int32],
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
        here = neighbors[here, port ^ 1]
        amount = min(amount, water[here, port])
    room[free] -= amount
    here = free
    while here != start:
        port = came_by[here]
        water[here, port ^ 1] += amount
        here = neighbors[here, port ^ 1]
        water[here, port] -= amount


@kernel
def _join(leader: NDArray[np.int32], one: int, other: int) -> None:
    one, other = find_leader(leader, one), find_leader(leader, other)
    leader[max(one, other)] = min(one, other)
