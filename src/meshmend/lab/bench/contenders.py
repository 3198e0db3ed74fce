"""The network of a benchmark, its payloads, and the contenders that run in the pool.

A **contender** is one way to sum or to exchange blocks, such as our schedules on our sockets, or
Gloo's all_reduce; the pool measures its time. Payloads are whole numbers in 32-bit floats. They are
so small that every order of adding gives the same bits: each result can be checked.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshmend.lab.testbed.bed import Testbed
from meshmend.lab.testbed.names import CHIP_INTERFACE
from meshmend.packages import need
from meshmend.planning.catalogue import ONE_HOST_RING, default_slices, is_one_host_ring
from meshmend.planning.choose import choose, chosen_schedule
from meshmend.planning.plan import AUTO
from meshmend.planning.plan import planned as proved_plan
from meshmend.planning.pricing import price
from meshmend.planning.progress import ProgressCallback
from meshmend.planning.target import Question, Target
from meshmend.planning.tree_formula import Pipeline
from meshmend.schedule.algorithms import algorithm
from meshmend.schedule.hazards import Hazards
from meshmend.schedule.priority import remaining_hops
from meshmend.schedule.table import Collective, Schedule
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


Run = Callable[[Buffer], Buffer]  # takes this rank's payload, which it may change


class Contender(Protocol):
    """One way to sum or exchange payloads of one size.

    `checked` says what every rank has to end with: sums (ALLREDUCE) or the blocks for it
    (ALL_TO_ALL). It is None for probes of the network, whose data nobody uses.
    """

    @property
    def name(self) -> str: ...

    @property
    def n_elements(self) -> int: ...

    @property
    def checked(self) -> Collective | None: ...

    def ready(self, participant: Participant) -> Run:
        """Return a function that makes the result; all workers call this at the same time."""


@dataclass(frozen=True)
class Expected:
    """What a rank gives to a collective, and what it has to end with."""

    given: Buffer
    result: Buffer


def expected(checked: Collective | None, rank: int, n_ranks: int, n_elements: int) -> Expected:
    """Return the payload and the right result of a rank; both are empty if nothing is checked."""
    if checked is None:
        nothing = np.zeros(0, dtype=np.float32)
        return Expected(nothing, nothing)
    if checked is Collective.ALLREDUCE:
        return Expected(operand(rank, n_elements), total(n_ranks, n_elements))
    assert checked is Collective.ALL_TO_ALL, "nothing else is checked"
    blocks = [_blocks(other, n_ranks, n_elements)[rank] for other in range(n_ranks)]
    return Expected(_blocks(rank, n_ranks, n_elements).reshape(-1), np.concatenate(blocks))


def _blocks(rank: int, n_ranks: int, n_elements: int) -> Buffer:
    """Return a rank's block for each other, in rows: no two blocks of any ranks are alike."""
    blocks = operand(rank, n_elements).reshape(n_ranks, -1)
    return blocks + _PRIME * np.arange(n_ranks, dtype=np.float32)[:, None]


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
    checked: Collective | None = Collective.ALLREDUCE
    delays: NDArray[np.float64] | None = None  # of each row, in slices

    @property
    def detail(self) -> str:
        """The schedule in words: algorithm, chunks, slices."""
        slices = f"{self.n_slices} slice{'s' if self.n_slices > 1 else ''}"
        return f"{self.schedule.algorithm}, {self.schedule.n_chunks} chunks, {slices}"

    def ready(self, participant: Participant) -> Run:
        """Connect to the peers and return a function that runs this rank's part of the schedule."""
        program = rank_program(self.schedule, self.hazards, participant.rank)
        task = task_of(program, self.n_elements, n_slices=self.n_slices, delays=self.delays)
        participant.connect(program.peers, timeout_s=TIMEOUT_S)
        probe_buffer = np.zeros(0 if self.checked else self.n_elements, dtype=np.float32)

        def move(payload: Buffer) -> Buffer:
            participant.transport.run(task, payload.view(np.uint8), timeout_s=TIMEOUT_S)
            return payload

        def run(buffer: Buffer) -> Buffer:
            if self.checked is not Collective.ALL_TO_ALL:
                move(buffer if self.checked else probe_buffer)
                return buffer
            partners = self.schedule.partners(participant.rank)  # a block has an agreed place
            moved = move(buffer.reshape(len(partners), -1)[partners].reshape(-1))
            result = np.empty_like(buffer).reshape(len(partners), -1)
            result[partners] = moved.reshape(result.shape)
            return result.reshape(-1)

        return run


@dataclass(frozen=True, eq=False)
class Gloo:
    """torch.distributed's own collective on the same processes and network."""

    n_elements: int
    checked: Collective = Collective.ALLREDUCE
    name: str = "gloo"
    predicted_s: float | None = None

    @property
    def detail(self) -> str:
        """The function that is called."""
        exchanges = self.checked is Collective.ALL_TO_ALL
        return f"torch.distributed {'all_to_all_single' if exchanges else 'all_reduce'}"

    def ready(self, participant: Participant) -> Run:
        """Return a function that calls Gloo; make the process group if there is none."""
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

        def run(buffer: Buffer) -> Buffer:
            if self.checked is Collective.ALL_TO_ALL:
                result = np.empty_like(buffer)
                dist.all_to_all_single(torch.from_numpy(result), torch.from_numpy(buffer))
                return result
            dist.all_reduce(torch.from_numpy(buffer))
            return buffer

        return run


def import_torch() -> None:
    """Import torch.distributed for Gloo, once, before workers are forked.

    Raises:
        InputError: torch is not installed.
    """
    need("--compare gloo", "torch", extra="torch")
    import torch.distributed  # noqa: F401


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
        pipeline = Pipeline(default_slices(schedule, int(question.payload_bytes)))
    else:
        schedule, pipeline = _parameters(name, question, progress)
    made = proved_plan(question.mesh, schedule, Target(question.payload_bytes, question.fabric))
    delays = pipeline.delays(
        schedule, remaining_hops(schedule, made.hazards, made.placement.routes)
    )
    predicted_s = made.in_pipeline(pipeline).time_s if predicts else None
    n_elements = int(question.payload_bytes) // ITEM_BYTES
    checked: Collective | None = Collective.ALLREDUCE if question.n_halves == 2 else None
    if question.collective is Collective.ALL_TO_ALL:
        checked = Collective.ALL_TO_ALL
    return Planned(
        name, n_elements, schedule, made.hazards, pipeline.slices, predicted_s, checked, delays
    )


def _is_ring(question: Question) -> bool:
    is_allreduce = question.collective is Collective.ALLREDUCE
    return is_allreduce and is_one_host_ring(question.mesh, question.payload_bytes)


def _parameters(
    name: str, question: Question, progress: ProgressCallback
) -> tuple[Schedule, Pipeline]:
    if name in (AUTO, SPEEDS_UNKNOWN):
        if name == SPEEDS_UNKNOWN:
            question = replace(question, mesh=replace(question.mesh, slow=frozenset()))
        choice = choose(question, progress=progress)
        return chosen_schedule(question.mesh, choice, question.collective), choice.pipeline
    result = price(question, name, progress=progress)
    return result.simulation.schedule, result.pipeline
