"""A model of chips that copy blocks to each other: what a program may do wrong, it does.

Any copy may take place at once or late, any rank may be fast or slow, in an order drawn from a
seed. So a program that does not wait where it must ends with a wrong sum, or stuck.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshmend.transport.dma_program import (
    ADD,
    BLOCK,
    BUFFER,
    CHANNEL,
    CREDIT,
    OP,
    REUSED,
    SEND,
    SLOT,
    WAIT_SENT,
    WAIT_STORED,
    Bits,
    DmaProgram,
)

Semaphore = tuple[Any, ...]  # a rank, a name and numbers


class StuckError(AssertionError):
    """Every rank waits."""


@dataclass
class ModelChips:
    """Chips under way: `blocks[rank]` in HBM, the rest as the kernel has it."""

    program: DmaProgram
    blocks: NDArray[np.int64]
    rng: np.random.Generator
    slots: dict[Semaphore, int] = field(default_factory=dict)
    buffers: dict[Semaphore, int] = field(default_factory=dict)
    counts: Counter[Semaphore] = field(default_factory=Counter)
    copies: list[Callable[[], None]] = field(default_factory=list)

    def run(self, slowest: int | None) -> None:
        """Execute the programs of all ranks to their ends.

        The slowest rank moves only when nothing else can.
        """
        ranks = {rank: self._execute(rank) for rank in range(len(self.blocks))}
        waits = {rank: next(run, None) for rank, run in ranks.items()}
        while any(waits.values()) or self.copies:
            able = [rank for rank, needed in waits.items() if needed and self.counts[needed]]
            if len(able) + len(self.copies) > 1 and slowest in able:
                able.remove(slowest)
            if not able and not self.copies:
                raise StuckError(f"all wait: {waits}")
            if able and (not self.copies or self.rng.random() < 0.5):
                rank = able[int(self.rng.integers(len(able)))]
                self.counts[waits[rank]] -= 1  # type: ignore[index]  # it waits
                waits[rank] = next(ranks[rank], None)
            else:
                self.copies.pop(int(self.rng.integers(len(self.copies))))()

    def _execute(self, rank: int) -> Iterator[Semaphore]:
        """Execute one rank's words; yield each semaphore that must be taken down by one."""
        for word in self.program.words[rank, : self.program.sizes[rank, 0]].tolist():
            op, channel, slot = (number_of(word, bits) for bits in (OP, CHANNEL, SLOT))
            left, stored = (rank, "left", channel, slot), (rank, "stored", number_of(word, BUFFER))
            if op == SEND:
                if number_of(word, CREDIT):
                    yield rank, "credits", channel
                if number_of(word, REUSED):
                    yield left
                self._send(rank, word)
            elif op == WAIT_SENT:
                yield left
            elif op == WAIT_STORED:
                yield stored
            else:
                if number_of(word, REUSED):
                    yield stored
                yield rank, "arrived", channel, slot
                self._take(rank, word)

    def _send(self, rank: int, word: int) -> None:
        channel, slot, block = (number_of(word, bits) for bits in (CHANNEL, SLOT, BLOCK))
        peer, there = self.program.channels[rank, 0:2, channel].tolist()

        def leave() -> None:
            value = int(self.blocks[rank, block])
            self.counts[rank, "left", channel, slot] += 1

            def arrive() -> None:
                self.slots[peer, there, slot] = value
                self.counts[peer, "arrived", there, slot] += 1

            self.copies.append(arrive)

        self.copies.append(leave)

    def _take(self, rank: int, word: int) -> None:
        channel, slot, block = (number_of(word, bits) for bits in (CHANNEL, SLOT, BLOCK))
        buffer = rank, number_of(word, BUFFER)
        landed = self.slots.get((rank, channel, slot), -(10**9))
        own = int(self.blocks[rank, block]) if number_of(word, OP) == ADD else 0
        self.buffers[buffer] = own + landed

        def store() -> None:
            self.blocks[rank, block] = self.buffers[buffer]
            self.counts[rank, "stored", buffer[1]] += 1

        self.copies.append(store)
        if number_of(word, CREDIT):
            peer, there = self.program.channels[rank, 2:4, channel].tolist()
            self.counts[peer, "credits", there] += 1


def number_of(word: int, bits: Bits) -> int:
    """Return one number of a word."""
    return word >> bits.shift & bits.mask


def model_sum(program: DmaProgram, *, seed: int = 0, slowest: int | None = None) -> str:
    """Return what is wrong after a program ran on random numbers; nothing if it did right.

    Raises:
        StuckError: ranks wait for each other.
    """
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 1 << 30, (len(program.words), program.n_blocks))
    chips = ModelChips(program, blocks.copy(), rng)
    chips.run(slowest)
    if np.any(chips.blocks != blocks.sum(axis=0)):
        return "wrong sum"
    left_over = +chips.counts
    return f"semaphores not at zero: {left_over}" if left_over else ""
