"""Two ends of a new connection prove to each other that they know the secret.

Challenge and response with HMAC-SHA256: the secret itself never crosses the wire. Both ends prove
it, so a stranger is refused whether it dials or listens. Every message has a fixed length; nothing
is unpickled.

    dialler    magic, its rank, the rank it wants, the epoch of the connection, the generation in
               which it calls, 32 random bytes
    listener   32 random bytes, proof over all of that
    dialler    proof over all of that
    listener   one byte: welcome

The magic ends with the version of what the two ends will say: both must have the same. A listener
of another version answers with its own magic and closes.
"""

import hmac
import os
import select
import socket
import struct
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from weakref import WeakSet

from meshmend.errors import HandshakeError, InputError, PeerLostError, StoppedError
from meshmend.transport.liveness import limit_unacknowledged

# The rank that a caller wants if it does not know whom it calls: whoever listens may answer.
ANYONE: Final = 0xFFFFFFFC

_NAME: Final = b"meshmend/"
# Another number whenever frames, control messages or this handshake change.
_MAGIC: Final = _NAME + b"5"
_HELLO: Final = struct.Struct(">10sIIII32s")
_NONCE_BYTES: Final = 32
_PROOF_BYTES: Final = 32
_WELCOME: Final = b"\x01"
_CREDENTIALS: Final = struct.Struct("iII")  # of SO_PEERCRED: process, user, group
_RESET: Final = struct.pack("ii", 1, 0)  # for SO_LINGER: `close` resets the connection

SHORTEST_BYTES: Final = 16
HOW_TO_MAKE: Final = 'make one with: python -c "import secrets; print(secrets.token_hex(32))"'
_OTHERS: Final = 0o077  # the permissions of the group and of everybody else


@dataclass(frozen=True)
class ConnectRequest:
    """Who calls whom, and in which epoch: both ends must mean the same connection.

    `generation` is the one that the caller has begun; 0 if it knows none.
    """

    caller: int
    wanted: int
    epoch: int = 0
    generation: int = 0


@dataclass(frozen=True)
class Deadline:
    """When to stop waiting; `stop_fd`, if given, ends every wait as soon as it can be read.

    The process at the other end may take all that time, but its kernel has to answer within
    `link_timeout_s`. With 0 the kernel of this host decides how long it waits for that.
    """

    at: float
    stop_fd: int | None = None
    link_timeout_s: float = 0.0

    def for_connecting(self) -> "Deadline":
        """Return the deadline for a TCP connect, which the other end's kernel answers."""
        if not self.link_timeout_s:
            return self
        return replace(self, at=min(self.at, time.monotonic() + self.link_timeout_s))

    def wait(self, connection: socket.socket, event: int) -> None:
        """Return when the event happens on the connection.

        Raises:
            StoppedError: `stop_fd` could be read. PeerLostError: the time is up.
        """
        poll = select.poll()
        poll.register(connection, event)
        if self.stop_fd is not None:
            poll.register(self.stop_fd, select.POLLIN)
        ready = dict(poll.poll(max(0.0, self.at - time.monotonic()) * 1e3))
        if self.stop_fd in ready:
            raise StoppedError("stopped while a connection was being made")
        if not ready:
            raise PeerLostError("the other end does not answer")


def dial(
    address: tuple[str, int],
    secret: bytes,
    request: ConnectRequest,
    deadline: Deadline,
    *,
    window_bytes: int = 0,
) -> socket.socket:
    """Connect to an address and return the connection once both ends have proved the secret.

    The other end may send `window_bytes` ahead; see `limit_window`.

    Raises:
        HandshakeError: the other end does not know the secret, or speaks another version.
        PeerLostError: nobody answers, or the other end closed the connection: it does so if it
            refuses this end.
    """
    try:
        return _dial(address, secret, request, deadline, window_bytes)
    except HandshakeError:  # one damaged bit looks like a wrong secret, but not twice
        return _dial(address, secret, request, deadline, window_bytes)


def _dial(
    address: tuple[str, int],
    secret: bytes,
    request: ConnectRequest,
    deadline: Deadline,
    window_bytes: int,
) -> socket.socket:
    connection = _local_connection(address) or socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    close_in_forks(connection)
    try:
        if not is_local(connection):
            limit_window(connection, address[0], window_bytes)
            _reach(connection, address, deadline)
        numbers = request.caller, request.wanted, request.epoch, request.generation
        hello = _HELLO.pack(_MAGIC, *numbers, os.urandom(_NONCE_BYTES))
        connection.sendall(hello)
        answer = _read(connection, _NONCE_BYTES + _PROOF_BYTES, deadline)
        if answer.startswith(_NAME):  # no random bytes do
            raise HandshakeError(_other_version(answer[: len(_MAGIC)]))
        nonce, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(secret, b"listener", hello, nonce)):
            raise HandshakeError("the listener does not know the secret")
        connection.sendall(_proof(secret, b"dialler", hello, nonce))
        if _read(connection, len(_WELCOME), deadline) != _WELCOME:
            raise PeerLostError("the listener's welcome was damaged on its way")
        if not is_local(connection):
            limit_unacknowledged(connection, 0.0)
    except OSError as error:
        connection.close()
        raise PeerLostError(
            f"the other end closed the connection: {error.strerror or error}"
        ) from None
    except BaseException:
        connection.close()
        raise
    return connection


def local_name(address: tuple[str, int]) -> str:
    """Return the name under which who listens at an address also listens for its own host.

    It is an abstract one: the kernel forgets it with its process, and other network namespaces,
    which are other hosts to TCP too, do not see it.
    """
    return f"\0meshmend {address[0]}:{address[1]}"


def is_local(connection: socket.socket) -> bool:
    """Whether a connection stays on this host, without TCP.

    The kernel tells each end at once when the other is gone, and loses nothing in between.
    """
    return connection.family == socket.AF_UNIX


def _local_connection(address: tuple[str, int]) -> socket.socket | None:
    """Return a connection within this host to who listens at an address, or None.

    It costs the processors half of what TCP takes for the same bytes. Any user may listen under
    any such name, so one of another user is left alone: TCP's port cannot be taken twice.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)  # a full queue of callers is no reason to wait: TCP's is longer
    try:
        connection.connect(local_name(address))
        credentials = connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        if _CREDENTIALS.unpack(credentials)[1] == os.geteuid():
            return connection
    except OSError:  # nobody on this host listens there
        pass
    connection.close()
    return None


def check_listens(address: tuple[str, int], deadline: Deadline) -> None:
    """Raise PeerLostError unless somebody listens at an address.

    The connection is reset before it says anything, so that the kernel of the other end drops it
    and its process sees nothing.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        _reach(connection, address, deadline)


def _reach(connection: socket.socket, address: tuple[str, int], deadline: Deadline) -> None:
    """Connect to an address where somebody listens."""
    where = f"{address[0]}:{address[1]}"
    connection.setblocking(False)
    limit_unacknowledged(connection, deadline.link_timeout_s)
    if _connect(connection, address) != 0:
        deadline.for_connecting().wait(connection, select.POLLOUT)
    if code := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise PeerLostError(f"cannot connect to {where}: {os.strerror(code)}")
    if connection.getsockname() == connection.getpeername():
        # The kernel gave this end, on the same host, the very port that it calls. Until this
        # connection is closed, nobody can listen there.
        raise PeerLostError(f"cannot connect to {where}: nobody listens there")


def limit_window(end: socket.socket, host: str, n_bytes: int) -> None:
    """Let other ends send so much ahead of what is read; call it before `end` connects or listens.

    With 0, and on loopback, the kernel decides. Once connected, the kernel has promised room for
    more. If the buffer is made smaller than that, it drops what does not fit and takes its promise
    back. If that happens at both ends, each drops the other's acknowledgements, for good.
    """
    if n_bytes and not host.startswith("127."):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, n_bytes)


class ListenerHandshake:
    """The listener's side of one handshake: bytes in, bytes out. Knows no socket and no clock.

    `rank` is the number under which this end is called. `request` is what the dialler wants, once
    it has proved that it knows the secret.
    """

    def __init__(self, secret: bytes, rank: int) -> None:
        self._secret = secret
        self._rank = rank
        self._received = b""
        self.refusal = b""  # what to answer to a dialler of another version before closing
        self._expected: bytes | None = None  # the dialler's proof, once it has sent its hello
        self._hello: ConnectRequest | None = None
        self.request: ConnectRequest | None = None

    @property
    def has_greeted(self) -> bool:
        """Whether the dialler has sent a valid hello, which proves nothing yet."""
        return self._hello is not None

    @property
    def n_wanted(self) -> int:
        """How many bytes the dialler still has to send before this end answers."""
        n_bytes = _HELLO.size if self._expected is None else _PROOF_BYTES
        return 0 if self.request is not None else n_bytes - len(self._received)

    def feed(self, data: bytes) -> bytes:
        """Take up to `n_wanted` bytes from the dialler; return what to answer.

        Raises:
            HandshakeError: the dialler does not know the secret, or wants another rank.
        """
        self._received += data
        if self.n_wanted:
            return b""
        received, self._received = self._received, b""
        return (
            self._answer_hello(received) if self._expected is None else self._check_proof(received)
        )

    def _answer_hello(self, hello: bytes) -> bytes:
        magic, caller, wanted, epoch, generation, _ = _HELLO.unpack(hello)
        if magic != _MAGIC and magic.startswith(_NAME):
            self.refusal = _MAGIC.ljust(_NONCE_BYTES + _PROOF_BYTES, b" ")
            raise HandshakeError(_other_version(magic))
        if magic != _MAGIC:
            raise HandshakeError(
                f"this is not a meshmend handshake: its first bytes are {hello[:10]!r}"
            )
        if wanted not in (self._rank, ANYONE):
            raise HandshakeError(
                f"rank {caller} wants rank {wanted}, but this is rank {self._rank}"
            )
        nonce = os.urandom(_NONCE_BYTES)
        self._hello = ConnectRequest(caller, wanted, epoch, generation)
        self._expected = _proof(self._secret, b"dialler", hello, nonce)
        return nonce + _proof(self._secret, b"listener", hello, nonce)

    def _check_proof(self, proof: bytes) -> bytes:
        assert self._hello is not None
        assert self._expected is not None
        if not hmac.compare_digest(proof, self._expected):
            raise HandshakeError(
                f"a caller that claims to be rank {self._hello.caller} does not know the secret"
            )
        self.request = self._hello
        return _WELCOME


def _other_version(magic: bytes) -> str:
    theirs = magic.decode("ascii", "replace")
    return (
        f"the other end speaks {theirs!r}, this process {_MAGIC.decode()!r}; install the same "
        "version of meshmend in every process of the job"
    )


def _connect(connection: socket.socket, address: tuple[str, int]) -> int:
    """Begin to connect; return 0 if the connection is there at once."""
    try:
        return connection.connect_ex(address)
    except OSError as error:  # the name of the host means nothing, or not yet
        raise PeerLostError(
            f"cannot connect to {address[0]}:{address[1]}: {error.strerror}"
        ) from None


def _proof(secret: bytes, side: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, side + hello + nonce, "sha256")


def _read(connection: socket.socket, n_bytes: int, deadline: Deadline) -> bytes:
    """Return exactly `n_bytes` bytes."""
    parts = b""
    while len(parts) < n_bytes:
        deadline.wait(connection, select.POLLIN)
        try:
            part = connection.recv(n_bytes - len(parts))
        except BlockingIOError:
            continue
        except (ConnectionResetError, TimeoutError):
            part = b""
        if not part:
            raise PeerLostError("the other end closed the connection during the handshake")
        parts += part
    return parts


def check_secret(secret: str, where: str) -> None:
    """Refuse a secret that is so short that it can be guessed; `where` names where it is set.

    Raises:
        InputError: it has fewer than 16 bytes.
    """
    n_bytes = len(secret.encode(errors="replace"))
    if n_bytes < SHORTEST_BYTES:
        raise InputError(
            f"{where} needs a secret of at least {SHORTEST_BYTES} bytes, but got one of {n_bytes}; "
            f"{HOW_TO_MAKE}"
        )


def secret_in(file: Path) -> str:
    """Return the secret that a file holds, without the blanks around it.

    Raises:
        InputError: the file cannot be read, others can read it, or the secret is too short.
    """
    try:
        if file.is_char_device():
            raise InputError(f"--secret-file cannot read {file}: it is a device, not a file")
        mode = file.stat().st_mode & 0o777
        secret = file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise InputError(f"--secret-file cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"--secret-file needs a text, but {file} is none") from None
    if mode & _OTHERS:
        raise InputError(
            f"--secret-file needs a file that only its owner can use, but {file} has mode "
            f"{mode:03o}; run: chmod 600 {file}"
        )
    if not secret:
        raise InputError(f"--secret-file needs a secret, but {file} is empty; {HOW_TO_MAKE}")
    check_secret(secret, f"--secret-file {file}")
    return secret


# A forked process inherits every connection. As long as it lives, the other end does not see that
# this process closed one, or died. So every fork, such as a loader worker of PyTorch, closes its
# copies at once. Listening sockets are inherited: a coordinator is forked with one.

_connections: "WeakSet[socket.socket]" = WeakSet()


def close_in_forks(connection: socket.socket) -> None:
    """Close this connection in every process that this process forks from now on."""
    _connections.add(connection)


def _close_all() -> None:
    for connection in list(_connections):
        connection.close()
    _connections.clear()


os.register_at_fork(after_in_child=_close_all)
