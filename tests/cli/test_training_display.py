"""The live display and the plain lines of a training run."""

import io
import math
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from meshmend.cli.mesh_map import mesh_map
from meshmend.cli.training_display import LossSketch, TrainingDisplay, plain_line
from meshmend.membership.events import (
    ConnectionRefused,
    CoordinatorChanged,
    CoordinatorState,
    FaultHappened,
    StepFinished,
    TimedEvent,
    WorkerLeft,
)
from meshmend.membership.job_view import ChipState, ChipStates
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh
from strategies import broken_meshes
from training_events import (
    all_chips,
    at,
    chips_without,
    fault,
    generation,
    long_run,
    short_run,
    start,
    step,
)

FULL = chips_without("4x4")
HOLE = chips_without("4x4", "2x2@0,2")
BOARD = [(0, 2), (0, 3), (1, 2), (1, 3)]


def died(chip: Chip) -> TimedEvent:
    return at(2.0, FaultHappened(f"chip {chip} died", 2, chips=(chip,)))


def states_after(*events: TimedEvent, mesh: Mesh | None = None) -> ChipStates:
    mesh = mesh or Mesh((4, 4))
    states = ChipStates(mesh.shape, mesh.failed)
    for timed in events:
        states.feed(timed.event)
    return states


def shown(renderable: Any, width: int = 100, height: int = 30) -> list[str]:
    out = io.StringIO()
    Console(width=width, height=height, file=out).print(renderable)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_before_any_event_live_chips_are_joining() -> None:
    states = states_after(mesh=Mesh((2, 2)).without("0,0"))

    assert states[(0, 0)] is ChipState.DEAD
    assert states.count(ChipState.JOINING) == 3


@pytest.mark.parametrize(
    ("event", "chips", "state"),
    [
        (fault(2.0, "kill 2x2@0,2"), BOARD, ChipState.DEAD),
        (fault(2.0, "hang 2x2@0,2"), BOARD, ChipState.HUNG),
        (fault(2.0, "kill board:1,3"), BOARD, ChipState.DEAD),
        (died((1, 1)), [(1, 1)], ChipState.DEAD),
        (fault(2.0, "slow 1,1"), [], ChipState.DEAD),
        (fault(2.0, "cut link:0,0-0,1"), [], ChipState.DEAD),
        (fault(2.0, "kill coordinator"), [], ChipState.DEAD),
        (fault(2.0, "kill 9,9"), [], ChipState.DEAD),
    ],
)
def test_a_fault_shows_on_its_chips_at_once(
    event: TimedEvent, chips: list[Chip], state: ChipState
) -> None:
    states = states_after(generation(0, 1, FULL), step(1, 1, 1.0), event)

    assert [chip for chip in all_chips((4, 4)) if states[chip] is state] == chips
    assert states.count(ChipState.ALIVE) == 16 - len(chips)


def test_a_board_that_hung_is_hung_until_it_joins_and_alive_after_a_step() -> None:
    story = [generation(0, 1, FULL), step(1, 1, 1.0), fault(2.0, "hang 2x2@0,2")]
    story += [generation(3, 2, HOLE), step(4, 2, 1.0)]

    assert states_after(*story)[(0, 2)] is ChipState.HUNG
    story.append(fault(4.5, "repair 2x2@0,2"))
    assert states_after(*story)[(0, 2)] is ChipState.JOINING
    story.append(generation(5, 3, FULL))
    assert states_after(*story)[(0, 2)] is ChipState.JOINING
    story.append(step(6, 3, 1.0))
    assert states_after(*story).count(ChipState.ALIVE) == 16


def test_a_step_that_is_told_late_does_not_bring_a_dead_chip_back() -> None:
    story = [generation(0, 1, FULL), step(1, 1, 1.0), fault(2.0, "kill 2x2@0,2"), step(3, 3, 1.0)]

    assert states_after(*story).count(ChipState.DEAD) == 4


def test_a_chip_that_left_is_dead_at_once() -> None:
    gone = at(2.0, WorkerLeft((1, 1), "its connection broke"))

    states = states_after(generation(0, 1, FULL), step(1, 1, 1.0), gone, step(2, 1, 1.0))
    assert states[(1, 1)] is ChipState.DEAD


def test_a_chip_that_hung_for_a_moment_is_alive_after_the_step_after_next() -> None:
    story = [generation(0, 1, FULL), step(1, 1, 1.0), fault(2.0, "hang 2x2@0,2"), step(3, 3, 1.0)]

    assert states_after(*story).count(ChipState.HUNG) == 4
    assert states_after(*story, step(4, 4, 1.0)).count(ChipState.ALIVE) == 16


def test_chips_cut_off_are_waiting() -> None:
    story = generation(0, 1, FULL), step(1, 1, 1.0), generation(2, 2, FULL[:12], waiting=FULL[12:])

    assert states_after(*story).count(ChipState.WAITING) == 4


@lru_cache
def long_events() -> list[TimedEvent]:
    return long_run(500, 40)


@given(st.integers(0, 650))
def test_after_any_step_exactly_the_generation_is_alive(cut: int) -> None:
    events = long_events()[:cut]
    steps = [i for i, timed in enumerate(events) if isinstance(timed.event, StepFinished)]
    kept = events[: steps[-1] + 1] if steps else []

    states = states_after(*kept)

    assert sum(states.count(state) for state in ChipState) == 16
    if kept:
        last = kept[-1].event
        assert isinstance(last, StepFinished)
        assert states.count(ChipState.ALIVE) == last.chips


@given(broken_meshes(), st.integers(30, 140), st.integers(8, 50))
def test_the_map_fits_and_has_a_sign_for_every_chip(mesh: Mesh, width: int, height: int) -> None:
    lines = shown(mesh_map(ChipStates(mesh.shape, mesh.failed), width, height), width, height)

    text = "\n".join(lines)
    if "too large" not in text:
        assert len(lines) <= height
        assert max(map(len, lines)) <= width
        # One sign for each chip, and one in the legend.
        assert text.count(ChipState.JOINING.sign) == mesh.n_live + 1
        assert text.count(ChipState.DEAD.sign) == len(mesh.failed) + bool(mesh.failed)


def test_a_mesh_too_large_for_the_terminal_is_counted() -> None:
    mesh = Mesh((64, 64)).without("4x2@0,0")
    states = ChipStates(mesh.shape, mesh.failed)
    text = "\n".join(shown(mesh_map(states, 60, 20)))

    assert "64x64, too large for this terminal to map" in text
    assert "4088 joining" in text
    assert "8 dead" in text


def test_layers_of_a_three_axis_mesh_stand_side_by_side() -> None:
    first, *_ = shown(mesh_map(ChipStates((2, 3, 3)), 60, 20))

    assert first.split() == ["0", "1"]


def display_after(events: list[TimedEvent], width: int = 110) -> list[str]:
    console = Console(width=width, height=40, file=io.StringIO(), force_terminal=True)
    display = TrainingDisplay(Mesh((4, 4)), 100, console=console)
    for event in events:
        display.feed(event)
    return shown(display.picture(), width, 40)


@pytest.mark.parametrize("width", [50, 80, 110, 200])
def test_the_picture_tells_step_loss_rate_chips_and_recoveries(width: int) -> None:
    events = short_run()
    steps = [i for i, timed in enumerate(events) if isinstance(timed.event, StepFinished)]

    text = "\n".join(display_after(events[: steps[39] + 1], width))

    for words in ("step", "40 of 100", "0.8335", "samples/s", "12 of 16, generation 2",
                  "last 0.41 s, median 0.41 s", "12 alive", "4 dead", "kill 2x2@0,2"):  # fmt: skip
        assert words in text
    assert max(map(len, text.splitlines())) <= width


def test_the_picture_shows_the_last_five_events_and_a_lost_coordinator() -> None:
    lost = at(9.0, CoordinatorChanged(CoordinatorState.LOST))
    refused = [at(8.0, ConnectionRefused(who=f"host-{n}", why="x")) for n in range(9)]

    text = "\n".join(display_after([start(), *refused, lost]))

    assert "host-4" not in text
    assert all(f"host-{n}" in text for n in (5, 6, 7, 8))
    assert "coordinator  lost; training goes on" in text


def test_the_live_display_draws_and_gives_the_terminal_back() -> None:
    out = io.StringIO()
    console = Console(width=100, height=40, file=out, force_terminal=True)

    with TrainingDisplay(Mesh((4, 4)), 100, console=console) as display:
        for event in short_run():
            display.feed(event)

    drawn = out.getvalue()
    assert "100 of 100" in drawn
    assert drawn.endswith("\x1b[?25h")  # the cursor is back


@given(st.lists(st.floats(0, 10), max_size=300), st.integers(2, 40))
def test_a_sparkline_is_never_longer_than_asked(losses: list[float], n_most: int) -> None:
    sketch = LossSketch(n_most)
    for loss in losses:
        sketch.add(loss)

    assert len(sketch.sparkline()) <= n_most
    assert bool(sketch.sparkline()) == bool(losses)


def test_a_sparkline_falls_with_the_loss_and_skips_what_is_no_number() -> None:
    sketch = LossSketch(8)
    for k in range(1000):
        sketch.add(math.nan if k % 10 == 3 else 1000.0 - k)

    bars = sketch.sparkline()

    assert list(bars) == sorted(bars, reverse=True)
    assert (bars[0], bars[-1]) == ("█", "▁")


@given(st.integers(1, 3000))
def test_plain_lines_are_few_and_tell_the_first_and_the_last_step(n_steps: int) -> None:
    told = [k for k in range(1, n_steps + 1) if plain_line(step(0.1 * k, k, 1.0), n_steps)]

    assert (told[0], told[-1]) == (1, n_steps)
    assert len(told) <= 42


def test_every_other_event_has_a_plain_line() -> None:
    others = [each for each in short_run() if not isinstance(each.event, StepFinished)]
    told = [plain_line(timed, 100) for timed in others]

    assert told[2] == "     2.61 s  kill 2x2@0,2 at step 30"
    assert None not in told
