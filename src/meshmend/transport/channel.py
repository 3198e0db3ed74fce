"""Frames of bytes over a connection whose ends have proved the secret.

Each frame follows its length, a checksum of the length, and a checksum of its bytes. So a damaged
frame ends the connection; it is neither waited for nor taken for what another end said.

Knows nothing of what the bytes mean. Only `is_ready` waits: the rest keeps what it cannot send yet,
and returns a frame once all of its bytes have arrived.
"""

import select
import socket
import struct
import time
import zlib
from typing import Final

from meshmend.errors import ChannelError
from meshmend.transport.handshake import is_local
from meshmend.transport.liveness import LinkWatch

_HEAD: Final = struct.Struct(">III")  # length, its checksum, checksum of the bytes
LONGEST_BYTES: Final = 1 << 24
MOST_UNSENT_BYTES: Final = 2 * LONGEST_BYTES
_READ_BYTES: Final = 1 << 16


class Channel:
    """Sends and receives frames over one connection.

    It refuses frames longer than `longest_bytes`. If the other end does not read, it keeps at most
    `MOST_UNSENT_BYTES` for it.
    """

    def __init__(self, connection: socket.socket, *, longest_bytes: int = LONGEST_BYTES) -> None:
        connection.setblocking(False)
        if not is_local(connection):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._longest_bytes = longest_bytes
        self._received = bytearray()
        self._unsent = bytearray()

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._connection.fileno()

    def is_ready(self, event: int, deadline: float) -> bool:
        """Wait for an event of `select.poll`; return whether it comes before the deadline."""
        poll = select.poll()
        poll.register(self, event)
        return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1e3))

    @property
    def has_unsent(self) -> bool:
        """Whether bytes still wait to be sent."""
        return bool(self._unsent)

    def send(self, frame: bytes) -> None:
        """Send a frame, or as much of it as the connection takes; `flush` sends the rest.

        Raises:
            ChannelError: the other end has closed, or does not read.
        """
        self.send_packed(packed_frame(frame))

    def send_packed(self, packed: bytes) -> None:
        """Send what `packed_frame` returned; a frame for many channels is packed once.

        Raises:
            ChannelError: the other end has closed, or does not read.
        """
        # What fits into the kernel's buffer at once, which is nearly everything, is not copied.
        n_sent = 0 if self._unsent else self._send(packed)
        if n_sent < len(packed):
            self._unsent += memoryview(packed)[n_sent:]
            self.flush()

    def flush(self) -> None:
        """Send as much of what is left as the connection takes.

        Raises:
            ChannelError: the other end has closed, or does not read.
        """
        while self._unsent and (n_sent := self._send(self._unsent)):
            del self._unsent[:n_sent]
        if len(self._unsent) > MOST_UNSENT_BYTES:
            raise ChannelError("the other end does not read what it is sent")

    def _send(self, data: bytes | bytearray) -> int:
        """Return how many bytes the connection takes now."""
        try:
            return self._connection.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ChannelError(f"the other end closed the connection: {error.strerror}") from None

    def receive(self) -> list[bytes]:
        """Return the frames that have arrived completely; call again while there is more to read.

        Reads a limited number of bytes, so that an end that sends without pause delays no other.

        Raises:
            ChannelError: the other end has closed, or sent a frame that is too long or damaged.
        """
        try:
            part = self._connection.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:  # a reset
            part = b""
        if not part:
            raise ChannelError("the other end closed the connection")
        self._received += part
        return self._complete_frames()

    def is_dead(self, watch: LinkWatch, now: float) -> bool:
        """Check once more whether the kernel at the other end no longer answers."""
        return watch.is_dead(self._connection, now)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _complete_frames(self) -> list[bytes]:
        frames = []
        while len(self._received) >= _HEAD.size:
            length, of_length, of_bytes = _HEAD.unpack_from(self._received)
            if of_length != _checksum_of(length):
                raise ChannelError("a frame was damaged on its way: its length")
            if length > self._longest_bytes:
                raise ChannelError(
                    f"a frame needs {self._longest_bytes} bytes at most, but the other end "
                    f"announced {length}"
                )
            if len(self._received) < _HEAD.size + length:
                break
            frame = bytes(self._received[_HEAD.size : _HEAD.size + length])
            if of_bytes != zlib.crc32(frame):
                raise ChannelError(f"a frame of {length} bytes was damaged on its way")
            frames.append(frame)
            del self._received[: _HEAD.size + length]
        return frames


def packed_frame(frame: bytes) -> bytes:
    """Return a frame with its length and checksums, as it crosses a connection."""
    return _HEAD.pack(len(frame), _checksum_of(len(frame)), zlib.crc32(frame)) + frame


def _checksum_of(length: int) -> int:
    return zlib.crc32(length.to_bytes(4, "big"))
