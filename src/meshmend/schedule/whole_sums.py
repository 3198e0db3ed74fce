"""Every chip gets the payload of every other and adds them up: `direct` and `flood`.

Payloads arrive in scratch buffers, and each chip adds them in the order of ranks, so that all have
the same bits. There is one phase, so nothing takes a longer way than the diameter, on any mesh,
around any holes. But each chip gets n - 1 payloads: this is for short payloads and few chips.

**`direct`** sends each payload in a message of its own from chip to chip, through all that lie
between. Every message pays its overhead once, whatever its hops, so a payload of some bytes takes
as long as the limit says.

**`flood`** hands payloads on from neighbour to neighbour, so that a link carries each payload once.
Where two ways are equally short, half of the payload takes each.
"""

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import UnsupportedError
from meshmend.schedule.ring_builders import NamedRows
from meshmend.schedule.table import COPY, REDUCE, Collective, Rows, Schedule, schedule_of
from meshmend.topology.graph import all_distances
from meshmend.topology.mesh import Mesh

MOST_CHIPS = 255  # a row names its buffers in one byte


def check_whole_sums(mesh: Mesh, name: str) -> None:
    """Raise UnsupportedError if a chip would need more buffers than a row can name."""
    if mesh.n_live > MOST_CHIPS:
        raise UnsupportedError(f"{name} needs at most {MOST_CHIPS} chips, but got {mesh}")


def direct(mesh: Mesh, collective: Collective) -> Schedule:
    """Return the allreduce in which every chip sends its payload straight to every other.

    Raises:
        UnsupportedError: too many chips.
    """
    check_whole_sums(mesh, "direct")
    hops = all_distances(mesh)
    source, target = np.nonzero(hops)
    far_first = np.argsort(-hops[source, target], kind="stable")
    source, target = source[far_first], target[far_first]
    rows = Rows(source, target, 0 * source, 1 + 0 * source, COPY, source, source)
    return _schedule(mesh, collective, "direct", [("send", rows)], n_chunks=1)


def flood(mesh: Mesh, collective: Collective) -> Schedule:
    """Return the allreduce in which payloads go from neighbour to neighbour on shortest ways.

    Raises:
        UnsupportedError: too many chips.
    """
    check_whole_sums(mesh, "flood")
    hops, n_ports = all_distances(mesh), mesh.neighbor_ranks.shape[1]
    first = _senders(mesh, hops, range(n_ports))
    second = _senders(mesh, hops, range(n_ports - 1, -1, -1))
    origin, target = np.nonzero(hops)
    one, other = first[origin, target], second[origin, target]
    whole = one == other
    parts = [(one, 0, 2, whole), (one, 0, 1, ~whole), (other, 1, 2, ~whole)]
    columns = [
        (
            origin[which],
            sender[which],
            target[which],
            lo + 0 * target[which],
            hi + 0 * target[which],
        )
        for sender, lo, hi, which in parts
    ]
    table = np.concatenate([np.array(each) for each in columns], axis=1)
    # The nearest first, so that whoever hands a payload on has it.
    near_first = np.argsort(hops[table[0], table[2]], kind="stable")
    origin, sender, target, lo, hi = table[:, near_first]
    rows = Rows(sender, target, lo, hi, COPY, origin, origin)
    return _schedule(mesh, collective, "flood", [("hand on", rows)], n_chunks=2)


def _senders(mesh: Mesh, hops: NDArray[np.int32], ports: range) -> NDArray[np.int64]:
    """Return who hands the payload of each rank (first axis) to each other, by the first port."""
    senders = np.full(hops.shape, -1, dtype=np.int64)
    for port in ports:
        beside = mesh.neighbor_ranks[:, port]
        is_nearer = (beside >= 0) & (hops[:, beside] == hops - 1) & (senders < 0)
        senders = np.where(is_nearer, beside, senders)
    return senders


def _schedule(
    mesh: Mesh, collective: Collective, name: str, sends: list[NamedRows], *, n_chunks: int
) -> Schedule:
    """Return the schedule: all but the first rank put their own away, all send, all add.

    The payload of rank r is in buffer r everywhere. Buffer 0 is where the sum is wanted.
    """
    n = mesh.n_live
    rank = np.arange(1, n)
    chip, origin = (each.reshape(-1) for each in np.mgrid[0:n, 1:n])
    put_away = Rows(rank, rank, 0 * rank, n_chunks + 0 * rank, COPY, 0 * rank, rank)
    add = Rows(chip, chip, 0 * chip, n_chunks + 0 * chip, REDUCE, origin)
    return schedule_of(
        [("put away", put_away), *sends, ("add", add)],
        algorithm=name,
        collective=collective,
        owners=np.zeros(n_chunks, dtype=np.int32),
        n_ranks=n,
        cuts=np.linspace(0.0, 1.0, n_chunks + 1),
    )
