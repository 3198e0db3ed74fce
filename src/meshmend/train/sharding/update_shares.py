"""Which chip updates which part of the parameters, which part it mirrors, and what has to move.

Parameters lie end to end in a row of bytes. Each rank **owns** an equal share of the row: the
optimizer's state of the share is there, and on the rank that **mirrors** it. A **span** is a part
of the row, from its first byte to before its last. Knows ranks and bytes, but no tensors.

All functions give the same result on all chips, so nothing has to be agreed on.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

ALIGN_BYTES: Final = 256  # of shares: a cut never divides what vector instructions handle at once
LARGEST_MOVE_BYTES: Final = 16 << 20

Span = tuple[int, int]
Spans = tuple[Span, ...]


@dataclass(frozen=True)
class UpdateShares:
    """Equal shares of `n_bytes`, one for each rank, and the rank that mirrors each.

    A rank that is alone mirrors its own share, so there is no second copy.
    """

    n_bytes: int
    mirror_of: tuple[int, ...]

    @property
    def n_ranks(self) -> int:
        return len(self.mirror_of)

    @cached_property
    def share_bytes(self) -> int:
        """The bytes of each share; the last ones may be shorter, or empty."""
        return max(ALIGN_BYTES, aligned(-(-self.n_bytes // self.n_ranks)))

    @property
    def gathered_bytes(self) -> int:
        """The bytes of all shares, with what fills up the last ones."""
        return self.share_bytes * self.n_ranks

    def owned(self, rank: int) -> Span:
        """Return what a rank owns."""
        begin, end = rank * self.share_bytes, (rank + 1) * self.share_bytes
        return min(begin, self.n_bytes), min(end, self.n_bytes)

    def mirrored(self, rank: int) -> Spans:
        """Return the shares of other ranks that a rank mirrors."""
        owners = (owner for owner, mirror in enumerate(self.mirror_of) if mirror == rank)
        return tuple(self.owned(owner) for owner in owners if owner != rank)

    def kept(self, rank: int) -> Spans:
        """Return all that a rank keeps the state of: its own share first."""
        return self.owned(rank), *self.mirrored(rank)


@dataclass(frozen=True)
class Move:
    """The state of a span goes from one rank to another."""

    span: Span
    source: int
    target: int


def aligned(n_bytes: int) -> int:
    """Return the next multiple of the alignment."""
    return -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES


def without(spans: Iterable[Span], removed: Iterable[Span]) -> Spans:
    """Return what is left of spans without others, in order."""
    left = sorted(span for span in spans if span[0] < span[1])
    for low, high in removed:
        parts = ((begin, min(end, low)) for begin, end in left)
        rest = ((max(begin, high), end) for begin, end in left)
        left = sorted({each for each in (*parts, *rest) if each[0] < each[1]})
    return tuple(left)


def moves_to(needed: Sequence[Spans], held: Sequence[Spans]) -> list[Move]:
    """Return the moves after which every rank has what it needs; both lists are by rank.

    Each comes from a rank that holds it, of several from the one that sends least so far. What no
    rank holds is left out. Long spans move in pieces.
    """
    sent = [0] * len(held)
    found: list[Move] = []
    for target, wanted in enumerate(needed):
        missing = without(wanted, held[target])
        while missing:
            begin, end = missing[0]
            holders = _holders_at(begin, held)
            if not holders:
                missing = without(missing, [(begin, _next_begin(begin, end, held))])
                continue
            source = min(holders, key=lambda rank: (sent[rank], rank))
            stop = min(end, holders[source], begin + LARGEST_MOVE_BYTES)
            found.append(Move((begin, stop), source, target))
            sent[source] += stop - begin
            missing = without(missing, [(begin, stop)])
    return found


def _holders_at(place: int, held: Sequence[Spans]) -> Mapping[int, int]:
    """Return the ranks that hold a byte, and how far the span of each goes."""
    return {
        rank: end for rank, spans in enumerate(held) for begin, end in spans if begin <= place < end
    }


def _next_begin(place: int, end: int, held: Sequence[Spans]) -> int:
    begins = [begin for spans in held for begin, _ in spans if begin > place]
    return min([end, *begins])


def batches_of_moves(moves: Sequence[Move], most_bytes: int) -> Iterator[list[Move]]:
    """Yield the moves in batches of up to so many bytes; a single move may be longer."""
    batch: list[Move] = []
    n_bytes = 0
    for move in moves:
        length = move.span[1] - move.span[0]
        if batch and n_bytes + length > most_bytes:
            yield batch
            batch, n_bytes = [], 0
        batch.append(move)
        n_bytes += length
    if batch:
        yield batch
