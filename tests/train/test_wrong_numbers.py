"""Chips that compute wrong numbers, as faults make them do."""

from pathlib import Path

import pytest

from elastic_job import elastic, losses, of_kind

pytest.importorskip("torch")

STEPS = 12


@pytest.mark.parametrize(
    "part", ["weights", *(pytest.param(part, marks=pytest.mark.slow) for part in ("state", "sum"))]
)
def test_a_bit_that_flips_on_one_chip_makes_it_differ_from_the_others(
    part: str, tmp_path: Path
) -> None:
    result = elastic(tmp_path, mesh="1x3", steps=STEPS, inject=[f"flip {part} 0,1 at 6"])

    fault, *_ = of_kind(result, "fault")
    assert (fault["kind"], fault["chips"], fault["at_step"] >= 6) == ("flip", [[0, 1]], True)
    (differ,) = of_kind(result, "states-differ")
    assert (differ["step"], differ["strange"]) == (STEPS, [[0, 1]])


def test_a_bit_that_flips_in_a_gradient_makes_all_chips_wrong_alike(tmp_path: Path) -> None:
    right = elastic(tmp_path / "right", mesh="1x3", steps=STEPS)
    wrong = elastic(tmp_path / "wrong", mesh="1x3", steps=STEPS, inject=["flip gradient 0,1 at 5"])

    assert wrong["finished"]
    assert not of_kind(wrong, "states-differ")
    same = [losses(wrong)[step] == losses(right)[step] for step in range(1, STEPS + 1)]
    assert all(same[:5])
    assert not all(same[5:])
