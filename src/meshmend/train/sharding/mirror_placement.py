"""Which chip mirrors which: no failure of one domain may take the owner of a share and its mirror.

A **domain** is what fails as a whole, such as a board, a host or a row of chips with one power
supply. Several may be named, the one that matters most first. Knows chips and ranks, but no bytes.

All functions give the same result on all chips, so nothing has to be agreed on.
"""

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.topology.failures import Chip, format_shape, parse_shape
from meshmend.topology.mesh import Mesh

BOARD: Final = "board"
HOST: Final = "host"
DEFAULT_DOMAINS: Final = (BOARD, HOST)
_AXES: Final = {"row": 0, "column": 1}

Domains = Sequence[Sequence[Hashable]]  # of each rank, equally many
_Compatible = NDArray[np.bool_]  # [owner, mirror]


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


def kept_apart(domains: Domains) -> int:
    """Return how many domains, from the first on, mirrors can keep apart from their owners."""
    n_ranks, n_domains = len(domains), len(domains[0])
    if n_ranks == 1:
        return 0
    feasible = (
        count for count in range(n_domains, 0, -1) if _compatible(domains, count).any(axis=1).all()
    )
    return next(feasible, 0)


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
