"""The listener admits callers that know the secret, and survives floods of callers that do not.

One thread accepts callers and reads all handshakes at the same time, so that a silent caller delays
no other. The number of callers that have not proved the secret yet is limited. When there is one
more, the listener cuts off a caller: of the address with the most such callers, the one that has
waited longest. A caller that knows the secret needs a few milliseconds, so it gets through even
when thousands call that do not. `admit` decides what to do with a caller that has proved it.

A worker's training waits while its listener runs, so strangers must cost little. The kernel keeps
callers that say nothing, and no caller costs more when many wait.
"""

import errno
import os
import resource
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from logging import getLogger
from typing import Annotated, Final

import msgspec

from meshmend.config import BIND
from meshmend.errors import HandshakeError, InputError, TransportError
from meshmend.transport.event_fd import clear, event_of
from meshmend.transport.handshake import (
    ConnectRequest,
    ListenerHandshake,
    close_in_forks,
    is_local,
    limit_window,
    local_name,
)
from meshmend.transport.pacing import RateLimit

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Address = tuple[str, Port]

_log = getLogger(__name__)
_HANDSHAKE_S: Final = 5.0
_MOST_PENDING: Final = 128  # callers that have not proved the secret
_SHARE_OF_DESCRIPTORS: Final = 8  # pending callers take at most this part: an eighth
_BACKLOG: Final = 4096  # the kernel takes as many as net.core.somaxconn
_DEFER_S: Final = 1
_OUT_OF_DESCRIPTORS: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_ACCEPT_RETRY_S: Final = 0.05  # when this process has no descriptor left
_EVERY_ADDRESS: Final = "0.0.0.0"
_OTHER_ADDRESS: Final = f"name another with --bind or {BIND.name}, or leave it out"
_MOST_LOGGED_PER_S: Final = 10  # refusals come in floods
_MANY_REFUSALS: Final = 50  # within a second: a flood
_FLOOD_PAUSE_S: Final = 0.01


def parse_address(text: str, name: str) -> Address:
    """Return the address that a text HOST:PORT names; `name` is what it was given as.

    Raises:
        InputError: the text has another form.
    """
    host, _, port = text.rpartition(":")
    if ":" in host:
        raise InputError(
            f"{name} needs HOST:PORT with a name or an IPv4 address, such as 10.0.0.1:7000, but "
            f"got {text!r}; meshmend does not speak IPv6"
        )
    if not host or not port.isdecimal() or int(port) > 0xFFFF:
        raise InputError(f"{name} needs HOST:PORT such as 10.0.0.1:7000, but got {text!r}")
    return host, int(port)


@dataclass
class _Caller:
    """A connection whose handshake is under way."""

    connection: socket.socket
    address: Address
    handshake: ListenerHandshake
    deadline: float
    is_registered: bool = False


class Listener:
    """Calls `admit(connection, request)` in its thread for every caller that proved the secret.

    `admit` may refuse with a HandshakeError and must not block. `name` is the name of this
    end in the log, `rank` the number under which callers ask for it. `beside` is a second socket to
    listen on. `n_expected`: so many may call in the same moment, and none of them is cut off; the
    process must be allowed as many open files.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        rank: int,
        *,
        name: str,
        admit: Callable[[socket.socket, ConnectRequest], None],
        beside: socket.socket | None = None,
        n_expected: int = 0,
    ) -> None:
        self._listeners = [listener] if beside is None else [listener, beside]
        self._secret = secret
        self._rank = rank
        self._name = name
        self._admit = admit
        self._pending: dict[int, _Caller] = {}  # by descriptor, the longest-waiting first
        self._n_pending_of: Counter[str] = Counter()  # by host
        self._most_pending = _most_pending(n_expected)
        self._refusals = RateLimit(_MOST_LOGGED_PER_S)
        self._refused_at: deque[float] = deque(maxlen=_MANY_REFUSALS)
        self._is_closed = False
        self._wake_fd = event_of(self)  # the thread may have seen that it is closed, and ended
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self.address: Address = listener.getsockname()[:2]
        for each in self._listeners:
            each.setblocking(False)
            self._selector.register(each, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="meshmend-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; calling it again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        os.eventfd_write(self._wake_fd, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _serve(self) -> None:
        while not self._is_closed:
            for key, _ in self._selector.select(self._next_deadline()):
                if key.fd == self._wake_fd:
                    clear(self._wake_fd)
                elif key.fd in self._pending:
                    self._read_handshake(self._pending[key.fd])
                elif key.fileobj in self._listeners:
                    self._accept_all(key.fileobj)
            self._drop_late()
            if self._is_flooded():
                time.sleep(_FLOOD_PAUSE_S)  # many at once cost less than each by itself
        for caller in list(self._pending.values()):
            self._drop(caller)
        for listener in self._listeners:
            listener.close()
        self._selector.close()

    def _is_flooded(self) -> bool:
        is_many = len(self._refused_at) == _MANY_REFUSALS
        return is_many and time.monotonic() - self._refused_at[0] < 1.0

    def _next_deadline(self) -> float | None:
        first = next(iter(self._pending.values()), None)
        return None if first is None else max(0.0, first.deadline - time.monotonic())

    def _accept_all(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _OUT_OF_DESCRIPTORS:
                    self._make_room()
                    return
                continue  # a caller that hung up before it was accepted
            if len(self._pending) >= self._most_pending:
                self._refuse(
                    self._longest_waiting(),
                    "too many callers wait, and it has not proved the secret",
                )
            self._begin(connection, (self.address[0], 0) if is_local(connection) else address[:2])

    def _begin(self, connection: socket.socket, address: Address) -> None:
        close_in_forks(connection)
        connection.setblocking(False)
        handshake = ListenerHandshake(self._secret, self._rank)
        deadline = time.monotonic() + _HANDSHAKE_S
        caller = _Caller(connection, address, handshake, deadline)
        self._pending[connection.fileno()] = caller
        self._n_pending_of[address[0]] += 1
        self._read_handshake(caller)  # its first bytes may be there already
        if connection.fileno() in self._pending:
            self._selector.register(connection, selectors.EVENT_READ)
            caller.is_registered = True

    def _make_room(self) -> None:
        """Free a descriptor by cutting off a caller; without callers, wait a moment."""
        if self._pending:
            self._refuse(self._longest_waiting(), "this process has no descriptor left")
        else:
            time.sleep(_ACCEPT_RETRY_S)

    def _longest_waiting(self) -> _Caller:
        """Return the longest-waiting caller of the address that has the most callers.

        A caller that has not sent its hello is taken before one that has.
        """
        host = max(self._n_pending_of, key=self._n_pending_of.__getitem__)
        callers = (each for each in self._pending.values() if each.address[0] == host)
        first = next(callers)
        is_silent = (each for each in callers if not each.handshake.has_greeted)
        return next(is_silent, first) if first.handshake.has_greeted else first

    def _read_handshake(self, caller: _Caller) -> None:
        """Read what a caller has sent; admit it once it has proved the secret."""
        try:
            data = caller.connection.recv(caller.handshake.n_wanted)
            if not data:
                raise HandshakeError("the other end closed the connection during the handshake")
            if answer := caller.handshake.feed(data):
                caller.connection.send(answer)  # less than any socket buffer holds
            if caller.handshake.request is not None:
                self._forget(caller)
                self._admit(caller.connection, caller.handshake.request)
        except BlockingIOError:
            return
        except (TransportError, OSError) as error:
            self._refuse(caller, str(error))

    def _drop_late(self) -> None:
        now = time.monotonic()
        while (first := next(iter(self._pending.values()), None)) and first.deadline <= now:
            self._refuse(first, "the other end does not answer")

    def _refuse(self, caller: _Caller, why: str) -> None:
        now = time.monotonic()
        self._refused_at.append(now)
        if caller.handshake.refusal:
            with suppress(OSError):
                caller.connection.send(caller.handshake.refusal)
        if text := self._refusals.text_of(why, now):
            host, port = caller.address
            _log.warning("%s refused a connection from %s:%d: %s", self._name, host, port, text)
        self._drop(caller)

    def _drop(self, caller: _Caller) -> None:
        self._forget(caller)
        caller.connection.close()

    def _forget(self, caller: _Caller) -> None:
        if self._pending.pop(caller.connection.fileno(), None) is not None:
            if caller.is_registered:
                self._selector.unregister(caller.connection)
            host = caller.address[0]
            self._n_pending_of[host] -= 1
            if not self._n_pending_of[host]:
                del self._n_pending_of[host]


def _most_pending(n_expected: int) -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, n_expected, min(_MOST_PENDING, soft // _SHARE_OF_DESCRIPTORS))


def listening(bind: str, port: int = 0, *, window_bytes: int = 0) -> socket.socket:
    """Return a socket that listens on an address; port 0 takes any free port.

    Callers may send `window_bytes` ahead; see `limit_window`.

    Raises:
        InputError: the address cannot be listened on.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        limit_window(listener, bind, window_bytes)
        listener.bind((bind, port))
        # A caller speaks first. Until it does, the kernel keeps it, for about this many seconds.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _DEFER_S)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        where = f"{bind}:{port}" if port else bind
        raise InputError(f"cannot listen on {where}: {error.strerror}") from None
    return listener


def listening_for_peers(bind: str, *, window_bytes: int = 0) -> socket.socket:
    """Return a socket that listens at one address of this host, which peers are told.

    Raises:
        InputError: it is no address of this host, or means all of them.
    """
    try:
        listener = listening(bind, window_bytes=window_bytes)
    except InputError as error:
        raise InputError(
            f"a worker needs an address of its host, but {error}; {_OTHER_ADDRESS}"
        ) from None
    if listener.getsockname()[0] == _EVERY_ADDRESS:
        listener.close()
        raise InputError(
            f"a worker needs one address at which the others call it, but {bind} is every address "
            f"of its host; {_OTHER_ADDRESS}"
        )
    return listener


def listening_locally(address: Address) -> socket.socket | None:
    """Return a socket that listens for callers on this host, who know the address; None if taken.

    Then they call the address itself.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(local_name(address))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        return None
    close_in_forks(listener)
    return listener
