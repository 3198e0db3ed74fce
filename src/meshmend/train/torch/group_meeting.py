"""How the chips of a generation make a process group: they agree on a store, then on the group.

The chip with rank 0 serves a store. Its address travels in a sum over all chips, in which the
others contribute zeros. So nobody needs an address that outlives a chip.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import numpy as np
import torch.distributed
from numpy.typing import NDArray

from meshmend.errors import StalledError, StoppedError
from meshmend.planning.settings import Settings
from meshmend.train.state.state_tree import Bytes

# torch's stubs lack the stores.
dist: Any = torch.distributed

_LENGTH: Final = 128  # numbers in the sum: an address, one number a character, and a count
MEETING_SUM: Final = (_LENGTH, "int32")
_MEET_S: Final = 300.0  # for all chips to connect; one that dies meanwhile is noticed sooner
_POLL_S: Final = 0.002

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
        address = bytes(numbers[:-1].astype(np.uint8)).rstrip(b"\0")
        host, _, port = address.decode().rpartition(":")
        store = _store(host, int(port), is_master=False)
    return InterruptibleStore(store, is_interrupted), int(numbers[-1])


class InterruptibleStore(dist.Store):  # type: ignore[misc]  # untyped
    """A store whose waits end with an error when the generation is over.

    Of what a chip that dies should have put there, the others would wait for the whole timeout.
    """

    def __init__(self, store: Any, is_interrupted: Callable[[], bool]) -> None:
        super().__init__()
        self._store = store
        self._is_interrupted = is_interrupted

    def set(self, key: str, value: bytes) -> None:
        """Set a key."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        self.wait([key])
        value: bytes = self._store.get(key)
        return value

    def add(self, key: str, amount: int) -> int:
        """Add to the number of a key; return the new number."""
        return int(self._store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        deadline = time.monotonic() + (timeout or self._store.timeout).total_seconds()
        while not self._store.check(keys):
            if self._is_interrupted():
                raise StoppedError("the mesh changed while its chips made a process group")
            if time.monotonic() > deadline:
                raise StalledError(f"no chip has set {', '.join(keys)} in the store")
            time.sleep(_POLL_S)


def init_group(settings: Settings, store: Any, rank: int) -> Any:
    """Make and return the default process group of a generation, of the backend meshmend.

    Raises:
        RuntimeError, TransportError: a chip did not take part.
    """
    import meshmend.torch  # noqa: F401  # registers the backend

    dist.init_process_group(
        "meshmend", store=store, rank=rank, world_size=settings.mesh.n_live, pg_options=settings
    )
    return dist.group.WORLD


def drop_group() -> None:
    """Interrupt and destroy all process groups of this process, if there are any."""
    if dist.is_initialized():
        world = dist.group.WORLD
        # Not `abort`, which peers take for a lost connection: they hear of the change otherwise.
        getattr(world, "interrupt", world.abort)()
        dist.destroy_process_group()


def _store(host: str, port: int, *, is_master: bool) -> Any:
    return dist.TCPStore(
        host,
        port,
        is_master=is_master,
        timeout=timedelta(seconds=_MEET_S),
        wait_for_workers=False,
    )
