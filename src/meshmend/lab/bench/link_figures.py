"""Measures the fabric with probes through the same sockets that the contenders use.

    probe    what it sends                                             what it measures
    ping     short messages to and fro between pairs of neighbours     latency + overhead
    short    one message over every link, both ways at once
    long     the same, three times as long                             long - short: bandwidth
    stream   as many bytes as long, in pieces                          stream - long: overhead

Every probe keeps many chips busy at once, because chips share the processors. The probes of
bandwidth use every link in both directions, because acknowledgements use bandwidth, too; slow links
are left out, because the fabric has the bandwidth of the others. The fastest of a few repetitions
counts: other work of the machine only makes a probe slower.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from meshmend.lab.bench.contenders import ITEM_BYTES, Network, Planned
from meshmend.lab.bench.worker_pool import WorkerPool
from meshmend.planning.proof import check_probe
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.table import COPY, Collective, Rows, schedule_of
from meshmend.topology.fabric import Fabric
from meshmend.topology.mesh import Mesh

MEASURED = "measured"
_N_REPETITIONS = 4
_PING_HOPS = 100
_PIECE_BYTES = 2048
_SHORT_S = 0.08
_LOOPBACK_BYTES = 1 << 19
_LEAST_PIECES, _MOST_PIECES = 16, 512  # of the short probe
_TIMES_LONGER = 3


def measured_fabric(network: Network, progress: Callable[[str], None]) -> Fabric:
    """Return the link figures of a network.

    Raises:
        BenchmarkError: a probe did not finish.
    """
    rate = None if network.bed is None else network.bed.link_bandwidth
    wanted_bytes = _LOOPBACK_BYTES if rate is None else _SHORT_S * rate
    n_pieces = int(np.clip(wanted_bytes // _PIECE_BYTES, _LEAST_PIECES, _MOST_PIECES))
    n_long = _TIMES_LONGER * n_pieces
    probes = (
        _ping(network.mesh),
        _flood(network.mesh, "short", 1, n_pieces * _PIECE_BYTES),
        _flood(network.mesh, "long", 1, n_long * _PIECE_BYTES),
        _flood(network.mesh, "stream", n_long, _PIECE_BYTES),
    )
    fastest = dict.fromkeys((probe.name for probe in probes), math.inf)
    with WorkerPool(network, probes) as pool:
        for repetition in range(_N_REPETITIONS + 1):
            for probe in probes:
                progress(f"measuring links: {probe.name}")
                time_s = pool.measure(probe).time_s
                if repetition:  # the first one fills caches and opens TCP windows
                    fastest[probe.name] = min(fastest[probe.name], time_s)
    fabric = fabric_from(*fastest.values(), n_pieces=n_pieces)
    fastest_link = float(network.mesh.link_speeds.max())
    return replace(
        fabric, link_bandwidth_bytes_per_s=fabric.link_bandwidth_bytes_per_s / fastest_link
    )


def fabric_from(
    ping_s: float, short_s: float, long_s: float, stream_s: float, *, n_pieces: int
) -> Fabric:
    """Return the fabric on which the probes take these times; the short probe has `n_pieces`.

    If noise makes the difference of long and short too small, the long probe alone gives the
    bandwidth.
    """
    n_long = _TIMES_LONGER * n_pieces
    more_bytes, more_s = (n_long - n_pieces) * _PIECE_BYTES, long_s - short_s
    if more_s <= 0.5 * long_s * (1 - 1 / _TIMES_LONGER):
        more_bytes, more_s = n_long * _PIECE_BYTES, long_s
    hop_s = ping_s / _PING_HOPS
    overhead_s = min(hop_s, max(0.0, (stream_s - long_s) / (n_long - 1)))
    return Fabric(
        MEASURED,
        more_bytes / more_s,
        hop_latency_s=hop_s - overhead_s,
        message_overhead_s=overhead_s,
        source="measured by the bench on its own network, through its own sockets",
    )


def _ping(mesh: Mesh) -> Planned:
    """Return messages of one element to and fro between the pairs of a matching, in a chain."""
    pairs = _matching(mesh)
    to_and_fro = np.concatenate([pairs, pairs[:, ::-1]])
    src, dst = np.tile(to_and_fro, (_PING_HOPS // 2, 1)).T
    pair = np.tile(np.arange(len(pairs)), _PING_HOPS)
    n_pairs = len(pairs)
    return _probe(mesh, "ping", Rows(src, dst, pair, pair + 1, COPY), n_pairs, n_pairs)


def _matching(mesh: Mesh) -> NDArray[np.int64]:
    """Return a maximal matching: links of which no two share a chip."""
    taken: set[int] = set()
    chosen = []
    for pair in mesh.links.tolist():
        if taken.isdisjoint(pair):
            taken.update(pair)
            chosen.append(pair)
    return np.array(chosen, dtype=np.int64)


def _flood(mesh: Mesh, name: str, n_pieces: int, piece_bytes: int) -> Planned:
    """Return `n_pieces` messages over every link in each direction; no message waits for another.

    A rank sends one set of chunks, one for each port, and receives the other set: the sets
    alternate over the mesh as the colours of a chess board do.
    """
    is_live = mesh.neighbor_ranks >= 0
    sender, port = np.nonzero(is_live & (mesh.port_speeds >= mesh.link_speeds.max()))
    receiver = mesh.neighbor_ranks[sender, port].astype(np.int64)
    n_ports = mesh.neighbor_ranks.shape[1]
    colour = np.array(mesh.live).sum(axis=1) % 2
    first = (colour[sender] * n_ports + port) * n_pieces
    chunk = (first + np.arange(n_pieces)[:, None]).reshape(-1)
    src, dst = np.tile(sender, n_pieces), np.tile(receiver, n_pieces)
    n_chunks = 2 * n_ports * n_pieces
    n_elements = n_chunks * piece_bytes // ITEM_BYTES
    return _probe(mesh, name, Rows(src, dst, chunk, chunk + 1, COPY), n_elements, n_chunks)


def _probe(mesh: Mesh, name: str, rows: Rows, n_elements: int, n_chunks: int = 1) -> Planned:
    schedule = schedule_of(
        [(name, rows)],
        algorithm=name,
        collective=Collective.ALL_GATHER,  # in name only: nobody uses the data of a probe
        owners=np.zeros(n_chunks, dtype=np.int64),
        n_ranks=mesh.n_live,
    )
    check_probe(mesh, schedule)
    return Planned(name, n_elements, schedule, hazards_of(schedule), 1, checked=None)
