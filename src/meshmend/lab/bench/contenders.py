"""Defines the network of a benchmark, the payloads to sum, and the interface of a contender.

A **contender** is one way to sum; the pool measures its time. Payloads are whole numbers in 32-bit
floats. They are so small that every order of adding gives the same bits: each result can be
checked.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshmend.lab.testbed.bed import Testbed
from meshmend.lab.testbed.names import CHIP_INTERFACE
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh
from meshmend.transport.listener import Address
from meshmend.transport.sockets import SocketTransport

ITEM_BYTES = 4
_PRIME = 251
LOOPBACK, LOOPBACK_INTERFACE = "127.0.0.1", "lo"

Buffer = NDArray[np.float32]


@dataclass(frozen=True)
class Network:
    """A connected mesh whose chips are processes: in a testbed's network, or on loopback."""

    mesh: Mesh
    bed: Testbed | None = None

    @property
    def interface(self) -> str:
        """The network interface that a worker's address is on."""
        return LOOPBACK_INTERFACE if self.bed is None else CHIP_INTERFACE

    def address(self, chip: Chip) -> str:
        """Return the address that a chip's worker listens on."""
        return LOOPBACK if self.bed is None else self.bed.address(chip)

    def enter(self, chip: Chip) -> None:
        """Move the calling process, a child just forked, to its chip."""
        if self.bed is not None:
            self.bed.enter(chip)


@dataclass(frozen=True)
class Participant:
    """A worker's rank among the others, and the transport and addresses to reach them."""

    rank: int
    n_ranks: int
    transport: SocketTransport
    addresses: tuple[Address, ...]
    interface: str
    folder: Path  # shared files by which workers find each other

    def connect(self, peers: Iterable[int], *, timeout_s: float) -> None:
        """Connect this worker to these ranks."""
        self.transport.connect({peer: self.addresses[peer] for peer in peers}, timeout_s=timeout_s)


class Contender(Protocol):
    """One way to sum payloads of one size; `is_sum` is false for probes of the network."""

    @property
    def name(self) -> str: ...

    @property
    def n_elements(self) -> int: ...

    @property
    def is_sum(self) -> bool: ...

    def ready(self, participant: Participant) -> Callable[[Buffer], None]:
        """Return a function that sums a buffer in place; all workers call this at the same time."""


def operand(rank: int, n_elements: int) -> Buffer:
    """Return the payload of a rank: whole numbers below 251, different on every rank."""
    return np.resize(_period(rank), n_elements)


def total(n_ranks: int, n_elements: int) -> Buffer:
    """Return the sum of the operands of all ranks: exact, for at most 67108 ranks."""
    return np.resize(sum(map(_period, range(n_ranks))), n_elements).astype(np.float32, copy=False)


def _period(rank: int) -> Buffer:
    """Return what repeats in an operand, with a prime length: no slice is a multiple of it.

    So a slice that lands in the place of another gives a wrong sum.
    """
    values = (np.arange(_PRIME) * (rank % (_PRIME - 1) + 1) + rank) % _PRIME
    return values.astype(np.float32)
