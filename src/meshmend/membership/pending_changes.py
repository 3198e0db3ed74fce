"""Collects the changes since the last generation, and says when to make the next one."""

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Final

from meshmend.topology.failures import Chip, Link

_LONGEST_SETTLE: Final = 10  # times `settle_s`, if changes keep coming
_MOST_REASONS: Final = 4  # named in the text; the others are counted


@dataclass
class DoubtfulLink:
    """When a worker complained about a link, and when to check it again."""

    since: float
    check_at: float


@dataclass
class PendingChanges:
    """The reasons for a new generation, and the links that are in doubt.

    A link in doubt counts as cut once both its ends have sent a message after the complaint. If a
    whole host is silent, its chips are dead and its links are not the cause.
    """

    settle_s: float
    doubt_s: float
    first: float = 0.0
    last: float = 0.0
    reasons: list[str] = field(default_factory=list)
    doubts: dict[Link, DoubtfulLink] = field(default_factory=dict)
    heard: dict[Chip, float] = field(default_factory=dict)

    def add(self, why: str, now: float) -> None:
        """Add a reason for a new generation."""
        if not self.reasons:
            self.first = now
        self.reasons.append(why)
        self.last = now

    def doubt_link(self, link: Link, now: float) -> None:
        """Record that one end of a link has lost its connection to the other."""
        self.doubts.setdefault(link, DoubtfulLink(now, now + self.doubt_s))

    def cut_links(self, live: Container[Chip], now: float) -> list[Link]:
        """Return the links that now count as cut, because both ends live; each once."""
        cut = []
        for link, doubt in list(self.doubts.items()):
            ends = (link.first, link.second)
            if not all(chip in live for chip in ends):
                del self.doubts[link]
            elif now >= doubt.check_at and all(self.heard[chip] >= doubt.since for chip in ends):
                del self.doubts[link]
                cut.append(link)
            elif now >= doubt.check_at:
                doubt.check_at = now + self.doubt_s
        return cut

    def settles_at(self) -> float:
        """Return when to make a new generation if no more changes come."""
        return min(self.last + self.settle_s, self.first + _LONGEST_SETTLE * self.settle_s)

    def take_reasons(self) -> str:
        """Return all reasons as one text, and forget them."""
        reasons = list(dict.fromkeys(self.reasons))
        self.reasons.clear()
        shown = ", ".join(reasons[:_MOST_REASONS])
        more = len(reasons) - _MOST_REASONS
        return shown if more <= 0 else f"{shown} and {more} more"
