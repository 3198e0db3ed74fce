"""Strangers' loops give the results of a plain loop, whichever moment chips are killed in.

`make slow` takes all rows through all moments. `make test` takes each style on one of its fronts
through two moments, but no style in JAX that differs from another in nothing that a job sees.
"""

from collections import Counter
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

from matrix import Row, check, distance, rows


def some_rows() -> list[Row]:
    """Return one row of each style, with two moments.

    Its front is the one that other styles have taken least; trainers, which are slow to start, are
    taken a third as often. The moments of a front go round from row to row.
    """
    found, n_of = [], Counter[str]()
    unlike = [row for row in rows() if not row.like]
    for _, own in groupby(unlike, key=lambda row: (row.style, row.front == "jax")):
        row = min(own, key=lambda row: n_of[row.front] * (3 if row.front == "trainer" else 1))
        first, n = 2 * n_of[row.front], len(row.moments)
        found.append(replace(row, moments=tuple(row.moments[(first + at) % n] for at in range(2))))
        n_of[row.front] += 1
    return found


@pytest.mark.parametrize("row", some_rows(), ids=str)
def test_a_loop_is_equal_to_the_plain_one_or_refused(row: Row, tmp_path: Path) -> None:
    check(row, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("row", rows(), ids=str)
def test_a_loop_killed_at_every_moment_is_equal_to_the_plain_one_or_refused(
    row: Row, tmp_path: Path
) -> None:
    check(row, tmp_path)


def test_what_make_test_takes_of_the_matrix_has_all_styles_fronts_and_moments() -> None:
    some, all_rows = some_rows(), rows()

    assert len({row.style for row in all_rows}) >= 24
    styles = {row.style for row in some}
    assert all((row.like or row.style) in styles for row in all_rows)
    for front in ("job", "group", "trainer", "jax"):
        whole = {moment for row in all_rows if row.front == front for moment in row.moments}
        assert whole
        assert whole == {moment for row in some if row.front == front for moment in row.moments}


def test_numbers_that_are_not_finite_are_equal_only_to_themselves() -> None:
    inf = float("inf")

    assert distance([-inf, 1.0], [-inf, 1.0]) == 0
    assert distance([float("nan")], [0.0]) == inf
    assert distance([float("nan")], [float("nan")]) == inf
    assert distance([1.0], []) == inf
