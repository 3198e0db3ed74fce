"""The table: what it promises of its columns, and what it refuses."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from numpy.testing import assert_allclose

from meshmend.errors import InputError
from meshmend.schedule.algorithms import ALGORITHMS, algorithm
from meshmend.schedule.placement import channel_loads, distinct_pairs, placed
from meshmend.schedule.table import COPY, REDUCE, SUMS, Collective, Phase, Schedule, index_dtype
from meshmend.topology.mesh import Mesh
from strategies import Row, connected_meshes, rows_of, schedule_from, tables

HOLE = Mesh((4, 4)).without("2x2@0,2")


def good() -> Schedule:
    return schedule_from([(0, 1, 0, 2, REDUCE), (1, 0, 1, 3, COPY)], n_ranks=2, n_chunks=3)


def column(*values: int) -> Any:
    return np.array(values, dtype=np.uint16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"src": column(0)}, "columns of one length"),
        ({"src": np.array([0, 1], dtype=np.int64)}, "its columns as .*uint16"),
        ({"src": column(0, 2)}, "row 1 needs a source below 2, but got rank 2 chunks"),
        ({"dst": column(9, 0)}, r"row 0 needs a destination below 2, but .* adds to rank 9"),
        ({"dst": column(0, 0)}, "row 0 needs two different ranks"),
        ({"lo": column(0, 3)}, r"row 1 needs at least one chunk, but .* \[3, 3\) overwrites"),
        ({"hi": column(2, 4)}, "row 1 needs chunks up to 3"),
        ({"op": np.array([0, 2], dtype=np.uint8)}, r"row 1 needs an op of 0 \(REDUCE\) or 1"),
        ({"cuts": np.array([0, 0.5, 0.4, 1])}, "cuts that rise from 0 to 1"),
        ({"cuts": np.array([0.1, 0.5, 0.6, 1])}, "cuts that rise from 0 to 1"),
        ({"cuts": np.array([0, 0.5, 0.6, 2])}, "cuts that rise from 0 to 1"),
        ({"cuts": np.array([0, np.nan, 0.6, 1])}, "cuts that rise from 0 to 1"),
        ({"owners": np.array([0, 1], dtype=np.int32)}, "an owner below 2 for each chunk"),
        ({"owners": np.array([0, 1, 2], dtype=np.int32)}, "an owner below 2 for each chunk"),
        ({"owners": np.array([0, 1, -1], dtype=np.int32)}, "an owner below 2 for each chunk"),
    ],
)
def test_a_table_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    assert good().n_rows == 2

    with pytest.raises(InputError, match=message):
        replace(good(), **change)


def test_columns_cannot_be_written_to() -> None:
    schedule = good()

    for array in (schedule.src, schedule.hi, schedule.op, schedule.owners, schedule.cuts):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_a_row_in_words() -> None:
    assert good().row(0) == "rank 0 chunks [0, 2) adds to rank 1"
    assert good().row(1) == "rank 1 chunks [1, 3) overwrites rank 0"


def test_columns_are_as_narrow_as_ranks_and_chunks_allow() -> None:
    assert index_dtype(65535, 65535) is np.uint16
    assert index_dtype(65536, 1) is np.uint32
    assert index_dtype(1, 65536) is np.uint32


def test_phases_name_runs_of_rows() -> None:
    schedule = replace(good(), phases=(Phase("one", 1, 2),))

    assert schedule.phase_of_rows().tolist() == [-1, 0]


@pytest.mark.parametrize("name", ["ring-1d", "ft-two-d", "rank-ring"])
@pytest.mark.parametrize("collective", list(SUMS))
def test_the_phases_of_a_built_schedule_cover_its_rows_in_order(
    name: str, collective: Collective
) -> None:
    schedule = ALGORITHMS[name].build(HOLE, collective)
    phase = schedule.phase_of_rows()

    assert phase.min() == 0
    assert phase.max() == len(schedule.phases) - 1
    assert np.all(np.diff(phase) >= 0)


@pytest.mark.parametrize("name", ["ring-1d", "two-d", "row-pair", "ft-two-d", "rank-ring"])
def test_allreduce_is_reduce_scatter_then_all_gather(name: str) -> None:
    mesh = HOLE if name in {"ring-1d", "ft-two-d", "rank-ring"} else Mesh((4, 4))
    whole, scatter, gather, update = (ALGORITHMS[name].build(mesh, kind) for kind in SUMS)

    assert rows_of(whole) == rows_of(update) == rows_of(scatter) + rows_of(gather)
    assert set(scatter.op.tolist()) == {REDUCE}
    assert set(gather.op.tolist()) == {COPY}
    assert whole.owners.tolist() == scatter.owners.tolist() == gather.owners.tolist()


@pytest.mark.parametrize(("rows", "cols"), [(2, 2), (4, 4), (4, 6), (12, 8)])
def test_a_ring_sends_every_share_to_all_the_others(rows: int, cols: int) -> None:
    schedule = ALGORITHMS["ring-1d"].build(Mesh((rows, cols)), Collective.ALLREDUCE)
    n_chips = rows * cols
    moved = schedule.row_fractions()
    out_of = np.bincount(schedule.src, weights=moved, minlength=n_chips)

    assert_allclose(out_of, 2 * (n_chips - 1) / n_chips)
    assert schedule.n_rows == 2 * 2 * n_chips * (n_chips - 1)


def test_a_ring_loads_each_of_its_links_alike_and_no_other() -> None:
    """Both ways round: each direction of a ring's link carries (n - 1) / n of the payload."""
    mesh = Mesh((4, 4)).without("2x2@0,0")
    schedule = ALGORITHMS["ring-1d"].build(mesh, Collective.ALLREDUCE)
    loads = channel_loads(schedule, placed(mesh, schedule).routes)

    assert_allclose(loads[loads > 0], 11 / 12)
    assert np.count_nonzero(loads) == 2 * 12


@settings(max_examples=50)
@given(connected_meshes())
def test_the_load_of_all_links_is_the_payload_times_its_hops(mesh: Mesh) -> None:
    schedule = ALGORITHMS["rank-ring"].build(mesh, Collective.ALLREDUCE)
    routes = placed(mesh, schedule).routes
    n_hops = {pair: len(routes.path(mesh, *pair)) - 1 for pair in pairs_of(schedule)}
    hops = [n_hops[src, dst] for src, dst, *_ in rows_of(schedule)]

    assert_allclose(channel_loads(schedule, routes).sum(), schedule.row_fractions() @ hops)


def pairs_of(schedule: Schedule) -> set[tuple[int, int]]:
    return {(src, dst) for src, dst, *_ in rows_of(schedule)}


@given(tables())
def test_the_pairs_of_a_schedule_are_each_named_once(schedule: Schedule) -> None:
    src, dst = distinct_pairs(schedule)
    pairs = list(zip(src.tolist(), dst.tolist(), strict=True))

    assert len(pairs) == len(set(pairs))
    assert set(pairs) == pairs_of(schedule)


def test_a_schedule_needs_as_many_chips_as_it_has_ranks() -> None:
    schedule = ALGORITHMS["rank-ring"].build(Mesh((2, 2)), Collective.ALLREDUCE)

    with pytest.raises(InputError, match="for 4 ranks needs as many live chips, but 2x3 has 6"):
        placed(Mesh((2, 3)), schedule)


def test_an_unknown_algorithm_is_refused_with_the_names_there_are() -> None:
    assert algorithm("two-d").name == "two-d"

    with pytest.raises(
        InputError, match="no algorithm 'three-d'; choose one of trees, ring-1d, two-d,"
    ):
        algorithm("three-d")


def test_the_digest_differs_for_another_value_in_any_column() -> None:
    """By it chips agree on a plan: two tables that differ must not pass for one."""
    rows: list[Row] = [(0, 1, 0, 2, REDUCE), (1, 0, 0, 2, COPY), (1, 2, 0, 3, COPY)]
    first = schedule_from(rows, n_ranks=3, n_chunks=3)
    scratch = np.array([0, 0, 1], dtype=np.uint8), np.zeros(3, dtype=np.uint8)
    others = [
        replace(first, owners=np.array([0, 0, 1], dtype=np.int32)),
        replace(first, cuts=np.array([0.0, 0.25, 0.5, 1.0])),
        replace(first, op=np.array([COPY, COPY, COPY], dtype=np.uint8)),
        replace(first, collective=Collective.REDUCE_SCATTER),
        replace(first, src_buffer=scratch[0], dst_buffer=scratch[1]),
        replace(first, src_buffer=scratch[1], dst_buffer=scratch[0]),
        replace(first, src=column(2, 1, 1)),
        replace(first, dst=column(1, 0, 0)),
        replace(first, lo=column(1, 0, 0)),
        replace(first, hi=column(2, 1, 3)),
    ]

    assert len({first.digest, *(other.digest for other in others)}) == 1 + len(others)
    assert schedule_from(rows, n_ranks=3, n_chunks=3).digest == first.digest
