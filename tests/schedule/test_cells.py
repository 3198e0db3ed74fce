"""Equal cells: a schedule keeps its meaning when its payload is cut anew and its rows are split."""

import numpy as np
import pytest

from meshmend import plan
from meshmend.schedule.contributions import check_contributions
from meshmend.schedule.lockstep_program import in_pieces, row_widths, with_equal_cells
from meshmend.schedule.table import COPY, REDUCE, Collective, Schedule, even_cuts
from meshmend.topology.mesh import Mesh


def two_ranks(cuts: list[float]) -> Schedule:
    """Return an allreduce of two ranks whose chunks end at these fractions."""
    n_chunks = len(cuts) - 1
    chunk = np.tile(np.arange(n_chunks, dtype=np.uint16), 2)
    src = np.repeat(np.array([1, 0], dtype=np.uint16), n_chunks)
    return Schedule(
        algorithm="by hand",
        collective=Collective.ALLREDUCE,
        n_ranks=2,
        cuts=np.array(cuts),
        owners=np.zeros(n_chunks, dtype=np.int32),
        src=src,
        dst=(1 - src).astype(np.uint16),
        lo=chunk,
        hi=(chunk + 1).astype(np.uint16),
        op=np.repeat(np.array([REDUCE, COPY], dtype=np.uint8), n_chunks),
    )


def test_chunks_of_one_size_stay_as_they_are() -> None:
    schedule = two_ranks(even_cuts(4).tolist())

    assert with_equal_cells(schedule) is schedule


def test_a_chunk_gets_cells_in_proportion_to_its_size_and_an_empty_one_none() -> None:
    cells = with_equal_cells(two_ranks([0.0, 0.5, 0.5, 0.75, 1.0]))

    check_contributions(cells)
    assert cells.n_chunks == 4
    assert (cells.hi - cells.lo).tolist() == [2, 1, 1, 2, 1, 1]


def test_a_tiny_chunk_still_gets_a_cell() -> None:
    cells = with_equal_cells(two_ranks([0.0, 0.999, 1.0]))

    check_contributions(cells)
    assert (cells.hi - cells.lo).min() == 1


@pytest.mark.parametrize("width", [1, 2, 3, 5, 12, 99])
def test_split_rows_say_the_same(width: int) -> None:
    schedule = plan(Mesh((8, 8)).without("2x2@2,2"), "ft-two-d").schedule

    pieces = in_pieces(schedule, width).schedule

    check_contributions(pieces)
    assert row_widths(pieces)[-1] <= width
    moved = (schedule.hi.astype(int) - schedule.lo).sum()
    assert (pieces.hi.astype(int) - pieces.lo).sum() == moved


def test_the_widths_of_rows_are_listed_once() -> None:
    assert row_widths(plan(Mesh((8, 8)).without("2x2@2,2"), "ft-two-d").schedule) == [1, 3, 12]
