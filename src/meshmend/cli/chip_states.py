"""Derives the state of each chip of a training job from the run's events."""

import itertools
from collections.abc import Collection, Iterable
from enum import Enum
from typing import assert_never

from meshmend.membership.events import (
    Event,
    FaultHappened,
    GenerationBegan,
    StepFinished,
    WorkerLeft,
)
from meshmend.membership.faults.fault import FaultKind
from meshmend.topology.failures import Chip


class ChipState(Enum):
    """The state of a chip: its name, its sign and its colour in a terminal."""

    ALIVE = ("alive", "■", "green")
    JOINING = ("joining", "◆", "cyan")
    WAITING = ("waiting", "◌", "yellow")
    HUNG = ("hung", "▲", "magenta")
    DEAD = ("dead", "✕", "red")

    def __init__(self, title: str, sign: str, colour: str) -> None:
        self.title, self.sign, self.colour = title, sign, colour


class ChipStates:
    """The state of every chip after the events fed so far; before any, live chips are joining."""

    def __init__(self, shape: tuple[int, ...], failed: Collection[Chip] = ()) -> None:
        self.shape = shape
        everywhere = itertools.product(*map(range, shape))
        self._state = {
            chip: ChipState.DEAD if chip in failed else ChipState.JOINING for chip in everywhere
        }
        self._members: frozenset[Chip] = frozenset()
        self._fault_step = 0  # the step after which the last fault happened

    def __getitem__(self, chip: Chip) -> ChipState:
        return self._state[chip]

    def count(self, state: ChipState) -> int:
        """Return how many chips are in a state."""
        return sum(each is state for each in self._state.values())

    def feed(self, event: Event) -> None:
        """Follow one event; events that are not about chips change nothing."""
        match event:
            case GenerationBegan():
                self._begin(frozenset(event.chips), frozenset(event.waiting))
            case StepFinished():
                self._step(event.step)
            case FaultHappened():
                self._fault_step = event.at_step or 0
                self._fault(event.kind, event.chips)
            case WorkerLeft():
                if self._state.get(event.chip) is not ChipState.HUNG:
                    self.set([event.chip], ChipState.DEAD)

    def _step(self, step: int) -> None:
        """Show members as alive after a step: those that joined, and those that hung only briefly.

        A step that was under way when a chip began to hang may be reported after the fault.
        """
        for chip in self._members:
            state = self._state[chip]
            is_over = state is ChipState.HUNG and step > self._fault_step + 1
            if state is ChipState.JOINING or is_over:
                self._state[chip] = ChipState.ALIVE

    def _begin(self, chips: frozenset[Chip], waiting: frozenset[Chip]) -> None:
        self._members = chips & self._state.keys()
        for chip, state in self._state.items():
            if chip in waiting:
                self._state[chip] = ChipState.WAITING
            elif chip in chips:
                known = state is ChipState.ALIVE
                self._state[chip] = ChipState.ALIVE if known else ChipState.JOINING
            elif state not in {ChipState.HUNG, ChipState.JOINING}:
                self._state[chip] = ChipState.DEAD

    def _fault(self, kind: FaultKind | None, chips: tuple[Chip, ...]) -> None:
        """Show a fault on its chips at once, before the next generation confirms it."""
        match kind:
            case FaultKind.KILL | None:  # without a kind: the chips died, no fault was injected
                self.set(chips, ChipState.DEAD)
            case FaultKind.HANG:
                self.set(chips, ChipState.HUNG)
            case FaultKind.REPAIR:
                absent = [chip for chip in chips if chip not in self._members]
                self.set(absent, ChipState.JOINING)
            case FaultKind.SLOW | FaultKind.CUT | FaultKind.FREEZE:
                pass
            case _:
                assert_never(kind)

    def set(self, chips: Iterable[Chip], state: ChipState) -> None:
        """Set the state of these chips; those outside the mesh are ignored."""
        self._state.update((chip, state) for chip in chips if chip in self._state)
