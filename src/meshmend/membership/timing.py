"""How long a coordinator waits for what."""

from dataclasses import dataclass

from meshmend.net.liveness import DEFAULT_LINK_TIMEOUT_S


@dataclass(frozen=True)
class Timing:
    """How long to wait for what, in seconds.

    `settle_s`: for more to happen before a new generation is made, as when a board dies chip by
    chip. `doubt_s`: from a complaint about a connection until the link counts as cut, if both
    ends live. `gather_s`: for the first workers; `recall_s`: for the workers of a coordinator that
    has been started again. `heartbeat_timeout_s`: without a heartbeat until a worker counts as
    dead, and without a sign of life until the coordinator does; `straggler_timeout_s`: for a worker
    whose loop keeps the others waiting, until it counts as dead; 0 is for ever. `holder_timeout_s`:
    for a worker that holds the state that counts, when none is left, until the others go on from a
    checkpoint. `link_timeout_s`: for the kernel at the other end of a connection to answer.
    """

    settle_s: float = 0.02
    doubt_s: float = 0.15
    gather_s: float = 120.0
    recall_s: float = 1.0
    heartbeat_timeout_s: float = 2.0
    straggler_timeout_s: float = 600.0
    holder_timeout_s: float = 60.0
    link_timeout_s: float = DEFAULT_LINK_TIMEOUT_S
