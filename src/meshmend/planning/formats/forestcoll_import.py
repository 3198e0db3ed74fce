"""Reads the spanning trees of ForestColl as a schedule of an allreduce, for our verifier.

ForestColl (arXiv 2402.06787) writes `<Algo nchunkspernode="k">` with trees that are rooted at every
node; each tree carries `nchunks` chunks. Its allreduce sums up all trees and broadcasts down them,
as our `trees` does. A `path` through switches is not used: between nodes that are no neighbours on
the mesh, our own routes lead.
"""

import ast
from collections.abc import Iterable, Mapping
from typing import Any, Final
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError, TopologyError
from meshmend.planning.formats.xml_reading import whole_number
from meshmend.schedule.table import Collective, Schedule
from meshmend.schedule.trees import tree_schedule
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh
from meshmend.trees.tree_packing import TreePacking

FORESTCOLL_TAG: Final = "Algo"  # MSCCL's is `algo`
_MOST_TREES: Final = 1 << 16
_MOST_PARENTS: Final = 1 << 26  # trees x nodes: 4 bytes each
_MOST_CHUNKS: Final = 1 << 30
_MOST_NAME: Final = 200  # characters of the name of a node

_RankOf = Mapping[str, int]  # the rank of each node, by its name in the file


def schedule_from_forestcoll(root: ElementTree.Element, mesh: Mesh) -> Schedule:
    """Return the allreduce over the trees of a file on the chips of a mesh; it is not proved yet.

    Nodes that are named like the live chips, such as `(0, 3)`, are these chips. Other nodes, such
    as `7` or `(0, 'GPU', 7)`, are ranks in their order.

    Raises:
        InputError: not such trees, or trees that do not span the live chips of the mesh.
    """
    per_node, trees = whole_number(root, "nchunkspernode"), root.findall("tree")
    if not 1 <= len(trees) < _MOST_TREES:
        raise InputError(f"ForestColl XML needs trees, but got {len(trees)} <tree>")
    if len(trees) * mesh.n_live > _MOST_PARENTS:
        raise InputError(
            f"ForestColl XML for {mesh.n_live} nodes needs at most {_MOST_PARENTS // mesh.n_live} "
            f"trees, but got {len(trees)}"
        )
    rank_of = _ranks(trees, mesh)
    roots = np.array([_rank(tree, "root", rank_of) for tree in trees], dtype=np.int32)
    chunks = np.array([_n_chunks(tree) for tree in trees], dtype=np.int64)
    of_roots = np.zeros(mesh.n_live, dtype=np.int64)
    np.add.at(of_roots, roots, chunks)
    _check_chunks(of_roots, per_node, mesh)
    parents = np.stack([_parents(tree, rank_of) for tree in trees])
    try:
        packing = TreePacking(roots, parents, chunks / chunks.sum())
    except TopologyError as error:
        raise InputError(f"these trees do not span {mesh}: {error}") from None
    return tree_schedule(packing, Collective.ALLREDUCE, algorithm="forestcoll")


def _ranks(trees: list[ElementTree.Element], mesh: Mesh) -> _RankOf:
    """Return which rank each node of the trees is."""
    names = {_text(tree, "root") for tree in trees}
    for tree in trees:
        names.update(_text(send, end) for send in tree.iter("send") for end in ("src", "dst"))
    if len(names) != mesh.n_live:
        raise InputError(
            f"ForestColl XML is for {len(names)} nodes, but {mesh} has {mesh.n_live} connected "
            "live chips; name another mesh with --mesh and --fail"
        )
    chips = {name: _chip(name, mesh) for name in names}
    if None in chips.values():
        return {name: rank for rank, name in enumerate(_in_order(names))}
    if dead := sorted(name for name, chip in chips.items() if chip not in mesh.rank_of):
        raise InputError(
            f"ForestColl XML names the chip {dead[0]}, which is not a live chip of {mesh}; name "
            "another mesh with --mesh and --fail"
        )
    return {name: mesh.rank_of[chip] for name, chip in chips.items() if chip is not None}


def _text(element: ElementTree.Element, name: str) -> str:
    word = element.get(name)
    if not word:
        raise InputError(f"<{element.tag}> of ForestColl XML needs a node {name}, but got {word!r}")
    return word


def _rank(element: ElementTree.Element, name: str, rank_of: _RankOf) -> int:
    return rank_of[_text(element, name)]


def _n_chunks(tree: ElementTree.Element) -> int:
    number = whole_number(tree, "nchunks")
    if not 1 <= number <= _MOST_CHUNKS:
        raise InputError(
            f"<tree> of ForestColl XML needs from 1 to {_MOST_CHUNKS} nchunks, but got {number}"
        )
    return number


def _value(name: str) -> Any:
    """Return the value that a name writes, such as (0, 'GPU', 3), or the name itself."""
    try:
        return ast.literal_eval(name) if len(name) <= _MOST_NAME else name
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return name


def _chip(name: str, mesh: Mesh) -> Chip | None:
    """Return the chip that a name writes, alive or not; None if it writes no chip."""
    value = _value(name)
    is_chip = isinstance(value, tuple) and all(type(at) is int for at in value)
    return value if is_chip and len(value) == len(mesh.shape) else None


def _in_order(names: Iterable[str]) -> list[str]:
    """Return names in the order of the values that they write: 10 comes after 9."""
    try:
        return sorted(names, key=_value)
    except TypeError:  # values of several types have no order among them
        return sorted(names)


def _parents(tree: ElementTree.Element, rank_of: _RankOf) -> NDArray[np.int32]:
    """Return the parent of each rank in one tree, -1 at its root."""
    parents = np.full(len(rank_of), -1, dtype=np.int32)
    for send in tree.iter("send"):
        src, dst = _rank(send, "src", rank_of), _rank(send, "dst", rank_of)
        if parents[dst] >= 0:
            raise InputError(
                f"a tree of ForestColl XML needs one <send> to each node, but the tree of root "
                f"{tree.get('root')} has two to {send.get('dst')}"
            )
        parents[dst] = src
    return parents


def _check_chunks(of_roots: NDArray[np.int64], per_node: int, mesh: Mesh) -> None:
    """Every node roots the same part of the payload, else trees are missing from the file."""
    wrong = np.flatnonzero(of_roots != per_node)
    if wrong.size:
        rank = int(wrong[0])
        raise InputError(
            f"ForestColl XML needs trees of {per_node} chunks from each node (nchunkspernode), but "
            f"the trees of chip {mesh.live[rank]} have {of_roots[rank]}"
        )
