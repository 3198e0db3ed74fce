"""A bracket of the spanning-tree packing number in time linear in the links, for huge meshes.

Trees give the lower end. Each tree is a minimum spanning tree by the load that the trees before it
put on the links (greedy tree packing, Thorup 2007); K trees whose fullest link is in `load` of them
pack K / load. Partitions give the upper end. Links that every tree needs end with the highest
loads, so without them the graph falls into parts that bind.
"""

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from meshmend.kernels import kernel


def bracketing_partition(
    links: NDArray[np.int32], n_ranks: int, *, n_trees: int, seed: int
) -> tuple[float, NDArray[np.int32]]:
    """Return the weight that these trees pack, and a partition whose quotient no packing exceeds.

    `links` join two or more ranks to one connected part.
    """
    load = _tree_loads(links, n_ranks, n_trees, seed)
    return n_trees / int(load.max()), _best_threshold_partition(links, n_ranks, load)


def quotient(part_of: NDArray[np.int32], links: NDArray[np.int32]) -> Fraction:
    """Return (cut links) / (parts - 1) of a partition into parts 0, 1, ..., at least two."""
    n_cut = int(np.count_nonzero(part_of[links[:, 0]] != part_of[links[:, 1]]))
    return Fraction(n_cut, int(part_of.max()))


def _tree_loads(
    links: NDArray[np.int32], n_ranks: int, n_trees: int, seed: int
) -> NDArray[np.int32]:
    """Return how many of the trees, grown one after another, use each link."""
    random = np.random.default_rng(seed)
    load: NDArray[np.int32] = np.zeros(len(links), dtype=np.int32)
    leader = np.empty(n_ranks, dtype=np.int32)
    for _ in range(n_trees):
        order = np.argsort(load + random.random(len(links)))  # ties fall at random
        leader[:] = np.arange(n_ranks)
        _grow_forest(links, order, leader, load)
    return load


def _best_threshold_partition(
    links: NDArray[np.int32], n_ranks: int, load: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Return the best partition among: one rank alone, and what links of low load hold together."""
    degree = np.bincount(links.ravel(), minlength=n_ranks)
    alone = int(degree.argmin())
    best: NDArray[np.int32] = (np.arange(n_ranks) == alone).astype(np.int32)
    best_quotient = Fraction(int(degree[alone]))
    order = np.argsort(load, kind="stable")
    bounds = np.searchsorted(load[order], np.unique(load))
    leader: NDArray[np.int32] = np.arange(n_ranks, dtype=np.int32)
    unused = np.zeros_like(load)
    for start, stop in zip((0, *bounds[:-1]), bounds, strict=True):
        _grow_forest(links, order[start:stop], leader, unused)
        n_parts, n_cut = _count_parts(links, leader)
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
def _count_parts(links: NDArray[np.int32], leader: NDArray[np.int32]) -> tuple[int, int]:
    """Return how many parts there are and how many links join two; ends with `leader` flat."""
    n_parts, n_cut = 0, 0
    for rank in range(len(leader)):
        leader[rank] = find_leader(leader, rank)
        n_parts += leader[rank] == rank
    for link in range(len(links)):
        n_cut += leader[links[link, 0]] != leader[links[link, 1]]
    return n_parts, n_cut


@kernel
def find_leader(leader: NDArray[np.int32], rank: int) -> int:
    """Return the smallest rank of a rank's part, and shorten the way to it."""
    while leader[rank] != rank:
        leader[rank] = leader[leader[rank]]
        rank = leader[rank]
    return rank
