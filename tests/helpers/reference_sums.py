"""What an all-reduce leaves on every rank, run row by row, and without one of its rows."""

from dataclasses import replace

import numpy as np
import pytest

from meshmend.errors import VerificationError
from meshmend.schedule.contributions import check_contributions
from meshmend.schedule.table import Schedule
from meshmend.transport import reference


def check_sums(schedule: Schedule) -> None:
    """Assert that every rank ends with the sum of all, and with the same bits."""
    random = np.random.default_rng(0)
    arrays = [random.normal(size=97).astype(np.float32) for _ in range(schedule.n_ranks)]
    results = reference.run(schedule, arrays)

    for result in results:
        assert result.tobytes() == results[0].tobytes()
    np.testing.assert_allclose(results[0], np.sum(arrays, axis=0), rtol=1e-4, atol=1e-4)


def check_every_row_counts(right: Schedule) -> None:
    """Assert that the proof accepts a schedule, and refuses it without any one of its rows."""
    check_contributions(right)

    for row in range(right.n_rows):
        keep = np.arange(right.n_rows) != row
        names = ("src", "dst", "lo", "hi", "op")
        wrong = replace(right, **{name: getattr(right, name)[keep] for name in names}, phases=())
        with pytest.raises(VerificationError):
            check_contributions(wrong)
