"""How the chips of a generation make a process group: they agree on a store, then on the group.

The chip with rank 0 serves a store. Its address travels in a sum over all chips, in which the
others contribute zeros. So nobody needs an address that outlives a chip.
"""

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshmend.planning.settings import Settings
from meshmend.torch.call_arguments import c10d, dist
from meshmend.torch.group import MeshmendGroup
from meshmend.torch.late_gloo import InterruptibleStore
from meshmend.train.state.state_tree import Bytes
from meshmend.transport.listener import parse_address

_LENGTH: Final = 128  # numbers in the sum: an address, one number a character, and a count
MEETING_SUM: Final = (_LENGTH, "int32")
_CONNECT_S: Final = 2.0  # for one try to reach the store
_MEET_S: Final = 300.0  # for all chips to connect; one that dies meanwhile is noticed sooner

TrySum = Callable[[Bytes], bool]


def meet(
    settings: Settings,
    rank: int,
    try_sum: TrySum,
    is_interrupted: Callable[[], bool],
    *,
    is_new: bool,
) -> tuple[Any, int] | None:
    """Return a store that all chips of a generation share, and how many of them are new.

    `try_sum` replaces a payload by its sum over all chips, and returns whether that went well. If
    it did not, this returns None: the generation is over. Who waits for a key of the store stops
    once `is_interrupted()`.

    Raises:
        RuntimeError: the store cannot be reached.
    """
    store = None
    numbers: NDArray[np.int32] = np.zeros(_LENGTH, dtype=np.int32)
    if rank == 0:
        store = _store(settings.bind, 0, is_master=True)
        address = f"{settings.bind}:{store.port}".encode()
        numbers[: len(address)] = np.frombuffer(address, dtype=np.uint8)
    numbers[-1] = is_new
    if not try_sum(numbers.view(np.uint8)):
        return None
    if store is None:
        told = bytes(numbers[:-1].astype(np.uint8)).rstrip(b"\0").decode()
        store = _reached_store(*parse_address(told, "the store of rank 0"), is_interrupted)
    return InterruptibleStore(store, is_interrupted), int(numbers[-1])


def init_group(settings: Settings, store: Any, rank: int) -> Any:
    """Make and return the default process group of a generation, of the backend meshmend.

    Raises:
        RuntimeError, TransportError: a chip did not take part.
    """
    # A try that a change of the mesh has ended counts as a group. Keys of the store begin with the
    # count, and a chip that comes later has not counted it: all would wait for each other's keys.
    c10d._world.group_count = 0
    dist.init_process_group(
        "meshmend", store=store, rank=rank, world_size=settings.mesh.n_live, pg_options=settings
    )
    return dist.group.WORLD


class PresentGroup:
    """The default process group of one generation after another: made, interrupted, dropped.

    Knows nothing of steps, and of what the chips of a group have.
    """

    def __init__(self) -> None:
        self.group: Any = None
        self._store: Any = None  # what C++ code holds of it does not keep it alive
        self._is_interrupted = False
        # Who has done all steps waits in no collective, and may use the group after the job.
        self.is_for_the_rest = False

    @property
    def is_broken(self) -> bool:
        """Whether there is no group, or a collective of it has failed."""
        return self.group is None or self.group.failure is not None

    def make(self, settings: Settings, rank: int, try_sum: TrySum, *, is_new: bool) -> int | None:
        """Make the group of a generation; return how many chips are new, None if that is over.

        Raises:
            RuntimeError, TransportError: a chip did not take part.
        """
        self._is_interrupted = False
        met = meet(settings, rank, try_sum, lambda: self._is_interrupted, is_new=is_new)
        if met is None:
            return None
        self._store, n_new = met
        self.group = init_group(settings, self._store, rank)
        return n_new

    def interrupt(self) -> None:
        """Make the collectives under way fail; another thread may call this."""
        self._is_interrupted = True
        if self.group is not None and not self.is_for_the_rest:
            for group in groups_of_ours():
                group.interrupt()

    def drop(self) -> None:
        """Interrupt and destroy the group and all others, so that nothing writes any more."""
        self.group = None
        if dist.is_initialized():
            if not isinstance(dist.group.WORLD, MeshmendGroup):
                dist.group.WORLD.abort()
            # Not `abort`, which peers take for a lost connection: they hear of it otherwise.
            for group in groups_of_ours():
                group.interrupt()
            dist.destroy_process_group()
        self._store = None

    def release(self) -> None:
        """Let the script use the group and its store after the job."""
        self._is_interrupted = False


def groups_of_ours() -> list[MeshmendGroup]:
    """Return the process groups of this process that run on our schedules, the default one too."""
    return [group for group in list(c10d._world.pg_map) if isinstance(group, MeshmendGroup)]


def _reached_store(host: str, port: int, is_interrupted: Callable[[], bool]) -> Any:
    """Return a connection to the store of rank 0.

    That has listened before it told its address. If it refuses, it has left for the next
    generation; a `TCPStore` would try until its timeout is over, and nothing could call it away.

    Raises:
        RuntimeError: the store cannot be reached, or `is_interrupted()`.
    """
    deadline = time.monotonic() + _MEET_S
    while True:
        try:
            socket.create_connection((host, port), timeout=_CONNECT_S).close()
            store = _store(host, port, is_master=False, timeout_s=_CONNECT_S)
            store.set_timeout(timedelta(seconds=_MEET_S))
            return store
        except (OSError, RuntimeError) as error:
            is_gone = isinstance(error, ConnectionRefusedError) or is_interrupted()
            if is_gone or time.monotonic() > deadline:
                why = str(error).partition("\n")[0]
                raise RuntimeError(f"the store of rank 0 cannot be reached: {why}") from None


def _store(host: str, port: int, *, is_master: bool, timeout_s: float = _MEET_S) -> Any:
    return dist.TCPStore(
        host,
        port,
        is_master=is_master,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )
