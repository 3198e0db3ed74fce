"""The timeouts of a coordinator."""

from dataclasses import dataclass

from meshmend.net.liveness import DEFAULT_LINK_TIMEOUT_S


@dataclass(frozen=True)
class Timing:
    """The timeouts of a coordinator, in seconds.

    - `settle_s`: waits for more changes before a new generation is made, as when a board dies chip
      by chip.
    - `doubt_s`: from a complaint about a connection until the link counts as cut, if both ends
      live.
    - `gather_s`: waits for the first workers of a job.
    - `recall_s`: waits for the workers after the coordinator was started again.
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
