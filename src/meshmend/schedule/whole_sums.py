"""Every chip gets the payload of every other and adds them up: `direct` and `flood`.

Payloads arrive in scratch buffers, and each chip adds them in the order of ranks, so that all have
the same bits. There is one phase, so nothing takes a longer way than the diameter, on any mesh,
around any holes. But each chip gets n - 1 payloads: this is for short payloads and few chips.

**`direct`** sends each payload in a message of its own from chip to chip, through all that lie
between. Every message pays its overhead once, whatever its hops, so a payload of some bytes takes
as long as the limit says.

**`flood`** hands payloads on from neighbour to neighbour on shortest ways, so that a chip gets each
payload once. Of equally short ways those are taken on which the fewest messages are late
(`trees/ways.py`).
"""

import numpy as np

from meshmend.errors import UnsupportedError
from meshmend.schedule.ring_builders import NamedRows
from meshmend.schedule.table import COPY, REDUCE, Collective, Rows, Schedule, schedule_of
from meshmend.topology.graph import all_distances
from meshmend.topology.mesh import Mesh
from meshmend.trees.ways import Ways

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
    return _schedule(mesh, collective, "direct", ("send", rows))


def flood(mesh: Mesh, collective: Collective) -> Schedule:
    """Return the allreduce in which payloads go from neighbour to neighbour on shortest ways.

    Raises:
        UnsupportedError: too many chips.
    """
    check_whole_sums(mesh, "flood")
    hops = all_distances(mesh)
    senders, _ = Ways(mesh).back(hops)
    origin, target = np.nonzero(hops)
    # The nearest first, so that whoever hands a payload on has it.
    near_first = np.argsort(hops[origin, target], kind="stable")
    origin, target = origin[near_first], target[near_first]
    sender, lo = senders[origin, target], 0 * target
    rows = Rows(sender, target, lo, lo + 1, COPY, origin, origin)
    return _schedule(mesh, collective, "flood", ("hand on", rows))


def _schedule(mesh: Mesh, collective: Collective, name: str, sends: NamedRows) -> Schedule:
    """Return the schedule: all but the first rank put their own away, all send, all add.

    The payload of rank r is in buffer r everywhere. Buffer 0 is where the sum is wanted.
    """
    n = mesh.n_live
    rank = np.arange(1, n)
    chip, origin = (each.reshape(-1) for each in np.mgrid[0:n, 1:n])
    put_away = Rows(rank, rank, 0 * rank, 1 + 0 * rank, COPY, 0 * rank, rank)
    add = Rows(chip, chip, 0 * chip, 1 + 0 * chip, REDUCE, origin)
    return schedule_of(
        [("put away", put_away), sends, ("add", add)],
        algorithm=name,
        collective=collective,
        owners=np.zeros(1, dtype=np.int32),
        n_ranks=n,
    )
