"""A decision of the membership rules, which the coordinator carries out."""

from dataclasses import dataclass

from meshmend.membership.generation import Generation
from meshmend.membership.messages import Go


@dataclass(frozen=True)
class Decision:
    """A new generation and why, a go message, the end of the job, or a failure; empty if nothing.

    `lost_step` is the last step whose state no worker holds any more. It is set when the
    job begins to wait for that state, and together with the `go` that restores an earlier one.
    """

    generation: Generation | None = None
    why: str = ""
    go: Go | None = None
    is_over: bool = False
    failed: str = ""
    lost_step: int | None = None
