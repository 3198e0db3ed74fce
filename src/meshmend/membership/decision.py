"""What a coordinator has to say to its workers."""

from dataclasses import dataclass

from meshmend.membership.generation import Generation
from meshmend.membership.messages import Go


@dataclass(frozen=True)
class Decision:
    """What `decide` found: a new generation and why, the word to begin, the end, or a failure.

    `lost_step` is the step that is lost when no worker holds it any more: told once when that is
    found, and once more with the word to begin from a checkpoint.
    """

    generation: Generation | None = None
    why: str = ""
    go: Go | None = None
    is_over: bool = False
    failed: str = ""
    lost_step: int | None = None
