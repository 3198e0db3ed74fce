"""What is going on in a job, folded from its events: every display and report reads this view.

A view follows the events that a coordinator sends to observers, or those that a run writes to
`events.jsonl`. It knows neither sockets nor a clock: callers pass in the times. What happened
before the first event that it was told is not known.
"""

import itertools
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, assert_never

from meshmend.membership import events
from meshmend.membership.events import Event
from meshmend.membership.faults.fault import FaultKind
from meshmend.membership.job_status import (
    RECOVERY_BUCKETS_S,
    ChangeCause,
    FinishedChange,
    JobCounts,
    PastChange,
    PastEvent,
    SlowPart,
)
from meshmend.membership.moving_rate import MovingRate
from meshmend.topology.failures import Chip, format_chip

_WINDOW_S: Final = 10.0  # of the rates
_N_LAST: Final = 10
_LOST_S: Final = 1.0  # a report of a first step that is late by so much counts as lost
_NOTABLE: Final = (
    events.WorkerLeft,
    events.WorkerTurnedAway,
    events.ConnectionRefused,
    events.GenerationBegan,
    events.StateLost,
    events.StateRestored,
    events.WriteFailed,
    events.NonFiniteSum,
    events.StatesDiffer,
    events.WrongResult,
    events.WrongSum,
    events.LinkSlow,
    events.LinkRestored,
    events.ChipSlow,
    events.ChipRestored,
    events.StateMended,
    events.JobFailed,
    events.JobFinished,
)
_COUNTED: Final[dict[type[Event], str]] = {
    events.WorkerArrived: "arrivals",
    events.WorkerLeft: "departures",
    events.WorkerTurnedAway: "turned_away",
    events.ConnectionRefused: "refusals",
    events.StateLost: "states_lost",
    events.StateRestored: "restores",
}


@dataclass
class Recovery:
    """A fault and how the job recovered from it; all times are of one clock.

    `kind` and `chips` are as in `FaultHappened`. A fault that `is_quiet` needs no new generation:
    the job has recovered from it at the next step. The same holds if no member was among its
    `victims`, the chips that the fault takes away. A repair returns the chips `repaired`, and is
    over when they are members again. `generation` is the one that the fault hit. `told` is the
    event that says how long the recovery took, where another process measured it.
    """

    fault: str
    at_step: int | None
    at: float
    kind: FaultKind | None = None
    chips: tuple[Chip, ...] = ()
    is_quiet: bool = False
    victims: frozenset[Chip] = frozenset()
    repaired: frozenset[Chip] = frozenset()
    generation: int = 0
    detected: float | None = None
    bound: float | None = None  # the job had recovered at this time, perhaps before
    recovered: float | None = None
    told: events.FaultRecovered | None = None

    @property
    def detected_s(self) -> float | None:
        if self.told is not None:
            return self.told.detected_s
        return None if self.detected is None else max(0.0, self.detected - self.at)

    @property
    def recovered_s(self) -> float | None:
        if self.told is not None:
            return self.told.recovered_s
        return None if self.recovered is None else max(0.0, self.recovered - self.at)

    def event(self) -> events.FaultRecovered:
        """Return the event that reports this recovery."""
        return events.FaultRecovered(
            fault=self.fault,
            at_step=self.at_step,
            detected_s=_rounded(self.detected_s),
            recovered_s=_rounded(self.recovered_s),
            kind=self.kind,
            chips=self.chips,
        )


def _slow_chip(chip: Chip) -> str:
    return f"chip {format_chip(chip)}"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


@dataclass(frozen=True)
class Ends:
    """What is over with an event: a change of the chips that train, recoveries from faults."""

    change: FinishedChange | None = None
    recoveries: tuple[Recovery, ...] = ()


class JobView:
    """What a job does and what has happened to it, after the events that were taken so far.

    `shape` and `failed` are of its mesh, where the states of chips are asked for.
    """

    def __init__(
        self, shape: tuple[int, ...] = (), failed: Collection[Chip] = (), *, now: float = 0.0
    ) -> None:
        self.chips = ChipStates(shape, failed)
        self.connected: set[Chip] = set()
        self.waiting: dict[Chip, str] = {}  # chips that do not train, and why
        self.forming: events.GenerationForming | None = None  # the last one
        self.generation: events.GenerationBegan | None = None  # the last one
        self.step = 0  # the last that was finished
        self.has_coordinator = True
        self.moved_at = now  # when a step was finished, or a chip joined or left
        self.formed_at: float | None = None  # when the latest generation was formed
        self.planned: tuple[int, int] | None = None  # losses of a board with plans, and all
        self.stepped_at: float | None = None  # when the last step was reported
        self.fabric: events.FabricMeasured | None = None  # as the chips have measured it
        self._slow: dict[str, float] = {}  # chips and links with less than the others' speed
        self._leader: Chip | None = None
        self._led_at = 0.0  # when the leader finished its last step, by its own clock
        self._steps, self._samples = MovingRate(_WINDOW_S), MovingRate(_WINDOW_S)
        self._counts: Counter[str] = Counter()
        self._buckets = [0] * (len(RECOVERY_BUCKETS_S) + 1)
        self._recovery_s = 0.0
        self._events: deque[tuple[float, Event]] = deque(maxlen=_N_LAST)
        self._changes: deque[tuple[float, FinishedChange]] = deque(maxlen=_N_LAST)
        self._timer = _ChangeTimer()
        self._measured = _Recoveries()
        self._told: list[Recovery] = []
        self._told_open: dict[tuple[str, int | None], list[Recovery]] = {}  # not recovered from
        self._recovered: list[Recovery] = []  # those that were told, as they ended

    def take(self, clock: float, event: Event, *, now: float | None = None) -> Ends:
        """Follow an event that happened at `clock` and was heard of `now`; return what it ends."""
        self.chips.feed(event)
        self._follow(clock if now is None else now, event)
        self._count(clock, event)
        self._hear_of_fault(clock, event)
        self._follow_speeds(event)
        if (change := self._timer.take(clock, event)) is not None:
            self._changes.append((clock, change))
            if change.cause is ChangeCause.LEFT:
                self._buckets[bisect_left(RECOVERY_BUCKETS_S, change.took_s)] += 1
                self._recovery_s += change.took_s
        return Ends(change, tuple(self._measured.handle(clock, event)))

    # Who trains.

    def _follow(self, now: float, event: Event) -> None:
        match event:
            case events.WorkerStepped(step=step):
                self.step = max(self.step, step)
            case events.StepFinished(step=step):
                self.step = step
            case events.WorkerArrived(chip=chip):
                self.connected.add(chip)
            case events.WorkerLeft(chip=chip) | events.WorkerTurnedAway(chip=chip):
                self.connected.discard(chip)
                self.waiting.pop(chip, None)
            case events.GenerationForming():
                self.forming = event
                self.waiting.clear()
            case events.GenerationBegan():
                self.generation, self.step = event, event.step
                self.waiting.clear()
            case events.ChipsWaiting(chips=chips, why=why):
                self.waiting |= dict.fromkeys(chips, why)
                return
            case events.StateLost(waits_s=waits_s):
                self.moved_at = now + waits_s  # the coordinator ends that wait
                return
            case events.CoordinatorChanged(state=state):
                self.has_coordinator = state is not events.CoordinatorState.LOST
                return
            case _:
                return
        self.moved_at = now

    def _follow_speeds(self, event: Event) -> None:
        match event:
            case events.ChipSlow(chip=chip, speed=speed):
                self._slow[_slow_chip(chip)] = speed
            case events.LinkSlow(link=link, speed=speed):
                self._slow[link] = speed
            case events.ChipRestored() | events.WorkerLeft() | events.WorkerTurnedAway():
                self._slow.pop(_slow_chip(event.chip), None)
            case events.LinkRestored(link=link):
                self._slow.pop(link, None)
            case events.FabricMeasured():
                self.fabric = event
            case _:
                pass

    def slow(self) -> tuple[SlowPart, ...]:
        """Return the chips and links that are known to be slower than the others."""
        return tuple(SlowPart(what, speed) for what, speed in sorted(self._slow.items()))

    # Counts, rates, the last changes and events.

    def _count(self, clock: float, event: Event) -> None:
        if name := _COUNTED.get(type(event)):
            self._counts[name] += 1
        match event:
            case events.GenerationForming():
                self.formed_at, self.planned = clock, None
            case events.StateRestored():
                self._counts["redone_steps"] += event.lost - event.step
            case events.WorkerStepped(leads=True):
                self._count_step(clock, event)
        if isinstance(event, _NOTABLE):
            self._events.append((clock, event))

    def _count_step(self, clock: float, event: events.WorkerStepped) -> None:
        self._counts["steps"] += 1
        self._counts["samples"] += event.samples
        if event.chip != self._leader:  # another process, perhaps another clock
            self._leader = event.chip
            self._steps, self._samples = MovingRate(_WINDOW_S), MovingRate(_WINDOW_S)
        # Reports may come late, and many at once. So steps are timed by their leader's clock.
        self._steps.add(event.at, 1)
        self._samples.add(event.at, event.samples)
        self._led_at, self.stepped_at = event.at, clock
        self.planned = event.planned

    def _leader_clock(self, now: float) -> float:
        """Return the time by the leader's clock."""
        return self._led_at + (0.0 if self.stepped_at is None else max(0.0, now - self.stepped_at))

    def counts(self) -> JobCounts:
        """Return what was counted."""
        return JobCounts(
            **self._counts, recoveries=tuple(self._buckets), recovery_s=self._recovery_s
        )

    def steps_per_s(self, now: float) -> float | None:
        """Return the mean steps per second of the last seconds; None if none is known."""
        return self._steps.at(self._leader_clock(now))

    def samples_per_s(self, now: float) -> float | None:
        """Return the mean samples per second of the last seconds; None if none is known."""
        return self._samples.at(self._leader_clock(now))

    def last_events(self, now: float) -> tuple[PastEvent, ...]:
        """Return the last events that someone who looks at a job wants to know, newest last."""
        return tuple(PastEvent(max(0.0, now - at), event) for at, event in self._events)

    def last_changes(self, now: float) -> tuple[PastChange, ...]:
        """Return the last changes of the chips that train, newest last."""
        return tuple(PastChange(max(0.0, now - at), change) for at, change in self._changes)

    # Faults.

    @property
    def faults(self) -> tuple[Recovery, ...]:
        """All faults that the view was told of, each with its recovery."""
        return (*self._measured.faults, *self._told)

    @property
    def recoveries_s(self) -> list[float]:
        """How long the recoveries that were told took, as they ended; repairs do not count."""
        faults = [fault for fault in self._recovered if fault.kind is not FaultKind.REPAIR]
        return [fault.recovered_s for fault in faults if fault.recovered_s is not None]

    def open_faults(self) -> list[Recovery]:
        """Return the faults whose recovery is being measured."""
        return self._measured.open()

    def measure(self, fault: Recovery) -> None:
        """Begin to measure the recovery from a fault that the caller knows of."""
        self._measured.add(fault)

    def _hear_of_fault(self, clock: float, event: Event) -> None:
        """Follow faults that somebody else measures, as the readers of `events.jsonl` do."""
        match event:
            case events.FaultHappened():
                self._tell(Recovery(event.fault, event.at_step, clock, event.kind, event.chips))
            case events.FaultRecovered():
                key = (event.fault, event.at_step)
                if not self._told_open.get(key):
                    at = max(0.0, clock - (event.recovered_s or 0.0))
                    self._tell(Recovery(*key, at, event.kind, event.chips))
                found = self._told_open[key][0]
                found.told = event
                if event.recovered_s is not None:
                    del self._told_open[key][0]
                self._recovered.append(found)

    def _tell(self, fault: Recovery) -> None:
        self._told.append(fault)
        self._told_open.setdefault((fault.fault, fault.at_step), []).append(fault)


class _ChangeTimer:
    """Measures how long each change of the chips that train took.

    A change begins when the first worker leaves, else when the last one connects, else when a
    generation forms because of a link. It ends when every chip of the new generation has finished a
    step.
    """

    def __init__(self) -> None:
        self._left_at: float | None = None
        self._arrived_at: float | None = None
        self._formed_at: float | None = None
        self._members: frozenset[Chip] | None = None  # None before the first generation
        self._expected: set[Chip] = set()  # members that have not finished a step

    def take(self, clock: float, event: Event) -> FinishedChange | None:
        """Follow an event; return the change that is over with it, if one is."""
        match event:
            case events.WorkerArrived():
                self._arrived_at = clock
                if self._members is None:  # a worker that left before the job began was replaced
                    self._left_at = None
            case events.WorkerLeft() | events.WorkerTurnedAway():
                if self._members is None or event.chip in self._members:
                    self._left_at = self._left_at or clock
            case events.GenerationForming() | events.GenerationBegan():
                self._formed_at = self._formed_at or clock
                self._members = frozenset(event.chips)
                self._expected = set(event.chips)
            case events.WorkerStepped(first=True):
                return self._step(clock, event)
        return None

    def _step(self, clock: float, event: events.WorkerStepped) -> FinishedChange | None:
        self._expected.discard(event.chip)
        if self._expected or self._formed_at is None:
            return None
        if self._left_at is not None:
            cause, since = ChangeCause.LEFT, self._left_at
        elif self._arrived_at is not None:
            cause, since = ChangeCause.CONNECTED, self._arrived_at
        else:
            cause, since = ChangeCause.LINKS, self._formed_at
        self._left_at = self._arrived_at = self._formed_at = None
        took_s = max(0.0, clock - since)
        n_chips = len(self._members or ())
        return FinishedChange(cause, took_s, n_chips, event.step, event.generation)


@dataclass
class _Recoveries:
    """Measures how long the job took to recover from each fault.

    A fault is detected when, after it, a worker leaves or a generation forms. The job has recovered
    when the last chip of the latest generation has finished its first step.
    """

    faults: list[Recovery] = field(default_factory=list)
    _unfinished: list[Recovery] = field(default_factory=list)  # of the faults; few of many
    _generation: int = 0
    _members: frozenset[Chip] = frozenset()
    _expected: set[Chip] = field(default_factory=set)
    _last: float = 0.0

    def add(self, fault: Recovery) -> None:
        """Begin to measure the recovery from a fault."""
        fault.generation = self._generation
        if fault.victims and self._members and not fault.victims & self._members:
            fault.is_quiet = True
        self.faults.append(fault)
        self._unfinished.append(fault)

    def open(self) -> list[Recovery]:
        """Return the faults that the job has not recovered from."""
        return [fault for fault in self._going_on() if not fault.is_quiet]

    def _going_on(self) -> list[Recovery]:
        """Return the faults without an end, the quiet ones too."""
        self._unfinished = [fault for fault in self._unfinished if fault.recovered is None]
        return self._unfinished

    def handle(self, clock: float, event: Event) -> list[Recovery]:
        """Handle an event of the coordinator; return the faults that are recovered with it."""
        match event:
            case events.WorkerLeft() | events.GenerationForming() | events.WorkerTurnedAway():
                self._detect(clock)
            case events.GenerationBegan():
                self._generation = max(self._generation, event.number)
                self._members = frozenset(event.chips)
                self._expected = set(self._members)
                self._last = 0.0
            case events.WorkerSaved():
                return self._end_quiet(event.at)
            case events.WorkerStepped():
                return self._end_quiet(event.at) + self._handle_step(event)
        return []

    def _end_quiet(self, at: float) -> list[Recovery]:
        """Count the quiet faults before this time as recovered: a worker has worked since."""
        quiet = [fault for fault in self._going_on() if fault.is_quiet and at > fault.at]
        for fault in quiet:
            fault.detected = fault.recovered = at
        return quiet

    def _handle_step(self, event: events.WorkerStepped) -> list[Recovery]:
        self._generation = max(self._generation, event.generation)
        if not event.first:
            return self._handle_later_step(event.at, event.generation)
        self._expected.discard(event.chip)
        self._last = max(self._last, event.at)
        return [] if self._expected else self._recover(self._last)

    def _handle_later_step(self, at: float, generation: int) -> list[Recovery]:
        """Handle a later step: all chips took part, so each of them has finished its first step.

        Reports of first steps may be lost with a coordinator. If they do not come within `_LOST_S`,
        the later step counts instead.
        """
        for fault in self._ready(at):
            if fault.generation < generation and fault.bound is None:
                fault.bound = at
        over = [fault for fault in self._ready(at) if fault.bound and at > fault.bound + _LOST_S]
        for fault in over:
            fault.recovered = fault.bound
        return over

    def _detect(self, at: float) -> None:
        for fault in self.open():
            if fault.detected is None and at >= fault.at:
                fault.detected = at

    def _recover(self, at: float) -> list[Recovery]:
        over = self._ready(at)
        for fault in over:
            fault.recovered = at
        return over

    def _ready(self, at: float) -> list[Recovery]:
        """Return the open faults that the job recovers from if the first steps end at this time."""
        return [
            fault
            for fault in self.open()
            if fault.detected is not None
            and fault.detected <= at
            and fault.repaired <= self._members
        ]


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
            case events.GenerationBegan():
                self._begin(frozenset(event.chips), frozenset(event.waiting))
            case events.StepFinished():
                self._step(event.step)
            case events.FaultHappened():
                self._fault_step = event.at_step or 0
                self._fault(event.kind, event.chips)
            case events.WorkerLeft():
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
            case FaultKind.FLIP | FaultKind.WRONG | FaultKind.THROTTLE | FaultKind.CORRUPT:
                pass
            case _:
                assert_never(kind)

    def set(self, chips: Iterable[Chip], state: ChipState) -> None:
        """Set the state of these chips; those outside the mesh are ignored."""
        self._state.update((chip, state) for chip in chips if chip in self._state)
