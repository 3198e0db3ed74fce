"""What has happened since the last generation was made, and when things have calmed down."""

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Final

from meshmend.topology.failures import Chip, Link

_LONGEST_SETTLE: Final = 10  # times the usual, if things keep happening
_MOST_REASONS: Final = 4  # that are named


@dataclass
class Doubt:
    """A complaint about a connection: since when, and when to look at it again."""

    since: float
    look_at: float


@dataclass
class Unrest:
    """Reasons for a new generation, and links that are in doubt.

    A link in doubt counts as cut once both its ends were heard after the complaint: if a whole host
    has fallen silent, its links are not to blame.
    """

    settle_s: float
    doubt_s: float
    first: float = 0.0
    last: float = 0.0
    reasons: list[str] = field(default_factory=list)
    doubts: dict[Link, Doubt] = field(default_factory=dict)
    heard: dict[Chip, float] = field(default_factory=dict)

    def stir(self, why: str, now: float) -> None:
        """Take in a reason."""
        if not self.reasons:
            self.first = now
        self.reasons.append(why)
        self.last = now

    def doubt(self, link: Link, now: float) -> None:
        """Take in that an end of a link has lost the other."""
        self.doubts.setdefault(link, Doubt(now, now + self.doubt_s))

    def cut_links(self, live: Container[Chip], now: float) -> list[Link]:
        """Return the links whose ends both live although one lost the other, each once."""
        cut = []
        for link, doubt in list(self.doubts.items()):
            ends = (link.first, link.second)
            if not all(chip in live for chip in ends):
                del self.doubts[link]
            elif now >= doubt.look_at and all(self.heard[chip] >= doubt.since for chip in ends):
                del self.doubts[link]
                cut.append(link)
            elif now >= doubt.look_at:
                doubt.look_at = now + self.doubt_s
        return cut

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
