"""The checker: it counts what an obvious loop counts, and no mutant that is wrong gets past it."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counting import obvious_counts, wrong_cells
from meshmend.errors import InputError, VerificationError
from meshmend.schedule import contributions
from meshmend.schedule.algorithms import ALGORITHMS
from meshmend.schedule.contributions import PRIME, check_contributions, contribution_counts
from meshmend.schedule.spanning import spread
from meshmend.schedule.table import COPY, REDUCE, SUMS, Collective, Schedule
from meshmend.schedule.trees import colour_schedule
from meshmend.topology.mesh import Mesh
from meshmend.trees.colour_trees import colour_trees
from strategies import Row, rows_of, schedule_from, tables

HOLE = Mesh((4, 4)).without("2x2@0,2")
BUILT = [
    pytest.param(ALGORITHMS[name].build(mesh, collective), id=f"{name}-{collective}")
    for name, mesh in (
        ("ring-1d", Mesh((4, 2)).without("2x2@0,0")),
        ("ring-1d", Mesh((2, 4))),
        ("rank-ring", Mesh((2, 3)).without("0,1")),
        ("ft-two-d", HOLE),
        ("two-d", Mesh((3, 3))),
        ("row-pair", Mesh((4, 2))),
    )
    for collective in SUMS
]


def without_row(schedule: Schedule, row: int) -> Schedule:
    names = ("src", "dst", "lo", "hi", "op", *schedule.buffer_columns)
    columns: dict[str, Any] = {name: np.delete(getattr(schedule, name), row) for name in names}
    return replace(schedule, **columns, phases=())


def is_caught(schedule: Schedule, *, exact: bool, replicas: Sequence[int] = ()) -> bool:
    try:
        check_contributions(schedule, exact=exact, replicas=replicas)
    except VerificationError:
        return True
    return False


def with_rows(schedule: Schedule, rows: list[Row]) -> Schedule:
    table = np.array(rows, dtype=np.int64).reshape(-1, 5)
    columns = np.ascontiguousarray(table[:, :4].T).astype(schedule.index_dtype)
    src, dst, lo, hi = columns
    op = table[:, 4].astype(np.uint8)
    return replace(schedule, src=src, dst=dst, lo=lo, hi=hi, op=op, phases=())


def mutants(schedule: Schedule, random: Random, n: int) -> Iterator[tuple[str, Schedule]]:
    """Yield n mutants of each kind, the row chosen at random."""
    rows = rows_of(schedule)
    for _ in range(n):
        at = random.randrange(len(rows))
        src, dst, lo, hi, op = row = rows[at]
        before, after = rows[:at], rows[at + 1 :]
        others = [rank for rank in range(schedule.n_ranks) if rank not in (src, dst)]
        yield "dropped", with_rows(schedule, before + after)
        yield "doubled", with_rows(schedule, [*before, row, row, *after])
        yield "swapped", with_rows(schedule, [*before, (dst, src, lo, hi, op), *after])
        yield "other op", with_rows(schedule, [*before, (src, dst, lo, hi, 1 - op), *after])
        other = random.choice(others)
        yield "other source", with_rows(schedule, [*before, (other, dst, lo, hi, op), *after])
        yield "other goal", with_rows(schedule, [*before, (src, other, lo, hi, op), *after])
        start = random.randrange(schedule.n_chunks)
        stop = random.randrange(start, schedule.n_chunks) + 1
        yield "other range", with_rows(schedule, [*before, (src, dst, start, stop, op), *after])
        if hi < schedule.n_chunks:
            yield "longer", with_rows(schedule, [*before, (src, dst, lo, hi + 1, op), *after])
        if hi - lo > 1:
            yield "shorter", with_rows(schedule, [*before, (src, dst, lo, hi - 1, op), *after])
        rest, to = before + after, random.randrange(len(rows))
        yield "moved", with_rows(schedule, [*rest[:to], row, *rest[to:]])


@pytest.mark.parametrize("schedule", BUILT)
def test_a_mutant_is_caught_exactly_when_an_obvious_count_finds_it_wrong(
    schedule: Schedule,
) -> None:
    """Some mutants change nothing (a copy made twice): counting shows it, none is skipped."""
    assert not wrong_cells(schedule, obvious_counts(schedule))
    assert not is_caught(schedule, exact=True)
    assert not is_caught(schedule, exact=False)
    seen: dict[str, list[bool]] = {}
    for kind, mutant in mutants(schedule, Random(schedule.n_rows), 12):
        wrong = bool(wrong_cells(mutant, obvious_counts(mutant)))
        assert is_caught(mutant, exact=True) == wrong, kind
        assert is_caught(mutant, exact=False) == wrong, kind
        seen.setdefault(kind, []).append(wrong)

    assert all(seen["dropped"])
    for kind in ("swapped", "other op", "other source", "other goal", "other range"):
        assert any(seen[kind]), kind
    if schedule.collective is not Collective.ALL_GATHER:
        assert any(seen["doubled"])


SEVERAL_HOLD = [(HOLE, [0]), (HOLE, [3, 7, 8]), (Mesh((3, 3)), [8, 0]), (Mesh((5,)), [0, 4])]


@pytest.mark.parametrize(("mesh", "holders"), SEVERAL_HOLD)
def test_a_mutant_of_a_spread_from_several_holders_is_caught_when_it_is_wrong(
    mesh: Mesh, holders: list[int]
) -> None:
    schedule = spread(mesh, holders)
    assert not wrong_cells(schedule, obvious_counts(schedule, holders))
    assert not is_caught(schedule, exact=True, replicas=holders)
    assert not is_caught(schedule, exact=False, replicas=holders)
    seen: dict[str, list[bool]] = {}
    for kind, mutant in mutants(schedule, Random(len(holders)), 12):
        wrong = bool(wrong_cells(mutant, obvious_counts(mutant, holders)))
        assert is_caught(mutant, exact=True, replicas=holders) == wrong, kind
        assert is_caught(mutant, exact=False, replicas=holders) == wrong, kind
        seen.setdefault(kind, []).append(wrong)

    for kind in ("dropped", "swapped", "other op"):
        assert all(seen[kind]), kind


def test_who_is_no_replica_gives_nothing_of_the_owners() -> None:
    """Without its holders named, a spread from several is wrong: the check is not just kinder."""
    line = spread(Mesh((5,)), [0, 4])

    for exact in (True, False):
        with pytest.raises(VerificationError, match=r"rank 3, .* data that do not .*, of rank 4$"):
            check_contributions(line, exact=exact)
        with pytest.raises(VerificationError, match=r"rank 3, .* data that do not .*, of rank 4$"):
            check_contributions(line, exact=exact, replicas=[0])


@settings(max_examples=100)
@given(tables(), st.data())
def test_a_random_gather_with_replicas_is_judged_as_an_obvious_count_judges_it(
    schedule: Schedule, data: st.DataObject
) -> None:
    gather = replace(schedule, collective=Collective.ALL_GATHER)
    replicas = data.draw(st.lists(st.integers(0, schedule.n_ranks - 1), max_size=3))
    wrong = bool(wrong_cells(gather, obvious_counts(gather, replicas)))

    assert is_caught(gather, exact=True, replicas=replicas) == wrong
    assert is_caught(gather, exact=False, replicas=replicas) == wrong


@pytest.mark.parametrize(
    ("collective", "replicas", "message"),
    [
        (Collective.ALLREDUCE, [1], "replicas need an all-gather, but by hand .* allreduce"),
        (Collective.REDUCE_SCATTER, [1], "in a sum every rank counts for itself"),
        (Collective.ALL_GATHER, [3], r"ranks below 3, but got \[3\]"),
        (Collective.ALL_GATHER, [-1], r"ranks below 3, but got \[-1\]"),
    ],
)
def test_replicas_that_make_no_sense_are_refused(
    collective: Collective, replicas: list[int], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        check_contributions(hand(RIGHT, collective), replicas=replicas)


@settings(max_examples=200)
@given(tables())
def test_a_random_table_is_judged_as_an_obvious_count_judges_it(schedule: Schedule) -> None:
    wrong = wrong_cells(schedule, obvious_counts(schedule))

    assert is_caught(schedule, exact=True) == bool(wrong)
    assert is_caught(schedule, exact=False) == bool(wrong)


@settings(max_examples=100)
@given(tables())
def test_counts_are_those_of_an_obvious_loop_up_to_255(schedule: Schedule) -> None:
    counts = obvious_counts(schedule)

    for chunk in range(schedule.n_chunks):
        expected = np.minimum(counts[:, chunk], 255)
        assert np.array_equal(contribution_counts(schedule, chunk), expected)


@settings(max_examples=150)
@given(tables())
def test_the_error_names_the_first_wrong_cell_and_what_is_wrong_there(schedule: Schedule) -> None:
    counts = obvious_counts(schedule)
    wrong = wrong_cells(schedule, counts)
    if not wrong:
        return
    rank, chunk = wrong[0]
    here = counts[rank, chunk]
    gathers = schedule.collective is Collective.ALL_GATHER
    wanted = (
        np.arange(schedule.n_ranks) == schedule.owners[chunk] if gathers else np.ones_like(here)
    )
    faults = {
        "misses the data of": here < wanted,
        "counts more than once": (here > wanted) & (wanted > 0),
        "has data that do not belong there, of": (here > 0) & (wanted == 0),
    }

    for exact in (True, False):
        with pytest.raises(VerificationError) as caught:
            check_contributions(schedule, exact=exact)
        message = str(caught.value)
        assert f"is wrong: rank {rank}, chunk {chunk} of {schedule.n_chunks} " in message
        for words, cells in faults.items():
            named = re.search(rf"{words} ranks? ([\d, ]+)", message)
            ranks = [int(number) for number in named[1].split(",")] if named else []
            assert ranks == np.nonzero(cells)[0].tolist()


def hand(rows: list[Row], collective: Collective = Collective.ALLREDUCE) -> Schedule:
    return schedule_from(rows, n_ranks=3, n_chunks=1, collective=collective)


RIGHT = [(1, 0, 0, 1, REDUCE), (2, 0, 0, 1, REDUCE), (0, 1, 0, 1, COPY), (0, 2, 0, 1, COPY)]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (hand(RIGHT[1:]), "rank 0, chunk 0 of 1 misses the data of rank 1$"),
        (hand([]), "rank 0, chunk 0 of 1 misses the data of ranks 1, 2$"),
        (hand([RIGHT[0], *RIGHT]), "rank 0, chunk 0 of 1 counts more than once rank 1$"),
        (hand([*RIGHT, RIGHT[0]]), "rank 0, chunk 0 of 1 counts more than once ranks 0, 1, 2$"),
        (hand(RIGHT[:3]), "rank 2, chunk 0 of 1 misses the data of ranks 0, 1$"),
        (
            hand([(1, 0, 0, 1, COPY), *RIGHT[1:]]),
            "by hand allreduce is wrong: rank 0, chunk 0 of 1 misses the data of rank 0$",
        ),
        (
            hand([RIGHT[0], RIGHT[0], *RIGHT[2:]]),
            "misses the data of rank 2 and counts more than once rank 1$",
        ),
        (hand(RIGHT[1:2], Collective.REDUCE_SCATTER), "rank 0, .* misses the data of rank 1$"),
        (
            hand(RIGHT, Collective.ALL_GATHER),
            "all-gather .* rank 0, .* has data that do not belong there, of ranks 1, 2$",
        ),
        (
            hand(RIGHT[2:3], Collective.ALL_GATHER),
            "rank 2, chunk 0 of 1 misses the data of rank 0 and has data .* of rank 2$",
        ),
    ],
)
def test_the_smallest_wrong_schedules_are_told_apart(schedule: Schedule, message: str) -> None:
    for exact in (True, False):
        with pytest.raises(VerificationError, match=message):
            check_contributions(schedule, exact=exact)


def test_the_smallest_right_schedules_pass() -> None:
    check_contributions(hand(RIGHT))
    check_contributions(hand(RIGHT[:2], Collective.REDUCE_SCATTER))
    check_contributions(hand(RIGHT[2:], Collective.ALL_GATHER))


@pytest.mark.parametrize("n_doublings", [1, 8, 9, 40, 61, 64, 122])
def test_counts_that_wrap_around_are_still_wrong(n_doublings: int) -> None:
    """256 must not pass for 0, nor 2^61 for 1 modulo 2^61 - 1: counting saturates."""
    doubling = [(0, 1, 0, 1, COPY), (1, 0, 0, 1, REDUCE)] * n_doublings
    gather = (0, 1, 0, 1, COPY)
    check_contributions(hand_gather([gather]), exact=False)
    schedule = hand_gather([*doubling, gather])

    assert contribution_counts(schedule, 0)[0].tolist() == [min(2**n_doublings, 255), 0]
    assert is_caught(schedule, exact=True)
    assert is_caught(schedule, exact=False)


def hand_gather(rows: list[Row]) -> Schedule:
    return schedule_from(rows, n_ranks=2, n_chunks=1, collective=Collective.ALL_GATHER)


def test_small_schedules_are_counted_exactly_and_large_ones_by_fingerprint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedule = ALGORITHMS["ft-two-d"].build(HOLE, Collective.ALLREDUCE)
    proof = check_contributions(schedule)
    assert (proof.method, proof.error_probability) == ("exact", 0.0)

    monkeypatch.setattr(contributions, "EXACT_COUNTERS", 10)
    proof = check_contributions(schedule)
    assert proof.method == "fingerprint"
    assert proof.error_probability == 1 / PRIME


@given(st.integers(0, 2**32))
@settings(max_examples=20)
def test_any_seed_passes_what_is_right_and_catches_what_is_wrong(seed: int) -> None:
    right = ALGORITHMS["ft-two-d"].build(HOLE, Collective.ALLREDUCE)
    wrong = with_rows(right, rows_of(right)[1:])

    assert check_contributions(right, exact=False, seed=seed).method == "fingerprint"
    with pytest.raises(VerificationError, match="misses the data of"):
        check_contributions(wrong, exact=False, seed=seed)


@pytest.mark.parametrize("collective", list(SUMS))
def test_a_fingerprint_in_blocks_of_chunks_finds_the_same(
    collective: Collective, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ALGORITHMS["rings-nd"].build(Mesh((3, 4)), collective)
    monkeypatch.setattr(contributions, "_CELLS_AT_A_TIME", 5 * right.n_ranks)
    assert right.n_chunks > 10  # five chunks make a block

    check_contributions(right, exact=False)
    n_caught = 0
    for row in range(0, right.n_rows, 7):
        with pytest.raises(VerificationError):
            check_contributions(without_row(right, row), exact=False)
        n_caught += 1
    assert n_caught > 5


@pytest.mark.parametrize("n_chunks_at_a_time", [1, 2, 5])
def test_blocks_of_chunks_of_an_all_to_all_and_of_colours_have_their_own_promises(
    n_chunks_at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose data a chunk must hold differs from chunk to chunk, so also from block to block."""
    blocks = ALGORITHMS["pairs"].build(Mesh((2, 3)), Collective.ALL_TO_ALL)
    tiling = Mesh((4, 4)).tiles("2x2")
    trees = colour_trees(tiling.mesh, tiling.colour_of, trees_each=2, goal=3)
    for right in (blocks, colour_schedule(trees)):
        at_a_time = n_chunks_at_a_time * right.n_places
        monkeypatch.setattr(contributions, "_CELLS_AT_A_TIME", at_a_time)
        assert right.n_chunks > 5

        assert check_contributions(right, exact=False).method == "fingerprint"
        for row in range(0, right.n_rows, 7):
            with pytest.raises(VerificationError):
                check_contributions(without_row(right, row), exact=False)
