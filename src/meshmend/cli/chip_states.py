"""What each chip of a training job is doing, followed from the run's events."""

import itertools
import re
from enum import Enum

from meshmend.errors import InputError
from meshmend.report.training_events import Event, chips_of, whole, words
from meshmend.topology.failures import Block, Chip, parse_failure
from meshmend.topology.mesh import Mesh

_SEEN = re.compile(r"chip \((\d+(?:, ?\d+)*),?\) (died|hung up|is gone|stopped)")


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

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        everywhere = itertools.product(*map(range, mesh.shape))
        self._state = {
            chip: ChipState.DEAD if chip in mesh.failed else ChipState.JOINING
            for chip in everywhere
        }
        self._members: frozenset[Chip] = frozenset()
        self._struck_at = 0  # the step after which the last fault came

    def __getitem__(self, chip: Chip) -> ChipState:
        return self._state[chip]

    def count(self, state: ChipState) -> int:
        """Return how many chips are in a state."""
        return sum(own is state for own in self._state.values())

    def feed(self, event: Event) -> None:
        """Follow one event; kinds that say nothing of chips change nothing."""
        kind = event.get("event")
        if kind == "generation":
            self._begin(frozenset(chips_of(event, "chips")), frozenset(chips_of(event, "waiting")))
        elif kind == "step":
            self._step(whole(event, "step"))
        elif kind == "fault":
            step = event.get("at_step")
            self._struck_at = step if isinstance(step, int) else 0
            self._fault(words(event, "fault"))
        elif kind == "left":
            (chip,) = chips_of({**event, "chips": [event.get("chip")]}, "chips")
            if self._state.get(chip) is not ChipState.HUNG:
                self._set([chip], ChipState.DEAD)

    def _step(self, step: int) -> None:
        """Show as alive with whom a step was finished: a joiner, or one that hung for a moment.

        The step that was under way when it began to hang may be told of later.
        """
        for chip in self._members:
            state = self._state[chip]
            is_over = state is ChipState.HUNG and step > self._struck_at + 1
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

    def _fault(self, fault: str) -> None:
        """Show a fault on its chips at once, before the next generation confirms it."""
        verb, _, what = fault.partition(" ")
        if seen := _SEEN.search(fault):
            self._set([tuple(map(int, seen[1].split(",")))], ChipState.DEAD)
        elif verb in {"kill", "hang"}:
            self._set(_block(what), ChipState.DEAD if verb == "kill" else ChipState.HUNG)
        elif verb == "repair":
            away = [chip for chip in _block(what) if chip not in self._members]
            self._set(away, ChipState.JOINING)

    def _set(self, chips: list[Chip], state: ChipState) -> None:
        self._state.update((chip, state) for chip in chips if chip in self._state)


def _block(text: str) -> list[Chip]:
    """Return the chips that a fault names; none for a link or the coordinator."""
    try:
        failure = parse_failure(text)
    except InputError:
        return []
    return list(failure.chips()) if isinstance(failure, Block) else []
