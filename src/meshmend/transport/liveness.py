"""Whether the machine at the other end of a connection still answers.

The kernel of a peer acknowledges data even while the peer itself is busy or stopped. So this module
can distinguish a broken network from a slow peer. The kernel's own limit (TCP_USER_TIMEOUT) does
not distinguish them: it also ends a connection whose other end is alive but does not read for that
long. It is only used for handshakes, which are so short that they fit into the receiver's buffer.
"""

import math
import socket
import struct
from typing import Final

_KEEPALIVE_S: Final = 1  # the kernel counts in whole seconds
_MOST_PROBES: Final = 127  # the kernel takes no more
# The beginning of Linux's struct tcp_info: bytes 2 and 3, and the words at 52 and 56.
_TCP_INFO: Final = struct.Struct("=2xBB48xII")
# tcpi_bytes_acked, and tcpi_busy_time and tcpi_rwnd_limited in microseconds.
_WORK: Final = struct.Struct("=120xQ40xQQ")
_REPEATED: Final = 2  # one repetition may be a single lost packet
_CHECKS_PER_TIMEOUT: Final = 8


def keep_alive(connection: socket.socket, timeout_s: float) -> None:
    """Make the kernel probe an idle peer every second, and close if its kernel does not answer.

    That takes up to two seconds longer than the timeout; `is_unanswered` detects it sooner.
    """
    n_probes = min(math.ceil(timeout_s) + 1, _MOST_PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, n_probes)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def is_unanswered(connection: socket.socket, timeout_s: float) -> bool:
    """Whether the kernel sent something repeatedly, and got no answer for `timeout_s`.

    A peer that does not read still answers: its kernel says that its buffer is full.
    """
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:  # it is closed: the next read will raise
        return False
    n_resent, n_probes, data_ms, answer_ms = _TCP_INFO.unpack(info)
    is_waiting = max(n_resent, n_probes) >= _REPEATED
    silent_ms: int = min(data_ms, answer_ms)
    return is_waiting and silent_ms >= 1e3 * timeout_s


def work_done(connection: socket.socket) -> tuple[int, int]:
    """Return how many bytes were acknowledged, and for how many microseconds some were on the way.

    Time in which the other end had no room for more does not count. Both are 0 if it is closed.
    """
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _WORK.size)
        n_bytes, busy_us, waiting_us = _WORK.unpack(info)
    except (OSError, struct.error):
        return 0, 0
    return int(n_bytes), max(0, int(busy_us) - int(waiting_us))


def limit_unacknowledged(connection: socket.socket, timeout_s: float) -> None:
    """Make the kernel close if the peer takes in no data for `timeout_s`; 0 sets no limit."""
    milliseconds = round(1e3 * timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


class LinkWatch:
    """Checks one connection repeatedly, and decides when its link is dead.

    Two checks have to agree, so that a machine that was delayed first reads what arrived meanwhile.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._silent_since: float | None = None

    @property
    def interval_s(self) -> float:
        """How long to wait between two checks."""
        return self.timeout_s / _CHECKS_PER_TIMEOUT

    def is_dead(self, connection: socket.socket, now: float) -> bool:
        """Check once more whether the other end's kernel failed to answer in time."""
        if not is_unanswered(connection, self.timeout_s):
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = now
        return self._silent_since is not None and now - self._silent_since >= self.interval_s / 2


class Silence:
    """Measures how long the other end has sent nothing, while this process was listening."""

    def __init__(self, now: float) -> None:
        self._heard = self._checked = now

    def is_too_long(self, now: float, timeout_s: float, *, has_heard: bool) -> bool:
        """Check once more whether nothing was heard for longer than `timeout_s`."""
        if has_heard or now - self._checked > timeout_s / 2:  # this process itself was delayed
            self._heard = now
        self._checked = now
        return now - self._heard > timeout_s
