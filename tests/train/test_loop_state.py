"""What a loop changes after a step that did not count is undone, in all that the job knows."""

import copy
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn.utils import prune  # noqa: E402

from commanding import meshmend_run  # noqa: E402
from meshmend.errors import InputError  # noqa: E402
from meshmend.train import Job  # noqa: E402
from meshmend.train.data.samples import Share  # noqa: E402
from meshmend.train.torch.group_state import GroupState  # noqa: E402
from meshmend.train.torch.learner import TorchLearner  # noqa: E402
from meshmend.train.torch.loop_state import LoopState, LoopWeights  # noqa: E402

_SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda of: torch.optim.lr_scheduler.StepLR(of, 1, gamma=0.5),
    "cosine": lambda of: torch.optim.lr_scheduler.CosineAnnealingLR(of, 9),
    "cycle, with a momentum of its own": lambda of: torch.optim.lr_scheduler.OneCycleLR(
        of, 0.5, total_steps=9
    ),
    "a row of two": lambda of: torch.optim.lr_scheduler.SequentialLR(
        of,
        [
            torch.optim.lr_scheduler.LinearLR(of, 0.1, total_iters=3),
            torch.optim.lr_scheduler.ExponentialLR(of, 0.9),
        ],
        milestones=[3],
    ),
    "a chain": lambda of: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ExponentialLR(of, each) for each in (0.9, 0.8)]
    ),
    "plateau": lambda of: torch.optim.lr_scheduler.ReduceLROnPlateau(of, patience=0),
}


def made(rate: Any = 0.1) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    # Two groups: a scheduler changes both.
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": rate}]
    return model, torch.optim.SGD(groups, lr=rate, momentum=0.9)


def settings(optimizer: Any) -> list[dict[str, Any]]:
    return [
        {name: float(value) for name, value in group.items() if name in ("lr", "momentum")}
        for group in optimizer.param_groups
    ]


def stepped(scheduler: Any, metric: float) -> None:
    is_metric = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    scheduler.step(*[metric] * is_metric)


@pytest.mark.filterwarnings("ignore:Detected call of", "ignore:Please also save")  # PyTorch's own
@pytest.mark.parametrize("name", _SCHEDULERS)
@pytest.mark.parametrize("is_tensor", [False, True])
def test_a_scheduler_goes_on_as_if_the_turn_had_not_been(name: str, is_tensor: bool) -> None:
    rates = []
    for turns in ([True] * 6, [True, False, True, True, False, False, True, True, True]):
        model, optimizer = made(torch.tensor(0.1, dtype=torch.float64) if is_tensor else 0.1)
        scheduler = _SCHEDULERS[name](optimizer)
        state = LoopState(model, {"": optimizer}, [scheduler])
        seen = []
        for at, counts in enumerate(turns):
            if not counts:
                state.keep()
            stepped(scheduler, float(at if counts else 100))
            state.put_back()
            if counts:
                seen.append(settings(optimizer))
        rates.append(seen)

    assert rates[0] == rates[1]


def test_averages_rates_and_weights_by_hand_are_put_back_only_after_a_step_that_did_not_count() -> (
    None
):
    model, optimizer = made()
    average = torch.optim.swa_utils.AveragedModel(model)
    state = LoopState(model, {"": optimizer}, [average])
    average.update_parameters(model)
    state.keep()
    with torch.no_grad():
        model.weight += 1
    average.update_parameters(model)
    optimizer.param_groups[1]["lr"] = 7.0

    state.put_back()

    assert int(average.n_averaged) == 1
    assert torch.equal(average.module.weight, model.weight)
    assert settings(optimizer)[1]["lr"] == 0.1
    optimizer.param_groups[1]["lr"] = 7.0
    state.put_back()  # the turn counted, so the loop meant it
    assert settings(optimizer)[1]["lr"] == 7.0


_CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda weight: weight.mul_(0.9),
    "through data": lambda weight: weight.data.mul_(0.9),
    "other memory": lambda weight: setattr(weight, "data", weight.data * 0.9),
}


@pytest.mark.parametrize("how", _CHANGES)
@pytest.mark.parametrize("turns", [[True, False, True], [False, False, True, True]])
def test_weights_that_change_before_each_step_go_on_as_if_the_turn_had_not_been(
    how: str, turns: list[bool]
) -> None:
    model, _ = made()
    first = model.weight.detach().clone()
    weights = LoopWeights(model)
    for counts in turns:
        weights.begin()
        with torch.no_grad():
            _CHANGES[how](model.weight)
        weights.note()
        if not counts:
            weights.restore()
            weights.restore()  # a state may be put back more than once

    torch.testing.assert_close(model.weight, first * 0.9**2)


def test_a_weight_that_changes_for_the_first_time_in_a_step_that_does_not_count_is_told() -> None:
    model, _ = made()
    weights = LoopWeights(model)
    for turn in range(3):
        weights.begin()
        if turn > 1:
            model.bias.data = model.bias.data + 1
        weights.note()

    with pytest.raises(InputError, match=r"has changed bias before job.step, for the first time"):
        weights.restore()
    weights.forget()
    weights.restore()  # of a step without samples, so without a turn of the loop


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("prune", "a model that keeps its parameters, but since the job was made 1 got others"),
        ("replace", "but since the job was made the model got others"),
        ("group", "optimizers that keep their parameters, but the loop has given them others"),
    ],
)
def test_a_loop_that_gives_model_or_optimizer_other_parameters_is_refused(
    change: str, words: str
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[0].parameters(), 0.1)
    job = Job(model, optimizer, torch.ones(8, 2), batch=4, steps=3)
    with pytest.raises(InputError, match=words):  # noqa: PT012
        for inputs in job:
            if job.step_number == 1 and change == "prune":
                prune.l1_unstructured(model[1], "weight", 0.5)  # type: ignore[no-untyped-call]
            elif job.step_number == 1 and change == "group":
                optimizer.add_param_group({"params": list(model[1].parameters())})
            elif job.step_number == 1:
                model[1] = torch.nn.Linear(2, 2)
            loss = model(inputs).square().mean()
            loss.backward()
            job.step(loss)
    assert job.step_number == 1


def test_an_optimizer_of_what_the_job_does_not_know_is_refused() -> None:
    model, _ = made()
    flat = torch.nn.Parameter(torch.zeros(6))

    with pytest.raises(InputError, match=r"SGD steps one of shape \[6\] that the model has not"):
        Job(model, torch.optim.SGD([flat], 0.1), torch.ones(8, 2), batch=4, steps=3)


class _Counted(torch.nn.Linear):  # type: ignore[misc,name-defined]
    """Counts its passes in a state of its own."""

    n_passes = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"passes": self.n_passes}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.n_passes = state["passes"]

    def forward(self, inputs: Any) -> Any:
        self.n_passes += 1
        return super().forward(inputs)


@pytest.mark.parametrize("is_tensor", [False, True])
def test_rates_and_counts_that_change_before_each_step_go_on_as_if_the_turn_had_not_been(
    is_tensor: bool,
) -> None:
    """But nothing is undone after another state has come, or in a step without samples."""
    model = _Counted(2, 2)
    rate: Any = torch.tensor(1.0) if is_tensor else 1.0
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    learner = TorchLearner(model, optimizer)
    group = optimizer.param_groups[0]
    for counts in (True, False, False, True):
        learner.begin(Share(0, 4, 4), lambda number: None)
        group["lr"] *= 0.5
        loss = model(torch.ones(4, 2)).sum()
        loss.backward()
        learner.gather(loss, None, is_last=False)
        if not counts:
            learner.undo()
    assert (float(group["lr"]), model.n_passes) == (0.25, 2)

    state = copy.deepcopy(learner.state())
    state["optimizer"]["param_groups"][0]["lr"] = 7.0
    learner.load(state)
    learner.undo()
    assert float(group["lr"]) == 7  # also: the loop's own dict is still that of the optimizer
    learner.begin(Share(0, 4, 4), lambda number: None)
    group["lr"] = 8.0
    learner.clear(is_last=False)
    learner.undo()
    assert float(optimizer.param_groups[0]["lr"]) == 8


def test_the_random_numbers_of_a_step_are_the_same_in_each_run_also_beside_loader_workers() -> None:
    """Those of Python and NumPy too, by which loops mix samples, for example."""
    found = []
    for seed in range(2):
        random.seed(seed)
        np.random.seed(seed)
        model, optimizer = made()
        loader = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=4, num_workers=1)
        job = Job(model, optimizer, loader, steps=2)
        for inputs in job:
            found.append((seed, random.random(), np.random.rand(), float(torch.rand(()))))
            loss = model(inputs).sum()
            loss.backward()
            job.step(loss)

    assert [each[1:] for each in found[:2]] == [each[1:] for each in found[2:]]
    assert len({number for each in found for number in each[1:]}) == 6


class _Curriculum:
    def __init__(self) -> None:
        self.level = 0

    def state_dict(self) -> dict[str, int]:
        return {"level": self.level}

    def load_state_dict(self, state_dict: dict[str, int], /) -> None:
        self.level = state_dict["level"]


@pytest.mark.parametrize(
    ("make", "change", "at", "name"),
    [
        (_Curriculum, lambda each: setattr(each, "level", 1), 0, "_Curriculum"),
        (_Curriculum, lambda each: setattr(each, "level", 1), 2, "_Curriculum"),
        (lambda: torch.nn.Linear(99, 99), lambda each: each.weight.data.mul_(2), 0, "Linear"),
        (
            lambda: torch.nn.Linear(99, 99),
            lambda each: torch.nn.init.ones_(each.weight),
            2,
            "Linea",
        ),
        (lambda: torch.nn.Linear(2, 2), lambda each: each.weight.data.mul_(2), 2, "Linear"),
    ],
)
def test_a_loop_that_changes_what_is_in_also_before_its_step_is_refused(
    make: Callable[[], Any], change: Callable[[Any], object], at: int, name: str
) -> None:
    model, optimizer = made()
    part = make()
    job = Job(model, optimizer, torch.ones(8, 2), batch=4, steps=4, also=[part])
    with pytest.raises(InputError, match=rf"must not change the {name}\w* in also before job.step"):  # noqa: PT012
        for inputs in job:
            if job.step_number == at:
                change(part)
            loss = model(inputs).square().mean()
            loss.backward()
            job.step(loss)
    assert job.step_number == at


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        lambda optimizer, model: optimizer.state[model.bias]["momentum_buffer"].mul_(0.5),
        lambda optimizer, model: optimizer.state.pop(model.bias),
    ],
)
def test_an_optimizer_whose_state_the_loop_changes_where_that_cannot_be_undone_is_refused(
    change: Callable[[Any, Any], object], is_before: bool
) -> None:
    """After a step that counts, it may."""
    model, optimizer = made()
    learner = TorchLearner(model, optimizer)

    def turn(*, counts: bool) -> None:
        learner.begin(Share(0, 4, 4), lambda number: None)
        if is_before and not counts:
            change(optimizer, model)
        loss = model(torch.ones(4, 2)).sum()
        loss.backward()
        learner.gather(loss, None, is_last=False)
        if counts:
            learner.update()
        else:
            learner.undo()
            learner.loop_state.keep()
            if not is_before:
                change(optimizer, model)
        if counts:
            optimizer.state[model.weight]["momentum_buffer"].mul_(0.5)
        learner.end_turn(1)

    turn(counts=True)
    turn(counts=True)
    with pytest.raises(InputError, match=r"chang\w+ the state of its SGD .* returned True, or"):
        turn(counts=False)


def test_a_state_that_comes_after_a_step_that_did_not_count_stays_as_it_came() -> None:
    """It may come while the loop still evaluates in that turn."""

    def chip() -> tuple[Any, TorchLearner]:
        model, optimizer = made()
        return model, TorchLearner(model, optimizer)

    (model, learner), (theirs, other) = chip(), chip()
    torch.nn.init.ones_(theirs.weight)
    learner.begin(Share(0, 4, 4), lambda number: None)
    learner.loop_state.keep()

    learner.load(copy.deepcopy(other.state()))
    torch.nn.init.zeros_(model.weight)
    learner.end_turn(1)

    assert torch.equal(model.weight, theirs.weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_chip_that_takes_the_state_of_an_optimizer_has_its_bits_whatever_their_types(
    dtype: Any,
) -> None:
    """PyTorch makes the float32 of NAdam and ASGD tensors of the parameters' type."""

    def chip() -> tuple[Any, TorchLearner]:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).to(dtype)
        optimizers = [
            torch.optim.NAdam(model[0].parameters()),
            torch.optim.ASGD(model[1].parameters()),
        ]
        return model, TorchLearner(model, optimizers)

    (model, learner), (_, other) = chip(), chip()
    learner.begin(Share(0, 4, 4), lambda number: None)
    loss = model(torch.ones(4, 2, dtype=dtype)).float().sum()
    loss.backward()
    learner.gather(loss, None, is_last=False)
    learner.update()

    other.load(copy.deepcopy(learner.state()))

    assert other.begun_digest().wait() == learner.begun_digest().wait()


def test_what_is_not_the_same_on_all_chips_is_left_alone() -> None:
    class Trainer:
        is_compared = False

        def state_dict(self) -> dict[str, Any]:
            raise AssertionError

        def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
            raise AssertionError

    model, optimizer = made()
    state = LoopState(model, {"": optimizer}, [Trainer()])

    state.keep()
    state.put_back()


def test_a_loop_that_steps_its_scheduler_needs_samples_on_all_chips(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import torch
from meshmend.train import Job

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
dataset = torch.utils.data.TensorDataset(torch.ones(64, 4))
job = Job(model, optimizer, dataset, batch=2, steps=3, also=[scheduler])
for (inputs,) in job:
    loss = model(inputs).mean()
    loss.backward()
    job.step(loss)
    scheduler.step()
""")

    ended = meshmend_run("--elastic", "--mesh", "1x3", str(script))

    assert ended.returncode == 1
    assert "must not step its StepLR: a batch of 2 gives some of the 3 chips" in ended.stderr
    assert "use a batch of at least 3, or step it in the optimizer" in ended.stderr


def test_a_chip_that_takes_a_state_freezes_and_thaws_what_the_loop_of_the_other_did() -> None:
    """What was frozen before the job was made stays so. Chips in different turns are not told."""

    def chip(loop_freezes: int) -> tuple[Any, TorchLearner]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
        model[0].requires_grad_(False)
        learner = TorchLearner(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model[loop_freezes].requires_grad_(False)
        return model, learner

    (_, learner), (model, other) = chip(1), chip(2)
    assert learner.begun_digest().wait() == other.begun_digest().wait()

    other.load(learner.state())

    assert [layer.weight.requires_grad for layer in model] == [False, False, True]


def test_a_chip_that_takes_a_state_has_the_modes_that_the_loop_of_the_other_has_set() -> None:
    """Batch norm that rests from some step on rests on a chip that joins later, and in a resume."""

    def chip() -> tuple[Any, TorchLearner]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        return model, TorchLearner(model, torch.optim.SGD(model.parameters(), lr=0.1))

    (model, learner), (joined, other), (resumed, third) = chip(), chip(), chip()
    model[1].eval()
    assert learner.begun_digest().wait() == other.begun_digest().wait()

    other.load(learner.state())
    third.load(learner.saved_state())

    for each in joined, resumed:
        assert [part.training for part in each.modules()] == [True, True, False]


def _expanded(model: Any) -> None:
    model.register_buffer("mask", torch.ones(1, 2).expand(3, 2))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_expanded, "mask was expanded; store mask.clone()"),
        (lambda model: model.to("meta"), "weight is on the device meta; give it values first"),
    ],
)
def test_a_model_without_memory_for_a_state_is_refused(
    change: Callable[[Any], None], words: str
) -> None:
    model, _ = made()
    change(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(InputError, match=f"Job needs .*{re.escape(words)}"):
        Job(model, optimizer, torch.utils.data.TensorDataset(torch.ones(4, 2)), batch=2, steps=1)
    with pytest.raises(InputError, match=f"reconfigure needs .*{re.escape(words)}"):
        GroupState([model, optimizer])


def test_a_chip_that_joins_knows_from_the_others_which_weights_the_loop_changes() -> None:
    """It would copy all weights in its first turn otherwise, as a job does in its own."""

    def chip() -> TorchLearner:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        return TorchLearner(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def turn(learner: TorchLearner) -> None:
        learner.begin(Share(0, 4, 4), lambda number: None)
        with torch.no_grad():
            learner._model.get_parameter("1.bias").mul_(0.5)
        loss = learner._model(torch.ones(4, 2)).sum()
        loss.backward()
        learner.gather(loss, None, is_last=False)

    learner, other = chip(), chip()
    assert len(learner.state()["moving"]) == 4
    turn(learner)

    other.load(learner.state())

    assert other.state()["moving"] == ["1.bias"]
    assert "moving" not in learner.saved_state()
