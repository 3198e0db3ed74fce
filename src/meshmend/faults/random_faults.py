"""Random faults for a run, as a value: the same seed gives the same faults at the same times.

Kills of chips, boards and several boards at once, kills while the others still recover from one,
hangs, slow chips, cut links, coordinator kills, and repairs. At least one board is left alone
until others are back, so that there is always something to go on from.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from meshmend.faults.fault import COORDINATOR, Fault, FaultKind
from meshmend.topology.failures import Block, Chip, Link
from meshmend.topology.mesh import Mesh

_FIRST_S = 3.0
_PAUSE_S = (2.0, 8.0)
_SOON_S = (0.0, 0.8)  # after a kill: the others are still recovering from it
_HANG_S = (3.0, 6.0)
_REST_S = 12.0  # without faults at the end, so that the last one is recovered from


def chaos(mesh: Mesh, board: tuple[int, ...], *, for_s: float, seed: int) -> tuple[Fault, ...]:
    """Return random faults for a run of so many seconds, in the order of their times."""
    mind = _Mind(mesh, board, random.Random(seed))
    at = _FIRST_S
    faults: list[Fault] = []
    while at < for_s - _REST_S:
        faults.extend(mind.next_at(at))
        at += mind.random.uniform(*_PAUSE_S)
    return tuple(sorted(faults, key=lambda fault: fault.at_s or 0.0))


@dataclass
class _Mind:
    """What the one who makes trouble thinks is broken."""

    mesh: Mesh
    board: tuple[int, ...]
    random: random.Random
    dead: set[Chip] = field(default_factory=set)
    cut: set[Link] = field(default_factory=set)

    def next_at(self, at: float) -> Iterator[Fault]:
        """Yield what happens next: one thing, or several close together."""
        whole = self._whole_boards()
        if len(whole) < 2 or (self.dead and self.random.random() < 0.3):
            yield from self._repair(at)
            return
        actions: list[tuple[float, Callable[[float], Iterator[Fault]]]] = [
            (4, self._kill_board),
            (2, self._kill_chip),
            (2, self._hang),
            (1, self._slow),
            (2, self._cut),
            (2, self._kill_coordinator),
            (3, self._kill_twice),
        ]
        weights, choices = zip(*actions, strict=True)
        yield from self.random.choices(choices, weights)[0](at)

    def _boards(self) -> list[Block]:
        extents = zip(self.mesh.shape, self.board, strict=True)
        corners = itertools.product(*(range(0, end - size + 1, size) for end, size in extents))
        return [Block(self.board, corner) for corner in corners]

    def _whole_boards(self) -> list[Block]:
        return [block for block in self._boards() if not self.dead & set(block.chips())]

    def _kill_board(self, at: float) -> Iterator[Fault]:
        block = self.random.choice(self._whole_boards())
        self.dead |= set(block.chips())
        yield Fault(FaultKind.KILL, block, at_s=at)

    def _kill_chip(self, at: float) -> Iterator[Fault]:
        block = self.random.choice(self._whole_boards())
        chip = self.random.choice(list(block.chips()))
        self.dead.add(chip)
        yield Fault(FaultKind.KILL, Block((1,) * len(chip), chip), at_s=at)

    def _kill_twice(self, at: float) -> Iterator[Fault]:
        """Kill again while the others still recover from the first kill."""
        yield from self._kill_board(at)
        if len(self._whole_boards()) > 1:
            soon = at + self.random.uniform(*_SOON_S)
            yield from self.random.choice((self._kill_board, self._kill_chip))(soon)

    def _hang(self, at: float) -> Iterator[Fault]:
        """Stop a chip for so long that it is turned away; it comes back by itself."""
        block = self.random.choice(self._whole_boards())
        chip = self.random.choice(list(block.chips()))
        target = Block((1,) * len(chip), chip)
        yield Fault(FaultKind.HANG, target, at_s=at, for_s=self.random.uniform(*_HANG_S))

    def _slow(self, at: float) -> Iterator[Fault]:
        chip = self.random.choice(sorted(set(self.mesh.live) - self.dead))
        yield Fault(FaultKind.SLOW, Block((1,) * len(chip), chip), at_s=at, for_s=2.0)

    def _cut(self, at: float) -> Iterator[Fault]:
        chips = sorted(set(self.mesh.live) - self.dead)
        links = sorted(
            Link(one, other)
            for one in chips
            for other in self.mesh.neighbors(one)
            if one < other and other not in self.dead
        )
        links = [link for link in links if link not in self.cut]
        if links and len(self.cut) < 2:
            link = self.random.choice(links)
            self.cut.add(link)
            yield Fault(FaultKind.CUT, link, at_s=at)

    def _kill_coordinator(self, at: float) -> Iterator[Fault]:
        """Kill the coordinator, at times together with chips, before or after."""
        yield Fault(FaultKind.KILL, COORDINATOR, at_s=at)
        if self.random.random() < 0.4:
            yield from self._kill_board(max(0.0, at + self.random.uniform(-0.3, 0.5)))

    def _repair(self, at: float) -> Iterator[Fault]:
        """Repair all that is broken, board by board."""
        for link in sorted(self.cut):
            yield Fault(FaultKind.REPAIR, link, at_s=at)
        for block in self._boards():
            broken = sorted(self.dead & set(block.chips()))
            if len(broken) == len(set(block.chips())):
                yield Fault(FaultKind.REPAIR, block, at_s=at)
            else:
                for chip in broken:
                    yield Fault(FaultKind.REPAIR, Block((1,) * len(chip), chip), at_s=at)
        self.dead.clear()
        self.cut.clear()
