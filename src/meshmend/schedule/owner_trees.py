"""Trees hung from every owner: each rank owns an equal part, which goes along one of the trees.

A tree has no direction: its links carry the same load whichever rank it hangs from. So each rank's
chunk is summed up one of the trees of a packing with that rank as its root, and comes down the same
tree. Between up and down the owner may update the chunk, at nearly the price of an allreduce.

Chunks are numbered in the order in which they go: neighbours in that order use different trees, and
their owners are scattered over the mesh, so that at any time all links are about equally busy. Rows
are in the order in which links should serve them, for executors that know nothing of delays.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.kernels import kernel
from meshmend.schedule.table import (
    COPY,
    REDUCE,
    Collective,
    Phase,
    Schedule,
    even_cuts,
    index_dtype,
)
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh
from meshmend.trees.tree_counts import MOST_TREES, least_load
from meshmend.trees.tree_packing import TreePacking, tree_packing

# A row goes before another if it is this many places of chunks per hop farther from the end of its
# chain. Found by trying on 8x8, 16x16 and 32x32: from 4 to 5 times differ by 0.5 %. In a half of an
# allreduce the farthest goes first.
_CHUNKS_PER_HOP: Final = 4.5
_CHUNKS_PER_HOP_OF_A_HALF: Final = 1000.0
_SCATTERED: Final = 0  # the seed of the order of owners
# On few ranks one chunk each is too coarse to load the links evenly: 12 chunks of 12 ranks on 16
# links load some link with 9, where 8.25 would do. A chunk more must pay by half a percent.
_MOST_CHUNKS: Final = 128
_MOST_CHUNKS_EACH: Final = 4
_WORTH_A_CHUNK: Final = 1.005


def owner_trees(mesh: Mesh, collective: Collective) -> Schedule:
    """Return the schedule over the packing that loads the links of a mesh most evenly."""
    n_trees, chunks_each = owner_tree_counts(mesh)[0]
    packing = tree_packing(mesh, n_trees=n_trees)
    return owner_tree_schedule(packing, collective, chunks_each=chunks_each)


def owner_tree_counts(mesh: Mesh) -> list[tuple[int, int]]:
    """Return the numbers of trees, and of chunks of each rank, that are worth trying.

    Those with the least load are first. A link that carries c trees carries the chunks that go
    along them. Where the chunks cannot be dealt out evenly, some trees have one more.
    """
    figures, n_ranks = mesh_figures(mesh), mesh.n_live

    def cost(count: tuple[int, int]) -> tuple[float, int, int]:
        n_trees, chunks_each = count
        n_chunks, on_a_link = chunks_each * n_ranks, least_load(figures, n_trees)
        load = on_a_link * (n_chunks // n_trees) + min(on_a_link, n_chunks % n_trees)
        return load / n_chunks * _WORTH_A_CHUNK**chunks_each, chunks_each, n_trees

    most_each = max(1, min(_MOST_CHUNKS_EACH, _MOST_CHUNKS // n_ranks))
    counts = [
        (n_trees, chunks_each)
        for chunks_each in range(1, most_each + 1)
        for n_trees in range(1, min(chunks_each * n_ranks, MOST_TREES) + 1)
    ]
    return sorted(counts, key=cost)


def owner_tree_schedule(
    packing: TreePacking, collective: Collective, *, chunks_each: int = 1
) -> Schedule:
    """Return the schedule in which each rank owns an equal part, over the trees of a packing.

    A rank owns `chunks_each` chunks. Each tree serves as many chunks as any other, or one more.
    Weights of the trees count for nothing.
    """
    n_trees, n_ranks = packing.parents.shape
    rng, n_chunks = np.random.default_rng(_SCATTERED), chunks_each * n_ranks
    owners = np.concatenate([rng.permutation(n_ranks) for _ in range(chunks_each)])
    owners = owners.astype(np.int32)
    parents = _hung_from(packing.parents, owners, np.arange(n_chunks) % n_trees)
    hung = TreePacking(owners, parents, np.full(n_chunks, 1 / n_chunks))
    src, dst, chunk, remaining, n_up = _rows(hung, collective)
    op = np.where(np.arange(len(src)) < n_up, REDUCE, COPY).astype(np.uint8)
    is_half = collective in {Collective.REDUCE_SCATTER, Collective.ALL_GATHER}
    chunks_per_hop = _CHUNKS_PER_HOP_OF_A_HALF if is_half else _CHUNKS_PER_HOP
    order = np.argsort(chunk - chunks_per_hop * remaining, kind="stable")
    dtype = index_dtype(n_ranks, n_chunks)
    chunk = chunk[order]
    return Schedule(
        algorithm="trees",
        collective=collective,
        n_ranks=n_ranks,
        cuts=even_cuts(n_chunks),
        owners=owners,
        src=src[order].astype(dtype),
        dst=dst[order].astype(dtype),
        lo=chunk.astype(dtype),
        hi=(chunk + 1).astype(dtype),
        op=op[order],
        phases=(Phase(_PHASES[collective], 0, len(order)),) if len(order) else (),
    )


_PHASES: Final = {
    Collective.ALLREDUCE: "reduce up, broadcast down",
    Collective.REDUCE_SCATTER: "reduce up",
    Collective.ALL_GATHER: "broadcast down",
    Collective.SHARDED_UPDATE: "reduce up, update, broadcast down",
}


_Ranks = NDArray[np.integer]


def _rows(hung: TreePacking, collective: Collective) -> tuple[_Ranks, _Ranks, _Ranks, _Ranks, int]:
    """Return source, destination, chunk and chain of hops of each row, and how many rows go up.

    The chain of a row up leads to the root and, unless it is a reduce-scatter, down to the deepest
    rank.
    """
    chunk, child = np.nonzero(hung.parents >= 0)
    parent = hung.parents[chunk, child]
    up = hung.hops[chunk, child]
    if collective is not Collective.REDUCE_SCATTER:
        up = up + hung.depths[chunk]
    down = hung.heights[chunk, child] + 1
    if collective is Collective.REDUCE_SCATTER:
        return child, parent, chunk, up, len(chunk)
    if collective is Collective.ALL_GATHER:
        return parent, child, chunk, down, 0
    return (
        np.concatenate([child, parent]),
        np.concatenate([parent, child]),
        np.concatenate([chunk, chunk]),
        np.concatenate([up, down]),
        len(chunk),
    )


@kernel
def _hung_from(parents, owners, tree_of_chunk):  # type: ignore[no-untyped-def]
    """Return for each chunk its tree with the chunk's owner as the root."""
    n_ranks = parents.shape[1]
    result = np.empty((len(owners), n_ranks), dtype=np.int32)
    for chunk in range(len(owners)):
        tree = tree_of_chunk[chunk]
        result[chunk] = parents[tree]
        # Reverse the path from the new root to the old one.
        before, here = -1, owners[chunk]
        while here >= 0:
            after = parents[tree, here]
            result[chunk, here] = before
            before, here = here, after
    return result
