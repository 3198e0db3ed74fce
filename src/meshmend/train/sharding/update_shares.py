"""Which chip updates which part of the parameters, which chip mirrors it, and what has to move.

Parameters lie end to end in a row of bytes. Each rank **owns** an equal share of the row: the
optimizer's state of the share is there, and on the rank that **mirrors** it. A **span** is a part
of the row, from its first byte to before its last.

No failure of one domain may take the owner of a share and its mirror. A **domain** is what fails as
a whole, such as a board, a host or a row of chips with one power supply. Several may be named, the
one that matters most first.

Knows chips, ranks and bytes, but no tensors. All functions give the same result on all chips, so
nothing has to be agreed on.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.topology.failures import Chip, board_shape, format_shape, parse_shape
from meshmend.topology.mesh import Mesh

ALIGN_BYTES: Final = 256  # of shares: a cut never divides what vector instructions handle at once
LARGEST_MOVE_BYTES: Final = 16 << 20
STATE_PER_WEIGHT: Final = 2  # AdamW and LAMB keep two numbers for each weight

BOARD: Final = "board"
HOST: Final = "host"
DEFAULT_DOMAINS: Final = (BOARD, HOST)
_AXES: Final = {"row": 0, "column": 1}

Span = tuple[int, int]
Spans = tuple[Span, ...]
Domains = Sequence[Sequence[Hashable]]  # of each rank, equally many
_Compatible = NDArray[np.bool_]  # [owner, mirror]


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


def aligned(n_bytes: int) -> int:
    """Return the next multiple of the alignment."""
    return -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True)
class Move:
    """The state of a span goes from one rank to another."""

    span: Span
    source: int
    target: int


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


def without(spans: Iterable[Span], removed: Iterable[Span]) -> Spans:
    """Return what is left of spans without others, in order."""
    left = sorted(span for span in spans if span[0] < span[1])
    for low, high in removed:
        parts = ((begin, min(end, low)) for begin, end in left)
        rest = ((max(begin, high), end) for begin, end in left)
        left = sorted({each for each in (*parts, *rest) if each[0] < each[1]})
    return tuple(left)


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


def mirrors_of(domains: Domains) -> tuple[int, ...]:
    """Return the rank that mirrors each rank's share.

    A mirror shares no domain with its owner. Where that cannot be, the last domains do not count,
    and if all ranks share the first, none does. Every rank mirrors one share if that can be; else
    the most that one rank mirrors is as small as possible.
    """
    n_ranks = len(domains)
    if n_ranks == 1:
        return (0,)
    compatible = _compatible(domains, kept_apart(domains))
    ranks = np.arange(n_ranks)
    for shift in range(1, n_ranks):
        if compatible[ranks, (ranks + shift) % n_ranks].all():
            return tuple(((ranks + shift) % n_ranks).tolist())
    found = (_matched(compatible, most) for most in range(1, n_ranks))
    return next(each for each in found if each is not None)


def kept_apart(domains: Domains) -> int:
    """Return how many domains, from the first on, mirrors can keep apart from their owners."""
    n_ranks, n_domains = len(domains), len(domains[0])
    if n_ranks == 1:
        return 0
    feasible = (
        count for count in range(n_domains, 0, -1) if _compatible(domains, count).any(axis=1).all()
    )
    return next(feasible, 0)


def _compatible(domains: Domains, n_counted: int) -> _Compatible:
    """Return whether each rank may be mirrored by each, if so many domains count."""
    result = ~np.eye(len(domains), dtype=np.bool_)
    for at in range(n_counted):
        number_of: dict[Hashable, int] = {}
        numbers = np.array([number_of.setdefault(each[at], len(number_of)) for each in domains])
        result &= numbers[:, None] != numbers[None, :]
    return result


def _matched(compatible: _Compatible, most: int) -> tuple[int, ...] | None:
    """Return mirrors such that no rank mirrors more than so many shares; None if there are none.

    One owner after another gets a mirror; owners before it change theirs where that makes room.
    """
    n_ranks = len(compatible)
    mirror_of = [-1] * n_ranks
    owners_of: list[list[int]] = [[] for _ in range(n_ranks)]
    for owner in range(n_ranks):
        reached, free = _search(compatible, owners_of, owner, most)
        if free is None:
            return None
        while free >= 0:
            moved = reached[free]
            before, mirror_of[moved] = mirror_of[moved], free
            owners_of[free].append(moved)
            if before >= 0:
                owners_of[before].remove(moved)
            free = before
    return tuple(mirror_of)


def _search(
    compatible: _Compatible, owners_of: Sequence[Sequence[int]], owner: int, most: int
) -> tuple[dict[int, int], int | None]:
    """Return a mirror with room that an owner reaches, and over which owners each was reached."""
    n_ranks = len(compatible)
    reached: dict[int, int] = {}
    queue = deque([owner])
    while queue:
        at = queue.popleft()
        candidates = np.flatnonzero(np.roll(compatible[at], -at - 1)) + at + 1
        for mirror in (candidates % n_ranks).tolist():
            if mirror in reached:
                continue
            reached[mirror] = at
            if len(owners_of[mirror]) < most:
                return reached, mirror
            queue.extend(owners_of[mirror])
    return reached, None


def check_domains(names: Sequence[str], mesh: Mesh, board: tuple[int, ...]) -> None:
    """Raise InputError if a name is unknown, or no mirrors keep all domains but the hosts apart.

    Hosts are known when all chips have come.
    """
    if not names:
        raise InputError(f"mirrors need at least one domain, such as {BOARD}, but got none")
    for name in names:
        _domain(name, mesh.live[0], {}, board)
    known = counted_domains(names, {})
    domains = domains_of(known, mesh.live, {}, board)
    if kept_apart(domains) == len(known) or tuple(names) == DEFAULT_DOMAINS:
        return
    joined = _compatible(domains, len(known)).sum(axis=1) == 0
    chip = mesh.live[int(np.argmax(joined))]
    raise InputError(
        f"mirrors need a chip that shares no {' and no '.join(known)} with their owner, but on "
        f"{format_shape(mesh.shape)} chip {chip} shares one with every other live chip; name "
        "fewer or smaller domains"
    )


def domains_of(
    names: Sequence[str],
    chips: Sequence[Chip],
    host_of: Mapping[Chip, str],
    board: tuple[int, ...],
) -> list[list[Hashable]]:
    """Return the domains of each chip, in the order of their names.

    Raises:
        InputError: a name is unknown.
    """
    return [[_domain(name, chip, host_of, board) for name in names] for chip in chips]


def counted_domains(names: Sequence[str], host_of: Mapping[Chip, str]) -> list[str]:
    """Return the domains that count: hosts do only if there are several."""
    n_hosts = len(set(host_of.values()))
    return [name for name in names if name != HOST or n_hosts > 1]


def _domain(name: str, chip: Chip, host_of: Mapping[Chip, str], board: tuple[int, ...]) -> Hashable:
    if name == HOST:
        return host_of.get(chip)
    if name in _AXES and _AXES[name] < len(chip):
        return chip[_AXES[name]]
    try:
        shape = board if name == BOARD else parse_shape(name)
        return tuple(at // size for at, size in zip(chip, shape, strict=True))
    except ValueError:
        example = format_shape((2,) * len(chip))
        raise InputError(
            f"a domain of mirrors needs to be {BOARD}, {HOST}, {', '.join(_AXES)}, or a block of "
            f"{len(chip)} axes such as {example}, but got {name!r}"
        ) from None


@dataclass(frozen=True)
class MirrorCost:
    """The cost of mirrors for each chip; of chips that differ, the most.

    A mirror updates its copy by itself, with the sums that every chip of a training job has. So
    nothing is sent to it. It costs the memory of a second share, and the time to update that share.

    `state_bytes` is what AdamW keeps without mirrors, `state_and_mirror_bytes` with them, and
    `unsharded_state_bytes` if the chips shared nothing. `update_s` is the time of a step that
    updating mirrors takes, None if it is not known how fast chips update. A job that sums by
    reduce-scatter would have to send `share_bytes` to each mirror in every step.
    """

    domains: tuple[str, ...]
    sent_bytes_per_step: int
    share_bytes: int
    state_bytes: int
    state_and_mirror_bytes: int
    unsharded_state_bytes: int
    update_s: float | None


def mirror_cost(
    mesh: Mesh,
    payload_bytes: int,
    update_bytes_per_s: float | None = None,
    *,
    domains: Sequence[str] = DEFAULT_DOMAINS,
) -> MirrorCost:
    """Return what mirrors cost on the live chips of a mesh, for weights of so many bytes.

    Raises:
        InputError: a domain is unknown, or no mirrors can be placed so.
    """
    board = board_shape(len(mesh.shape))
    check_domains(domains, mesh, board)
    counted = counted_domains(domains, {})
    mirror_of = mirrors_of(domains_of(counted, mesh.live, {}, board))
    shares = UpdateShares(payload_bytes, mirror_of)
    mirrored = [_length(shares.mirrored(rank)) for rank in range(shares.n_ranks)]
    kept = [_length(shares.kept(rank)) for rank in range(shares.n_ranks)]
    owned = _length([shares.owned(0)])
    return MirrorCost(
        tuple(counted),
        0,
        owned,
        STATE_PER_WEIGHT * owned,
        STATE_PER_WEIGHT * max(kept),
        STATE_PER_WEIGHT * payload_bytes,
        max(mirrored) / update_bytes_per_s if update_bytes_per_s else None,
    )


def _length(spans: Sequence[tuple[int, int]]) -> int:
    return sum(end - begin for begin, end in spans)
