"""What must hold in every run, checked as it happens.

A step is **settled** once all members of one generation have finished it. A settled step is never
done again and never differs between workers, unless the coordinator has told that it is lost. A
step that only some members finished may be lost with them: it was in flight.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

from meshmend.membership.events import (
    Event,
    GenerationBegan,
    HistoryDropped,
    JobFailed,
    StateLost,
    StateRestored,
    WorkerStepped,
    WorkerTurnedAway,
)
from meshmend.membership.generation import Generation
from meshmend.topology.failures import Chip
from simulation.disk import State
from simulation.event_loop import EventLoop

WRONG = "computed wrong numbers"  # begins why a chip is turned away for good
Contribution = tuple[int, int, int, int]  # first sample, one past the last, batch, digest before


def digest_after(before: State, number: int, parts: Sequence[Contribution]) -> int:
    """Return the digest of what a step in a generation makes of a state."""
    return hash((before.digest, number, *parts))


class ProtocolError(AssertionError):
    """Something happened that never may."""


class Invariants:
    """The history of one run, as somebody sees it who sees everything."""

    def __init__(self, events: EventLoop) -> None:
        self._events = events
        self.is_forgiving = False
        self._told_dropped: set[Chip | None] = set()
        self.settled: list[State] = [State(0, 0, 0)]  # by step
        self._formed: dict[int, Generation] = {}
        self._begun: dict[int, int] = {}  # generation: the step it began with
        self._results: dict[tuple[int, int], State] = {}  # generation, step
        self._finished: dict[tuple[int, int], set[Chip]] = defaultdict(set)
        self._last_sum: tuple[int, State, Sequence[Contribution], State] | None = None
        self._before: dict[int, State] = {}  # by digest, what a state came from
        self._links: dict[int, str] = {}  # by digest, the speeds of links that belong to a state
        self._lost_told_at: float | None = None
        self._is_restoring = False  # the next generation to begin goes back
        self._restored_by: list[int] = []  # the generations that went back
        self._given_up: list[State] = []  # steps that the last restore goes back behind
        self.n_restores = 0
        self.n_generations = 0
        self.wrong: set[Chip] = set()  # chips that have computed a wrong number
        self.expelled: set[Chip] = set()
        self.is_undecided = False  # of two chips that differ, nobody can say which is wrong
        self.failure = ""
        self.on_restored: Callable[[], None] = lambda: None  # before steps are given up

    def allow_forks(self, why: str) -> None:
        """Take in that a coordinator does not know of what another one did: each may go on.

        What must hold all the same: no sum is over different replicas or misses a sample, and
        nothing that was settled vanishes without an event.
        """
        self.is_forgiving = True
        self._events.tell("invariants", why)

    def begins_after_spoilt_record(self, step: int) -> None:
        """Take in the first step of a coordinator with a damaged record: not taken for none."""
        if step == 0 < self.settled[-1].step:
            raise ProtocolError("a job whose record is spoilt begins anew without a word")

    def replaced(self, chip: Chip, before: State, after: State) -> None:
        """Take in that a worker gives up a state for another one."""
        if not self.is_forgiving:
            return
        lost, states = before, set()
        while after.step > 0:
            states.add(after.digest)
            after = self._before[after.digest]
        while lost.step > 0 and lost.digest not in states:
            lost = self._before[lost.digest]
        is_told = chip in self._told_dropped or self.n_restores > 0
        if before.step - lost.step > 1 and not is_told:
            raise ProtocolError(f"{chip} gives up steps {lost.step + 1} to {before.step} unsaid")

    def formed(self, generation: Generation) -> None:
        """Take in that the coordinator asks for a generation."""
        known = self._formed.setdefault(generation.number, generation)
        self.check(known == generation or self.is_forgiving, "a number of two generations")

    def observe(self, clock: float, event: Event) -> None:
        """Take in what the coordinator tells those who watch."""
        if not isinstance(event, WorkerStepped):
            self._events.tell("observer", "%s", event)
        match event:
            case StateLost():
                self._lost_told_at = clock
            case StateRestored(step=step, why=why):
                is_told = self._lost_told_at is not None or bool(why and self.wrong)
                self.check(is_told, "restored without a word of a loss")
                self.on_restored()
                self._lost_told_at = None
                self._is_restoring = True
                self._given_up = self.settled[step + 1 :]
                del self.settled[step + 1 :]
                self.n_restores += 1
            case GenerationBegan(number=number, step=step):
                self.n_generations += 1
                self._begun[number] = step
                if self._is_restoring:
                    self._is_restoring = False
                    self._restored_by.append(number)
                self._settle_before(step)
                if step > len(self.settled):  # the restore took no step, and a holder came back
                    self.settled += self._given_up
                    self._settle_before(step)
                top = self.settled[-1].step
                self.check(step >= top, f"generation {number} goes back to {step} from {top}")
                self.check(step <= top + 1, f"generation {number} skips from {top} to {step}")
            case WorkerTurnedAway(chip=chip, why=why) if WRONG in why:
                self.check(chip in self.wrong, f"{chip} is out, and never was wrong")
                self.expelled.add(chip)
            case HistoryDropped(chip=chip):
                self._told_dropped.add(chip)
            case JobFailed(why=why):
                self.failure = why

    @property
    def is_in_doubt(self) -> bool:
        """Whether a step after those that are settled may count: a dead chip may have ended it."""
        if not self._begun:
            return False
        newest, top = max(self._begun), self.settled[-1].step
        return self._begun[newest] > top or (newest, top + 1) in self._results

    def attempts(self, chip: Chip, number: int, state: State) -> None:
        """Take in that a worker begins a step in a generation."""
        self.check(number in self._begun, f"{chip} steps in generation {number}, which never began")
        self.check(
            chip in self._formed[number].seat_of, f"{chip} is no member of generation {number}"
        )
        self.check(state.step >= self._begun[number], f"{chip} is behind its generation")
        known = self._links.setdefault(state.digest, state.links)
        self.check(known == state.links, f"{chip} knows other links at step {state.step}")

    def tries(self, chip: Chip, number: int, before: State, parts: Sequence[Contribution]) -> State:
        """Take in that a worker has done its part of a step; return what it holds then too."""
        state = self._state_after(number, before, parts)
        known = self._results.setdefault((number, state.step), state)
        self.check(known == state, f"{chip} tries step {state.step} with bits of its own")
        self._before[state.digest] = before
        return state

    def finishes(
        self, chip: Chip, number: int, before: State, parts: Sequence[Contribution]
    ) -> State:
        """Take in that a worker finished a step; return what it holds then."""
        state, step = self._state_after(number, before, parts), before.step + 1
        known = self._results.setdefault((number, step), state)
        self.check(known == state, f"{chip} ends step {step} with bits of its own")
        self._before[state.digest] = before
        if number < max(self._begun):
            self._check_fenced(chip, number, step)
            return state  # the others went on without it, and it will hear so
        self._check_goes_on(chip, state)
        self._settle(before)  # all members put it into this sum
        finished = self._finished[number, step]
        finished.add(chip)
        if finished == self._formed[number].seat_of.keys():
            self._settle(state)
        return state

    def _state_after(self, number: int, before: State, parts: Sequence[Contribution]) -> State:
        """Check the sum of a step and return what it leads to; the same sum is checked once."""
        if self._last_sum is not None and self._last_sum[:3] == (number, before, parts):
            return self._last_sum[3]
        batch = parts[0][2]
        if {part[3] for part in parts} != {before.digest}:
            raise ProtocolError("a sum over different replicas")
        self._check_samples(before.position, batch, parts)
        digest = digest_after(before, number, parts)
        state = State(before.step + 1, before.position + batch, digest)
        self._last_sum = number, before, parts, state
        return state

    def _check_fenced(self, chip: Chip, number: int, step: int) -> None:
        """Check that a generation that the others went on without has stopped.

        Whoever leaves it takes part in no sum of it, so at most the step in flight is finished
        later. If the others went back, nobody left it: its members have stopped by themselves.
        """
        later = [each for each in self._restored_by if each > number]
        self.check(not later, f"{chip} steps in generation {number}, though {later} went back")
        first = min(each for each in self._begun if each > number)
        self.check(
            step <= self._begun[first] + 1,
            f"{chip} ends step {step} in {number}, though {first} began at {self._begun[first]}",
        )

    def check_over(self, chip: Chip, state: State, n_steps: int) -> None:
        """Check that a worker has done all steps of the job when it hears that all is over."""
        self.check(state.step == n_steps, f"all is over for {chip} at step {state.step}")
        self._check_goes_on(chip, state)

    def _settle_before(self, step: int) -> None:
        """Settle what the newest generation that finished a step has put into it.

        It may have finished steps while others began without it, and came back before those did.
        """
        found = [number for number, finished in self._results if finished == step]
        state = self._results[max(found), step] if found else self.settled[-1]
        earlier: list[State] = []
        while state.step > len(self.settled):
            state = self._before[state.digest]
            earlier.insert(0, state)
        if earlier and self._before[state.digest] == self.settled[-1]:
            self.settled += earlier

    def _settle(self, state: State) -> None:
        if state.step == len(self.settled):
            self.settled.append(state)

    def _check_goes_on(self, chip: Chip, state: State) -> None:
        """Check that nothing that was settled is missing in a state."""
        top = self.settled[-1]
        before = state
        while before.step > top.step:
            before = self._before[before.digest]
        is_again = state.step <= top.step and state != self.settled[state.step]
        self.check(not is_again, f"{chip} does step {state.step} again, {top.step} was settled")
        self.check(state.step < top.step or before == top, f"{chip} forks after step {top.step}")

    def _check_samples(self, start: int, batch: int, parts: Sequence[Contribution]) -> None:
        """Check that a sum is over each sample of a step once, whatever else has broken."""
        at = start
        for first, stop, _, _ in sorted(parts):
            if first != at:
                raise ProtocolError(f"samples from {at} to {first} are missing or used twice")
            at = stop
        if at != start + batch:
            raise ProtocolError(f"samples from {at} on are missing or used twice")

    def check(self, is_right: bool, what: str) -> None:
        """Raise ProtocolError unless something is right."""
        if not is_right and not self.is_forgiving:
            raise ProtocolError(what)
