"""The proof that no message waits for ever: the channel-dependency graph and its cycles.

A message that holds a channel waits for the next channel of its path. Routes cannot deadlock
if, on each virtual channel, these waits form no cycle (Dally and Seitz 1987). The proof
reads finished routes only, so it does not depend on how they were made.

The graph is an array (channels, ports): entry `[c, q]` is the channel that leaves the far end
of channel c by port q, if some path takes it after c, else -1.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import DeadlockError
from meshmend.kernels import kernel, plain_kernel
from meshmend.topology.graph import breadth_first
from meshmend.topology.mesh import Mesh
from meshmend.topology.routes import Routes, check_paths


def check_deadlock_free(mesh: Mesh, routes: Routes) -> None:
    """Prove that on no virtual channel these routes can wait for each other in a circle.

    Raises:
        VerificationError: a path is broken.
        DeadlockError: they can; the message prints the circle, chip by chip.
    """
    check_paths(mesh, routes)
    assert routes.virtual_channel.max(initial=0) < max(1, routes.n_virtual_channels)
    n_ranks, n_ports = mesh.neighbor_ranks.shape
    waits = np.full((routes.n_virtual_channels, n_ranks * n_ports, n_ports), -1, dtype=np.int32)
    _fill_waits(routes.hop_ptr, routes.channels, routes.virtual_channel, waits)
    for number in range(routes.n_virtual_channels):
        _check_waits(mesh, waits[number], number)


@plain_kernel
def _fill_waits(hop_ptr, channels, virtual_channel, waits):  # type: ignore[no-untyped-def]
    """Fill in which channels a message waits for while it holds another; see the module."""
    n_ports = waits.shape[2]
    for pair in range(len(virtual_channel)):
        for hop in range(hop_ptr[pair] + 1, hop_ptr[pair + 1]):
            there = channels[hop]
            waits[virtual_channel[pair], channels[hop - 1], there % n_ports] = there


def find_cycle(waits: NDArray[np.int32]) -> tuple[int, ...]:
    """Return a cycle of channels, each waiting for the next and the last for the first, or ().

    It is the shortest cycle through the channel at which the search found the first one.
    """
    waits.flags.writeable = False  # one kind of array, one compilation of the kernels
    start = int(_channel_on_cycle(waits))
    if start < 0:
        return ()
    distance, queue = np.empty((2, len(waits)), dtype=np.int32)
    n_reached = breadth_first(waits, start, distance, queue)
    here = next(channel for channel in queue[:n_reached] if start in waits[channel])
    cycle = [int(here)]
    while here != start:
        before = np.nonzero((waits == here).any(axis=1) & (distance == distance[here] - 1))[0]
        here = before[0]
        cycle.append(int(here))
    return tuple(reversed(cycle))


@kernel
def _channel_on_cycle(waits: NDArray[np.int32]) -> int:
    """Return a channel that waits, step by step, for itself, or -1: a depth-first search."""
    n_channels, n_ports = waits.shape
    is_open = np.zeros(n_channels, dtype=np.bool_)
    n_tried = np.zeros(n_channels, dtype=np.int64)
    stack = np.empty(n_channels, dtype=np.int64)
    for start in range(n_channels):
        if n_tried[start] == n_ports:
            continue
        stack[0], depth = start, 1
        is_open[start] = True
        while depth:
            here = stack[depth - 1]
            if n_tried[here] == n_ports:
                is_open[here] = False
                depth -= 1
                continue
            there = waits[here, n_tried[here]]
            n_tried[here] += 1
            if there < 0:
                continue
            if is_open[there]:
                return int(there)
            if n_tried[there] == 0:
                is_open[there] = True
                stack[depth] = there
                depth += 1
    return -1


def _check_waits(mesh: Mesh, waits: NDArray[np.int32], virtual_channel: int) -> None:
    if cycle := find_cycle(waits):
        circle = " waits for ".join(_in_words(mesh, (*cycle, cycle[0])))
        raise DeadlockError(
            f"routes need channels that never wait in a circle, but on virtual channel "
            f"{virtual_channel} {circle}; routes_for finds routes that do not"
        )


def _in_words(mesh: Mesh, channels: tuple[int, ...]) -> Iterator[str]:
    n_ports = mesh.neighbor_ranks.shape[1]
    for channel in channels:
        rank, port = divmod(channel, n_ports)
        yield f"{mesh.live[rank]}->{mesh.live[mesh.neighbor_ranks[rank, port]]}"
