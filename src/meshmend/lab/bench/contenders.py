"""The network of a benchmark, the payloads to sum, and the contenders that run in the pool.

A **contender** is one way to sum, such as our schedules on our sockets, or Gloo's all_reduce; the
pool measures its time. Payloads are whole numbers in 32-bit floats. They are so small that every
order of adding gives the same bits: each result can be checked.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.lab.testbed.bed import Testbed
from meshmend.lab.testbed.names import CHIP_INTERFACE
from meshmend.planning.catalogue import ONE_HOST_RING, default_slices, is_one_host_ring
from meshmend.planning.choose import choose, chosen_schedule
from meshmend.planning.pricing import price
from meshmend.planning.progress import ProgressCallback
from meshmend.planning.proof import prove
from meshmend.planning.target import Question
from meshmend.schedule.algorithms import algorithm
from meshmend.schedule.hazards import Hazards
from meshmend.schedule.table import Collective, Schedule
from meshmend.simulator.network_program import program_of
from meshmend.simulator.rules import simulate
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh
from meshmend.transport.listener import Address
from meshmend.transport.sockets import SocketTransport
from meshmend.transport.tasks import rank_program, task_of

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


AUTO = "auto"
SPEEDS_UNKNOWN = "auto, speeds unknown"  # what auto takes if it believes all links to be alike
TIMEOUT_S = 60.0


@dataclass(frozen=True, eq=False)
class Planned:
    """One of our schedules, cut in slices; `predicted_s` is its time in the simulator."""

    name: str
    n_elements: int
    schedule: Schedule
    hazards: Hazards
    n_slices: int
    predicted_s: float | None = None
    is_sum: bool = True

    @property
    def detail(self) -> str:
        """The schedule in words: algorithm, chunks, slices."""
        slices = f"{self.n_slices} slice{'s' if self.n_slices > 1 else ''}"
        return f"{self.schedule.algorithm}, {self.schedule.n_chunks} chunks, {slices}"

    def ready(self, participant: Participant) -> Callable[[Buffer], None]:
        """Connect to the peers and return a function that runs this rank's part of the schedule."""
        program = rank_program(self.schedule, self.hazards, participant.rank)
        task = task_of(program, self.n_elements, n_slices=self.n_slices)
        participant.connect(program.peers, timeout_s=TIMEOUT_S)
        probe_buffer = np.zeros(0 if self.is_sum else self.n_elements, dtype=np.float32)

        def run(buffer: Buffer) -> None:
            payload = buffer if self.is_sum else probe_buffer
            participant.transport.run(task, payload.view(np.uint8), timeout_s=TIMEOUT_S)

        return run


@dataclass(frozen=True, eq=False)
class Gloo:
    """torch.distributed's all_reduce on the same processes and network."""

    n_elements: int
    name: str = "gloo"
    is_sum: bool = True
    detail: str = field(default="torch.distributed all_reduce")
    predicted_s: float | None = None

    def ready(self, participant: Participant) -> Callable[[Buffer], None]:
        """Return a function that calls all_reduce; make the process group if there is none."""
        import torch
        import torch.distributed

        dist: Any = torch.distributed  # its type stubs lack the stores
        if not dist.is_initialized():
            torch.set_num_threads(1)
            os.environ["GLOO_SOCKET_IFNAME"] = participant.interface
            store = dist.FileStore(str(participant.folder / "gloo"), participant.n_ranks)
            dist.init_process_group(
                "gloo", store=store, rank=participant.rank, world_size=participant.n_ranks
            )
        return lambda buffer: dist.all_reduce(torch.from_numpy(buffer))


def import_torch() -> None:
    """Import torch.distributed for Gloo, once, before workers are forked.

    Raises:
        InputError: torch is not installed.
    """
    try:
        import torch.distributed  # noqa: F401
    except ImportError:
        raise InputError(
            "--compare gloo needs torch, but it is not installed; run: pip install "
            "'meshmend[torch]'"
        ) from None


def planned(
    name: str, question: Question, *, predicts: bool, progress: ProgressCallback
) -> Planned:
    """Return the schedule of an algorithm, or of `auto`, with the fastest parameters in simulation.

    With `predicts`, the final schedule is also simulated on the question's fabric. Without, the
    ranks share a host: `auto` is then what a process group would take there.

    Raises:
        UnsupportedError: the algorithm does not support the mesh.
        InputError: no algorithm has this name.
        ProofError: the schedule is wrong.
    """
    if name == AUTO and not predicts and _is_ring(question):
        schedule = algorithm(ONE_HOST_RING).build(question.mesh, question.collective)
        n_slices = default_slices(schedule, int(question.payload_bytes))
    else:
        schedule, n_slices = _parameters(name, question, progress)
    proved = prove(question.mesh, schedule)
    predicted_s = None
    if predicts:
        program = program_of(schedule, proved.hazards, proved.placement.routes)
        predicted_s = simulate(
            program, question.fabric, payload_bytes=question.payload_bytes, slices=n_slices
        ).time_s
    n_elements = int(question.payload_bytes) // ITEM_BYTES
    is_sum = question.n_halves == 2
    return Planned(name, n_elements, schedule, proved.hazards, n_slices, predicted_s, is_sum)


def _is_ring(question: Question) -> bool:
    is_allreduce = question.collective is Collective.ALLREDUCE
    return is_allreduce and is_one_host_ring(question.mesh, question.payload_bytes)


def _parameters(name: str, question: Question, progress: ProgressCallback) -> tuple[Schedule, int]:
    if name in (AUTO, SPEEDS_UNKNOWN):
        mesh = question.mesh
        if name == SPEEDS_UNKNOWN:
            mesh = replace(mesh, slow=frozenset())
        choice = choose(
            mesh,
            question.fabric,
            question.payload_bytes,
            collective=question.collective,
            progress=progress,
        )
        return chosen_schedule(mesh, choice, question.collective), choice.slices
    result = price(question, name, progress=progress)
    assert result is not None, "without a time to beat there is always a price"
    return result.simulation.schedule, result.simulation.slices
