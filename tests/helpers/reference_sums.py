"""What an all-reduce leaves on every rank, run row by row on random numbers."""

import numpy as np

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
