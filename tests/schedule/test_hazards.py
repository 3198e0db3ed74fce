"""Hazards: whatever order they allow gives what program order gives, and none is idle."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counting import Counts, obvious_counts, start_counts
from meshmend.schedule import hazards as hazards_module
from meshmend.schedule.algorithms import ALGORITHMS
from meshmend.schedule.hazards import MANY, NONE, Hazards, hazards_of
from meshmend.schedule.table import COPY, REDUCE, SUMS, Collective, Schedule
from meshmend.topology.mesh import Mesh
from strategies import Row, rows_of, schedule_from, tables

HOLE = Mesh((4, 4)).without("2x2@0,2")
FULL = Mesh((2, 4))
BUILT = [
    pytest.param(ALGORITHMS[name].build(mesh, collective), id=f"{name}-{collective}")
    for name, mesh in (
        ("ring-1d", HOLE),
        ("rank-ring", Mesh((2, 3)).without("0,1")),
        ("ft-two-d", HOLE),
        ("two-d", Mesh((3, 3))),
        ("row-pair", FULL),
    )
    for collective in SUMS
]


def constraints(schedule: Schedule, hazards: Hazards) -> list[set[int]]:
    """What each event waits for: event 2 r sends row r, event 2 r + 1 writes it."""
    rows = rows_of(schedule)
    waits: list[set[int]] = []
    for row, (_, dst, *_) in enumerate(rows):
        waits.append({2 * earlier + 1 for earlier in hazards.before_send(row)})
        at_receiver = {
            2 * earlier + (rows[earlier][0] != dst) for earlier in hazards.before_write(row)
        }
        waits.append({2 * row} | at_receiver)
    return waits


def random_order(waits: list[set[int]], random: Random) -> list[int]:
    """Return events in a random order that keeps every constraint."""
    left = [len(before) for before in waits]
    after: list[list[int]] = [[] for _ in waits]
    for event, before in enumerate(waits):
        for earlier in before:
            after[earlier].append(event)
    ready, order = [event for event, n in enumerate(left) if n == 0], []
    while ready:
        at = random.randrange(len(ready)) if random.random() < 0.7 else -1
        ready[at], ready[-1] = ready[-1], ready[at]
        event = ready.pop()
        order.append(event)
        for later in after[event]:
            left[later] -= 1
            if left[later] == 0:
                ready.append(later)
    assert len(order) == len(waits), "constraints run in a circle"
    return order


def run_in_order(schedule: Schedule, order: list[int]) -> Counts:
    """Run sends and writes apart; what is under way is kept as a message."""
    counts, rows = start_counts(schedule), rows_of(schedule)
    message: dict[int, Counts] = {}
    for event in order:
        src, dst, lo, hi, op = rows[event // 2]
        if event % 2 == 0:
            message[event // 2] = counts[src, lo:hi].copy()
        elif op == REDUCE:
            counts[dst, lo:hi] = np.minimum(counts[dst, lo:hi] + message[event // 2], 10**6)
        else:
            counts[dst, lo:hi] = message[event // 2]
    return counts


@settings(max_examples=300)
@given(tables(), st.integers(0, 2**32))
def test_any_order_that_keeps_the_hazards_ends_like_program_order(
    schedule: Schedule, seed: int
) -> None:
    waits, random = constraints(schedule, hazards_of(schedule)), Random(seed)

    for _ in range(3):
        ended = run_in_order(schedule, random_order(waits, random))
        assert np.array_equal(ended, obvious_counts(schedule))


@pytest.mark.parametrize("schedule", BUILT)
def test_any_order_of_a_built_schedule_ends_like_program_order(schedule: Schedule) -> None:
    waits, random = constraints(schedule, hazards_of(schedule)), Random(1)
    expected = obvious_counts(schedule)

    for _ in range(5):
        assert np.array_equal(run_in_order(schedule, random_order(waits, random)), expected)


def overlap(one: Row, other: Row) -> bool:
    return max(one[2], other[2]) < min(one[3], other[3])


def check_dependencies_are_conflicts(schedule: Schedule, hazards: Hazards) -> None:
    rows = rows_of(schedule)
    for row, here in enumerate(rows):
        for earlier in hazards.before_send(row):
            assert earlier < row
            assert rows[earlier][1] == here[0]
            assert overlap(rows[earlier], here)
        for earlier in hazards.before_write(row):
            there = rows[earlier]
            assert earlier < row
            assert overlap(there, here)
            reads, writes = there[0] == here[1], there[1] == here[1]
            assert reads or (writes and COPY in (there[4], here[4]))
        for waits in (hazards.before_send(row), hazards.before_write(row)):
            assert waits == sorted(set(waits))


@settings(max_examples=300)
@given(tables())
def test_every_dependency_is_a_conflict_and_additions_do_not_wait_for_additions(
    schedule: Schedule,
) -> None:
    check_dependencies_are_conflicts(schedule, hazards_of(schedule))


@pytest.mark.parametrize("schedule", BUILT)
def test_every_dependency_of_a_built_schedule_is_a_conflict(schedule: Schedule) -> None:
    check_dependencies_are_conflicts(schedule, hazards_of(schedule))


@settings(max_examples=300)
@given(tables())
def test_every_conflict_is_ordered_directly_or_through_others(schedule: Schedule) -> None:
    """The claim of the page, cell by cell, against all pairs of rows."""
    rows, waits = rows_of(schedule), constraints(schedule, hazards_of(schedule))
    before: list[set[int]] = []
    for own in waits:  # an event waits for smaller events only
        before.append(own.union(*(before[event] for event in own)))

    for later, here in enumerate(rows):
        for earlier, there in enumerate(rows[:later]):
            if not overlap(there, here):
                continue
            if there[1] == here[0]:
                assert 2 * earlier + 1 in before[2 * later]
            if there[0] == here[1]:
                assert 2 * earlier in before[2 * later + 1]
            if there[1] == here[1] and COPY in (there[4], here[4]):
                assert 2 * earlier + 1 in before[2 * later + 1]


def hazard_lists(rows: list[Row], n_chunks: int = 4) -> tuple[list[list[int]], list[list[int]]]:
    hazards = hazards_of(schedule_from(rows, n_ranks=4, n_chunks=n_chunks))
    numbers = range(len(rows))
    return [hazards.before_send(r) for r in numbers], [hazards.before_write(r) for r in numbers]


@pytest.mark.parametrize(
    ("rows", "send", "write"),
    [
        pytest.param([], [], [], id="nothing"),
        pytest.param([(0, 1, 0, 1, REDUCE)], [[]], [[]], id="one row"),
        pytest.param(
            [(0, 1, 0, 1, REDUCE), (1, 2, 0, 1, REDUCE)], [[], [0]], [[], []], id="read after write"
        ),
        pytest.param(
            [(1, 2, 0, 1, REDUCE), (0, 1, 0, 1, REDUCE)], [[], []], [[], [0]], id="write after read"
        ),
        pytest.param(
            [(0, 1, 0, 1, COPY), (2, 1, 0, 1, COPY)], [[], []], [[], [0]], id="write after write"
        ),
        pytest.param(
            [(0, 1, 0, 1, REDUCE), (2, 1, 0, 1, REDUCE)], [[], []], [[], []], id="additions commute"
        ),
        pytest.param(
            [(0, 1, 0, 1, REDUCE), (2, 1, 0, 1, REDUCE), (1, 3, 0, 1, COPY)],
            [[], [], [0, 1]],
            [[], [], []],
            id="a reader waits for all additions",
        ),
        pytest.param(
            [(0, 1, 0, 1, REDUCE), (2, 1, 0, 1, REDUCE), (3, 1, 0, 1, COPY)],
            [[], [], []],
            [[], [], [0, 1]],
            id="an overwrite waits for all additions",
        ),
        pytest.param(
            [(0, 1, 0, 1, COPY), (2, 1, 0, 1, REDUCE), (3, 1, 0, 1, REDUCE)],
            [[], [], []],
            [[], [0], [0]],
            id="additions wait for the overwrite before them",
        ),
        pytest.param(
            [(1, 0, 0, 1, COPY), (1, 2, 0, 1, COPY), (3, 1, 0, 1, REDUCE), (0, 1, 0, 1, REDUCE)],
            [[], [], [], [0]],
            [[], [], [0, 1], [0, 1]],
            id="additions wait for all readers before them",
        ),
        pytest.param(
            [(0, 1, 0, 2, COPY), (0, 1, 2, 4, COPY), (1, 2, 1, 3, COPY), (1, 3, 3, 4, COPY)],
            [[], [], [0, 1], [1]],
            [[], [], [], []],
            id="ranges that overlap in part",
        ),
        pytest.param(
            [(0, 1, 0, 1, COPY), (1, 2, 1, 2, COPY), (1, 0, 2, 3, REDUCE)],
            [[], [], []],
            [[], [], []],
            id="other chunks",
        ),
    ],
)
def test_the_smallest_cases_by_hand(
    rows: list[Row], send: list[list[int]], write: list[list[int]]
) -> None:
    assert hazard_lists(rows) == (send, write)


def test_long_lists_are_kept_apart_and_counted() -> None:
    rows = [(rank, 0, 0, 1, REDUCE) for rank in range(1, 40)]
    table = [*rows, (0, 1, 0, 1, COPY), (2, 1, 0, 1, COPY)]
    hazards = hazards_of(schedule_from(table, n_ranks=40, n_chunks=1))

    assert hazards.send[39] == MANY
    assert hazards.more[0] == 39
    assert hazards.before_send(39) == list(range(39))
    assert hazards.before_write(39) == [0]
    assert hazards.before_write(40) == [39]
    assert hazards.send[0] == NONE


def test_more_lists_than_the_first_buffer_holds() -> None:
    n_ranks = 64
    gather = [(rank, 0, 0, 1, REDUCE) for rank in range(1, n_ranks)]
    spread = [(0, rank, 0, 1, COPY) for rank in range(1, n_ranks)]
    schedule = schedule_from([*gather, *spread] * 3, n_ranks=n_ranks, n_chunks=1)
    hazards = hazards_of(schedule)

    assert len(hazards.more) > 2 * 1024
    check_dependencies_are_conflicts(schedule, hazards)
    for row in range(n_ranks - 1, 2 * (n_ranks - 1)):
        assert hazards.before_send(row) == list(range(n_ranks - 1))


@settings(max_examples=60)
@given(tables(), st.integers(1, 9))
def test_batches_change_nothing(schedule: Schedule, events: int) -> None:
    check_batches_change_nothing(schedule, events)


@pytest.mark.parametrize("schedule", BUILT)
def test_batches_change_nothing_in_a_built_schedule(schedule: Schedule) -> None:
    for events in (1, 7, 100, schedule.n_rows):
        check_batches_change_nothing(schedule, events)


def check_batches_change_nothing(schedule: Schedule, events: int) -> None:
    whole = hazards_of(schedule)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hazards_module, "_EVENTS_PER_BATCH", events)
        batched = hazards_of(schedule)

    for row in range(schedule.n_rows):
        assert batched.before_send(row) == whole.before_send(row)
        assert batched.before_write(row) == whole.before_write(row)
    assert len(batched.more) == len(whole.more)


def test_the_arrays_are_read_only() -> None:
    hazards = hazards_of(schedule_from([(0, 1, 0, 1, REDUCE)], n_ranks=2, n_chunks=1))

    for array in (hazards.send, hazards.write):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 3


def test_forwarding_overlaps_the_blue_rings() -> None:
    """No barrier: most blue rows of the first phase do not wait for any forwarding."""
    mesh = Mesh((8, 8)).without("2x2@2,2")
    schedule = ALGORITHMS["ft-two-d"].build(mesh, Collective.ALLREDUCE)
    hazards = hazards_of(schedule)
    spans = {phase.name: range(phase.start, phase.stop) for phase in schedule.phases}
    behind: set[int] = set(spans["forward"])
    for row in spans["blue reduce-scatter"]:
        if behind.intersection(hazards.before_send(row)):
            behind.add(row)

    waiting = behind.intersection(spans["blue reduce-scatter"])
    assert 0 < len(waiting) < len(spans["blue reduce-scatter"]) / 2
