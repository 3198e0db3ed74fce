"""The fabric as this bench finds it: three probes through the same sockets as the contenders.

    ping     one pair of neighbours, one empty message to and fro     latency + overhead
    bulk     every link both ways at once, one long message           bandwidth
    stream   every link both ways at once, the same bytes in pieces   overhead of a message

Bandwidth is measured with every link busy in both directions, because acknowledgements take their
part of it and all chips share the processors. So is the overhead, with pieces short enough that
the processors are what they cost.
"""

import statistics
from collections.abc import Callable

import numpy as np

from meshmend.bench.contenders import Planned
from meshmend.bench.crew import Crew
from meshmend.bench.seats import ITEM_BYTES, Ground
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.table import COPY, Collective, Rows, schedule_of
from meshmend.topology.fabric import Fabric
from meshmend.topology.mesh import Mesh

MEASURED = "measured"
_LAPS = 5
_PING_HOPS = 100
_PIECE_BYTES = 2048
_BULK_S = 0.15
_LOOPBACK_BYTES = 1 << 20
_LEAST_PIECES, _MOST_PIECES = 32, 512


def measured_fabric(ground: Ground, tell: Callable[[str], None]) -> Fabric:
    """Return the link figures of a ground, medians of a few probes each.

    Raises:
        BenchError: a probe did not finish.
    """
    rate = None if ground.bed is None else ground.bed.link_bandwidth
    wanted_bytes = _LOOPBACK_BYTES if rate is None else _BULK_S * rate
    n_pieces = int(np.clip(wanted_bytes // _PIECE_BYTES, _LEAST_PIECES, _MOST_PIECES))
    ping, bulk, stream = (
        _ping(ground.mesh),
        _flood(ground.mesh, "bulk", 1, n_pieces * _PIECE_BYTES),
        _flood(ground.mesh, "stream", n_pieces, _PIECE_BYTES),
    )
    times: dict[str, list[float]] = {probe.name: [] for probe in (ping, bulk, stream)}
    with Crew(ground, (ping, bulk, stream)) as crew:
        for lap in range(_LAPS + 1):
            for probe in (ping, bulk, stream):
                tell(f"measuring links: {probe.name}")
                time_s = crew.lap(probe).time_s
                if lap:  # the first fills caches and opens windows
                    times[probe.name].append(time_s)
    ping_s, bulk_s, stream_s = (statistics.median(times[name]) for name in times)
    return fabric_from(ping_s / _PING_HOPS, bulk_s, stream_s, n_pieces=n_pieces)


def fabric_from(hop_s: float, bulk_s: float, stream_s: float, *, n_pieces: int) -> Fabric:
    """Return the fabric on which the simulator gives the probes these times.

    `hop_s` is what an empty message takes; the others carried `n_pieces` pieces each way.
    """
    overhead_s = max(0.0, (stream_s - bulk_s) / max(1, n_pieces - 1))
    overhead_s = min(overhead_s, hop_s)
    bulk_bytes = n_pieces * _PIECE_BYTES
    bandwidth = bulk_bytes / max(bulk_s - hop_s, 1e-9)
    return Fabric(
        MEASURED,
        bandwidth,
        hop_latency_s=hop_s - overhead_s,
        message_overhead_s=overhead_s,
        source="measured by the bench on its own network, through its own sockets",
    )


def _ping(mesh: Mesh) -> Planned:
    """Return a chain of messages of one element between the first two neighbours."""
    one, other = mesh.links[0].tolist()
    there = np.tile(np.array([one, other]), _PING_HOPS // 2)
    zero = np.zeros(_PING_HOPS, dtype=np.int64)
    return _probe(mesh, "ping", Rows(there, one + other - there, zero, zero + 1, COPY), 1)


def _flood(mesh: Mesh, name: str, n_pieces: int, piece_bytes: int) -> Planned:
    """Return so many messages over every link in each direction, none waiting for another.

    A rank sends one set of chunks, one for each port, and receives the other set: the sets
    alternate over the mesh as the colours of a chess board do.
    """
    sender, port = np.nonzero(mesh.neighbor_ranks >= 0)
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
        collective=Collective.ALL_GATHER,
        owners=np.zeros(n_chunks, dtype=np.int64),
        n_ranks=mesh.n_live,
    )
    return Planned(name, n_elements, schedule, hazards_of(schedule), 1, is_sum=False)
