"""Shortest ways of many trees at once, such that few messages are late.

All messages start as soon as they can, and on a channel those with the most hops to go leave first.
In the time of a hop only so many can leave: those are **late** for which there was no room. Of
several neighbours that are one hop nearer a rank takes the one whose channel is late the least, and
of those the one that carries the least. Knows nothing of bytes and seconds.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.kernels import kernel
from meshmend.topology.mesh import Mesh

Ranks = NDArray[np.int32]

# Messages that leave on a channel in the time of a hop. They are 2 to 6 where such trees are best;
# with 2, 3, 4 or 6 here times differ by a percent or two, either way.
MESSAGES_PER_HOP: Final = 4.0
_WORTH_OF_LATE: Final = 3.0  # a message late, in messages on the channel; 1 takes up to 4 % longer
_SWEEPS: Final = 3  # over all ranks of all trees; 6 are no better, 1 takes 1 to 4 % longer


class Ways:
    """Shortest ways over a mesh that share its channels, those to and those from ends."""

    def __init__(self, mesh: Mesh) -> None:
        self._neighbors, self._slowness = mesh.neighbor_ranks, 1 / mesh.port_speeds
        n_ranks, n_ports = mesh.neighbor_ranks.shape
        outwards = np.arange(n_ranks * n_ports, dtype=np.int32).reshape(n_ranks, n_ports)
        opposite = np.arange(n_ports, dtype=np.int32) ^ 1
        inwards = np.where(self._neighbors >= 0, self._neighbors * n_ports + opposite, outwards)
        self._outwards, self._inwards = outwards, inwards.astype(np.int32)
        self._loads = np.zeros(n_ranks * n_ports)

    @property
    def load(self) -> float:
        """How many messages the busiest channel carries, a slow one so much more."""
        return float(self._loads.max())

    def to(self, hops: Ranks) -> tuple[Ranks, float]:
        """Return each rank's neighbour one hop nearer in each tree, and how many messages are late.

        `hops` (trees, ranks) is to the ends of each tree, which have no such neighbour: -1.
        """
        return self._found(self._outwards, hops)

    def back(self, hops: Ranks) -> tuple[Ranks, float]:
        """Return the same for messages that go the other way, from the ends."""
        return self._found(self._inwards, hops)

    def _found(self, channels: Ranks, hops: Ranks) -> tuple[Ranks, float]:
        nearer, late = _ways(self._neighbors, channels, self._slowness, hops, self._loads)
        return nearer, float(late)


@kernel
def _ways(neighbors, channels, slowness, hops, loads):  # type: ignore[no-untyped-def]
    """Return each rank's neighbour one hop nearer in each tree, -1 at zero hops, and what is late.

    Adds to the loads. Of a channel's messages those with d hops or more leave before the others, so
    that many less those that leave in the time of the hops beyond d are late.
    """
    (n_trees, n_ranks), n_ports = hops.shape, neighbors.shape[1]
    most_hops = hops.max()
    # How many messages of so many hops or more each channel carries.
    n_before = np.zeros((len(loads), most_hops + 1))
    ports = np.full(hops.shape, -1, dtype=np.int8)
    for _ in range(_SWEEPS):
        for tree in range(n_trees):
            for rank in range(n_ranks):
                far = hops[tree, rank]
                if far == 0:
                    continue
                port = ports[tree, rank]
                if port >= 0:
                    loads[channels[rank, port]] -= slowness[rank, port]
                    n_before[channels[rank, port], : far + 1] -= slowness[rank, port]
                best, least = -1, 0.0
                for turn in range(n_ports):
                    port = (tree + rank + turn) % n_ports
                    beside = neighbors[rank, port]
                    if beside < 0 or hops[tree, beside] >= far:
                        continue
                    channel, slow = channels[rank, port], slowness[rank, port]
                    late = 0.0
                    for each in range(far, 0, -1):
                        room = (most_hops - each) * MESSAGES_PER_HOP
                        late = max(late, n_before[channel, each] + slow - room)
                    cost = loads[channel] + slow + _WORTH_OF_LATE * late
                    if best < 0 or cost < least:
                        best, least = port, cost
                ports[tree, rank] = best
                loads[channels[rank, best]] += slowness[rank, best]
                n_before[channels[rank, best], : far + 1] += slowness[rank, best]
    late, nearer = 0.0, np.full(hops.shape, -1, dtype=np.int32)
    for each in range(1, most_hops + 1):
        room = (most_hops - each) * MESSAGES_PER_HOP
        late = max(late, n_before[:, each].max() - room)
    for tree in range(n_trees):
        for rank in range(n_ranks):
            if ports[tree, rank] >= 0:
                nearer[tree, rank] = neighbors[rank, ports[tree, rank]]
    return nearer, late
