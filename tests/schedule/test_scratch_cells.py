"""Nobody reads scratch before something was written there, and the check finds who does."""

import numpy as np
import pytest

from meshmend.errors import VerificationError
from meshmend.schedule.contributions import check_contributions
from meshmend.schedule.proofs import check_scratch
from meshmend.schedule.table import COPY, REDUCE, Collective, Rows, Schedule, schedule_of

# Two ranks exchange what they have through buffer 1, and add it up.
Row = tuple[int, int, int, int, int, int, int]  # src, its buffer, dst, its buffer, lo, hi, op
SENT: list[Row] = [(0, 0, 1, 1, 0, 2, COPY), (1, 0, 0, 1, 0, 2, COPY)]
ADDED: list[Row] = [(0, 1, 0, 0, 0, 2, REDUCE), (1, 1, 1, 0, 0, 2, REDUCE)]


def table(rows: list[Row]) -> Schedule:
    phases = []
    for src, src_buffer, dst, dst_buffer, lo, hi, op in rows:
        one, two, first, stop = (np.array([each]) for each in (src, dst, lo, hi))
        phases.append(("row", Rows(one, two, first, stop, op, src_buffer, dst_buffer)))
    return schedule_of(
        phases,
        algorithm="by hand",
        collective=Collective.ALLREDUCE,
        owners=np.zeros(2, dtype=np.int32),
        n_ranks=2,
    )


def test_an_exchange_of_two_ranks_is_right() -> None:
    check_scratch(table(SENT + ADDED))
    check_contributions(table(SENT + ADDED), exact=True)
    check_contributions(table(SENT + ADDED), exact=False)


def test_without_scratch_there_is_nothing_to_prove() -> None:
    check_scratch(table([(0, 0, 1, 0, 0, 2, REDUCE)]))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (ADDED + SENT, "row 0, where rank 0 buffer 1 .* uses chunk 0 in buffer 1 of rank 0"),
        ([*SENT[:1], *ADDED], "row 1, .* uses chunk 0 in buffer 1 of rank 0"),
        ([*SENT, (0, 1, 1, 2, 0, 2, REDUCE), *ADDED], "row 2, .* chunk 0 in buffer 2 of rank 1"),
        ([(0, 0, 1, 1, 0, 1, COPY), *SENT[1:], *ADDED], "row 3, .* chunk 1 in buffer 1 of rank 1"),
        ([*SENT, (0, 2, 0, 1, 0, 2, COPY), *ADDED], "row 2, .* chunk 0 in buffer 2 of rank 0"),
    ],
)
def test_what_was_never_written_is_not_read(rows: list[Row], words: str) -> None:
    with pytest.raises(VerificationError, match=words):
        check_scratch(table(rows))


def test_counting_contributions_alone_would_miss_it() -> None:
    """Scratch that nothing was written to counts as nothing, but memory holds something."""
    wrong = table([*SENT, *ADDED, (0, 2, 0, 0, 0, 2, REDUCE)])
    check_contributions(wrong, exact=True)

    with pytest.raises(VerificationError, match="where nothing was written"):
        check_scratch(wrong)


@pytest.mark.parametrize("exact", [True, False])
def test_a_sum_that_stays_in_scratch_is_no_sum(exact: bool) -> None:
    wrong = table([*SENT, *ADDED[:1], (1, 0, 1, 1, 0, 2, REDUCE)])
    check_scratch(wrong)

    with pytest.raises(VerificationError, match="rank 1, chunk 0 of 2 misses the data of rank 0"):
        check_contributions(wrong, exact=exact)
