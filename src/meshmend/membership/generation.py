"""A generation: a numbered set of live chips, where they listen, and which links are cut.

The coordinator makes this value and every worker reads it. `membership` decides who is in it.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from meshmend.membership.events import ChipCoordinates
from meshmend.topology.failures import Chip, Link
from meshmend.transport.codec import Value
from meshmend.transport.listener import Address

if TYPE_CHECKING:
    from meshmend.topology.mesh import Mesh

# Enough for one generation a second for thirty years. Frames and handshakes hold 32 bits.
LARGEST_NUMBER: Final = 1 << 30
GenerationNumber = Annotated[int, Meta(ge=0, le=LARGEST_NUMBER)]
_TOKENS: Final = 1_000_000
_DIGEST_BYTES: Final = 16
LARGEST_TERM: Final = 1 << 50
Term = Annotated[int, Meta(ge=0, le=LARGEST_TERM)]


class Seat(Value, frozen=True, order=True, array_like=True):
    """A member of a generation: its chip, where it listens, and since when it is a member.

    `since` is the generation with which it last joined; it has been a member ever since.
    """

    chip: ChipCoordinates
    address: Address
    since: GenerationNumber


class GenerationName(Value, frozen=True):
    """What names a generation in a few bytes, whatever its size; `digest` is that of its parts."""

    number: GenerationNumber
    term: Term
    digest: Annotated[bytes, Meta(min_length=_DIGEST_BYTES, max_length=_DIGEST_BYTES)]


class Generation(Value, frozen=True, dict=True):
    """A numbered set of chips that train together.

    `mended` holds the links that were cut and repaired, each with the generation of the repair.
    `term` is that of the coordinator that formed it: two coordinators of one job that do not know
    of each other may use the same number, never the same term.
    """

    number: GenerationNumber
    seats: tuple[Seat, ...]
    cut: frozenset[Link] = frozenset()
    mended: tuple[tuple[Link, GenerationNumber], ...] = ()
    term: Term = 0

    @cached_property
    def chips(self) -> tuple[Chip, ...]:
        """The chips, in row-major order."""
        return tuple(seat.chip for seat in self.seats)

    @cached_property
    def name(self) -> GenerationName:
        """The name of this generation: equal names are of equal generations."""
        parts = msgspec.msgpack.encode(self, order="deterministic")
        digest = hashlib.blake2b(parts, digest_size=_DIGEST_BYTES).digest()
        return GenerationName(self.number, self.term, digest)

    @cached_property
    def seat_of(self) -> Mapping[Chip, Seat]:
        return {seat.chip: seat for seat in self.seats}

    def mesh_of(self, whole: "Mesh") -> "Mesh":
        """Return `whole` with all other chips and all cut links marked as failed."""
        dead = frozenset(whole.live) - set(self.chips)
        return replace(
            whole, failed=whole.failed | dead, failed_links=whole.failed_links | self.cut
        )

    def epoch(self, one: Chip, other: Chip) -> int:
        """Return the first generation that a connection of two chips can date from, unbroken."""
        link = min(one, other), max(one, other)
        mended = dict(self.mended).get(Link(*link), 0)
        return max(self.seat_of[one].since, self.seat_of[other].since, mended)


def term_after(known: int, token: int) -> int:
    """Return a term that is higher than all that are known; coordinators count them.

    Its last six digits are the coordinator's `token`, a random number: two coordinators that count
    alike, because neither knows of the other, have different terms all the same.
    """
    return (known // _TOKENS + 1) * _TOKENS + token % _TOKENS
