"""Ranks of one machine as threads of one process: the event loop holds no interpreter lock."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.table import Schedule
from meshmend.transport.sockets import SocketTransport
from meshmend.transport.tasks import RankProgram, Task, rank_program, task_of
from waiting import HANG_S

SECRET = b"known to all of us"


def programs_of(schedule: Schedule) -> list[RankProgram]:
    """Return what each rank does of a schedule."""
    hazards = hazards_of(schedule)
    return [rank_program(schedule, hazards, rank) for rank in range(schedule.n_ranks)]


@contextmanager
def transports(
    n_ranks: int,
    *,
    reports_failures: bool = False,
    link_timeout_s: float = 0.0,
    sums_payloads: bool = False,
) -> Iterator[list[SocketTransport]]:
    """Yield one transport per rank, not connected yet."""
    labels = [f"rank {rank}" for rank in range(n_ranks)]
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                SocketTransport(
                    rank,
                    labels,
                    SECRET,
                    reports_failures=reports_failures,
                    link_timeout_s=link_timeout_s,
                    sums_payloads=sums_payloads,
                )
            )
            for rank in range(n_ranks)
        ]


@contextmanager
def connected(
    programs: Sequence[RankProgram],
    *,
    reports_failures: bool = False,
    link_timeout_s: float = 0.0,
    over_tcp: bool = False,
) -> Iterator[list[SocketTransport]]:
    """Yield one transport per rank, connected as the programs need, perhaps as between hosts."""
    with transports(
        len(programs), reports_failures=reports_failures, link_timeout_s=link_timeout_s
    ) as made:
        addresses = {rank: transport.address for rank, transport in enumerate(made)}
        if over_tcp:  # nobody listens locally under this name of the host
            addresses = {rank: ("localhost", port) for rank, (_, port) in addresses.items()}

        def connect(rank: int) -> None:
            peers = {peer: addresses[peer] for peer in programs[rank].peers}
            made[rank].connect(peers, timeout_s=HANG_S)

        assert together(connect, len(made)) == [None] * len(made)
        yield made


def together(job: Callable[[int], Any], n_ranks: int) -> list[Any]:
    """Return what a job returns or raises on each rank, all at once."""
    outcome: list[Any] = ["still running"] * n_ranks

    def work(rank: int) -> None:
        try:
            outcome[rank] = job(rank)
        except Exception as error:
            outcome[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(n_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    return outcome


def run_all(
    made: Sequence[SocketTransport],
    programs: Sequence[RankProgram],
    arrays: Sequence[NDArray[Any]],
    *,
    n_slices: int = 1,
    op: str = "sum",
) -> list[NDArray[Any]]:
    """Return what each rank holds after the collective; the inputs are left as they are."""
    buffers = [array.copy() for array in arrays]

    def run(rank: int) -> None:
        task = task_for(programs[rank], buffers[rank], n_slices=n_slices, op=op)
        made[rank].run(task, buffers[rank].view(np.uint8))

    assert together(run, len(made)) == [None] * len(made)
    return buffers


def task_for(
    program: RankProgram, array: NDArray[Any], *, n_slices: int = 1, op: str = "sum"
) -> Task:
    """Return a rank's part in a collective on such an array."""
    return task_of(program, array.size, dtype=str(array.dtype), op=op, n_slices=n_slices)
