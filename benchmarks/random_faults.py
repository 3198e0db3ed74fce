"""Random faults for a run, as values: the same seed gives the same faults at the same times.

There are kills of chips and boards, kills while the other chips still recover from a kill, hangs,
slow chips, cut links, coordinator kills and freezes, and repairs. At least one board always keeps
all its chips, and no kill cuts the living chips apart, so that there is always a copy of the state.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from meshmend.membership.faults.fault import COORDINATOR, MAX_STEP, Fault, FaultKind
from meshmend.topology.failures import Block, Chip, Link
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh

_FIRST_S: Final = 3.0
_PAUSE_S: Final = (2.0, 8.0)  # between two faults
_SECOND_KILL_S: Final = (0.0, 0.8)  # after a kill, while the other chips recover from it
_COORDINATOR_GAP_S: Final = (-0.3, 0.5)  # from a coordinator kill to the kill of a board
_HANG_S: Final = (3.0, 6.0)  # longer than the usual heartbeat timeout
_SLOW_S: Final = 2.0
_FREEZE_S: Final = (1.0, 5.0)  # shorter and longer than the usual heartbeat timeout
_REPAIR_PROBABILITY: Final = 0.3
_BOARD_WITH_COORDINATOR_PROBABILITY: Final = 0.4
_MAX_CUT_LINKS: Final = 2
_REST_S: Final = 12.0  # without faults at the end, so that the job can recover from the last one

_FIRST_STEP: Final = 10
_GAP_STEPS: Final = (1, 2)  # that the job must go on after a fault, before the next
_REST_STEPS: Final = 20  # after the last fault
_PATIENCE_S: Final = 30.0  # for a job that goes on, but does not recover from a fault


def random_faults(
    mesh: Mesh, board: tuple[int, ...], *, for_s: float, seed: int
) -> tuple[Fault, ...]:
    """Return random faults for a run of this many seconds, in the order of their times."""
    state = FaultSource(mesh, board, random.Random(seed))
    at_s = _FIRST_S
    faults: list[Fault] = []
    while at_s < for_s - _REST_S:
        faults.extend(state.next_faults(round(at_s, 3)))
        at_s += state.random.uniform(*_PAUSE_S)
    return tuple(sorted(faults, key=lambda fault: fault.at_s or 0.0))


@dataclass
class FaultSource:
    """Draws one fault after the other; knows what is broken after those so far.

    Which faults come, and in which order, depends on the random numbers, not on their times; only
    if `holders` are told, the chips that train now, it also spares the last of these.
    """

    mesh: Mesh
    board: tuple[int, ...]
    random: random.Random
    dead: set[Chip] = field(default_factory=set)
    cut: set[Link] = field(default_factory=set)
    holders: frozenset[Chip] | None = None

    def next_faults(self, at_s: float) -> Iterator[Fault]:
        """Yield the next fault, or several close together."""
        if len(self._whole_boards()) < 2 or (
            self.dead and self.random.random() < _REPAIR_PROBABILITY
        ):
            yield from self._repair_all(at_s)
            return
        weights: dict[Callable[[float], Iterator[Fault]], float] = {
            self._kill_board: 4,
            self._kill_chip: 2,
            self._hang_chip: 2,
            self._slow_chip: 1,
            self._cut_link: 2,
            self._kill_coordinator: 2,
            self._freeze_coordinator: 1,
            self._kill_twice: 3,
        }
        choices = self.random.choices(list(weights), list(weights.values()))
        yield from choices[0](at_s)

    def _boards(self) -> list[Block]:
        extents = zip(self.mesh.shape, self.board, strict=True)
        corners = itertools.product(*(range(0, end - size + 1, size) for end, size in extents))
        return [Block(self.board, corner) for corner in corners]

    def _whole_boards(self) -> list[Block]:
        dead = self.dead | self.mesh.failed
        return [block for block in self._boards() if dead.isdisjoint(block.chips())]

    def _leaves_the_state(self, killed: Block) -> bool:
        """Whether the chips that live after a kill are connected, and some have the state."""
        left = replace(
            self.mesh,
            failed=self.mesh.failed | self.dead | frozenset(killed.chips()),
            failed_links=self.mesh.failed_links | self.cut,
        )
        holders = set(left.live if self.holders is None else self.holders)
        return not holders.isdisjoint(left.live) and largest_part(left) == left

    def _random_time(self, bounds_s: tuple[float, float]) -> float:
        return round(self.random.uniform(*bounds_s), 3)

    def _chip_of_a_whole_board(self) -> Block:
        board = self.random.choice(self._whole_boards())
        return _single_chip(self.random.choice(list(board.chips())))

    def _kill_board(self, at_s: float) -> Iterator[Fault]:
        yield from self._kill(self.random.choice(self._whole_boards()), at_s)

    def _kill_chip(self, at_s: float) -> Iterator[Fault]:
        yield from self._kill(self._chip_of_a_whole_board(), at_s)

    def _kill(self, chips: Block, at_s: float) -> Iterator[Fault]:
        if self._leaves_the_state(chips):
            self.dead.update(chips.chips())
            yield Fault(FaultKind.KILL, chips, at_s=at_s)

    def _kill_twice(self, at_s: float) -> Iterator[Fault]:
        """Kill a board, then a board or a chip while the others still recover."""
        yield from self._kill_board(at_s)
        if len(self._whole_boards()) > 1:
            kill = self.random.choice((self._kill_board, self._kill_chip))
            yield from kill(round(at_s + self._random_time(_SECOND_KILL_S), 3))

    def _hang_chip(self, at_s: float) -> Iterator[Fault]:
        """Stop a chip until the coordinator counts it as dead; it rejoins when it resumes."""
        chip = self._chip_of_a_whole_board()
        yield Fault(FaultKind.HANG, chip, at_s=at_s, for_s=self._random_time(_HANG_S))

    def _slow_chip(self, at_s: float) -> Iterator[Fault]:
        chip = self.random.choice(sorted(set(self.mesh.live) - self.dead))
        yield Fault(FaultKind.SLOW, _single_chip(chip), at_s=at_s, for_s=_SLOW_S)

    def _cut_link(self, at_s: float) -> Iterator[Fault]:
        living = set(self.mesh.live) - self.dead
        links = sorted(
            Link(chip, other)
            for chip in living
            for other in living.intersection(self.mesh.neighbors(chip))
            if chip < other and Link(chip, other) not in self.cut
        )
        if links and len(self.cut) < _MAX_CUT_LINKS:
            link = self.random.choice(links)
            self.cut.add(link)
            yield Fault(FaultKind.CUT, link, at_s=at_s)

    def _kill_coordinator(self, at_s: float) -> Iterator[Fault]:
        """Kill the coordinator, sometimes together with a board, shortly before or after."""
        yield Fault(FaultKind.KILL, COORDINATOR, at_s=at_s)
        if self.random.random() < _BOARD_WITH_COORDINATOR_PROBABILITY:
            yield from self._kill_board(round(at_s + self._random_time(_COORDINATOR_GAP_S), 3))

    def _freeze_coordinator(self, at_s: float) -> Iterator[Fault]:
        """Stop the coordinator for a time; sometimes a board dies meanwhile."""
        for_s = self._random_time(_FREEZE_S)
        yield Fault(FaultKind.FREEZE, COORDINATOR, at_s=at_s, for_s=for_s)
        if self.random.random() < _BOARD_WITH_COORDINATOR_PROBABILITY:
            yield from self._kill_board(round(at_s + self._random_time(_SECOND_KILL_S), 3))

    def _repair_all(self, at_s: float) -> Iterator[Fault]:
        """Repair everything that is broken: links, whole boards, single chips."""
        for link in sorted(self.cut):
            yield Fault(FaultKind.REPAIR, link, at_s=at_s)
        for board in self._boards():
            broken = sorted(self.dead.intersection(board.chips()))
            if len(broken) == len(set(board.chips())):
                yield Fault(FaultKind.REPAIR, board, at_s=at_s)
            else:
                yield from (
                    Fault(FaultKind.REPAIR, _single_chip(chip), at_s=at_s) for chip in broken
                )
        self.dead.clear()
        self.cut.clear()


class FaultDriver:
    """Hands out random faults, each as soon as the job has gone on a step or two after the last.

    After `n_faults` of them, repairs not counted, or the last step for faults, and some steps more
    it hands out None: the end.
    Faults that `can_do` denies are drawn, so that the others stay the same, but not handed out.
    """

    def __init__(
        self,
        source: FaultSource,
        n_faults: int,
        can_do: Callable[[Fault], bool] = lambda fault: True,
        *,
        last_step: int = MAX_STEP,
    ) -> None:
        self._source = source
        self._last_step = last_step
        self.n_asked = n_faults
        self._can_do = can_do
        self.n_faults = 0
        self.skipped: list[str] = []  # what `can_do` denied
        self._asked_at_s = self._until_s = 0.0
        self._due_step: int | None = _FIRST_STEP

    def next_faults(
        self,
        step: int,
        elapsed_s: float,
        *,
        has_recovered: bool,
        holders: frozenset[Chip] | None = None,
    ) -> tuple[Fault, ...] | None:
        """Return the faults that are due now, mostly none; None if the job is to end.

        `has_recovered` says that the job has recovered from all faults that were injected so far,
        `holders` which chips train, so that some of them are spared.
        """
        self._source.holders = holders
        is_late = elapsed_s > self._asked_at_s + _PATIENCE_S
        if elapsed_s <= self._until_s or not (has_recovered or is_late):
            self._due_step = None
            return ()
        is_over = self.n_faults >= self.n_asked or step >= self._last_step
        if self._due_step is None:
            gap = _REST_STEPS if is_over else self._source.random.randint(*_GAP_STEPS)
            self._due_step = step + gap
        if step < self._due_step:
            return ()
        if is_over:
            return None
        return self._draw(elapsed_s)

    def _draw(self, elapsed_s: float) -> tuple[Fault, ...]:
        drawn = tuple(self._source.next_faults(round(elapsed_s, 3)))
        faults = tuple(fault for fault in drawn if self._can_do(fault))
        self.skipped += [str(fault) for fault in drawn if fault not in faults]
        self.n_faults += sum(fault.kind is not FaultKind.REPAIR for fault in faults)
        self._asked_at_s = elapsed_s
        self._until_s = max((fault.at_s or 0.0 for fault in faults), default=elapsed_s) + 0.1
        self._due_step = None
        return faults


def _single_chip(chip: Chip) -> Block:
    return Block((1,) * len(chip), chip)
