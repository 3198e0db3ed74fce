"""Plans inside jitted programs on virtual devices: exact, same bits, differentiable, on links."""

from pathlib import Path

import pytest

from virtual_devices import needs_jax, outcomes

pytestmark = needs_jax

SCRIPT = Path(__file__).with_name("collective_checks.py")
# Each mesh with one number of slices here, with the other in MORE.
PLANNED = [
    *(("12", algorithm) for algorithm in ("trees", "ft-two-d")),
    *((name, "trees") for name in ("3x5", "2x3x4", "torus", "line", "link")),
]
SMALL, MORE = (
    [
        f"exact {mesh} {algorithm} {(1, 8)[(at + turn) % 2]}"
        for at, (mesh, algorithm) in enumerate(PLANNED)
    ]
    for turn in (0, 1)
)
OTHERS = [
    "tiles",
    "same bits",
    "short floats",
    "trees",
    "not a number",
    "gradients of a model",
    "gradients through the sum",
    "means of whole numbers",
    "parts",
    "gradients of parts",
    "blocks",
    "size does not grow",
    "wrong pair is caught",
    "text of a tpu",
    "bytes of loops",
    "tables are swapped",
    "refusals",
]
LARGE = [
    (n, f"exact {n} {name} {slices}")
    for n in (60, 252)
    for name in ("trees", "ft-two-d")
    for slices in (1, 8)
]


@pytest.fixture(scope="module")
def ended() -> dict[str, str]:
    return outcomes(SCRIPT, 24, *SMALL, *OTHERS)


@pytest.mark.parametrize("check", SMALL)
def test_sums_are_exact_and_follow_links(check: str, ended: dict[str, str]) -> None:
    assert ended[check] == "ok"


@pytest.mark.parametrize("check", OTHERS)
def test_collectives_agree_with_those_of_jax(check: str, ended: dict[str, str]) -> None:
    assert ended[check] == "ok"


@pytest.mark.slow
def test_sums_parts_and_gradients_agree_in_other_cases_too() -> None:
    more = [*MORE, "more parts", "more gradients"]
    assert outcomes(SCRIPT, 24, *more) == dict.fromkeys(more, "ok")


@pytest.mark.slow
@pytest.mark.parametrize(("n_devices", "check"), LARGE)
def test_sums_are_exact_on_many_devices(n_devices: int, check: str) -> None:
    assert outcomes(SCRIPT, n_devices, check) == {check: "ok"}
