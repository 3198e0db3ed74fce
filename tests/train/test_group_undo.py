"""The state before a step comes back exactly, whatever the step has changed."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from meshmend.train.data.random_numbers import RandomNumbers
from meshmend.train.torch.group_state import GroupState
from meshmend.train.torch.state_before import StateBefore


class Net(torch.nn.Module):
    """Two layers, a persistent and another buffer."""

    seen: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.second = torch.nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("mask", torch.full((4,), 0.5), persistent=False)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.second(torch.tanh(self.first(inputs)) * self.mask)


class World:
    """A model in training, all of whose state is known."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = Net()
        self.optimizer: Any = torch.optim.Adam(self.model.parameters())
        self.scheduler: Any = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.scaler: Any = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.before = StateBefore((self.model, self.optimizer, self.scheduler, self.scaler))

    def backward(self) -> None:
        self.scaler.scale(self.model(torch.ones(2, 3)).square().sum()).backward()

    def step(self) -> None:
        self.backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()

    def seen(self) -> Any:
        """Return copies of all that a step may change."""
        parameters = list(self.model.parameters())
        return (
            [each.detach().clone() for each in parameters],
            [None if each.grad is None else each.grad.clone() for each in parameters],
            {name: each.clone() for name, each in self.model.named_buffers()},
            [(each.requires_grad, each.shape) for each in parameters],
            [each.training for each in self.model.modules()],
            {
                key: {name: value.clone() for name, value in each.items()}
                for key, each in self.optimizer.state_dict()["state"].items()
            },
            self.optimizer.state_dict()["param_groups"],
            self.scheduler.state_dict(),
            self.scaler.state_dict(),
            {key: dict(each) for key, each in self.scaler._per_optimizer_states.items()},
            torch.get_rng_state(),
            random.getstate(),
            np.random.get_state(legacy=False)["state"]["key"],
        )


def perturb(world: World) -> None:
    """What SAM does between its backward passes."""
    world.backward()
    with torch.no_grad():
        for each in world.model.parameters():
            old = each.data.clone()
            each.add_(1.0)
            each.data = old


def draw(world: World) -> None:
    torch.rand(3), random.random(), np.random.rand()


def evaluate(world: World) -> None:
    world.model.eval()
    world.model.first.requires_grad_(False)


def unscale(world: World) -> None:
    world.backward()
    world.scaler.unscale_(world.optimizer)


def change_buffers(world: World) -> None:
    world.model.mask.mul_(2)
    world.model.seen = world.model.seen + 1


def regroup(world: World) -> None:
    world.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 3.0})
    world.optimizer.param_groups[0]["lr"] = 7.0


CHANGES: list[Callable[[World], None]] = [
    World.backward,
    World.step,
    lambda world: world.optimizer.zero_grad(set_to_none=True),
    lambda world: world.optimizer.zero_grad(set_to_none=False),
    perturb,
    draw,
    evaluate,
    unscale,
    change_buffers,
    regroup,
    lambda world: world.optimizer.state.clear(),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("n_steps", [0, 1, 3])
def test_all_that_a_step_changes_is_brought_back(
    change: Callable[[World], None], n_steps: int
) -> None:
    world = World()
    for _ in range(n_steps):
        world.before.capture()
        world.step()
    world.before.capture()
    was = world.seen()

    for _ in range(2):
        change(world)
        world.before.restore()

        torch.testing.assert_close(world.seen(), was, rtol=0, atol=0)


def test_after_a_step_was_undone_the_next_ones_are_those_of_an_undisturbed_loop() -> None:
    usual, struck = World(), World()
    for at in range(4):
        usual.step()
        struck.before.capture()
        if at == 2:
            unscale(struck)
            perturb(struck)
            struck.before.restore()
        struck.step()

    for name, value in usual.model.state_dict().items():
        assert torch.equal(value, struck.model.state_dict()[name])


def test_a_closure_that_fails_in_the_middle_of_lbfgs_leaves_no_trace() -> None:
    def trained(fails_at: int) -> list[torch.Tensor]:
        world = World()
        world.optimizer = torch.optim.LBFGS(world.model.parameters(), max_iter=4)
        before = StateBefore((world.model, world.optimizer))
        calls = 0

        def closure() -> Any:
            nonlocal calls
            calls += 1
            if calls == fails_at:
                raise RuntimeError("a chip is gone")
            world.optimizer.zero_grad()
            loss = world.model(torch.ones(2, 3)).square().sum()
            loss.backward()
            return loss

        for _ in range(3):
            before.capture()
            try:
                world.optimizer.step(closure)
            except RuntimeError:
                before.restore()
                world.optimizer.step(closure)
        return [each.detach() for each in world.model.parameters()]

    for one, other in zip(trained(0), trained(7), strict=True):
        assert torch.equal(one, other)


def test_a_chip_that_joins_gets_every_buffer_and_mode() -> None:
    one, other = World(), World()
    one.model.mask = torch.full((4,), 3.0)
    one.model.seen = torch.ones(5)  # of another shape
    evaluate(one)

    state = GroupState((one.model,)).state(7)
    GroupState((other.model,)).load(state)

    assert state["step"] == 7
    torch.testing.assert_close(other.seen()[:5], one.seen()[:5], rtol=0, atol=0)
    assert "mask" not in other.model.state_dict()


def test_the_digest_sees_every_buffer_that_steps_leave_alone_and_every_plain_value() -> None:
    def digest(world: World) -> str:
        return GroupState((world.model, world.optimizer, world.scheduler)).digest()

    def flip(world: World) -> None:
        world.model.mask[2] += 1e-7

    def set_rate(world: World) -> None:
        world.optimizer.param_groups[0]["lr"] = 0.1

    def advance(world: World) -> None:
        world.scheduler.last_epoch += 1

    assert digest(World()) == digest(World())
    for change in (flip, set_rate, advance):
        world = World()
        change(world)
        assert digest(world) != digest(World()), change


def test_loading_an_optimizer_keeps_the_groups_that_another_one_shares() -> None:
    """SAM's inner optimizer has the same groups: a scheduler that changes one changes both."""
    world = World()
    outer = torch.optim.SGD(world.model.parameters(), lr=0.5)
    inner = torch.optim.SGD(outer.param_groups)
    inner.param_groups = outer.param_groups
    state = GroupState((outer, inner))

    state.load(state.state(0))
    outer.param_groups[0]["lr"] = 0.25

    assert inner.param_groups[0]["lr"] == 0.25


def drawn() -> tuple[float, float, float]:
    return random.random(), np.random.random(), float(torch.rand(()))


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("torch_seed", [3, 4])
def test_a_chip_goes_on_with_the_random_numbers_of_others_unless_it_was_seeded_apart(
    torch_seed: int, *, is_new: bool
) -> None:
    def joined(seed: int, *, has_begun: bool) -> RandomNumbers:
        numbers = RandomNumbers()
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        numbers.see("join")
        torch.manual_seed(seed)
        if has_begun:
            numbers.see("step")
        return numbers

    giver = joined(3, has_begun=True)
    drawn()
    state = giver.state()
    expected = drawn()

    joined(torch_seed, has_begun=not is_new).take(state)
    found = drawn()

    assert found[:2] == expected[:2]
    assert (found[2] == expected[2]) == (is_new or torch_seed == 3)


def test_a_chip_that_shares_some_numbers_with_the_first_one_gives_its_own_on() -> None:
    """Others that were seeded as it was go on with all of its numbers."""

    def joined(torch_seed: int) -> RandomNumbers:
        numbers = RandomNumbers()
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(torch_seed)
        numbers.see("join")
        return numbers

    first, second = joined(3), joined(4)
    first.see("step")
    second.take(first.state())
    second.see("step")
    drawn()
    state = second.state()
    expected = drawn()

    joined(4).take(state)

    assert drawn() == expected
