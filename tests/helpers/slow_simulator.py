"""A second simulator, slow and plain, to check the fast one against.

Written from the rules alone: at each moment it looks at every message again and asks what
holds now. Time is an exact fraction. Knows no queues, no counters, no events. What is in place
holds nothing any more, so it looks at the others only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

Message = tuple[int, int]  # slice, row


@dataclass(frozen=True)
class Row:
    """What the rules need to know of a row."""

    src: int
    dst: int
    fraction: Fraction
    reduces: bool
    path: Sequence[int]
    before_send: Sequence[int]
    before_write: Sequence[int]
    speeds: Sequence[Fraction] = ()  # of the links of the path; none: all are 1
    is_local: bool = False  # then its path is a channel of its chip's own, which it holds no time


@dataclass(frozen=True)
class Figures:
    """A fabric and a payload in exact numbers."""

    bandwidth: Fraction
    latency: Fraction
    overhead: Fraction
    chip_bandwidth: Fraction | None
    payload: Fraction
    # How many, what a message takes, bytes a second, and what a rank's start takes.
    processors: tuple[int, Fraction, Fraction, Fraction] | None = None
    queue: Fraction = Fraction(0)  # bytes that a link takes before it carries them


@dataclass
class SlowSimulation:
    """Everything that has happened so far."""

    rows: Sequence[Row]
    figures: Figures
    slices: int
    delay_slices: Sequence[float] = ()  # none: no row has any
    now: Fraction = Fraction(0)
    round: int = 0
    holds: dict[Message, list[Fraction]] = field(default_factory=dict)
    starts: dict[Message, list[Fraction]] = field(default_factory=dict)
    queues: dict[int, list[Message]] = field(default_factory=dict)  # taken, but not started
    came_to_chip: dict[Message, int] = field(default_factory=dict)  # in which round
    adding_since: dict[Message, Fraction] = field(default_factory=dict)
    leaving_since: dict[Message, Fraction] = field(default_factory=dict)  # worked on at its source
    taken_since: dict[Message, Fraction] = field(default_factory=dict)  # and at its destination
    started_since: dict[int, Fraction] = field(default_factory=dict)  # by rank
    n_ranks: int = 0  # that start, if there are processors
    in_place: dict[Message, Fraction] = field(default_factory=dict)

    def run(self) -> "SlowSimulation":
        """Play everything until all messages are in place."""
        everything = [(s, r) for s in range(self.slices) for r in range(len(self.rows))]
        self.starts = {message: [] for message in everything}
        self.holds = {
            message: [self._hold(message, hop) for hop in range(len(self.rows[message[1]].path))]
            for message in everything
        }
        while left := [message for message in everything if message not in self.in_place]:
            while self._look(left) | self._choose(left):
                self.round += 1
            if len(self.in_place) < len(everything):
                self.now = min(time for time in self._moments(left) if time > self.now)
        return self

    @property
    def time(self) -> Fraction:
        return max(self.in_place.values(), default=Fraction(0))

    def _hold(self, message: Message, hop: int) -> Fraction:
        """Bytes come no faster than over the slowest link so far."""
        if self.rows[message[1]].is_local:
            return Fraction(0)
        speed = min(self.rows[message[1]].speeds[: hop + 1], default=Fraction(1))
        return self.figures.overhead + self._bytes(message) / (self.figures.bandwidth * speed)

    def _priority(self, message: Message) -> tuple[float, int]:
        part, row = message
        return part + (self.delay_slices[row] if self.delay_slices else 0), row

    def _bytes(self, message: Message) -> Fraction:
        return self.figures.payload * self.rows[message[1]].fraction / self.slices

    def _add_time(self, message: Message) -> Fraction:
        assert self.figures.chip_bandwidth is not None
        return self._bytes(message) / self.figures.chip_bandwidth

    def _work_time(self, message: Message) -> Fraction:
        assert self.figures.processors is not None
        _, of_message, rate, _ = self.figures.processors
        return of_message + self._bytes(message) / rate

    def _is_worked(self, message: Message, since: Mapping[Message, Fraction]) -> bool:
        """Whether no processor has to work on a message any more, at one of its ends."""
        if self.figures.processors is None:
            return True
        return message in since and since[message] + self._work_time(message) <= self.now

    def _moments(self, left: Sequence[Message]) -> list[Fraction]:
        """Return every time at which something may come to hold, past ones too."""
        moments = []
        for message in left:
            latency = self.figures.latency
            for start, hold in zip(self.starts[message], self.holds[message], strict=False):
                moments += [start + hold, start + latency, start + latency + hold]
            if message in self.adding_since:
                moments.append(self.adding_since[message] + self._add_time(message))
            for since in (self.leaving_since, self.taken_since):
                if message in since:
                    moments.append(since[message] + self._work_time(message))
        return moments + [self._start_end(rank) for rank in self.started_since]

    def _start_end(self, rank: int) -> Fraction:
        assert self.figures.processors is not None
        return self.started_since[rank] + self.figures.processors[3]

    def _has_left(self, message: Message) -> bool:
        starts = self.starts[message]
        return bool(starts) and starts[0] + self.holds[message][0] <= self.now

    def _has_arrived(self, message: Message) -> bool:
        return self._is_there(message) and self._is_worked(message, self.taken_since)

    def _is_there(self, message: Message) -> bool:
        starts = self.starts[message]
        if len(starts) < len(self.rows[message[1]].path):
            return False
        latency = 0 if self.rows[message[1]].is_local else self.figures.latency
        return starts[-1] + latency + self.holds[message][-1] <= self.now

    def _may_write(self, message: Message) -> bool:
        part, row = message[0], self.rows[message[1]]
        for number in row.before_write:
            other = self.rows[number]
            reads_there = other.src == row.dst and not other.is_local
            earlier = (part, number)
            if not (self._has_left(earlier) if reads_there else earlier in self.in_place):
                return False
        return self._has_arrived(message)

    def _look(self, left: Sequence[Message]) -> bool:
        """Take in all that is so by now; return whether anything is new."""
        anything, more = False, True
        while more:
            more = False
            for message in left:
                if message in self.in_place:
                    continue
                limited = self.figures.chip_bandwidth is not None
                if message in self.adding_since:
                    done = self.adding_since[message] + self._add_time(message) <= self.now
                elif limited and self.rows[message[1]].reduces:
                    done = False
                    if message not in self.came_to_chip and self._may_write(message):
                        self.came_to_chip[message] = self.round
                        more = True
                else:
                    done = self._may_write(message)
                if done:
                    self.in_place[message] = self.now
                    more = True
            anything |= more
        return anything

    def _waits_for(self, message: Message) -> int | None:
        """Return the channel that a message could start on now."""
        row, starts = self.rows[message[1]], self.starts[message]
        if len(starts) == len(row.path):
            return None
        if starts and starts[-1] + self.figures.latency > self.now:
            return None
        if not starts and not self._may_leave(message):
            return None
        if not starts and not self._is_worked(message, self.leaving_since):
            return None
        return row.path[len(starts)]

    def _may_leave(self, message: Message) -> bool:
        part, row = message[0], self.rows[message[1]]
        return all((part, number) in self.in_place for number in row.before_send)

    def _choose_work(self, left: Sequence[Message]) -> bool:
        """Let idle processors choose, by priority among messages whose rank keeps none busy."""
        if self.figures.processors is None:
            return False
        waiting = []
        busy = {rank for rank in self.started_since if self._start_end(rank) > self.now}
        for message in left:
            row = self.rows[message[1]]
            for since, rank, is_ready in (
                (self.leaving_since, row.src, self._may_leave),
                (self.taken_since, row.dst, self._is_there),
            ):
                if message not in since and is_ready(message):
                    waiting.append((self._priority(message), message, rank, since))
                elif message in since and not self._is_worked(message, since):
                    busy.add(rank)
        n_busy, n_started = len(busy), len(self.started_since)
        for rank in range(n_started, self.n_ranks):
            if len(busy) < self.figures.processors[0]:
                self.started_since[rank] = self.now
                busy.add(rank)
        for _, message, rank, since in sorted(waiting, key=lambda each: each[0]):
            if rank not in busy and len(busy) < self.figures.processors[0]:
                since[message] = self.now
                busy.add(rank)
        return len(busy) > n_busy or len(self.started_since) > n_started

    def _choose(self, left: Sequence[Message]) -> bool:
        """Let all free channels and chips choose at once; return whether any starts.

        Processors choose when nothing else starts any more at this moment.
        """
        starts_any = self._choose_messages(left)
        adding = {
            self.rows[message[1]].dst
            for message, since in self.adding_since.items()
            if message not in self.in_place and since + self._add_time(message) > self.now
        }
        at_chip: dict[int, tuple[int, tuple[float, int], Message]] = {}
        for message, came in self.came_to_chip.items():
            chip = self.rows[message[1]].dst
            if message not in self.adding_since and chip not in adding:
                this = (came, self._priority(message), message)
                at_chip[chip] = min(this, at_chip.get(chip, this))
        for _, _, message in at_chip.values():
            self.adding_since[message] = self.now
        return bool(starts_any or at_chip) or self._choose_work(left)

    def _choose_messages(self, left: Sequence[Message]) -> bool:
        """Let every link take what waits, as far as it may, and start what it took first."""
        carried = {
            self.rows[message[1]].path[hop]: message
            for message in left
            for hop, start in enumerate(self.starts[message])
            if start + self.holds[message][hop] > self.now
        }
        starts_any = False
        for message in sorted(left, key=self._priority):
            channel = self._waits_for(message)
            if channel is None or message in self.queues.setdefault(channel, []):
                continue
            has = [*self.queues[channel], *([carried[channel]] if channel in carried else [])]
            if not has or sum(map(self._queued_bytes, has)) < self.figures.queue:
                self.queues[channel].append(message)
        for channel, taken in self.queues.items():
            if taken and channel not in carried:
                self.starts[taken.pop(0)].append(self.now)
                starts_any = True
        return starts_any

    def _queued_bytes(self, message: Message) -> Fraction:
        return self._bytes(message) + self.figures.overhead * self.figures.bandwidth


def busy_of(simulation: SlowSimulation) -> Mapping[int, Fraction]:
    """Return how long each channel that was used was busy."""
    busy: dict[int, Fraction] = {}
    for message, starts in simulation.starts.items():
        path = simulation.rows[message[1]].path[: len(starts)]
        for channel, hold in zip(path, simulation.holds[message], strict=False):
            busy[channel] = busy.get(channel, Fraction(0)) + hold
    return busy
