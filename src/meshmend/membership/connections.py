"""The coordinator's view of its connections: numbers instead of sockets."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol

from meshmend.membership.messages import Heartbeat, Message
from meshmend.topology.failures import Chip
from meshmend.transport.pacing import RateLimit

_MOST_STRANGERS: Final = 128
_MOST_ASKERS: Final = 32
_MOST_REPORTS_PER_S: Final = 5000  # forwarded to observers; no training loop is that fast


class Connections(Protocol):
    """Sends the coordinator's messages; each connection has a number."""

    def send(self, connection: int, message: Message) -> None:
        """Send a message. If that fails, the coordinator's `closed` is called later."""

    def hang_up(self, connection: int) -> None:
        """Close a connection after the messages already sent; `closed` is not called for it."""


@dataclass
class ControlConnection:
    """A connection of a worker, an observer, an asker, or a stranger.

    An asker was sent the status of the job; it hangs up once it has read it. A stranger has not
    said yet which of these it is; if it `is_asked`, it will say hello once more. `beat` is the last
    heartbeat of a worker.
    """

    number: int
    name: str
    heard: float
    chip: Chip | None = None
    is_observer: bool = False
    is_asker: bool = False
    is_asked: bool = False
    beat: Heartbeat | None = None
    reports: RateLimit = field(default_factory=lambda: RateLimit(_MOST_REPORTS_PER_S))


def most_strangers(n_chips: int) -> int:
    """Return how many strangers may be connected: all workers of a job may come at once."""
    return max(_MOST_STRANGERS, 2 * n_chips)


def asker_over_limit(connections: Iterable[ControlConnection]) -> ControlConnection | None:
    """Return the oldest asker if there are too many askers, else None."""
    askers = [each for each in connections if each.is_asker]
    return askers[0] if len(askers) >= _MOST_ASKERS else None
