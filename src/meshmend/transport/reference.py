"""Runs a schedule with NumPy, all ranks in one process, on arrays of any dtype.

Runs the table one row after another, which defines what a schedule means. It is slow and simple on
purpose: faster executors are compared with it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError, check_kind
from meshmend.schedule.table import COPY, Collective, Schedule

Arrays = list[NDArray[Any]]  # the element type is the caller's


def element_bounds(schedule: Schedule, n_elements: int) -> NDArray[np.int64]:
    """Return where each chunk starts in a payload of so many elements, and where the last ends."""
    return np.rint(schedule.cuts * n_elements).astype(np.int64)


def run(
    schedule: Schedule,
    arrays: Sequence[NDArray[Any]],
    *,
    combine: np.ufunc = np.add,
    update: Callable[[NDArray[Any]], NDArray[Any]] | None = None,
) -> Arrays:
    """Return the result of each rank after the collective; the inputs do not change.

    An allreduce takes one array per rank, all of one shape and dtype, and returns the combined
    array for each rank. An all-to-all takes a block for each rank, one after another in the order
    of ranks, and returns those that each rank got, in the same order. A reduce-scatter returns each
    rank's own chunks as one flat array. An all-gather takes arrays of that form and returns the
    whole payload for each rank. `combine` is any commutative and associative ufunc. In a sharded
    update each owner replaces its chunks by what `update` makes of them, each element for itself;
    without `update` they stay sums.

    Raises:
        InputError: the number of arrays is wrong, or their shapes or dtypes do not fit together.
    """
    check_kind("run", "a ufunc such as np.add to combine by", combine, np.ufunc)
    if len(arrays) != schedule.n_ranks:
        raise InputError(
            f"{schedule.algorithm} needs one array per rank, {schedule.n_ranks}, but got "
            f"{len(arrays)}"
        )
    gathers = schedule.collective is Collective.ALL_GATHER
    buffers = _gathered(schedule, arrays) if gathers else _stacked(arrays)
    exchanges = schedule.collective is Collective.ALL_TO_ALL
    if exchanges:
        buffers = _in_places(schedule, buffers)
    bounds = element_bounds(schedule, buffers.shape[1])
    places = schedule.src_place, schedule.dst_place
    columns = (*places, bounds[schedule.lo], bounds[schedule.hi], schedule.op)
    updates = _Updates(schedule, buffers, bounds, update)
    # Rank r's payload is place r x buffers; what scratch holds at the start is never read.
    cells = np.repeat(buffers, schedule.n_buffers, axis=0) if schedule.has_scratch else buffers
    for row, (src, dst, start, stop, op) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        updates.before(row)
        sent, kept = cells[src, start:stop], cells[dst, start:stop]
        if op == COPY:
            kept[...] = sent
        else:
            combine(kept, sent, out=kept)
    updates.before(schedule.n_rows)
    buffers = cells[:: schedule.n_buffers]
    if schedule.collective is Collective.REDUCE_SCATTER:
        owned = [_owned(schedule, rank, bounds) for rank in range(schedule.n_ranks)]
        return [buffer[index] for buffer, index in zip(buffers, owned, strict=True)]
    if gathers:
        return list(buffers)
    if exchanges:  # block b has place b + rank: the reverse of `partners`
        buffers = _in_places(schedule, buffers, back=True)
    return [buffer.reshape(arrays[0].shape) for buffer in buffers]


def run_colours(
    schedule: Schedule, parts: Sequence[NDArray[Any]], *, combine: np.ufunc = np.add
) -> Arrays:
    """Return each rank's part of the payload after the sums of a table of colours.

    A rank gives the part of its colour, flat and of one length for all, and gets the combined one.
    What a rank of no colour gives comes back as it was.

    Raises:
        InputError: the table has no colours, or the parts do not fit together.
    """
    colours = schedule.colours
    if colours is None:
        raise InputError(f"run_colours needs a table of colours, but {schedule!r} has none")
    if len(parts) != schedule.n_ranks:
        raise InputError(
            f"{schedule.algorithm} needs one array per rank, {schedule.n_ranks}, but got "
            f"{len(parts)}"
        )
    flat = _stacked(parts)
    whole = np.zeros((len(flat), colours.n_colours, flat.shape[1]), dtype=flat.dtype)
    has_part = np.flatnonzero(colours.of_rank >= 0)
    whole[has_part, colours.of_rank[has_part]] = flat[has_part]
    summed = run(schedule, list(whole.reshape(len(flat), -1)), combine=combine)
    results = [part.copy() for part in parts]
    for rank in has_part.tolist():
        own = summed[rank].reshape(colours.n_colours, -1)[colours.of_rank[rank]]
        results[rank] = own.reshape(parts[rank].shape)
    return results


def chunk_at(
    schedule: Schedule, n_elements: int, element: int, *, n_slices: int = 1
) -> tuple[int, int, int]:
    """Return the chunk of an element, and the first and one after the last element of that piece.

    `n_slices` is how often the payload is cut, as `layout_of` does it.
    """
    if np.all(schedule.hi.astype(np.int64) - schedule.lo == 1):
        start, bounds = 0, element_bounds(schedule, n_elements)
    else:
        edges = n_elements * np.arange(n_slices + 1, dtype=np.int64) // n_slices
        part = int(np.searchsorted(edges, element, side="right")) - 1
        start, stop = int(edges[part]), int(edges[part + 1])
        bounds = start + element_bounds(schedule, stop - start)
    chunk = int(np.searchsorted(bounds, element, side="right")) - 1
    return chunk, int(bounds[chunk]), int(bounds[chunk + 1])


def run_chunk(schedule: Schedule, chunk: int, parts: Sequence[NDArray[Any]]) -> Arrays:
    """Return what each rank has of elements of one chunk after an all-reduce, bit for bit."""
    buffers = _stacked(parts)
    cells = np.repeat(buffers, schedule.n_buffers, axis=0) if schedule.has_scratch else buffers
    rows = np.flatnonzero((schedule.lo <= chunk) & (chunk < schedule.hi))
    columns = (schedule.src_place[rows], schedule.dst_place[rows], schedule.op[rows])
    for src, dst, op in zip(*(column.tolist() for column in columns), strict=True):
        if op == COPY:
            cells[dst] = cells[src]
        else:
            cells[dst] += cells[src]
    return list(cells[:: schedule.n_buffers])


class _Updates:
    """Updates each chunk at its owner, just before the first row that copies it from there."""

    def __init__(
        self,
        schedule: Schedule,
        buffers: NDArray[Any],
        bounds: NDArray[np.int64],
        update: Callable[[NDArray[Any]], NDArray[Any]] | None,
    ) -> None:
        self._schedule, self._buffers, self._bounds = schedule, buffers, bounds
        self._update = update if schedule.collective is Collective.SHARDED_UPDATE else None
        self._left = set(range(schedule.n_chunks))

    def before(self, row: int) -> None:
        """Update what this row copies from its owner; after the last row, what is left."""
        schedule, chunks = self._schedule, self._left
        if self._update is None:
            return
        if row < schedule.n_rows:
            if schedule.op[row] != COPY:
                return
            moved = range(int(schedule.lo[row]), int(schedule.hi[row]))
            chunks = {
                chunk for chunk in moved if schedule.owners[chunk] == schedule.src[row]
            } & self._left
        for chunk in sorted(chunks):
            part = self._buffers[
                schedule.owners[chunk], self._bounds[chunk] : self._bounds[chunk + 1]
            ]
            part[...] = self._update(part.copy())
        self._left = self._left - chunks


def _stacked(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    first = arrays[0]
    for rank, array in enumerate(arrays):
        check_kind("a collective", f"a NumPy array of rank {rank}", array, np.ndarray)
        if array.shape != first.shape or array.dtype != first.dtype:
            raise InputError(
                f"a collective needs arrays of one dtype and shape, but rank 0 has {first.dtype} "
                f"{first.shape} and rank {rank} has {array.dtype} {array.shape}"
            )
    return np.stack([array.reshape(-1) for array in arrays])


def _in_places(schedule: Schedule, payloads: NDArray[Any], *, back: bool = False) -> NDArray[Any]:
    """Return payloads with their blocks in the places of an all-to-all, or `back` in rank order."""
    n_ranks, n_elements = schedule.n_ranks, payloads.shape[1]
    if n_elements % n_ranks:
        raise InputError(
            f"an all-to-all over {n_ranks} ranks needs as many equal blocks, but got payloads of "
            f"{n_elements} elements"
        )
    blocks = payloads.reshape(n_ranks, n_ranks, -1)
    for rank in range(n_ranks):
        partners = schedule.partners(rank)
        blocks[rank] = blocks[rank, np.argsort(partners) if back else partners]
    return payloads


def _gathered(schedule: Schedule, shards: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return one buffer per rank that holds the rank's own chunks, and zeros elsewhere."""
    n_elements = sum(shard.size for shard in shards)
    bounds = element_bounds(schedule, n_elements)
    buffers = np.zeros((schedule.n_ranks, n_elements), dtype=shards[0].dtype)
    for rank, shard in enumerate(shards):
        index = _owned(schedule, rank, bounds)
        if shard.shape != index.shape or shard.dtype != shards[0].dtype:
            raise InputError(
                f"all-gather of {n_elements} elements needs {index.size} of {shards[0].dtype} "
                f"from rank {rank}, but got {shard.dtype} {shard.shape}"
            )
        buffers[rank, index] = shard
    return buffers


def _owned(schedule: Schedule, rank: int, bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    chunks = np.nonzero(schedule.owners == rank)[0]
    parts = [np.arange(bounds[chunk], bounds[chunk + 1]) for chunk in chunks]
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])
