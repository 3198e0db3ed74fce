"""LARS and LAMB do what their papers say."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from meshmend.errors import InputError  # noqa: E402  # after the check that torch is there
from meshmend.train import LAMB, LARS, layerwise_groups  # noqa: E402


def stepped(make: Any, weight: list[float], gradient: list[float]) -> list[float]:
    """Return what a step makes of a weight."""
    parameter = torch.nn.Parameter(torch.tensor(weight))
    parameter.grad = torch.tensor(gradient)
    make([parameter]).step()
    found: list[float] = parameter.tolist()
    return found


def test_lars_scales_the_gradient_by_the_ratio_of_the_norms() -> None:
    """|w| = 5 and |g| = 1, so the rate is 0.1 * 0.5 * 5 / (1 + 0.2 * 5) = 0.125."""
    found = stepped(lambda p: LARS(p, lr=0.1, trust=0.5, weight_decay=0.2), [3.0, 4.0], [0.0, 1.0])

    assert found == pytest.approx([3 - 0.125 * 0.2 * 3, 4 - 0.125 * (1 + 0.2 * 4)])


def test_the_first_step_of_lamb_has_the_norm_of_the_weights_times_the_rate() -> None:
    """Without decay the direction of the first step is (1, 1), so the ratio is 5 / sqrt(2)."""
    found = stepped(lambda p: LAMB(p, lr=0.1, weight_decay=0.0, eps=0.0), [3.0, 4.0], [0.01, 7.0])

    assert found == pytest.approx([3 - 0.5 / 2**0.5, 4 - 0.5 / 2**0.5])


@pytest.mark.parametrize("make", [LARS, LAMB])
def test_a_tensor_of_zeros_and_one_without_a_gradient_are_not_scaled(make: Any) -> None:
    assert all(value == value for value in stepped(make, [0.0, 0.0], [1.0, 1.0]))
    assert stepped(make, [0.0], [0.0]) == [0.0]


def test_groups_that_do_not_adapt_are_plain_sgd_and_adamw() -> None:
    weight, gradient = [3.0, 4.0], [0.5, -1.0]

    lars = stepped(lambda p: LARS(p, lr=0.1, adapts=False, weight_decay=0.01), weight, gradient)
    sgd = stepped(lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01), weight, gradient)
    lamb = stepped(lambda p: LAMB(p, lr=0.1, adapts=False, eps=1e-8), weight, gradient)
    adamw = stepped(lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.01), weight, gradient)

    assert lars == pytest.approx(sgd)
    assert lamb == pytest.approx(adamw)


def test_vectors_are_neither_scaled_nor_decayed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    model[0].weight.requires_grad_(requires_grad=True)

    matrices, vectors = LAMB(layerwise_groups(model), lr=0.1).param_groups

    assert [tuple(each.shape) for each in matrices["params"]] == [(2, 3)]
    assert len(vectors["params"]) == 3
    assert (vectors["adapts"], vectors["weight_decay"]) == (False, 0.0)


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (LARS, {"lr": -1.0}, "LARS needs lr of 0 or more, but got -1.0"),
        (LAMB, {"eps": float("nan")}, "LAMB needs eps of 0 or more, but got nan"),
        (LAMB, {"betas": (0.9, 1.0)}, "LAMB needs betas from 0 to below 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    make: Any, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        make([torch.zeros(1)], **settings)
