"""A generation: a numbered set of live chips, where they listen, and which links are cut.

A value that the coordinator makes and every worker reads. Nothing here knows how it is agreed on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Final

from meshmend.net.codec import Within
from meshmend.net.listener import Address
from meshmend.topology.failures import Chip, Link
from meshmend.topology.mesh import Mesh

# A new generation every second for thirty years. Frames and handshakes hold 32 bits.
LARGEST_NUMBER: Final = 1 << 30
GenerationNumber = Annotated[int, Within(0, LARGEST_NUMBER)]


@dataclass(frozen=True, order=True)
class Seat:
    """A member of a generation: its chip, where it listens, and since when it is a member.

    `since` is the generation at which it came, or came back: from then on it never left.
    """

    chip: Chip
    address: Address
    since: GenerationNumber


@dataclass(frozen=True)
class Generation:
    """A numbered set of chips that train together.

    `mended` holds the links that were cut and came back, with the generation of that.
    """

    number: GenerationNumber
    seats: tuple[Seat, ...]
    cut: frozenset[Link] = frozenset()
    mended: tuple[tuple[Link, GenerationNumber], ...] = ()

    @cached_property
    def chips(self) -> tuple[Chip, ...]:
        """The chips, in row-major order."""
        return tuple(seat.chip for seat in self.seats)

    @cached_property
    def seat_of(self) -> Mapping[Chip, Seat]:
        return {seat.chip: seat for seat in self.seats}

    def mesh_of(self, whole: Mesh) -> Mesh:
        """Return the mesh that is left of a whole one: all other chips count as failed."""
        dead = frozenset(whole.live) - set(self.chips)
        return replace(
            whole, failed=whole.failed | dead, failed_links=whole.failed_links | self.cut
        )

    def epoch(self, one: Chip, other: Chip) -> int:
        """Return the generation since which two chips can have had a connection without a break."""
        link = min(one, other), max(one, other)
        mended = dict(self.mended).get(Link(*link), 0)
        return max(self.seat_of[one].since, self.seat_of[other].since, mended)
