"""The timeouts of a coordinator."""

from dataclasses import dataclass
from typing import Final

from meshmend.errors import InputError
from meshmend.transport.liveness import DEFAULT_LINK_TIMEOUT_S

_LEASE_SHARE: Final = 0.75  # of the holder timeout; the rest is for clocks that run differently
_SHORTEST_HOLDER_TIMEOUT_S: Final = 0.2


@dataclass(frozen=True)
class Timing:
    """The timeouts of a coordinator, in seconds.

    - `settle_s`: waits for more changes before a new generation is made, as when a board dies chip
      by chip.
    - `doubt_s`: from a complaint about a connection until the link counts as cut, if both ends
      live.
    - `gather_s`: waits for the first workers of a job.
    - `recall_s`: after the coordinator was started again, waits for one more worker of the latest
      generation.
    - `heartbeat_timeout_s`: a worker without a heartbeat for this time counts as dead; so does a
      coordinator without a sign of life.
    - `straggler_timeout_s`: a worker whose loop keeps the others waiting for this time counts as
      dead; 0 means never.
    - `holder_timeout_s`: waits for a holder when none is left; then the others go on from a
      checkpoint.
    - `link_timeout_s`: a connection whose other kernel does not answer for this time is dead.
    """

    settle_s: float = 0.02
    doubt_s: float = 0.15
    gather_s: float = 120.0
    recall_s: float = 1.0
    heartbeat_timeout_s: float = 2.0
    straggler_timeout_s: float = 600.0
    holder_timeout_s: float = 60.0
    link_timeout_s: float = DEFAULT_LINK_TIMEOUT_S

    def __post_init__(self) -> None:
        if self.holder_timeout_s < _SHORTEST_HOLDER_TIMEOUT_S:
            raise InputError(
                f"a job needs a holder timeout of at least {_SHORTEST_HOLDER_TIMEOUT_S:g} s, but "
                f"got {self.holder_timeout_s:g}: chips that are cut off have to stop within it"
            )

    @property
    def lease_s(self) -> float:
        """How long a worker may step without word from its coordinator.

        It is shorter than the holder timeout: before the others go on from a checkpoint, those that
        hold the state but cannot be heard have stopped.
        """
        return _LEASE_SHARE * self.holder_timeout_s

    @property
    def alive_every_s(self) -> float:
        """How often the coordinator and its workers send each other a sign of life."""
        return alive_every_s(self.heartbeat_timeout_s, self.lease_s)


def alive_every_s(heartbeat_timeout_s: float, lease_s: float) -> float:
    """Return how often to send a sign of life, so that neither timeout passes by chance."""
    return min(heartbeat_timeout_s / 4, lease_s / 6)
