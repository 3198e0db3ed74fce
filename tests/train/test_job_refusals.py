"""What a job cannot train is refused in one line that says what to do."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meshmend.errors import InputError, NonFiniteError
from meshmend.train import Job, Saving

SAMPLES = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 4))


def job(model: Any, optimizer: Any = None, **more: Any) -> Job:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    return Job(model, optimizer, SAMPLES, **{"batch": 8, "steps": 2, **more})


def lbfgs() -> Job:
    model = torch.nn.Linear(4, 4)
    return job(model, torch.optim.LBFGS(model.parameters()))


def lazy() -> Job:
    model = torch.nn.LazyLinear(4)
    return job(model, torch.optim.SGD(model.parameters()))


def half_with_scaler() -> Job:
    return job(torch.nn.Linear(4, 4).half(), scaler=torch.amp.GradScaler("cpu"))


def scaler_in_also() -> Job:
    return job(torch.nn.Linear(4, 4), also=[torch.amp.GradScaler("cpu")])


def complex_numbers() -> Job:
    return job(torch.nn.Linear(4, 4, dtype=torch.complex64))


def no_such_policy() -> Job:
    return job(torch.nn.Linear(4, 4), non_finite="ignore")


def checks_less_than_never() -> Job:
    return job(torch.nn.Linear(4, 4), check_shares=-1)


def checks_of_fewer_samples() -> Job:
    return job(torch.nn.Linear(4, 4), check_shares=4, policy="shrink")


def no_way_on() -> Job:
    return job(torch.nn.Linear(4, 4), check_shares=4, on_wrong_result="ignore")


def no_such_batch() -> Job:
    return job(torch.nn.Linear(4, 4), policy="grow")


def no_way_to_share() -> Job:
    return job(torch.nn.Linear(4, 4), shares="fair")


def no_every() -> Job:
    return job(torch.nn.Linear(4, 4), saving=Saving(Path("checkpoints"), every=0))


def folder_as_saving() -> Job:
    return job(torch.nn.Linear(4, 4), saving="checkpoints")


def seed_as_text() -> Job:
    return job(torch.nn.Linear(4, 4), seed="7")


def endless() -> Job:
    return job(torch.nn.Linear(4, 4), steps=sys.maxsize)


def large_seed() -> Job:
    return job(torch.nn.Linear(4, 4), seed=1 << 64)


def rare_checks() -> Job:
    return job(torch.nn.Linear(4, 4), check_shares=10**18)


def number_as_resume() -> Job:
    return job(torch.nn.Linear(4, 4), resume=3)


def no_module() -> Job:
    return job(["a model"], torch.optim.SGD([torch.zeros(1)]))


class Colours:
    """An object with a state that no chip could get."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": {"red", "blue"}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to do."""


def set_in_also() -> Job:
    return job(torch.nn.Linear(4, 4), also=[Colours()])


def made_in_inference_mode() -> Job:
    model = torch.nn.Linear(4, 4)
    with torch.inference_mode():
        model.register_buffer("scale", torch.ones(4))
    return job(model)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lbfgs, "cannot step LBFGS: it needs a closure.*use an optimizer that steps once"),
        (lazy, "weight has none yet; call the model once"),
        (half_with_scaler, "GradScaler needs parameters of float32.*torch.autocast"),
        (scaler_in_also, "GradScaler as scaler="),
        (complex_numbers, "weight is torch.complex64; store its real and imaginary part"),
        (no_such_policy, "one of raise, skip, but got 'ignore'"),
        (
            checks_less_than_never,
            "Job needs check_shares as a whole number of at least 0, but got -1",
        ),
        (checks_of_fewer_samples, 'check_shares needs policy="constant", but got .shrink.'),
        (no_way_on, "one of restore, continue, stop, but got 'ignore'"),
        (no_such_batch, "a batch policy needs to be one of constant, shrink, but got 'grow'"),
        (no_way_to_share, "shares needs to be one of equal, speed, but got 'fair'"),
        (no_every, "Saving needs every as a whole number of at least 1, but got 0"),
        (folder_as_saving, r"saving=Saving\(folder, every=...\), but got a str"),
        (seed_as_text, "Job needs seed as a whole number of at least 0, but got '7'"),
        (endless, "Job needs steps of at most 9007199254740991, but got 9223372036854775807"),
        (large_seed, "Job needs seed of at most 18446744073709551615, but got 184467440737095516"),
        (rare_checks, "Job needs check_shares of at most 9007199254740991, but got 1000000"),
        (number_as_resume, 'a folder of checkpoints or "auto", but got 3'),
        (set_in_also, r"state\['also'\]\[0\]\['seen'\] is a set; leave it out"),
        (made_in_inference_mode, r"scale was made in torch.inference_mode\(\); make the model"),
        (no_module, "Job needs a module, or several in a list or dict"),
    ],
)
def test_it_is_refused_when_the_job_is_made(make: Any, words: str) -> None:
    with pytest.raises(InputError, match=words) as refused:
        make()
    assert "\n" not in str(refused.value)


def test_checkpoints_stay_in_one_folder_wherever_the_loop_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(4, 4)
    for inputs, _ in (training := job(model, saving=Saving(Path("saved"), every=1))):
        monkeypatch.chdir(tmp_path / "other")
        loss = model(inputs).sum()
        loss.backward()
        training.step(loss)

    assert sorted(path.name for path in (tmp_path / "saved").glob("step-*"))[-1].endswith("2")
    assert not list((tmp_path / "other").iterdir())


def test_a_sparse_gradient_is_refused_by_name() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(10, 4, sparse=True))
    for _ in (training := job(model)):
        loss = model(torch.tensor([1, 2])).sum()
        loss.backward()
        with pytest.raises(InputError, match=r"sparse gradients, but that of 0.weight is"):
            training.step(loss)
        break


def test_a_parameter_that_is_thawed_later_is_refused_by_name() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[0].weight.requires_grad_(False)
    for inputs, _ in (training := job(model)):
        model[0].weight.requires_grad_(True)
        loss = model(inputs).sum()
        loss.backward()
        with pytest.raises(InputError, match=r"gradient of 0.weight: it was frozen when the job"):
            training.step(loss)
        break


def test_calls_outside_their_place_are_refused() -> None:
    model = torch.nn.Linear(4, 4)
    training = job(model)
    with pytest.raises(InputError, match=r"samples of a new step"):
        training.clip_grad_norm(1.0)
    for inputs, _ in training:
        with pytest.raises(InputError, match=r"a norm above 0, but got 0"):
            training.clip_grad_norm(0)
        with pytest.raises(InputError, match=r"samples and a batch of at least 1"):
            training.evaluate([], lambda batch: 0)
        loss = model(inputs).sum()
        loss.backward()
        training.step(loss)


def test_gradients_that_are_not_finite_raise_before_the_weights_change() -> None:
    model = torch.nn.Linear(4, 4)
    before = model.weight.detach().clone()
    for inputs, _ in (training := job(model)):
        loss = (model(inputs) * float("nan")).sum()
        loss.backward()
        with pytest.raises(NonFiniteError, match=r"chip \(0,\): weight, bias; the weights are"):
            training.step(loss)
        break
    assert torch.equal(model.weight, before)


def test_with_skip_such_a_step_counts_and_changes_nothing() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    training = job(model, non_finite="skip")
    states = []
    for inputs, _ in training:
        factor = float("inf") if training.step_number == 0 else 1.0
        loss = (model(inputs) * factor).square().mean()
        loss.backward()
        assert training.step(loss)
        states.append([each.clone() for each in model.state_dict().values()])

    assert training.step_number == 2
    assert all(torch.isfinite(each).all() for each in states[0])
    assert not all(torch.equal(*pair) for pair in zip(*states, strict=True))
