"""Gloo that connects after a group was made again, so that the first sum does not wait for it.

Gloo connects every rank with every other one, which takes longer than all else that a group needs.
Our own collectives do not need it. So a thread connects it: when this rank first needs it, when
its first collective is done, or a moment later. Who needs Gloo sooner waits for that thread.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Final

from meshmend.errors import StalledError, StoppedError
from meshmend.torch.call_arguments import dist
from meshmend.torch.group import group_on

_LATEST_S: Final = 0.5  # after that, peers that need Gloo already need not wait for this rank
_POLL_S: Final = 0.002


class InterruptibleStore(dist.Store):  # type: ignore[misc]  # untyped
    """A store whose waits end with an error when the group is not wanted any more.

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

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for keys and return their values."""
        self.wait(keys)
        values: list[bytes] = self._store.multi_get(keys)
        return values

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


class LateGloo:
    """One rank of a Gloo group that connects in a thread; `backend` and `group` wait for it.

    The thread does first what `first` does: to leave the group before this one.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        n_ranks: int,
        timeout: timedelta,
        *,
        first: Callable[[], None] = lambda: None,
    ) -> None:
        self._is_closed = False
        # Kept here: what C++ code holds of it does not keep it alive.
        self._store = InterruptibleStore(store, lambda: self._is_closed)
        self._timeout = timeout
        self._wanted = threading.Event()
        self._made: Future[tuple[Any, Any]] = Future()
        connect = threading.Thread(
            target=self._connect, args=(rank, n_ranks, first), name="meshmend-gloo", daemon=True
        )
        connect.start()

    def want(self) -> None:
        """Begin to connect now, if that has not begun."""
        self._wanted.set()

    @property
    def backend(self) -> Any:
        """Gloo itself, once it is connected."""
        return self._connected()[0]

    @property
    def group(self) -> Any:
        """A group that is all Gloo, once it is connected."""
        return self._connected()[1]

    @property
    def n_called(self) -> int:
        """How many collectives this rank has called on it."""
        return int(self.backend._get_sequence_number_for_group()) if self._is_connected else 0

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of its collectives."""
        self._timeout = timeout
        if self._is_connected:
            self.backend._set_default_timeout(timeout)

    def close(self) -> None:
        """Leave the group. Gloo waits for what is under way, so a thread lets it go."""
        self._is_closed = True
        self.want()
        made, self._made = self._made, Future()
        self._made.set_exception(StoppedError("the process group was left"))
        threading.Thread(target=made.exception, daemon=True).start()

    @property
    def _is_connected(self) -> bool:
        return self._made.done() and self._made.exception() is None

    def _connected(self) -> tuple[Any, Any]:
        self.want()
        return self._made.result()

    def _connect(self, rank: int, n_ranks: int, first: Callable[[], None]) -> None:
        made = self._made
        first()
        del first  # Gloo of the group before this one ends with the last that holds it
        self._wanted.wait(_LATEST_S)
        try:
            if self._is_closed:
                raise StoppedError("the process group was left before Gloo was connected")
            backend = dist.ProcessGroupGloo(self._store, rank, n_ranks, timeout=self._timeout)
            made.set_result((backend, group_on(backend, self._store)))
        except Exception as error:
            made.set_exception(error)
        self.set_timeout(self._timeout)  # it may have changed meanwhile
