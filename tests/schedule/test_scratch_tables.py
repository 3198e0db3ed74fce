"""Tables with scratch buffers: what they refuse, what waits for what, and that files keep them."""

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from meshmend.errors import InputError, UnsupportedError
from meshmend.planning.formats.msccl_xml import msccl_xml
from meshmend.planning.lowering import lockstep_plan
from meshmend.planning.plan import load_plan, plan
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.lockstep_program import with_equal_cells
from meshmend.schedule.table import COPY, REDUCE, Collective, Schedule, index_dtype
from meshmend.topology.mesh import Mesh
from strategies import rows_of, schedule_from

TORUS = Mesh((4, 4), (True, True))
Place = tuple[int, int]  # rank, buffer


def with_buffers(
    rows: list[tuple[Place, Place, int, int, int]], *, n_ranks: int, n_chunks: int = 1
) -> Schedule:
    """Return the table with these rows from place to place, right or wrong."""
    first = schedule_from(
        [
            (src, (src + 1) % n_ranks if dst == src else dst, lo, hi, op)
            for (src, _), (dst, _), lo, hi, op in rows
        ],
        n_ranks=n_ranks,
        n_chunks=n_chunks,
    )
    most = max((max(one[1], two[1]) for one, two, *_ in rows), default=0)
    dtype = index_dtype(n_ranks * (1 + most), n_chunks)
    return replace(
        first,
        dst=np.array([dst for _, (dst, _), *_ in rows], dtype=dtype),
        src_buffer=np.array([buffer for (_, buffer), *_ in rows], dtype=np.uint8),
        dst_buffer=np.array([buffer for _, (_, buffer), *_ in rows], dtype=np.uint8),
    )


@st.composite
def scratch_tables(draw: st.DrawFn) -> Schedule:
    """Random rows between few places, so that they conflict; mostly wrong."""
    n_ranks, n_chunks = draw(st.integers(2, 3)), draw(st.integers(1, 3))
    place = st.tuples(st.integers(0, n_ranks - 1), st.integers(0, 2))
    pair = st.lists(place, min_size=2, max_size=2, unique=True)
    bounds = st.lists(st.integers(0, n_chunks), min_size=2, max_size=2, unique=True).map(sorted)
    drawn = draw(st.lists(st.tuples(pair, bounds, st.integers(0, 1)), min_size=1, max_size=25))
    rows = [(one, two, lo, hi, op) for (one, two), (lo, hi), op in drawn]
    return with_buffers(rows, n_ranks=n_ranks, n_chunks=n_chunks)


def run_in_order(schedule: Schedule, order: list[int]) -> NDArray[Any]:
    """Run events on numbers: event 2 r reads row r, event 2 r + 1 writes what was read."""
    numbers = np.arange(1, 1 + schedule.n_places * schedule.n_chunks, dtype=object)
    cells: NDArray[Any] = (numbers**3).reshape(schedule.n_places, schedule.n_chunks)
    sent = {}
    for event in order:
        row = event // 2
        chunks = slice(int(schedule.lo[row]), int(schedule.hi[row]))
        if event % 2 == 0:
            sent[row] = cells[schedule.src_place[row], chunks].copy()
        elif schedule.op[row] == COPY:
            cells[schedule.dst_place[row], chunks] = sent[row]
        else:
            cells[schedule.dst_place[row], chunks] += sent[row]
    return cells


@settings(max_examples=200, deadline=None)
@given(scratch_tables(), st.randoms(use_true_random=False))
def test_any_order_that_keeps_the_hazards_ends_like_program_order(
    schedule: Schedule, random: Random
) -> None:
    hazards = hazards_of(schedule)
    waits: list[set[int]] = []
    for row in range(schedule.n_rows):
        waits.append({2 * earlier + 1 for earlier in hazards.before_send(row)})
        at_receiver = {
            2 * earlier + int(schedule.src_place[earlier] != schedule.dst_place[row])
            for earlier in hazards.before_write(row)
        }
        waits.append({2 * row} | at_receiver)
    order: list[int] = []
    while len(order) < len(waits):
        done = set(order)
        ready = [event for event in range(len(waits)) if event not in done and waits[event] <= done]
        order.append(random.choice(ready))

    in_program_order = run_in_order(schedule, list(range(len(waits))))
    assert (run_in_order(schedule, order) == in_program_order).all()


def test_a_table_without_scratch_has_ranks_for_places() -> None:
    schedule = schedule_from([(0, 1, 0, 2, REDUCE)], n_ranks=2, n_chunks=2)

    assert schedule.src_place is schedule.src
    assert schedule.dst_place is schedule.dst
    assert (schedule.n_buffers, schedule.n_places, schedule.has_scratch) == (1, 2, False)


def test_a_place_is_a_buffer_of_a_rank() -> None:
    schedule = with_buffers(
        [((1, 0), (1, 2), 0, 1, COPY), ((1, 2), (0, 0), 0, 1, REDUCE)], n_ranks=2
    )

    assert schedule.n_buffers == 3
    assert schedule.src_place.tolist() == [3, 5]
    assert schedule.dst_place.tolist() == [5, 0]
    assert schedule.is_local.tolist() == [True, False]
    assert schedule.row(0) == "rank 1 buffer 0 chunks [0, 1) overwrites rank 1 buffer 2"


def test_tables_that_cannot_be_are_refused() -> None:
    right = with_buffers([((0, 0), (1, 1), 0, 1, COPY)], n_ranks=2)

    with pytest.raises(InputError, match="two different ranks, or buffers of one rank"):
        with_buffers([((0, 1), (0, 1), 0, 1, COPY)], n_ranks=2)
    with pytest.raises(InputError, match="both buffer columns or none"):
        replace(right, src_buffer=None)
    with pytest.raises(InputError, match="buffer columns as long as the others"):
        replace(right, src_buffer=np.zeros(2, dtype=np.uint8))
    with pytest.raises(InputError, match="a sharded update needs a Schedule without scratch"):
        replace(right, collective=Collective.SHARDED_UPDATE)


@pytest.mark.parametrize("name", ["exchange", "exchange-1"])
def test_a_plan_with_scratch_is_a_file_of_version_2_and_is_proved_anew(
    tmp_path: Path, name: str
) -> None:
    saved = plan(TORUS, name)
    saved.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json").schedule

    assert '"version":2' in (tmp_path / "plan.json").read_text()
    assert rows_of(loaded) == rows_of(saved.schedule)
    for column, value in saved.schedule.buffer_columns.items():
        assert (loaded.buffer_columns[column] == value).all()


def test_a_plan_without_scratch_is_still_a_file_of_version_1(tmp_path: Path) -> None:
    plan(TORUS, "rings-nd").save(tmp_path / "plan.json")

    text = (tmp_path / "plan.json").read_text()
    assert '"version":1' in text
    assert "src_buffer" not in text


def test_who_has_no_scratch_says_so_in_one_line() -> None:
    made = plan(TORUS, "exchange")

    for refuses in (lambda: msccl_xml(made), lambda: with_equal_cells(made.schedule)):
        with pytest.raises(
            UnsupportedError, match=r"without scratch buffers, but exchange has \d+"
        ):
            refuses()


def test_in_lockstep_auto_takes_no_exchange() -> None:
    assert plan(TORUS, payload="10KB", fabric="tpu-v4").schedule.algorithm == "exchange"

    low = lockstep_plan(TORUS, payload="10KB", fabric="tpu-v4")

    assert low.plan.schedule.algorithm == "trees"
