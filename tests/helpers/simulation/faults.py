"""Random faults: what befalls a world, and when."""

from collections.abc import Callable
from functools import partial

from meshmend.membership.generation import LARGEST_NUMBER
from meshmend.membership.messages import (
    Go,
    Heartbeat,
    Hello,
    Message,
    Over,
    Status,
    StatusChanged,
)
from meshmend.topology.failures import Chip
from simulation.coordinator_process import COORDINATOR_HOST, COORDINATOR_PORT
from simulation.event_loop import Process
from simulation.network import End
from simulation.simulated_worker import BATCH
from simulation.world import World

_KILLS = ("kill", "reset", "power loss")


def plan_faults(world: World) -> None:
    """Have some faults happen to a world until it is to be calm."""
    random, scenario = world.events.random, world.scenario
    faults = SPLIT_FAULTS if scenario.is_split else FAULTS
    if scenario.tile:  # its tile would wait for it for ever, and may hold the last part of a state
        faults = tuple(fault for fault in faults if fault is not _freeze_for_good)
    for _ in range(scenario.n_faults):
        fault = random.choice(faults)
        world.events.at(random.uniform(0.0, scenario.calm_at), _unless_calm(world, fault))
    world.events.at(scenario.calm_at, world.calm)


def _unless_calm(world: World, fault: Callable[[World], None]) -> Callable[[], None]:
    return lambda: None if world.is_calm or world.is_over else fault(world)


def _kill_one(world: World) -> None:
    random = world.events.random
    world.kill_worker(random.choice(world.mesh.live), how=random.choice(_KILLS))


def _kill_several(world: World) -> None:
    random, live = world.events.random, world.mesh.live
    for chip in random.sample(live, random.randint(1, len(live))):
        fault = partial(_kill, chip=chip, how=random.choice(_KILLS))
        world.events.after(random.choice([0.0, 0.0, 0.05, 0.3]), _unless_calm(world, fault))


def _kill(world: World, *, chip: Chip, how: str) -> None:
    world.kill_worker(chip, how=how)


def _wrong_worker(world: World) -> None:
    """Start a worker with other arguments in the place of one."""
    chip = world.events.random.choice(world.mesh.live)
    if world.rules.n_generations:  # else it would be the one that the others are compared with
        world.kill_worker(chip)
        world.start_worker(chip, batch=BATCH + 1)


def _kill_coordinator(world: World) -> None:
    world.kill_coordinator(how=world.events.random.choice(_KILLS))


def _spoil_record(world: World) -> None:
    """Spoil the coordinator's record while it runs, or while it is down."""
    random = world.events.random
    if random.random() < 0.8:
        world.kill_coordinator(how=random.choice(_KILLS))
    world.spoil_record(random.choice(["torn", "rotten", "lost"]))


def _freeze_workers(world: World) -> None:
    random, live = world.events.random, world.mesh.live
    for chip in random.sample(live, random.choice([1, 1, 2, len(live)])):
        world.freeze(world.workers[chip].process, random.choice([0.1, 0.5, 1.0, 2.5]))


def _freeze_for_good(world: World) -> None:
    """Let one worker hang until the end; the others have to go on without it."""
    if not world.frozen_for_good:
        process = world.workers[world.events.random.choice(world.mesh.live)].process
        world.frozen_for_good.append(process)
        world.freeze(process, 1e9)


def _freeze_coordinator(world: World) -> None:
    world.freeze(world.coordinator, world.events.random.choice([0.1, 0.5, 1.5]))


def _stick(world: World) -> None:
    random = world.events.random
    world.stick(random.choice(world.mesh.live), random.choice([0.2, 1.0, 2.5]))


def _drop_one_way(world: World) -> None:
    random = world.events.random
    one, other = random.sample(range(1 + len(world.mesh.live)), 2)
    world.block(one, other, random.choice([0.1, 0.3, 1.0, 2.5]))


def _partition(world: World) -> None:
    random = world.events.random
    hosts = range(1 + len(world.mesh.live))
    part = set(random.sample(hosts, random.randint(1, len(hosts) - 1)))
    world.partition(part, random.choice([0.1, 0.5, 1.0, 2.5]))


def _strand(world: World) -> None:
    """Cut chips off from the coordinator, and not from each other."""
    random, n_chips = world.events.random, len(world.mesh.live)
    hosts = random.sample(range(1, 1 + n_chips), random.randint(1, n_chips))
    world.strand(set(hosts), random.choice([0.5, 1.5, 3.0]))


def _replace_some_and_strand_the_others(world: World) -> None:
    """Leave the coordinator with new workers only, while those with the state train on."""
    random, live = world.events.random, world.mesh.live
    replaced = random.sample(live, random.randint(1, len(live) - 1))
    for chip in replaced:
        world.kill_worker(chip, how=random.choice(_KILLS), back_s=random.choice([0.8, 1.2]))
    hosts = {1 + live.index(chip) for chip in live if chip not in replaced}
    seconds = random.choice([2.0, 3.0, 4.0])
    world.events.after(
        random.choice([0.3, 0.6]), _unless_calm(world, lambda _: world.strand(hosts, seconds))
    )


def _second_coordinator(world: World) -> None:
    world.start_second_coordinator(has_record=True)


def _second_coordinator_without_record(world: World) -> None:
    if world.rules.n_generations:  # else the job has not begun
        world.start_second_coordinator(has_record=False)


def _deaf_coordinator(world: World) -> None:
    if world.rules.n_generations:
        world.lend_address(world.events.random.choice([1.0, 2.0]))


def _reset(world: World) -> None:
    processes = [world.coordinator, *(worker.process for worker in world.workers.values())]
    world.reset_connections(world.events.random.choice(processes))


def _cut_link(world: World) -> None:
    world.cut(world.events.random.choice(world.links))


def _slow_network(world: World) -> None:
    world.disturb("a slow network")
    world.network.slow_until = world.events.now + world.events.random.choice([0.2, 0.8])


def _full_disk(world: World) -> None:
    world.disturb("a full disk")
    world.disk.is_full = True

    def empty() -> None:
        world.disk.is_full = False

    world.events.after(world.events.random.choice([0.3, 1.5]), empty)


def _slow_disk(world: World) -> None:
    world.disturb("a slow disk")
    world.disk.is_slow = True


def _damaged_checkpoint(world: World) -> None:
    if steps := world.disk.complete_steps():
        world.disturb(f"damage to the checkpoint of step {steps[-1]}")
        world.disk.damaged.add(steps[-1])


def _faulty_peer(world: World) -> None:
    """Let one call the coordinator that knows the secret and talks nonsense."""
    random, events = world.events.random, world.events
    chip = random.choice(world.mesh.live)
    process = Process(events, 1 + world.mesh.live.index(chip), "faulty peer")
    hello = Hello("job", world.mesh.shape, chip, ("host-99", 99), Status())
    huge = Status(generation=LARGEST_NUMBER)
    nonsense: list[list[Message | bytes]] = [
        [hello, hello],
        [hello, Heartbeat(0, 0), hello],
        [hello, StatusChanged(huge)],
        [Hello("job", world.mesh.shape, chip, ("host-99", 99), huge)],
        [hello, Go(1, 0, (chip,)), Over()],
        [Hello("job", world.mesh.shape, (9, 9), ("host-99", 99), Status())],
        [Hello("other job", world.mesh.shape, chip, ("host-99", 99), Status())],
        [Heartbeat(1, 1)],
        [b"{}", hello],
        [b"\xff\x00"],
    ]
    words = random.choice(nonsense)
    world.disturb(f"a faulty peer says {words}")

    def talk(end: End | None) -> None:
        if end is None:
            return
        for word in words:
            end.send(word)
        if random.random() < 0.5:
            events.after(random.choice([0.001, 0.3]), end.close)

    address = COORDINATOR_HOST, COORDINATOR_PORT
    world.network.dial(process, address, None, on_ready=lambda: None, on_result=talk)


FAULTS: tuple[Callable[[World], None], ...] = (
    *(_kill_one, _kill_one, _kill_several, _kill_coordinator, _kill_coordinator),
    *(_freeze_workers, _freeze_workers, _freeze_for_good, _freeze_coordinator, _stick),
    *(_drop_one_way, _drop_one_way, _partition, _partition, _reset, _reset, _cut_link),
    *(_slow_network, _full_disk, _slow_disk, _damaged_checkpoint, _faulty_peer, _faulty_peer),
    *(_wrong_worker,),
)
SPLIT_FAULTS: tuple[Callable[[World], None], ...] = (
    *(_replace_some_and_strand_the_others,) * 4,
    *(_strand, _strand, _partition, _partition, _drop_one_way, _freeze_workers),
    *(_kill_one, _kill_several, _kill_coordinator, _kill_coordinator, _freeze_coordinator),
    *(_damaged_checkpoint, _full_disk, _second_coordinator, _second_coordinator),
    *(_second_coordinator_without_record, _deaf_coordinator),
    *(_spoil_record,) * 3,
)
