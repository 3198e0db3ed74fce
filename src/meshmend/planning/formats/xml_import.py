"""Reads a collective of another program, in MSCCL XML or as ForestColl's trees, as a schedule.

**MSCCL XML** of an allreduce or all-gather. The program is run step by step, as its thread blocks
would, with a queue for each connection. Each received message is one row. The order of the rows
keeps, for every chunk of every rank, the order in which it was read and written. A table has one
cell for each rank and chunk: programs that use scratch buffers, copy on a rank, or move a chunk to
another place cannot be written as one.

**ForestColl** (arXiv 2402.06787) writes `<Algo nchunkspernode="k">` with trees that are rooted at
every node; each tree carries `nchunks` chunks. Its allreduce sums up all trees and broadcasts down
them, as our `trees` does. A `path` through switches is not used: between nodes that are no
neighbours on the mesh, our own routes lead.
"""

import ast
import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError, TopologyError
from meshmend.schedule.table import COPY, REDUCE, Collective, Schedule, even_cuts, index_dtype
from meshmend.schedule.trees import tree_schedule
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh
from meshmend.trees.tree_packing import TreePacking

_FORESTCOLL_TAG: Final = "Algo"  # MSCCL's is `algo`
_MOST_TREES: Final = 1 << 16
_MOST_PARENTS: Final = 1 << 26  # trees x nodes: 4 bytes each
_MOST_TREE_CHUNKS: Final = 1 << 30
_MOST_NAME: Final = 200  # characters of the name of a node

_SENDS = frozenset({"s", "rcs", "rrs", "rrcs"})
_REDUCES = frozenset({"rrc", "rrs", "rrcs"})
_RECEIVES = frozenset({"r", "rcs"}) | _REDUCES
_KINDS = _SENDS | _RECEIVES | {"nop"}
_MOST_CHUNKS = 1 << 16
_MOST_CELLS = 1 << 26  # ranks x chunks: a byte each
_MOST_ACCESSES = 1 << 23  # chunks that all steps read or write: about 100 bytes each
_COLLECTIVES = {"allreduce": Collective.ALLREDUCE, "allgather": Collective.ALL_GATHER}

_RankOf = Mapping[str, int]  # the rank of each node, by its name in the file


def schedule_from_xml(text: str, mesh: Mesh) -> Schedule:
    """Return the collective of MSCCL XML or of ForestColl's trees for a mesh; it is not proved yet.

    Raises:
        InputError: neither format, or what a table cannot hold.
    """
    root = _xml_root(text)
    if root.tag == _FORESTCOLL_TAG:
        return _schedule_from_forestcoll(root, mesh)
    return _schedule_from_msccl(root, mesh)


def _xml_root(text: str) -> ElementTree.Element:
    """Return the root of an XML document.

    Raises:
        InputError: it is no XML.
    """
    try:
        return ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise InputError(f"an allreduce to import needs to be XML, but: {error}") from None


def _whole_number(element: ElementTree.Element, name: str, default: int | None = None) -> int:
    """Return an attribute that is a whole number.

    Raises:
        InputError: it is no such number, or it is absent and has no default.
    """
    word = element.get(name)
    try:
        return default if word is None and default is not None else int(str(word))
    except ValueError:
        raise InputError(f"<{element.tag}> needs a whole number {name}, but got {word!r}") from None


@dataclass(frozen=True)
class _Step:
    """One step: its kind, its chunks, and the thread block and step that it waits for."""

    kind: str
    first: int
    count: int
    waits_for: tuple[int, int] | None


@dataclass(frozen=True)
class _Block:
    rank: int
    number: int
    send: int
    recv: int
    channel: int
    steps: tuple[_Step, ...]


@dataclass(frozen=True)
class _Row:
    src: int
    dst: int
    lo: int
    hi: int
    op: int


def _schedule_from_msccl(root: ElementTree.Element, mesh: Mesh) -> Schedule:
    """Return the schedule of the collective that MSCCL XML describes; it is not proved yet.

    Rank n is the n-th live chip of the mesh. What the file says of its size is held against the
    mesh and against bounds before memory is taken for it.

    Raises:
        InputError: not such XML, another collective, for another number of ranks, a program that
            is too large or that a table cannot hold, or one that never ends.
    """
    collective = _COLLECTIVES.get(root.get("coll", "")) if root.tag == "algo" else None
    if collective is None:
        raise InputError(
            f"MSCCL XML needs <algo coll='allreduce'> or <algo coll='allgather'>, but got "
            f"<{root.tag} coll={root.get('coll')!r}>"
        )
    n_ranks, n_chunks = _whole_number(root, "ngpus"), _whole_number(root, "nchunksperloop")
    if n_ranks != mesh.n_live:
        raise InputError(
            f"MSCCL XML is for {n_ranks} ranks, but {mesh} has {mesh.n_live} connected live chips; "
            "name another mesh with --mesh and --fail"
        )
    most = min(_MOST_CHUNKS, _MOST_CELLS // n_ranks)
    if not 1 <= n_chunks <= most:
        raise InputError(
            f"MSCCL XML for {n_ranks} ranks needs from 1 to {most} chunks, but got {n_chunks}"
        )
    blocks = [
        _block(gpu, element, n_ranks, n_chunks)
        for gpu in root.iter("gpu")
        for element in gpu.iter("tb")
    ]
    n_accesses = sum(step.count for block in blocks for step in block.steps)
    if n_accesses > _MOST_ACCESSES:
        raise InputError(
            f"MSCCL XML needs steps of at most {_MOST_ACCESSES} chunks in all, but got {n_accesses}"
        )
    rows = _in_order(_Run(blocks).rows())
    name = (root.get("name") or "msccl").strip() or "msccl"
    owners = _summing_ranks if collective is Collective.ALLREDUCE else _first_ranks
    return _schedule(name, collective, n_ranks, owners(n_ranks, n_chunks, rows), rows)


def _summing_ranks(_n_ranks: int, n_chunks: int, rows: list[_Row]) -> NDArray[np.int32]:
    """Return the rank that adds up each chunk last: it holds the sum first."""
    owners = np.zeros(n_chunks, dtype=np.int32)
    for row in rows:
        if row.op == REDUCE:
            owners[row.lo : row.hi] = row.dst
    return owners


def _first_ranks(n_ranks: int, n_chunks: int, rows: list[_Row]) -> NDArray[np.int32]:
    """Return the rank that never receives each chunk: it has it at the start."""
    is_sent = np.zeros((n_ranks, n_chunks), dtype=np.bool_)
    for row in rows:
        is_sent[row.dst, row.lo : row.hi] = True
    owners: NDArray[np.int32] = np.argmin(is_sent, axis=0).astype(np.int32)
    return owners


def _schedule(
    name: str, collective: Collective, n_ranks: int, owners: NDArray[np.int32], rows: list[_Row]
) -> Schedule:
    dtype = index_dtype(n_ranks, len(owners))
    return Schedule(
        algorithm=name,
        collective=collective,
        n_ranks=n_ranks,
        cuts=even_cuts(len(owners)),
        owners=owners,
        src=np.array([row.src for row in rows], dtype=dtype),
        dst=np.array([row.dst for row in rows], dtype=dtype),
        lo=np.array([row.lo for row in rows], dtype=dtype),
        hi=np.array([row.hi for row in rows], dtype=dtype),
        op=np.array([row.op for row in rows], dtype=np.uint8),
    )


def _block(
    gpu: ElementTree.Element, element: ElementTree.Element, n_ranks: int, n_chunks: int
) -> _Block:
    rank, number = _whole_number(gpu, "id"), _whole_number(element, "id")
    send, recv, channel = (_whole_number(element, name) for name in ("send", "recv", "chan"))
    if not 0 <= rank < n_ranks or not all(-1 <= peer < n_ranks for peer in (send, recv)):
        raise InputError(f"MSCCL XML needs ranks from 0 to {n_ranks - 1}, but got {rank}")
    steps = tuple(_step(each, rank, n_chunks) for each in element.iter("step"))
    for step in steps:
        if (step.kind in _SENDS and send < 0) or (step.kind in _RECEIVES and recv < 0):
            raise InputError(
                f"thread block {number} of rank {rank} needs a peer for its step {step.kind!r}"
            )
    return _Block(rank, number, send, recv, channel, steps)


def _step(element: ElementTree.Element, rank: int, n_chunks: int) -> _Step:
    kind = element.get("type", "")
    if kind not in _KINDS:
        raise InputError(
            f"a table cannot hold the step {kind!r} of rank {rank}; it holds "
            f"{', '.join(sorted(_KINDS))}"
        )
    block, before = _whole_number(element, "depid", -1), _whole_number(element, "deps", -1)
    waits_for = (block, before) if block >= 0 else None
    if kind == "nop":
        return _Step(kind, 0, 0, waits_for)
    places = {_whole_number(element, name) for name in ("srcoff", "dstoff")}
    buffers = {element.get("srcbuf"), element.get("dstbuf")}
    first, count = min(places), _whole_number(element, "cnt", 1)
    if len(places) > 1 or not buffers <= {"i", "o"}:
        raise InputError(
            f"a table cannot hold a step of rank {rank} from {element.get('srcbuf')}"
            f"[{element.get('srcoff')}] to {element.get('dstbuf')}[{element.get('dstoff')}]: each "
            "chunk stays in its place, without scratch buffers"
        )
    if not 0 <= first < first + count <= n_chunks:
        raise InputError(f"MSCCL XML needs chunks from 0 to {n_chunks - 1}, but got {first}")
    return _Step(kind, first, count, waits_for)


class _Run:
    """Runs thread blocks as far as they go, and numbers every access to a cell."""

    def __init__(self, blocks: Iterable[_Block]) -> None:
        self._blocks = list(blocks)
        self._done: Mapping[tuple[int, int], list[int]] = {
            (block.rank, block.number): [0] for block in self._blocks
        }
        self._queues: dict[tuple[int, int, int], deque[int]] = defaultdict(deque)
        self._rows: list[_Row | None] = []
        self._sent: list[_Step] = []
        self.accesses: dict[tuple[int, int], list[tuple[int, bool]]] = defaultdict(list)

    def rows(self) -> tuple[list[_Row], dict[tuple[int, int], list[tuple[int, bool]]]]:
        """Return all rows, and for each cell the rows that read it (False) and wrote it (True)."""
        moved = True
        while moved:
            moved = False
            for block in self._blocks:
                while self._advance(block):
                    moved = True
        for block in self._blocks:
            done = self._done[block.rank, block.number][0]
            if done < len(block.steps):
                raise InputError(
                    f"this MSCCL XML never ends: rank {block.rank} waits for ever in step {done} "
                    f"of thread block {block.number}"
                )
        if lost := [row for row in self._rows if row is None]:
            raise InputError(f"this MSCCL XML sends {len(lost)} messages that nobody receives")
        return [row for row in self._rows if row is not None], self.accesses

    def _advance(self, block: _Block) -> bool:
        """Run the next step of a thread block if it need not wait; return whether it ran."""
        done = self._done[block.rank, block.number]
        if done[0] >= len(block.steps):
            return False
        step = block.steps[done[0]]
        if step.waits_for is not None:
            other, number = step.waits_for
            if self._done.get((block.rank, other), [0])[0] <= number:
                return False
        if step.kind in _RECEIVES and not self._receive(block, step):
            return False
        if step.kind in _SENDS:
            self._send(block, step)
        done[0] += 1
        return True

    def _send(self, block: _Block, step: _Step) -> None:
        number = len(self._rows)
        self._rows.append(None)
        self._sent.append(step)
        self._queues[block.rank, block.send, block.channel].append(number)
        for chunk in range(step.first, step.first + step.count):
            self.accesses[block.rank, chunk].append((number, False))

    def _receive(self, block: _Block, step: _Step) -> bool:
        queue = self._queues[block.recv, block.rank, block.channel]
        if not queue:
            return False
        number = queue.popleft()
        sent = self._sent[number]
        if (sent.first, sent.count) != (step.first, step.count):
            raise InputError(
                f"a table cannot hold a message of rank {block.recv} to {block.rank} from chunks "
                f"{sent.first} to chunks {step.first}: each chunk stays in its place"
            )
        op = REDUCE if step.kind in _REDUCES else COPY
        last = step.first + step.count
        self._rows[number] = _Row(block.recv, block.rank, step.first, last, op)
        for chunk in range(step.first, last):
            self.accesses[block.rank, chunk].append((number, True))
        return True


def _in_order(
    run: tuple[list[_Row], dict[tuple[int, int], list[tuple[int, bool]]]],
) -> list[_Row]:
    """Return the rows in an order that keeps reads and writes of every cell in theirs.

    Raises:
        InputError: there is none, as when two ranks exchange a chunk at the same time.
    """
    rows, accesses = run
    after: list[set[int]] = [set() for _ in rows]
    for own in accesses.values():
        writer, readers = -1, list[int]()
        for number, writes in own:
            before = [writer, *readers] if writes else [writer]
            for earlier in before:
                if earlier >= 0 and earlier != number:
                    after[earlier].add(number)
            writer, readers = (number, []) if writes else (writer, [*readers, number])
    waits = [0] * len(rows)
    for each in after:
        for later in each:
            waits[later] += 1
    ready = [number for number, count in enumerate(waits) if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        number = heapq.heappop(ready)
        order.append(rows[number])
        for later in after[number]:
            waits[later] -= 1
            if waits[later] == 0:
                heapq.heappush(ready, later)
    if len(order) < len(rows):
        raise InputError(
            "a table cannot hold ranks that exchange a chunk at the same time: one of the two "
            "transfers comes first in it"
        )
    return order


def _schedule_from_forestcoll(root: ElementTree.Element, mesh: Mesh) -> Schedule:
    """Return the allreduce over the trees of a file on the chips of a mesh; it is not proved yet.

    Nodes that are named like the live chips, such as `(0, 3)`, are these chips. Other nodes, such
    as `7` or `(0, 'GPU', 7)`, are ranks in their order.

    Raises:
        InputError: not such trees, or trees that do not span the live chips of the mesh.
    """
    per_node, trees = _whole_number(root, "nchunkspernode"), root.findall("tree")
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
        return {name: rank for rank, name in enumerate(_names_in_order(names))}
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
    number = _whole_number(tree, "nchunks")
    if not 1 <= number <= _MOST_TREE_CHUNKS:
        raise InputError(
            f"<tree> of ForestColl XML needs from 1 to {_MOST_TREE_CHUNKS} nchunks, but got "
            f"{number}"
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


def _names_in_order(names: Iterable[str]) -> list[str]:
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
