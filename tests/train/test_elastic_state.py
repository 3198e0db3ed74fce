"""What a chip of an elastic group holds: of the states that come, and of a step that was tried."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from meshmend.errors import ResumeError
from meshmend.membership.faults.fault_injector import SelfInjection
from meshmend.train import Saving
from meshmend.train.core.worker_environment import WorkerEnvironment
from meshmend.train.data.random_numbers import RandomNumbers
from meshmend.train.data.samples import Order
from meshmend.train.torch import job_record
from meshmend.train.torch.built_objects import BuiltObjects
from meshmend.train.torch.elastic_group import ElasticGroup
from meshmend.train.torch.group_state import GroupState
from meshmend.train.torch.job_record import JobRecord, SampleTerms
from meshmend.train.torch.step_in_flight import StepInFlight
from meshmend.train.torch.tile_checkpoints import whole_state
from meshmend.train.torch.tile_replica import TileReplica


def build() -> list[Any]:
    """Return a model with random weights and a moving average, and its optimizer."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    return [model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]


def step(objects: Any) -> None:
    model, optimizer = objects
    model(torch.rand(4, 2)).square().sum().backward()
    optimizer.step()


def weights(objects: Any) -> list[float]:
    return [float(value) for each in objects[0].state_dict().values() for value in each.flatten()]


@pytest.fixture
def tried() -> Iterator[StepInFlight]:
    """A step in a job; what it checks in all optimizers of the process ends with the test."""
    held = StepInFlight(SelfInjection((0, 0), ()), RandomNumbers())
    held.is_in_job = True
    yield held
    held.is_in_job = False


def built_group() -> ElasticGroup:
    group = ElasticGroup(WorkerEnvironment())
    group.use_built(build)
    return group


def test_a_checkpoint_that_cannot_be_read_leaves_a_chip_the_state_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another chip says: read step 4. There is none here, and this chip may be needed still."""
    monkeypatch.setattr(job_record, "_SEEN_S", 0.0)  # it does not come later either
    environment = WorkerEnvironment()
    weight = torch.nn.Linear(2, 1)
    terms = SampleTerms(Order(8, 0), batch=2, steps=9, samples=lambda: "")
    group = ElasticGroup(environment)
    group.use_built(
        lambda: [weight, torch.optim.SGD(weight.parameters())],
        record=JobRecord(environment, terms, Saving(tmp_path, every=1)),
    )
    group.enter()

    with pytest.raises(ResumeError):
        group.take_state({"step": 4, "objects": [], "moving": [], "checkpoint": True})

    assert group.step_number == 0
    assert len(group.state()["objects"]) == 2


def test_a_chip_goes_on_from_the_state_of_another_one_and_gives_all_of_it_on() -> None:
    giver, taker = built_group(), built_group()
    giver.enter()
    step(giver.objects)
    told = {"step": 7, "saved": 5, "links": "0,0-0,1 at 0.25", "moving": ["0.1.running_mean"]}
    state = {**giver.state(), **told}

    taker.take_state(state)
    taker.enter()

    assert weights(taker.objects) == weights(giver.objects)
    assert taker.step_number == 7
    assert {name: taker.state()[name] for name in told} == told


def test_objects_that_are_made_once_more_have_the_state_of_those_before_them() -> None:
    """Not the state that came for those."""
    giver, taker = built_group(), built_group()
    giver.enter()
    taker.take_state(giver.state())
    taker.enter()
    step(taker.objects)
    expected = weights(taker.objects)

    taker.enter()

    assert weights(taker.objects) == expected != weights(giver.objects)


def test_objects_take_the_state_of_a_checkpoint_once() -> None:
    objects = build()
    whole = whole_state(GroupState(objects), has_parts=True)
    built = BuiltObjects(build, whole=whole)
    new = built.made()
    assert built.coming(4) is not None

    built.fill(new, {"objects": []})

    assert weights(new.objects) == weights(objects)
    assert built.coming(4) is None


def test_a_chip_that_takes_the_state_of_another_one_keeps_no_shares_of_its_own() -> None:
    """It lacks a step, and so do the shares that it holds; with its next objects it keeps them."""
    kept: list[bool] = []
    shares = SimpleNamespace(share=lambda _, *, has_begun, keeps_own: kept.append(keeps_own))
    tile: Any = SimpleNamespace(shares=shares)  # all of a `TileReplica` that this asks for
    built = BuiltObjects(build, tile)
    state = built.made().state(3)
    built.take(state, lambda _: {})

    for _ in range(2):
        built.fill(built.made(), state)

    assert kept == [False, True]


def test_a_chip_that_goes_back_to_a_checkpoint_does_not_write_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = WorkerEnvironment()
    terms = SampleTerms(Order(8, 0), batch=2, steps=9, samples=lambda: "")
    record = JobRecord(environment, terms)
    objects = build()
    whole = whole_state(GroupState(objects), has_parts=True)
    monkeypatch.setattr(record, "load", lambda _: whole)
    group = ElasticGroup(environment)
    group.use_built(build, record=record)
    group.enter()

    group.restore(4)
    group.enter()

    assert (group.step_number, record.saved_step) == (4, 4)
    assert weights(group.objects) == weights(objects)


@pytest.mark.parametrize(
    ("also", "settled", "is_after"), [(8, 8, True), (8, 7, False), (None, 8, True)]
)
def test_of_two_steps_a_chip_keeps_the_one_that_counts(
    tried: StepInFlight, *, also: int | None, settled: int, is_after: bool
) -> None:
    """It has done step 7, and tried step 8; or no other step is open."""
    objects = build()
    tried.watch(GroupState(objects))
    tried.keep()
    before = weights(objects)
    step(objects)
    after = weights(objects)
    tile = TileReplica("1x2", WorkerEnvironment(), shares_optimizers=False)
    loop: Any = SimpleNamespace(also=also)  # all of a `WorkerLoop` that this asks for

    counts = tile.settle(loop, tried, settled)

    assert counts == tile.has_settled == (also == settled)
    assert weights(objects) == (after if is_after else before)
    assert loop.also is None


def test_what_a_script_does_after_it_has_joined_late_is_undone_but_its_seed_is_not(
    tried: StepInFlight,
) -> None:
    objects = build()
    tried.watch(GroupState(objects))
    taken = weights(objects)

    tried.keep_joined()
    step(objects)
    torch.manual_seed(7)
    was_undone = tried.forget_rest()

    assert was_undone
    assert weights(objects) == taken
    assert torch.initial_seed() == 7
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(7).get_state())


def test_a_model_that_is_tied_to_another_group_is_as_one_that_is_new() -> None:
    """A chip that joins has a new one: they must do the same in the next step."""
    dist: Any = torch.distributed  # torch's stubs lack half of it
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        used, new = DistributedDataParallel(plain), DistributedDataParallel(plain)
        for _ in range(2):  # the second pass makes the buckets anew
            used(torch.rand(4, 2)).sum().backward()
        with torch.no_grad():  # after it, the next forward pass would sync no buffers
            used(torch.rand(4, 2))
        new(torch.rand(4, 2))
        wanted = choices_of(new)
        assert not wanted.items() <= choices_of(used).items()

        GroupState((used,)).use_default_group()

        assert wanted.items() <= choices_of(used).items()
    finally:
        dist.destroy_process_group()


def choices_of(module: DistributedDataParallel) -> dict[str, bool]:
    """Return what a module has noted of its use, by which it chooses what it sends."""
    return {name: each for name, each in vars(module).items() if isinstance(each, bool)}
