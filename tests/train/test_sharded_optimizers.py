"""Sharded optimizers give the bits of unsharded ones, on any number of ranks, also after moves."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from meshmend.errors import InputError  # noqa: E402  # after the check that torch is there
from meshmend.topology.text import parse_mesh  # noqa: E402
from meshmend.train.sharding.layerwise import LAMB, LARS  # noqa: E402
from meshmend.train.sharding.sharded_optimizers import ShardedOptimizers  # noqa: E402
from meshmend.train.sharding.update_shares import (  # noqa: E402
    UpdateShares,
    mirror_cost,
    mirrors_of,
    moves_to,
)
from meshmend.train.torch.optimizers import SteppedOptimizers  # noqa: E402

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "foreach adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamax": lambda p: torch.optim.Adamax(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p),
    "adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "asgd": lambda p: torch.optim.ASGD(p),
}
SHAPES = [(97, 33), (), (5,), (1000,), (64, 64), (1,), (3, 7, 11)]


class Ranks:
    """The optimizers of several ranks in one process, which gather and move as chips do."""

    def __init__(
        self,
        parameters: Sequence[Any],
        make: Callable[[Any], Any],
        n: int,
        *,
        has_masters: bool = False,
    ) -> None:
        self.parameters = [copy.deepcopy(list(parameters)) for _ in range(n)]
        self._has_masters = has_masters
        self.sharded = [self._sharded(make(each)) for each in self.parameters]
        self.generation = 0
        self.arrange(n)

    def _sharded(self, optimizer: Any) -> Any:
        return ShardedOptimizers({"": optimizer}, has_masters=self._has_masters)

    def arrange(self, n: int) -> None:
        """Cut the shares anew for the first n ranks, of which some may be new."""
        self.generation += 1
        n_bytes = self.sharded[0].flat.n_bytes
        self.shares = UpdateShares(n_bytes, mirrors_of([[rank // 2] for rank in range(n)]))
        needed = [self.shares.kept(rank) for rank in range(n)]
        for move in moves_to(needed, [each.held for each in self.sharded]):
            data = self.sharded[move.source].packed_span(move.span)
            self.sharded[move.target].receive(move.span, data)
        for rank, each in enumerate(self.sharded):
            each.keep(self.shares.owned(rank), self.shares.mirrored(rank))

    def step(self, gradients: Sequence[Any], *, late: int | None = None) -> None:
        """Step all ranks; a late one hears of it only afterwards."""
        for parameters in self.parameters:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = None if gradient is None else gradient.clone()
        squares = [each.squared_norms() for each in self.sharded]
        if squares[0] is not None:
            total = sum(squares)
            for each in squares:
                each[:] = total
        payloads = [each.trial((self.generation, 1), self.shares) for each in self.sharded]
        for rank in range(len(payloads)):
            low, high = self.shares.owned(rank)
            for payload in payloads:
                payload[low:high] = payloads[rank][low:high]
        for rank, each in enumerate(self.sharded):
            if rank == late:
                each.step_late()
            else:
                each.step()
        if late is not None:
            sound = self.parameters[(late + 1) % len(self.parameters)]
            for mine, theirs in zip(self.parameters[late], sound, strict=True):
                mine.data.copy_(theirs.data)

    def lose(self, ranks: set[int]) -> None:
        """Lose some ranks, and cut the shares anew."""
        alive = [rank for rank in range(len(self.sharded)) if rank not in ranks]
        self.sharded = [self.sharded[rank] for rank in alive]
        self.parameters = [self.parameters[rank] for rank in alive]
        self.arrange(len(alive))

    def add(self, make: Callable[[Any], Any]) -> None:
        """Add a rank that has nothing, and cut the shares anew."""
        self.parameters.append(copy.deepcopy(self.parameters[0]))
        new = self._sharded(make(self.parameters[-1]))
        new.drop()
        new.load_state_dict(self.sharded[0].state_dict())
        self.sharded.append(new)
        self.arrange(len(self.sharded))


def gradients_at(step: int) -> list[Any]:
    """Return random gradients; one parameter has none in every other step."""
    generator = torch.Generator().manual_seed(step)
    found = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [None if at == 3 and step % 2 else each for at, each in enumerate(found)]


def new_parameters() -> list[Any]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def steps_beside(make: Callable[[Any], Any]) -> Iterator[tuple[Ranks, list[Any]]]:
    """Step ranks that share an optimizer beside one that is not shared, through losses."""
    parameters = new_parameters()
    plain = copy.deepcopy(parameters)
    optimizer = make(plain)
    ranks = Ranks(parameters, make, 6)
    for step in range(8):
        gradients = gradients_at(step)
        for parameter, gradient in zip(plain, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        optimizer.step()
        ranks.step(gradients, late=step % 3)
        yield ranks, plain
        if step == 2:
            ranks.lose({2, 3})
        if step == 4:
            ranks.add(make)
            ranks.add(make)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_elementwise_optimizer_gives_the_bits_of_an_unsharded_one_through_losses(
    name: str,
) -> None:
    for ranks, plain in steps_beside(OPTIMIZERS[name]):
        for mine in ranks.parameters:
            assert all(torch.equal(*pair) for pair in zip(mine, plain, strict=True))


LAYERWISE: dict[str, Callable[[Any], Any]] = {
    "lars": lambda p: LARS(groups_of(p), lr=2.0, weight_decay=0.01),
    "lamb": lambda p: LAMB(groups_of(p), lr=0.02),
}


def groups_of(parameters: Sequence[Any]) -> list[dict[str, Any]]:
    """Return two groups as `layerwise_groups` makes them of a model."""
    return [
        {"params": [each for each in parameters if each.dim() >= 2]},
        {"params": [each for each in parameters if each.dim() < 2], "adapts": False},
    ]


@pytest.mark.parametrize("name", LAYERWISE)
def test_lars_and_lamb_have_norms_of_whole_tensors_and_the_same_bits_on_all_ranks(
    name: str,
) -> None:
    for ranks, plain in steps_beside(LAYERWISE[name]):
        first = ranks.parameters[0]
        assert all(torch.allclose(*pair, rtol=1e-6) for pair in zip(first, plain, strict=True))
        for mine in ranks.parameters:
            assert all(torch.equal(*pair) for pair in zip(mine, first, strict=True))
        check_mirrors(ranks)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["momentum", "adamw", "lamb"])
def test_masters_are_sharded_and_give_the_bits_of_masters_that_are_not(
    name: str, dtype: str
) -> None:
    make = (OPTIMIZERS | LAYERWISE)[name]
    parameters = [
        torch.nn.Parameter(each.detach().to(getattr(torch, dtype))) for each in new_parameters()
    ]
    parameters[1] = torch.nn.Parameter(parameters[1].detach().float())  # one that needs no master
    plain = copy.deepcopy(parameters)
    stepped = SteppedOptimizers({"": make(plain)}, has_masters=True)
    ranks = Ranks(parameters, make, 6, has_masters=True)

    for step in range(6):
        gradients = [
            None if gradient is None else (1e-3 * gradient).to(parameter.dtype)
            for parameter, gradient in zip(plain, gradients_at(step), strict=True)
        ]
        for parameter, gradient in zip(plain, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        stepped.step(None)
        ranks.step(gradients, late=step % 3)
        for mine in ranks.parameters:
            for one, other in zip(mine, plain, strict=True):
                assert one.dtype == other.dtype
                assert torch.equal(one, other)
        check_mirrors(ranks)
        if step == 2:
            ranks.lose({2, 3})
    ranks.sharded[0].squared_norms()
    payload = ranks.sharded[0].trial((9, 9), ranks.shares)
    assert len(payload) < sum(each.nbytes for each in plain) + 256 * len(plain) * 4


def check_mirrors(ranks: Ranks) -> None:
    """Check that owner and mirror of each share keep the same bits."""
    for owner, mirror in enumerate(ranks.shares.mirror_of):
        span = ranks.shares.owned(owner)
        one, other = (ranks.sharded[rank].packed_span(span) for rank in (owner, mirror))
        assert one.tobytes() == other.tobytes()


def test_masters_of_a_chip_that_began_with_other_weights_follow_the_weights_it_is_sent() -> None:
    weight = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    sharded = ShardedOptimizers({"": optimizer}, has_masters=True)
    with torch.no_grad():
        weight.fill_(3.0)

    sharded.renew_masters()
    weight.grad = torch.full_like(weight, 2.0)
    sharded.step()

    assert torch.equal(weight, torch.full_like(weight, 2.0))


def test_masters_keep_changes_that_16_bits_would_lose() -> None:
    weight = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    ranks = Ranks([weight], OPTIMIZERS["sgd"], 2, has_masters=True)

    for _ in range(10):
        ranks.step([torch.full((64,), 0.01, dtype=torch.bfloat16)])

    assert torch.equal(ranks.parameters[0][0], torch.full((64,), 0.99, dtype=torch.bfloat16))


def test_a_trial_changes_nothing_until_the_step_counts() -> None:
    ranks = Ranks(new_parameters(), OPTIMIZERS["adamw"], 4)
    ranks.step(gradients_at(0))
    before = copy.deepcopy(ranks.parameters[0])
    sent = ranks.sharded[0].packed_span(ranks.shares.owned(0)).tobytes()

    ranks.sharded[0].trial((1, 2), ranks.shares)

    assert all(torch.equal(*pair) for pair in zip(before, ranks.parameters[0], strict=True))
    assert ranks.sharded[0].packed_span(ranks.shares.owned(0)).tobytes() == sent


def test_owner_and_mirror_keep_the_same_bits_and_two_shares_of_the_state() -> None:
    parameters = [torch.nn.Parameter(torch.randn(512, 512)), torch.nn.Parameter(torch.randn(77))]
    ranks = Ranks(parameters, OPTIMIZERS["adamw"], 16)
    for step in range(3):
        torch.manual_seed(step)
        ranks.step([torch.randn_like(each) for each in parameters])

    check_mirrors(ranks)
    whole = 2 * sum(each.nbytes for each in parameters)
    most = max(each.n_state_bytes() for each in ranks.sharded)
    assert most <= 2.2 / 16 * whole
    predicted = mirror_cost(parse_mesh("4x4"), ranks.sharded[0].flat.n_bytes)
    assert most == pytest.approx(predicted.state_and_mirror_bytes, rel=1e-3)


def test_hooks_after_the_step_see_new_weights_and_change_settings_once() -> None:
    parameters = new_parameters()
    made: list[Any] = []

    def make(mine: Any) -> Any:
        made.append(torch.optim.SGD(mine, lr=0.1))
        return made[-1]

    def watched(optimizer: Any, mine: list[Any]) -> Callable[..., None]:
        before = [each.detach().clone() for each in mine]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

        def after_step(*_: Any) -> None:
            seen.append(all(not torch.equal(*pair) for pair in zip(mine, before, strict=True)))
            scheduler.step()

        return after_step

    ranks = Ranks(parameters, make, 2)
    seen: list[bool] = []
    for optimizer, mine in zip(made, ranks.parameters, strict=True):
        optimizer.register_step_post_hook(watched(optimizer, mine))

    ranks.step([torch.ones(shape) for shape in SHAPES])

    assert seen == [True, True]
    assert [group["lr"] for each in made for group in each.param_groups] == [0.05, 0.05]


def test_what_cannot_be_sharded_is_refused_in_one_line() -> None:
    parameters = new_parameters()
    with pytest.raises(InputError, match="but got LBFGS; train with shard_optimizer=False"):
        ShardedOptimizers({"": torch.optim.LBFGS(parameters)})
    with pytest.raises(InputError, match="but got Adafactor"):
        ShardedOptimizers({"": torch.optim.Adafactor(parameters)})
    with pytest.raises(InputError, match="but got Muon"):
        ShardedOptimizers({"": torch.optim.Muon([parameters[0]])})
    with pytest.raises(InputError, match="contiguous parameters, but number 0"):
        ShardedOptimizers({"": torch.optim.SGD([torch.randn(3, 5).T], lr=1.0)})
    twice = {name: torch.optim.SGD(parameters, lr=1.0) for name in ("one", "other")}
    with pytest.raises(InputError, match="each parameter in one group of one optimizer"):
        ShardedOptimizers(twice)


def test_a_changed_optimizer_and_its_own_state_dict_are_refused() -> None:
    parameters = new_parameters()
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    sharded = ShardedOptimizers({"": optimizer})
    shares = UpdateShares(sharded.flat.n_bytes, (0,))

    with pytest.raises(InputError, match=r"save it with saving= of the job"):
        optimizer.state_dict()
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(InputError, match="cannot call step_pre_hooks"):
        sharded.trial((1, 1), shares)
    handle.remove()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.randn(2))]})
    with pytest.raises(InputError, match="its groups have changed"):
        sharded.trial((1, 1), shares)


_Optimizer: Any = torch.optim.Optimizer


class Lion(_Optimizer):  # type: ignore[misc]  # torch is imported where it may be missing
    """An elementwise optimizer that torch does not have."""

    is_elementwise = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.state[parameter].setdefault(
                        "momentum", torch.zeros_like(parameter)
                    )
                    momentum.lerp_(parameter.grad, 0.1)
                    parameter.data.sub_(momentum.sign() * group["lr"])


def test_an_optimizer_that_says_that_it_is_elementwise_is_sharded() -> None:
    OPTIMIZERS["lion"] = Lion
    test_every_elementwise_optimizer_gives_the_bits_of_an_unsharded_one_through_losses("lion")
