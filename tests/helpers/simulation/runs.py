"""Runs: one seed, one job from its start to its end, and what is to be said of it."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from meshmend.membership.messages import FRESH
from meshmend.topology.failures import Chip
from meshmend.topology.text import parse_tile
from meshmend.topology.tiles import box_colour
from simulation.event_loop import EventLoop
from simulation.faults import plan_faults
from simulation.invariants import ProtocolError
from simulation.world import TIMING, Scenario, World

# After the last fault: to find it, to wait for a holder, to do all steps, and as much again.
_PATIENCE_S = 30.0


@dataclass(frozen=True)
class Run:
    """How a run went; `problem` is what went wrong with the protocol, or nothing."""

    seed: int
    problem: str
    is_failed_job: bool = False
    n_restores: int = 0
    n_generations: int = 0
    expelled: frozenset[Chip] = frozenset()
    n_actions: int = 0
    trace: tuple[str, ...] = ()


RunOf = Callable[[int], Run]


def simulate(
    seed: int,
    *,
    scenario_of: Callable[[int], Scenario] = Scenario.of,
    traces: bool = False,
    is_sharded: bool = False,
    swaps_plans: bool = False,
    watches_links: bool = False,
) -> Run:
    """Run the job of a seed until it has ended; the chips may share the optimizer's state.

    `swaps_plans`: generations begin with the plans that are there, and swap them. `watches_links`:
    some links are slow for a while, and all chips know the same of it.
    """
    events = EventLoop(seed, traces=traces)
    scenario = scenario_of(seed)
    world = World(
        events,
        scenario,
        is_sharded=is_sharded,
        swaps_plans=swaps_plans,
        watches_links=watches_links,
    )
    problem = ""
    try:
        with _quiet():
            plan_faults(world)
            events.run(scenario.calm_at + _PATIENCE_S, world.is_done)
        problem = _problem_at_the_end(world)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        if not isinstance(error, ProtocolError):
            problem += _where(error)
    finally:
        if problem:
            _tell_where_all_wait(world)
        world.close()
    return Run(
        seed,
        problem,
        is_failed_job=bool(world.rules.failure),
        n_restores=world.rules.n_restores,
        n_generations=world.rules.n_generations,
        expelled=frozenset(world.rules.expelled),
        n_actions=events.n_actions,
        trace=tuple(events.trace),
    )


def problems(seeds: Iterable[int], run_of: RunOf = simulate) -> Iterator[Run]:
    """Yield the runs of some seeds that went wrong."""
    return (run for run in map(run_of, seeds) if run.problem)


def check_caught(
    n_seeds: int, run_of: RunOf = simulate, *, first: int = 0, problem: str = ""
) -> None:
    """Check that one of `n_seeds` finds a flaw; `first`, which found it before, is tried first.

    Raises:
        AssertionError: none does, or with another problem, or the flaw no longer fits the protocol.
    """
    caught = next(problems([*range(first, n_seeds), *range(first)], run_of), None)
    assert caught is not None
    assert not caught.problem.startswith("TypeError"), "the mutant no longer fits the protocol"
    assert problem in caught.problem


def parts_of(first: int, n_seeds: int, n_parts: int) -> list[range]:
    """Split seeds into parts that several processes can share."""
    size = n_seeds // n_parts
    return [range(start, start + size) for start in range(first, first + n_seeds, size)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the real code from logging: the trace tells all, and more."""
    logger = logging.getLogger("meshmend")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def _tell_where_all_wait(world: World) -> None:
    """Write down in which call each worker waits: the last lines of a trace."""
    for process in (worker.process for worker in world.workers.values()):
        if process.is_alive:
            world.events.tell(process.name, "waits in %s", " > ".join(process.stack()))


def _problem_at_the_end(world: World) -> str:
    if world.rules.failure:
        world.check_lost()
        return _why_no_failure(world)
    if world.rules.is_undecided:
        return ""
    if not world.is_over:
        step = world.rules.settled[-1].step
        return f"the job stands still at step {step} of {world.scenario.n_steps}"
    for chip, worker in world.workers.items():
        if worker.is_over and not worker.loop.was_waiting:
            world.rules.check_over(chip, worker.replica.state, world.scenario.n_steps)
    return ""


def _why_no_failure(world: World) -> str:
    """Return who could have gone on although the job has failed, or nothing.

    With a sharded optimizer they must have all parts of its state between them.
    """
    if world.events.now - world.undisturbed_since < 2 * TIMING.holder_timeout_s:
        return ""
    top = world.rules.settled[-1]
    holders = [
        chip
        for chip, worker in world.workers.items()
        if worker.process.is_alive and worker.process not in world.frozen_for_good
        if worker.loop.state_version != FRESH
        if top in (worker.replica.state, worker.replica.also) and top.step > 0
    ]
    if (tile := world.scenario.tile) and not _are_all_colours(holders, parse_tile(tile)):
        return ""
    shards = [each for chip in holders if (each := world.workers[chip].replica.shards)]
    if shards and shards[0].missing(top.digest, shards[1:]):
        return ""
    return f"the job failed although {holders} hold the state" if holders else ""


def _are_all_colours(chips: Iterable[Chip], tile: tuple[int, ...]) -> bool:
    return len({box_colour(tile, chip) for chip in chips}) == math.prod(tile)


def _where(error: Exception) -> str:
    """Return the place in the code where an error was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace else ""
