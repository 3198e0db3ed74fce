"""Tables of several sums: what the checker promises of them, and that no mutant gets past it."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from meshmend.errors import InputError, VerificationError
from meshmend.schedule.contributions import check_contributions
from meshmend.schedule.proofs import check_scratch
from meshmend.schedule.table import COPY, REDUCE, Collective, Colours, Schedule
from meshmend.schedule.trees import colour_schedule
from meshmend.topology.mesh import Mesh
from meshmend.topology.tiles import Tiling
from meshmend.trees.colour_trees import colour_trees
from strategies import Row, rows_of, schedule_from

TILED = Mesh((4, 6)).without("0,0").tiles("2x2")


def built(tiling: Tiling) -> Schedule:
    return colour_schedule(colour_trees(tiling.mesh, tiling.colour_of, trees_each=2, goal=3))


def coloured(rows: list[Row], of_rank: list[int], of_chunk: list[int]) -> Schedule:
    plain = schedule_from(rows, n_ranks=len(of_rank), n_chunks=len(of_chunk))
    colours = Colours(np.array(of_rank, dtype=np.int32), np.array(of_chunk, dtype=np.int32))
    return replace(plain, colours=colours)


def check(schedule: Schedule, *, exact: bool) -> None:
    check_contributions(schedule, exact=exact)
    check_scratch(schedule)


def is_caught(schedule: Schedule, *, exact: bool) -> bool:
    try:
        check(schedule, exact=exact)
    except VerificationError:
        return True
    return False


# Chips 0 1 2 3 in a line, tiles (0, 1) and (2, 3): colour 0 is on 0 and 2, colour 1 on 1 and 3.
LINE: list[Row] = [
    (0, 1, 0, 1, COPY),  # colour 0 passes chip 1,
    (1, 2, 0, 1, REDUCE),  # is added up at chip 2,
    (2, 1, 0, 1, COPY),
    (1, 0, 0, 1, COPY),  # and comes back
    (3, 2, 1, 2, COPY),
    (2, 1, 1, 2, REDUCE),
    (1, 2, 1, 2, COPY),
    (2, 3, 1, 2, COPY),
]


@pytest.mark.parametrize("exact", [True, False])
def test_two_colours_on_a_line_by_hand(exact: bool) -> None:
    check(coloured(LINE, [0, 1, 0, 1], [0, 1]), exact=exact)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    ("row", "other", "message"),
    [
        (0, (0, 1, 0, 1, REDUCE), "where nothing was written"),  # chip 1 has no colour 0 of its own
        (1, (1, 2, 1, 2, REDUCE), "misses the data of rank 0"),  # sends its own colour instead
        (2, None, "rank 0, chunk 0 of 2 misses the data of rank 2"),
        (5, (2, 1, 0, 1, REDUCE), "misses the data of rank 3"),
        (7, None, "rank 3, chunk 1 of 2 misses the data of rank 1"),
    ],
)
def test_a_message_of_another_colour_or_none_is_caught(
    row: int, other: Row | None, message: str, exact: bool
) -> None:
    rows = [*LINE[:row], *([] if other is None else [other]), *LINE[row + 1 :]]

    with pytest.raises(VerificationError, match=message):
        check(coloured(rows, [0, 1, 0, 1], [0, 1]), exact=exact)


@pytest.mark.parametrize("exact", [True, False])
def test_a_contribution_that_comes_twice_is_caught(exact: bool) -> None:
    twice = [*LINE[:2], LINE[1], *LINE[2:]]

    with pytest.raises(VerificationError, match="counts more than once rank 0"):
        check(coloured(twice, [0, 1, 0, 1], [0, 1]), exact=exact)


@pytest.mark.parametrize("exact", [True, False])
def test_the_data_of_a_spare_count_as_wrong(exact: bool) -> None:
    """Chip 1 is a spare: if it added what it holds, that would be of no colour."""
    rows: list[Row] = [(0, 1, 0, 1, REDUCE), (1, 2, 0, 1, REDUCE), (2, 1, 0, 1, COPY)]
    rows += [(1, 0, 0, 1, COPY)]

    assert is_caught(coloured(rows, [0, -1, 0], [0]), exact=exact)
    rows[0] = (0, 1, 0, 1, COPY)
    assert not is_caught(coloured(rows, [0, -1, 0], [0]), exact=exact)


def mutants(schedule: Schedule, random: Random, n: int) -> Iterator[Schedule]:
    """Yield tables in which a row is missing, there twice, of another chunk, or turned around."""
    rows = rows_of(schedule)
    for _ in range(n):
        at = random.randrange(len(rows))
        src, dst, lo, _, op = rows[at]
        other = random.choice([c for c in range(schedule.n_chunks) if c != lo])
        for row in (
            [],
            [(dst, src, lo, lo + 1, op)],
            [(src, dst, other, other + 1, op)],
            [rows[at], rows[at]] if op == REDUCE else [],
            [(src, dst, lo, lo + 1, COPY)] if op == REDUCE else [(src, dst, lo, lo + 1, REDUCE)],
        ):
            changed = [*rows[:at], *row, *rows[at + 1 :]]
            plain = schedule_from(changed, n_ranks=schedule.n_ranks, n_chunks=schedule.n_chunks)
            yield replace(plain, colours=schedule.colours)


@pytest.mark.parametrize("exact", [True, False])
def test_no_wrong_mutant_passes(exact: bool) -> None:
    schedule = built(TILED)
    check(schedule, exact=exact)

    missed = [
        mutant for mutant in mutants(schedule, Random(1), 60) if not is_caught(mutant, exact=exact)
    ]

    for mutant in missed:  # it must be right after all
        assert sums_are_right(mutant)
    assert len(missed) < 10


def sums_are_right(schedule: Schedule) -> bool:
    """Whether every rank ends with its colour's sum, from cells that hold garbage elsewhere."""
    assert schedule.colours is not None
    takes_part = schedule.colours.takes_part
    random = np.random.default_rng(3)
    cells = random.integers(1 << 40, size=takes_part.shape)
    wanted = np.where(takes_part, cells, 0).sum(axis=0)
    for src, dst, lo, hi, op in rows_of(schedule):
        if op == COPY:
            cells[dst, lo:hi] = cells[src, lo:hi]
        else:
            cells[dst, lo:hi] += cells[src, lo:hi]
    return bool(np.all(cells[takes_part] == np.broadcast_to(wanted, cells.shape)[takes_part]))


def test_a_table_with_other_colours_has_another_digest() -> None:
    one = coloured(LINE, [0, 1, 0, 1], [0, 1])
    other = coloured(LINE, [1, 0, 1, 0], [0, 1])
    plain = replace(one, colours=None)

    assert len({one.digest, other.digest, plain.digest}) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"collective": Collective.ALL_GATHER}, "a Schedule of colours needs an allreduce"),
        ({"of_rank": [0, 1]}, "a colour for each of 4 ranks and 2 chunks, but got 2 and 2"),
        ({"of_chunk": [0, 5]}, "chunks of colours that some rank has"),
        ({"of_chunk": [1, 0]}, "in order of colour, an equal part of the payload each"),
        ({"cuts": [0.0, 0.4, 1.0]}, "in order of colour, an equal part of the payload each"),
    ],
)
def test_colours_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    schedule = coloured(LINE, [0, 1, 0, 1], [0, 1])
    collective = Collective(change.get("collective", "allreduce"))
    of_rank, of_chunk = (
        np.array(change.get(name, default), dtype=np.int32)
        for name, default in (("of_rank", [0, 1, 0, 1]), ("of_chunk", [0, 1]))
    )
    cuts = np.array(change.get("cuts", schedule.cuts))
    with pytest.raises(InputError, match=message):
        replace(schedule, collective=collective, cuts=cuts, colours=Colours(of_rank, of_chunk))
