"""Programs of remote copies with one thing wrong."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.transport.dma_program import (
    ADD,
    CHANNEL,
    CREDIT,
    OP,
    PUT,
    SEND,
    SLOT,
    WAIT_SENT,
    WAIT_STORED,
    Bits,
    DmaProgram,
    field_of,
)

_Places = NDArray[np.int64]  # of words in a rank's program
_End = tuple[int, _Places]  # a rank, and its words for a channel


def _ends_of_busiest_channel(program: DmaProgram) -> tuple[_End, _End]:
    """Return sender and receiver of the channel with the most blocks, and which words use it."""
    n_ranks, _, n_channels = program.channels.shape
    channels = [(rank, channel) for rank in range(n_ranks) for channel in range(n_channels)]
    rank, channel = max(channels, key=lambda of: len(_users(program, of[0], of[1], (SEND,))))
    peer, there = program.channels[rank, 0:2, channel].tolist()
    sender = rank, _users(program, rank, channel, (SEND, WAIT_SENT))
    return sender, (peer, _users(program, peer, there, (ADD, PUT)))


def _users(program: DmaProgram, rank: int, channel: int, ops: tuple[int, ...]) -> _Places:
    words = program.words[rank, : program.sizes[rank, 0]]
    wanted = np.isin(field_of(words, OP), ops) & (field_of(words, CHANNEL) == channel)
    return np.flatnonzero(wanted)


def _without(words: NDArray[np.int32], rank: int, at: np.int64, bits: Bits) -> None:
    words[rank, at] &= ~(bits.mask << bits.shift)


def credit_removed(program: DmaProgram) -> DmaProgram:
    """One block is sent without waiting for a credit, and its credit is not given."""
    (sender, sends), (receiver, takes) = _ends_of_busiest_channel(program)
    words = program.words.copy()
    needs = [at for at in sends if field_of(words[sender, at], CREDIT)]
    _without(words, sender, needs[0], CREDIT)
    _without(words, receiver, takes[0], CREDIT)
    return replace(program, words=words)


def slots_merged(program: DmaProgram) -> DmaProgram:
    """The blocks of one channel all land in one slot."""
    words = program.words.copy()
    for rank, users in _ends_of_busiest_channel(program):
        for at in users:
            _without(words, rank, at, SLOT)
    return replace(program, words=words)


def _wait_dropped(program: DmaProgram, op: int) -> DmaProgram:
    """The first rank that waits in a word of its own does not do so."""
    words, sizes = program.words.copy(), program.sizes.copy()
    rank, at = np.argwhere(field_of(words, OP) == op)[0]
    words[rank, at:-1] = words[rank, at + 1 :]
    sizes[rank, 0] -= 1
    return replace(program, words=words, sizes=sizes)


def store_wait_dropped(program: DmaProgram) -> DmaProgram:
    """One block is touched while it is still being stored."""
    return _wait_dropped(program, WAIT_STORED)


def send_wait_dropped(program: DmaProgram) -> DmaProgram:
    """One block is not waited for when it is sent."""
    return _wait_dropped(program, WAIT_SENT)


def unchanged(program: DmaProgram) -> DmaProgram:
    """Nothing is wrong."""
    return program


ARRIVAL_WAIT_DROPPED: Final = "waits for arrivals dropped"  # in the kernel; not in the words

MUTANTS: Final[dict[str, Callable[[DmaProgram], DmaProgram]]] = {
    "none": unchanged,
    "credit removed": credit_removed,
    "slots merged": slots_merged,
    "wait for a store dropped": store_wait_dropped,
    "wait for a send dropped": send_wait_dropped,
    ARRIVAL_WAIT_DROPPED: unchanged,
}
