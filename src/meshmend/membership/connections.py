"""A coordinator's connections, as it knows them: by number, without sockets."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol

from meshmend.membership.messages import Message
from meshmend.net.rate_limit import RateLimit
from meshmend.topology.failures import Chip

_MOST_STRANGERS: Final = 128
_MOST_REPORTS_PER_S: Final = 5000  # that reach the observers; no loop takes so many steps


class Connections(Protocol):
    """Where a coordinator's words go; connections are known by number."""

    def send(self, connection: int, message: Message) -> None:
        """Send a message. If that fails, the coordinator is told by `closed`, later."""

    def hang_up(self, connection: int) -> None:
        """Close a connection once what was sent is on its way; `closed` is not called for it."""


@dataclass
class ControlConnection:
    """A connection: of a worker once it has said which, of an observer, or of neither yet."""

    number: int
    name: str
    heard: float
    chip: Chip | None = None
    is_observer: bool = False
    reports: RateLimit = field(default_factory=lambda: RateLimit(_MOST_REPORTS_PER_S))

    @property
    def is_stranger(self) -> bool:
        """Whether it has not said yet whose it is."""
        return self.chip is None and not self.is_observer


def one_too_many(connections: Iterable[ControlConnection]) -> ControlConnection | None:
    """Return the oldest connection that has not said whose it is, if there are too many."""
    strangers = [each for each in connections if each.is_stranger]
    return strangers[0] if len(strangers) >= _MOST_STRANGERS else None
