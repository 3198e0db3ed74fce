"""Runs a lockstep program with NumPy, all ranks in one process, and proves it right by doing so.

The proof runs the tables, not the schedule that they come from. So it finds a step that comes too
early, a cell that is put in the wrong place, and a pair that is used twice.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import VerificationError
from meshmend.schedule.lockstep_program import LockstepProgram
from meshmend.schedule.table import Collective

Combine = Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]


def run_program(
    program: LockstepProgram, cells: NDArray[Any], *, combine: Combine = np.add
) -> NDArray[Any]:
    """Return the cells of all ranks after the last step, from those at the start (ranks, cells).

    All sends of a step read before anything is written, as in a compiled program.
    """
    dropped = np.zeros((program.n_ranks, program.width), dtype=cells.dtype)
    buffers = np.concatenate([cells, dropped], axis=1)
    span = np.arange(program.width)
    for step in range(program.n_steps):
        arriving = []
        for k, pairs in enumerate(program.permutations):
            src, dst = np.array(pairs, dtype=np.int64).T
            starts = program.send[src, step, k].astype(np.int64)
            arriving.append((dst, buffers[src[:, None], starts[:, None] + span]))
        for k, (dst, cells_in) in enumerate(arriving):
            start, take = program.place[dst, step, k].astype(np.int64), program.take[dst, step, k]
            at = (dst[:, None], start[:, None] + span)
            counts = span < np.abs(take)[:, None]
            added = np.where((take < 0)[:, None], cells_in, combine(buffers[at], cells_in))
            buffers[at] = np.where(counts, added, buffers[at])
    return buffers[:, : program.n_cells]


def check_program(program: LockstepProgram, *, seed: int = 0) -> None:
    """Prove that a program does its collective, and that all ranks end with the same bits.

    Sums random 64-bit words, modulo 2^64: a contribution that is lost, repeated or misplaced
    changes a sum, but for a chance below 2^-40. Then it runs once more with a combination that
    depends on the order of its parts: ranks that end alike have added in the same order.

    Raises:
        VerificationError: a pair moves two spans in a step, a table points outside, or a rank
            ends with the wrong cells.
    """
    check_shape(program)
    random = np.random.default_rng(seed)
    shape = (program.n_ranks, program.n_cells)
    words = random.integers(0, 1 << 64, size=shape, dtype=np.uint64)
    _check_result(program, run_program(program, words), words)
    mixed = run_program(program, words, combine=_mixed)
    if program.collective is not Collective.REDUCE_SCATTER and not np.all(mixed == mixed[0]):
        rank, cell = np.argwhere(mixed != mixed[0])[0]
        raise VerificationError(
            f"cell {cell} of rank {rank} is not a copy of what rank 0 holds: it was added up in "
            "another order"
        )


def _mixed(one: NDArray[np.uint64], other: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a combination that depends on the order and the grouping of its parts."""
    one, other = one ^ (one >> np.uint64(29)), other ^ (other >> np.uint64(31))
    mixed: NDArray[np.uint64] = one * np.uint64(0x9E3779B97F4A7C15)
    return mixed + other * np.uint64(0xBF58476D1CE4E5B9)


def _check_result(
    program: LockstepProgram, ended: NDArray[np.uint64], words: NDArray[np.uint64]
) -> None:
    owners = np.tile(program.owners, program.slices)
    own = np.arange(program.n_cells)
    if program.collective is Collective.ALL_GATHER:
        wanted = words[owners, own]
    else:
        wanted = words.sum(axis=0, dtype=np.uint64)
    wrong = ended != wanted
    if program.collective is Collective.REDUCE_SCATTER:
        wrong &= owners == np.arange(program.n_ranks)[:, None]
    if wrong.any():
        rank, cell = np.argwhere(wrong)[0]
        raise VerificationError(
            f"the lockstep program leaves rank {rank} with the wrong cell {cell}, one of "
            f"{int(wrong.sum())} wrong cells"
        )


def check_shape(program: LockstepProgram) -> None:
    seen: set[tuple[int, int]] = set()
    for k, pairs in enumerate(program.permutations):
        for ends, what in ((0, "sends"), (1, "receives")):
            ranks = [pair[ends] for pair in pairs]
            if len(set(ranks)) != len(ranks):
                twice = next(rank for rank in ranks if ranks.count(rank) > 1)
                raise VerificationError(f"in permutation {k} rank {twice} {what} twice")
        if again := sorted(seen & set(pairs)):
            raise VerificationError(
                f"the pair {again[0]} moves two spans in a step: it is in two permutations"
            )
        seen |= set(pairs)
        hears = np.zeros(program.n_ranks, dtype=np.bool_)
        hears[[pair[1] for pair in pairs]] = True
        if np.any(program.take[~hears, :, k]):
            raise VerificationError(f"a rank takes cells of permutation {k}, but gets none of it")
    for table in (program.send, program.place):
        if table.size and (table.min() < 0 or table.max() > program.n_cells):
            raise VerificationError(
                f"a table of the program points outside its {program.n_cells} cells"
            )
    end = program.place.astype(np.int64) + np.abs(program.take)
    if np.any((program.take != 0) & (end > program.n_cells)):
        raise VerificationError(f"a row is put beyond the {program.n_cells} cells of the payload")
