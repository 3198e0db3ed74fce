"""Gloo that connects after its group was made, so that nothing of ours waits for it.

Gloo connects every rank with every other one, which takes longer than all else that a group needs,
and cannot be interrupted: a rank that has left for the next group calls nobody, and the others wait
for it until their timeout is over. Our own collectives do not need Gloo. So a thread connects it:
when this rank first needs it, or a moment later. Who needs it sooner waits for that thread, until
this rank leaves the group.
"""

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import torch

from meshmend.errors import StalledError, StoppedError
from meshmend.torch.call_arguments import dist

_LATEST_S: Final = 0.5  # after that, peers that need Gloo already need not wait for this rank
_POLL_S: Final = 0.002
_LEAVE_S: Final = 1.0  # at the end of the process, for a thread that waits for a peer


def run_on(group: Any, backend: Any) -> None:
    """Make a process group send its collectives to a backend."""
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)


def group_on(backend: Any, store: Any) -> Any:
    """Return a group that is all Gloo: it has every method in every form."""
    group = dist.ProcessGroup(store, backend.rank(), backend.size())
    run_on(group, backend)
    return group


class InterruptibleStore(dist.Store):  # type: ignore[misc]  # untyped
    """A store whose waits end with an error when the group is not wanted any more.

    Of what a chip that dies should have put there, the others would wait for the whole timeout. And
    c10d prints pages for each call of a store whose server is gone, so after one there is no other.
    """

    def __init__(self, store: Any, is_interrupted: Callable[[], bool]) -> None:
        super().__init__()
        self._store = store
        self._is_interrupted = is_interrupted
        self._is_lost = False

    def set(self, key: str, value: bytes) -> None:
        """Set a key."""
        self._call("set", key, value)

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        self.wait([key])
        value: bytes = self._call("get", key)
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for keys and return their values."""
        self.wait(keys)
        values: list[bytes] = self._call("multi_get", keys)
        return values

    def add(self, key: str, amount: int) -> int:
        """Add to the number of a key; return the new number."""
        return int(self._call("add", key, amount))

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""
        return bool(self._call("check", keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        deadline = time.monotonic() + (timeout or self._store.timeout).total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise StalledError(f"no chip has set {', '.join(keys)} in the store")
            time.sleep(_POLL_S)

    def _call(self, method: str, *arguments: Any) -> Any:
        if self._is_lost or self._is_interrupted():
            raise StoppedError("the mesh changed while its chips made a process group")
        try:
            return getattr(self._store, method)(*arguments)
        except Exception:
            self._is_lost = True
            raise


class LateGloo:
    """One rank of a Gloo group that connects in a thread; `backend` and `group` wait for it.

    The thread does first what `first` does: to leave the group before this one. It connects at
    once when Gloo is wanted, and `latest_s` after it began if not. A peer that does not answer for
    `connect` ends it.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        n_ranks: int,
        timeout: timedelta,
        *,
        connect: timedelta | None = None,
        latest_s: float = _LATEST_S,
        first: Callable[[], None] = lambda: None,
    ) -> None:
        self._left: Future[tuple[Any, Any]] = Future()  # fails when this rank leaves the group
        # Kept here: what C++ code holds of it does not keep it alive.
        self._store = InterruptibleStore(store, self._left.done)
        self.options = dist.ProcessGroupGloo._Options()
        self.options._timeout = timeout  # of its collectives
        self._latest_s = latest_s
        self._wanted = threading.Event()
        self._made: Future[tuple[Any, Any]] = Future()
        self._thread = threading.Thread(
            target=self._connect,
            args=(rank, n_ranks, connect or timeout, first),
            name="meshmend-gloo",
            daemon=True,
        )
        self._thread.start()
        _all.add(self)

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
        self.options._timeout = timeout
        if self._is_connected:
            self.backend._set_default_timeout(timeout)

    def leave(self) -> None:
        """Make who waits for Gloo stop; any thread may call this, and more than once.

        It starts no thread: that takes a busy process a tenth of a second, and a thread that brings
        news of a change has not got that.
        """
        with suppress(InvalidStateError):
            self._left.set_exception(StoppedError("the process group was left"))
        self.want()

    def close(self) -> None:
        """Leave the group, and let Gloo go; may be called more than once.

        Gloo waits for what is under way and for its threads. So another thread does that, which has
        the last reference: a caller that had it would wait in its place.
        """
        self.leave()
        if self._made is not self._left:
            held, self._made = [self._made], self._left
            threading.Thread(target=_let_go, args=(held,), daemon=True).start()

    @property
    def _is_connected(self) -> bool:
        made = self._made
        return made.done() and made.exception() is None

    def _connected(self) -> tuple[Any, Any]:
        self.want()
        made = self._made
        wait([made, self._left], return_when=FIRST_COMPLETED)
        return self._left.result() if self._left.done() else made.result()

    def _connect(
        self, rank: int, n_ranks: int, connect: timedelta, first: Callable[[], None]
    ) -> None:
        made = self._made
        first()
        del first  # Gloo of the group before this one ends with the last that holds it
        self._wanted.wait(self._latest_s)
        try:
            if self._left.done():
                raise StoppedError("the process group was left before Gloo was connected")
            backend = dist.ProcessGroupGloo(self._store, rank, n_ranks, timeout=connect)
            made.set_result((backend, group_on(backend, self._store)))
        except Exception as error:
            made.set_exception(error)
        self.set_timeout(self.options._timeout)  # it may have changed meanwhile

    def leave_at_exit(self) -> None:
        """Leave the group before the interpreter ends, under which Gloo still calls the store."""
        self.close()
        self._thread.join(_LEAVE_S)


def _let_go(held: list[Future[tuple[Any, Any]]]) -> None:
    held[0].exception()  # which waits until Gloo has connected, or not
    held.clear()


_all: weakref.WeakSet[LateGloo] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    for late in list(_all):
        late.leave_at_exit()
