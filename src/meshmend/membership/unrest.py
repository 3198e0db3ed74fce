"""What has happened since the last generation was made, and when things have calmed down."""

from dataclasses import dataclass, field
from typing import Final

from meshmend.topology.failures import Link

_LONGEST_SETTLE: Final = 10  # times the usual, if things keep happening
_MOST_REASONS: Final = 4  # that are named


@dataclass
class Unrest:
    """Reasons for a new generation, and links that are in doubt until a time."""

    settle_s: float
    first: float = 0.0
    last: float = 0.0
    reasons: list[str] = field(default_factory=list)
    doubts: dict[Link, float] = field(default_factory=dict)

    def stir(self, why: str, now: float) -> None:
        """Take in a reason."""
        if not self.reasons:
            self.first = now
        self.reasons.append(why)
        self.last = now

    def calm_at(self) -> float:
        """Return when a new generation is made if nothing more happens."""
        return min(self.last + self.settle_s, self.first + _LONGEST_SETTLE * self.settle_s)

    def settle(self) -> str:
        """Return all reasons in words, and forget them."""
        reasons = list(dict.fromkeys(self.reasons))
        self.reasons.clear()
        shown = ", ".join(reasons[:_MOST_REASONS])
        more = len(reasons) - _MOST_REASONS
        return shown if more <= 0 else f"{shown} and {more} more"
