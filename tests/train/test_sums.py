"""Sums of values that the chips of a job bring together."""

from typing import Any

import numpy as np
import pytest

from meshmend.errors import InputError
from meshmend.train.core.chip_job import added


def test_numbers_arrays_lists_and_dicts_are_added_part_by_part() -> None:
    total = added(
        [{"n": 1, "parts": [1.5, np.array([1, 2])]}, {"n": 2, "parts": [2.0, np.ones(2)]}]
    )

    assert total["n"] == 3
    assert total["parts"][0] == 3.5
    assert total["parts"][1].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([{"a": 1}, {"b": 1}], "the same keys"),
        ([[1], [1, 2]], "equally long lists"),
        (["a", "b"], "numbers and tensors"),
        ([1, {"a": 1}], "values alike"),
        ([np.ones(2), np.ones(3)], "values alike"),
    ],
)
def test_values_that_do_not_fit_are_refused(values: list[Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        added(values)
