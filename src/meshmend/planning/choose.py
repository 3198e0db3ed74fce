"""`auto`: finds the fastest algorithm and its parameters for a mesh, payload and fabric.

Algorithms are compared by simulation; bounds rule most of them out before that. Answers are kept in
memory and, if a folder is given, on disk, so that no search is repeated.
"""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from meshmend.errors import TopologyError, UnsupportedError
from meshmend.planning.cache import Cache
from meshmend.planning.least_times import (
    EXPRESS,
    REGIONS,
    SCATTERED_AXES,
    WHOLE_SUMS,
    exchange_skew,
    least_time,
    optimistic_tree_s,
)
from meshmend.planning.packed_trees import Trees, TreeShape, packing_of, trees_of
from meshmend.planning.pricing import TREES, Price, names_to_try, price, price_below
from meshmend.planning.progress import ProgressCallback, ProgressShares, no_progress
from meshmend.planning.target import Question
from meshmend.planning.tree_formula import Pipeline
from meshmend.planning.tree_search import best_pipeline
from meshmend.schedule.algorithms import algorithm
from meshmend.schedule.table import Collective, Schedule, renamed
from meshmend.schedule.trees import owner_tree_schedule
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh
from meshmend.topology.symmetry import stand_in
from meshmend.trees.tree_counts import MOST_TREES
from meshmend.trees.tree_packing import TreePacking

# Payloads within 1.5 % share their answer. No time grows faster than the payload, so a shared
# answer is at most that much slower than the payload's own.
_CLASSES_PER_OCTAVE = 24
_SHORT = 4  # a payload is short if the hops of a tree take this many times as long as its bytes
# Tables with scratch buffers do not fit other programs, and processes copy more for them. So they
# must be faster by half a percent.
_WORTH_SCRATCH = 1.005
_MOST_RANKS_TIMES_TREES = 30_000  # of many trees whose pipeline is searched for in a second or two

_MOST_SIMULATED = 512  # chips: beyond, loads alone choose an all-to-all, which has a million rows
_CHIPS_OF_OWN_SLICES = 64  # up to here a schedule's slices are searched for in milliseconds
_WITH_SCRATCH = frozenset({*SCATTERED_AXES, *WHOLE_SUMS, *REGIONS})

_known: dict[Question, "Choice"] = {}


@dataclass(frozen=True)
class Choice:
    """What `auto` runs: an algorithm, how it is pipelined, and its packing if it has trees.

    Ranks are those of the mesh's stand-in. With the mesh it gives the same schedule again. The
    packing is kept because the search for it takes longer than all other steps of a plan.
    """

    algorithm: str
    pipeline: Pipeline
    shape: TreeShape | None = None
    packing: TreePacking | None = field(default=None, compare=False, repr=False)

    @property
    def slices(self) -> int:
        return self.pipeline.slices


def choose(
    question: Question,
    *,
    cache_dir: Path | None = None,
    progress: ProgressCallback = no_progress,
) -> Choice:
    """Return the fastest algorithm for a connected mesh, among all that support it.

    The answer is the fastest for the payload's class. For the payload itself, no other is more than
    2 % faster. It is found on the mesh's stand-in: images of a mesh have one answer.
    """
    question = replace(question, mesh=stand_in(question.mesh).mesh)
    typical = replace(question, payload_bytes=payload_class_bytes(question.payload_bytes))
    choice = _choice_for_class(typical, cache_dir, progress)
    if question == typical or not _has_own_pipeline(question, choice):
        return choice
    if question not in _known:
        if choice.algorithm in WHOLE_SUMS:
            choice = _fastest_whole_sum(question)
        else:
            choice = replace(choice, pipeline=_own_pipeline(question, choice))
        _known[question] = choice
    return _known[question]


def _has_own_pipeline(question: Question, choice: Choice) -> bool:
    """Whether each payload of a class gets a pipeline of its own.

    The best number of slices of a schedule may be the worst for 1 % more bytes: 5x5 as a torus at
    1 MB without overhead takes 11 % longer in that of its class. Disjoint trees avoid delaying each
    other for one payload, not for its whole class. Many trees have few slices, whose times depend
    on the payload: 16x16 less 4x2 as a torus at 10 MB takes 0.5 % less time. On large meshes that
    is not worth the time of the search.
    """
    n_live, shape = question.mesh.n_live, choice.shape
    if shape is None:
        return n_live <= _CHIPS_OF_OWN_SLICES
    is_quick = shape.n_trees * n_live <= _MOST_RANKS_TIMES_TREES
    needs_one = shape.is_disjoint or (shape.n_trees > MOST_TREES and is_quick)
    return needs_one and question.collective is Collective.ALLREDUCE


def _own_pipeline(question: Question, choice: Choice) -> Pipeline:
    """Return the fastest pipeline found of a choice for exactly this payload."""
    mesh, shape = question.mesh, choice.shape
    if shape is not None:
        trees = Trees(mesh, shape, choice.packing or trees_of(mesh, shape).packing)
        return best_pipeline(trees, question.fabric, question.payload_bytes)
    return price(question, choice.algorithm).pipeline


def _fastest_whole_sum(question: Question) -> Choice:
    """Return the fastest of these algorithms for exactly this payload.

    Their many messages queue at every link. With 0.3 % more bytes they may queue in another order,
    and take 6 % longer: 3x5 less one chip at 10 KB.
    """
    priced = (price(question, name) for name in sorted(WHOLE_SUMS))
    best = min(priced, key=lambda each: each.time_s)
    return _choice_of(question.mesh, best)


def choose_trees(question: Question, *, progress: ProgressCallback = no_progress) -> Choice:
    """Return the trees that are fastest, as `simulate` prices them."""
    question = replace(question, mesh=stand_in(question.mesh).mesh)
    found = price(question, TREES, may_estimate=True, progress=progress)
    return _choice_of(question.mesh, found)


def _choice_for_class(
    question: Question, cache_dir: Path | None, progress: ProgressCallback
) -> Choice:
    """Return the answer for a payload class: from memory, from disk, or searched now."""
    if question not in _known:
        on_disk = Cache(cache_dir, "choice", encode_choice, partial(decode_choice, question.mesh))
        _known[question] = on_disk.get_or_make(question.key, lambda: _search(question, progress))
    return _known[question]


def forget() -> None:
    """Forget the answers kept in memory."""
    _known.clear()


def chosen_schedule(mesh: Mesh, choice: Choice, collective: Collective) -> Schedule:
    """Return the schedule of a choice; except in an allreduce, trees hang from every rank."""
    like = stand_in(mesh)
    if collective is Collective.ALL_TO_ALL:  # where blocks lie depends on the ranks' names
        return algorithm(choice.algorithm).build(mesh, collective)
    return renamed(_on_stand_in(like.mesh, choice, collective), like.ranks)


def _on_stand_in(mesh: Mesh, choice: Choice, collective: Collective) -> Schedule:
    if choice.shape is None:
        return algorithm(choice.algorithm).build(mesh, collective)
    if collective is Collective.ALLREDUCE:
        packing = choice.packing or trees_of(mesh, choice.shape).packing
        return Trees(mesh, choice.shape, packing).schedule
    return owner_tree_schedule(choice.packing or packing_of(mesh, choice.shape), collective)


def payload_class_bytes(payload_bytes: float) -> float:
    """Return the payload that represents its class."""
    if payload_bytes < 1:
        return 0.0
    octave = round(math.log2(payload_bytes) * _CLASSES_PER_OCTAVE) / _CLASSES_PER_OCTAVE
    return float(2**octave)


def _search(question: Question, progress: ProgressCallback) -> Choice:
    names = _in_order(question)
    if question.collective is Collective.ALL_TO_ALL and question.mesh.n_live > _MOST_SIMULATED:
        return Choice(names[0], Pipeline(1, exchange_skew(question.mesh, names[0])))
    best, best_s = None, math.inf
    for name, share in zip(names, ProgressShares(progress, len(names)).in_turn(), strict=True):
        try:
            result = price_below(question, name, best_s, may_estimate=True, progress=share)
        except UnsupportedError:  # its table has too many rows
            if name == names[-1] and best is None:
                raise
            continue
        if result is None:
            continue
        time_s = result.time_s * (_WORTH_SCRATCH if name in _WITH_SCRATCH else 1.0)
        if best is None or time_s < best_s:
            best, best_s = result, time_s
    assert best is not None, "trees support every connected mesh"
    return _choice_of(question.mesh, best)


def _in_order(question: Question) -> list[str]:
    """Return the algorithms to try: where hops take much longer than bytes, those of few messages.

    They are quickly built, and once one is known no trees have to be searched for. Regions that
    may be faster than any trees come before these too, the others last.
    """
    mesh, fabric = question.mesh, question.fabric
    names = list(names_to_try(mesh, question.collective))
    hopes = {name: least_time(question, name) for name in names if name in REGIONS}
    trees_s = optimistic_tree_s(question) if hopes else 0.0
    share = (mesh.n_live - 1) / max(1, len(mesh.links))
    bytes_s = share * question.payload_bytes / fabric.link_bandwidth_bytes_per_s
    short = _SHORT * bytes_s < 2 * mesh_figures(mesh).radius * fabric.hop_latency_s
    first = {*_WITH_SCRATCH, EXPRESS} if short else {n for n in hopes if hopes[n] < trees_s}
    return sorted(names, key=lambda name: (name not in first, hopes.get(name, 0.0)))


def _choice_of(mesh: Mesh, best: Price) -> Choice:
    packing = None
    if best.shape is not None and not best.shape.is_quick:
        packing = packing_of(mesh, best.shape)
    return Choice(best.name, best.pipeline, best.shape, packing)


@dataclass(frozen=True)
class _StoredChoice:
    """A choice as a file holds it: its trees as the parent of each rank, -1 for the root."""

    algorithm: str
    pipeline: Pipeline
    shape: TreeShape | None
    parents: list[list[int]] | None
    weights: list[float] | None


def encode_choice(choice: Choice) -> bytes:
    """Return a choice, with its trees, as bytes that `decode_choice` reads back."""
    trees = choice.packing
    stored = _StoredChoice(
        choice.algorithm,
        choice.pipeline,
        choice.shape,
        None if trees is None else trees.parents.tolist(),
        None if trees is None else trees.weights.tolist(),
    )
    return msgspec.json.encode(stored)


def decode_choice(mesh: Mesh, content: bytes) -> Choice:
    """Return the choice that `encode_choice` wrote.

    Raises:
        msgspec.MsgspecError: the bytes are not a choice.
        InputError: there is no such algorithm, or the trees are none of this mesh's stand-in.
    """
    mesh = stand_in(mesh).mesh
    stored = msgspec.json.decode(content, type=_StoredChoice)
    packing = None
    if stored.shape is not None and not stored.shape.is_quick:
        packing = _packing(mesh, stored.parents or [], stored.weights or [])
    return Choice(algorithm(stored.algorithm).name, stored.pipeline, stored.shape, packing)


def _packing(mesh: Mesh, parents: list[list[int]], weights: list[float]) -> TreePacking:
    """Return the packing of trees with these parents.

    Raises:
        TopologyError: they are not spanning trees of the mesh.
        ValueError: the trees have not one length.
    """
    up = np.array(parents, dtype=np.int32)
    fits = up.ndim == 2 and len(up) > 0 and up.shape[1] == mesh.n_live
    if not fits or not np.all((mesh.neighbor_ranks == up[:, :, None]).any(axis=2) | (up == -1)):
        raise TopologyError(
            f"a packing on {mesh} needs parents that are neighbours, but got others"
        )
    return TreePacking(
        roots=np.argmin(up, axis=1).astype(np.int32),
        parents=up,
        weights=np.array(weights, dtype=np.float64),
    )
