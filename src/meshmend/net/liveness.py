"""Whether the machine at the other end of a connection still answers.

The kernel of a peer acknowledges even while the peer is busy or stopped, so a network that has
fallen silent can be told apart from a peer that is slow. The kernel's own limit
(TCP_USER_TIMEOUT) cannot tell: it also ends a connection whose other end is alive but does not read
for so long. It is only used for handshakes, which are short enough to be taken in at once.
"""

import math
import socket
import struct
from typing import Final

DEFAULT_LINK_TIMEOUT_S: Final = 2.0

_KEEPALIVE_S: Final = 1  # the kernel counts in whole seconds
_MOST_PROBES: Final = 127  # the kernel takes no more
# The beginning of Linux's struct tcp_info: bytes 2 and 3, and the words at 52 and 56.
_TCP_INFO: Final = struct.Struct("=2xBB48xII")
_REPEATED: Final = 2  # one repetition may be a packet that was lost
_LOOKS: Final = 8  # at a connection within its timeout


def keep_alive(connection: socket.socket, timeout_s: float) -> None:
    """Have the kernel ask an idle peer every second, and hang up if its kernel stays silent.

    That takes up to two seconds longer than the timeout; `is_unanswered` knows it sooner.
    """
    n_probes = min(math.ceil(timeout_s) + 1, _MOST_PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, n_probes)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def is_unanswered(connection: socket.socket, timeout_s: float) -> bool:
    """Whether the kernel sent something again and again, and heard nothing for so long.

    A peer that does not read is not silent: its kernel answers that it has no room.
    """
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:  # it is closed: the next read will tell
        return False
    n_resent, n_probes, data_ms, answer_ms = _TCP_INFO.unpack(info)
    is_waiting = max(n_resent, n_probes) >= _REPEATED
    silent_ms: int = min(data_ms, answer_ms)
    return is_waiting and silent_ms >= 1e3 * timeout_s


def limit_unacknowledged(connection: socket.socket, timeout_s: float) -> None:
    """Have the kernel hang up if what was sent is not taken in for so long; 0 sets no limit."""
    milliseconds = round(1e3 * timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


class LinkWatch:
    """Looks at one connection again and again, and says when its link is dead.

    Two looks have to agree, so that a machine that was held up first reads what came meanwhile.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._silent_since: float | None = None

    @property
    def interval_s(self) -> float:
        """How long to wait between two looks."""
        return self.timeout_s / _LOOKS

    def is_dead(self, connection: socket.socket, now: float) -> bool:
        """Look once more: whether the other end's kernel did not answer in time."""
        if not is_unanswered(connection, self.timeout_s):
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = now
        return self._silent_since is not None and now - self._silent_since >= self.interval_s / 2


class Silence:
    """How long the other end has said nothing; time in which nobody listened does not count."""

    def __init__(self, now: float) -> None:
        self._heard = self._looked = now

    def is_too_long(self, now: float, timeout_s: float, *, has_heard: bool) -> bool:
        """Look once more: whether nothing was heard for so long in spite of looking."""
        if has_heard or now - self._looked > timeout_s / 2:  # this process itself was held up
            self._heard = now
        self._looked = now
        return now - self._heard > timeout_s
