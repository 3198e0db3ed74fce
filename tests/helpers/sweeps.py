"""Sweeps over several things at once: `make test` takes a spread of the cases, `make slow` all."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def spread(*axes: Sequence[Any], one_in: int) -> list[Any]:
    """Return all combinations as parameters; all but one in `one_in` of them are slow.

    Those that are left lie on diagonals, so that each value of each axis is among them.
    """
    cases = list(product(*(enumerate(axis) for axis in axes)))
    kept = [case for case in cases if sum(place for place, _ in case) % one_in == 0]
    for at, axis in enumerate(axes):
        assert {case[at][0] for case in kept} == set(range(len(axis))), f"axis {at} has gaps"
    return [
        pytest.param(
            *(value for _, value in case),
            marks=() if case in kept else pytest.mark.slow,
            id="-".join(str(getattr(value, "name", value)) for _, value in case),
        )
        for case in cases
    ]
