"""The fingerprint of a job: what differs between two workers is found and named, and no more."""

import random
import re
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch.utils.data import Dataset, TensorDataset

from meshmend.membership.job import NOT_COMPARED, JobFingerprint
from meshmend.train.core.job_settings import JobSettings
from meshmend.train.torch.job import fingerprint_of

INPUTS = torch.arange(80, dtype=torch.float32).reshape(10, 8)


def fingerprint(
    model: torch.nn.Module | None = None,
    optimizer: Any = torch.optim.SGD,
    dataset: Any = None,
    **changes: Any,
) -> JobFingerprint:
    model = model or torch.nn.Linear(8, 1)
    dataset = TensorDataset(INPUTS) if dataset is None else dataset
    arguments = JobSettings(len(dataset), **{"batch": 16, "steps": 60, **changes})
    return fingerprint_of(model, optimizer(model.parameters(), lr=0.1), dataset, arguments)


class Samples(Dataset[Any]):
    """Samples that a function makes of their index."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return self._make(index)


def test_two_workers_of_a_job_have_the_same_fingerprint_whatever_their_weights() -> None:
    assert fingerprint() == fingerprint()
    assert fingerprint().difference(fingerprint()) == ""
    assert NOT_COMPARED not in str(fingerprint())


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"steps": 30}, "steps is 30 on that chip, but 60 in this job"),
        ({"batch": 8}, "batch is 8 on that chip, but 16 in this job"),
        ({"seed": 7}, "seed is 7 on that chip, but 0 in this job"),
        ({"policy": "shrink"}, "policy is shrink on that chip, but constant in this job"),
        ({"model": torch.nn.Linear(8, 2)},
         r"model is 2 parameters of 18 elements \(digest \w+\) on that chip, "
         r"but 2 parameters of 9 "),
        ({"model": torch.nn.Linear(8, 1).double()}, r"model is 2 parameters of 9 elements"),
        ({"optimizer": torch.optim.Adam},
         r"optimizer is Adam\(.*\) on that chip, but SGD\(.*lr, .*\) in"),
        ({"dataset": TensorDataset(INPUTS[:9])},
         "the length of the data set is 9 on that chip, but 10 in this job"),
        ({"dataset": TensorDataset(INPUTS + 1)},
         r"the digest of a few samples is \w{16} on that chip, but \w{16} in this job"),
    ],
)  # fmt: skip
def test_what_differs_is_named_with_both_values(other: dict[str, Any], words: str) -> None:
    difference = fingerprint().difference(fingerprint(**other))

    assert re.search(words, difference), difference


def test_another_version_of_the_code_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = fingerprint()
    monkeypatch.setattr("meshmend.__version__", "9.9")

    difference = ours.difference(fingerprint())

    assert difference.startswith("meshmend's version is 9.9 on that chip, but 0.")


@pytest.mark.parametrize(
    "make",
    [
        lambda index: (torch.full((2,), index), index),
        lambda index: {"text": f"number {index}", "ids": [index, index + 1]},
        lambda index: (np.full(3, index), np.float32(index), b"bytes"),
        lambda index: torch.rand(3) + index,
        lambda index: (random.random(), np.random.rand(2)),
    ],
    ids=["tensors", "texts", "arrays", "torch's random numbers", "other random numbers"],
)
def test_samples_of_these_kinds_are_compared(make: Any) -> None:
    first, second = (fingerprint(dataset=Samples(make)).samples for _ in range(2))

    assert first == second != NOT_COMPARED


def _fails(index: int) -> Any:
    raise OSError("no such file")


def test_samples_that_cannot_be_digested_are_not_compared() -> None:
    own = random.Random(0)
    for make in (lambda index: own.random(), lambda index: object(), _fails):
        odd = fingerprint(dataset=Samples(make))

        assert odd.samples == NOT_COMPARED
        assert odd.difference(fingerprint()) == fingerprint().difference(odd) == ""


@pytest.mark.parametrize("length", [0, 1, 2])
def test_small_data_sets_have_fingerprints_too(length: int) -> None:
    assert fingerprint(dataset=TensorDataset(INPUTS[:length])).dataset_length == length


def test_making_a_fingerprint_draws_no_random_number_of_the_script() -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def seed() -> None:
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)

    made = torch.nn.Linear(8, 1)
    seed()
    expected = drawn()
    seed()
    fingerprint(model=made, dataset=Samples(lambda index: torch.rand(3)))

    assert drawn() == expected
