"""The contenders that run in the pool: our schedules on our sockets, and Gloo's all_reduce."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshmend.errors import InputError
from meshmend.lab.bench.contenders import ITEM_BYTES, Buffer, Participant
from meshmend.planning.catalogue import ONE_HOST_RING, default_slices, is_one_host_ring
from meshmend.planning.choose import choose, chosen_schedule
from meshmend.planning.pricing import Question, price
from meshmend.planning.progress import ProgressCallback
from meshmend.planning.proof import prove
from meshmend.schedule.algorithms import algorithm
from meshmend.schedule.hazards import Hazards
from meshmend.schedule.table import Collective, Schedule
from meshmend.simulator.network_program import program_of
from meshmend.simulator.rules import simulate
from meshmend.transport.rank_program import rank_program
from meshmend.transport.transport import task_of

AUTO = "auto"
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
    if name == AUTO:
        choice = choose(
            question.mesh,
            question.fabric,
            question.payload_bytes,
            collective=question.collective,
            progress=progress,
        )
        return chosen_schedule(question.mesh, choice, question.collective), choice.slices
    result = price(question, name, progress=progress)
    assert result is not None, "without a time to beat there is always a price"
    return result.simulation.schedule, result.simulation.slices
