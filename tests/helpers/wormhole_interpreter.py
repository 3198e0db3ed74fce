"""Walks tables of moves in this process, as the kernel walks them on Ethernet cores.

Cores take turns in an order that a seed decides, and a core goes on for as long as it can before
another has its turn. So a move that does not wait for what it needs finds it missing, sooner or
later, as it would on a machine whose cores are unequally fast. Knows nothing of plans.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import TransportError
from meshmend.wormhole.payload import Written, gathered, scattered
from meshmend.wormhole.table import (
    ADD,
    COPY,
    ETHERNET_PLACES,
    L1_BYTES,
    LOAD,
    MOVE_BYTES,
    N_WORDS,
    PASS,
    SEND,
    STORE,
    WAIT,
    Core,
    Program,
)

_CHANNEL_AT = {place: channel for channel, place in enumerate(ETHERNET_PLACES)}


class Interpreter:
    """The cores of a program, their L1, and the DRAM of their chips.

    `sent_bytes` counts what each core sent over its cable, a counter as 16 bytes.
    """

    def __init__(self, program: Program, dtype: "np.dtype[Any]") -> None:
        self._program, self._dtype = program, dtype
        self._l1 = {core: np.zeros(L1_BYTES, dtype=np.uint8) for core in program.moves}
        self._dram: dict[tuple[int, int], dict[int, NDArray[np.uint8]]] = defaultdict(dict)
        self._at = dict.fromkeys(program.moves, 0)
        self._slice = dict.fromkeys(program.moves, 0)
        self.sent_bytes = dict.fromkeys(program.moves, 0)
        for core, moves in program.moves.items():
            start = program.table_at[core]
            self._l1[core][start : start + moves.size * 4] = moves.reshape(-1).view(np.uint8)

    def run(self, arrays: Sequence[NDArray[Any]], *, seed: int = 0) -> list[NDArray[Any]]:
        """Return what each rank holds after all cores walked their tables.

        Raises:
            TransportError: no core can go on, but some have not done all their moves.
        """
        for region, data in scattered(self._program, arrays):
            self._dram[region.rank, region.place][region.address] = data.copy()
        rng = np.random.default_rng(seed)
        cores = list(self._program.moves)
        waiting = set(cores)
        while waiting:
            went_on = False
            for number in rng.permutation(len(cores)).tolist():
                core = cores[number]
                while core in waiting and self._step(core):
                    went_on = True
                    if self._slice[core] == self._program.n_slices:
                        waiting.discard(core)
            if not went_on:
                core = min(waiting)
                raise TransportError(
                    f"{len(waiting)} cores wait forever, {core} for move {self._at[core]} of slice "
                    f"{self._slice[core]}"
                )
        read: list[Written] = [
            (region, self._dram[region.rank, region.place][region.address])
            for region in self._program.regions
        ]
        return gathered(self._program, read, self._dtype)

    def _step(self, core: Core) -> bool:
        """Do a core's next move; return whether it could be done."""
        l1, program = self._l1[core], self._program
        start = program.table_at[core] + self._at[core] * MOVE_BYTES
        words = l1[start : start + MOVE_BYTES].view(np.int32).tolist()
        assert len(words) == N_WORDS
        op, target, source, n_bytes, counter, place, value, per_slice = words
        value += self._slice[core] * per_slice
        if op == WAIT:
            if l1[counter : counter + 4].view(np.int32)[0] < value:
                return False
        elif op in (ADD, COPY):
            moved, kept = (l1[at : at + n_bytes].view(self._dtype) for at in (source, target))
            kept[...] = moved if op == COPY else kept + moved
        elif op in (SEND, PASS):
            other = program.peer[core] if op == SEND else Core(core.rank, _CHANNEL_AT[place])
            there = self._l1[other]
            there[target : target + n_bytes] = l1[source : source + n_bytes]
            there[counter : counter + 4].view(np.int32)[0] = value
            if op == SEND:
                self.sent_bytes[core] += n_bytes + 16
        elif op in (LOAD, STORE):
            address = source if op == LOAD else target
            data = self._dram[core.rank, place][address]
            offset = self._slice[core] * per_slice
            in_dram = data[offset : offset + n_bytes]
            if op == LOAD:
                l1[target : target + n_bytes] = in_dram
            else:
                in_dram[...] = l1[source : source + n_bytes]
        else:
            raise TransportError(f"{core} has no move {op}")
        self._at[core] += 1
        if self._at[core] == len(program.moves[core]):
            self._at[core] = 0
            self._slice[core] += 1
        return True
