"""Schedules that measure links through the sockets that sums use, and what their times mean.

    probe    what it sends                                             what it measures
    ping     short messages to and fro between pairs of neighbours     latency + overhead
    short    one message over every link, both ways at once
    long     the same, three times as long                             long - short: bandwidth
    stream   as many bytes as long, in pieces                          stream - long: overhead
    pings    a ping between many pairs at once                         what wakes a chip
    start    one short message over every link, both ways at once      what starting takes

What a probe keeps processors busy for, in all its chips together, says what these do: long for the
bytes, stream for messages that find their chip awake, pings for those that wake it, start for what
a chip does before its first message. Chips of one host share its processors, so pairs of a ping are
no more than those, unless no processors are measured: then probes keep many chips busy at once, and
the figures of links have a part of what processors do. The probes of
bandwidth use every link in both directions, because acknowledgements use bandwidth, too; slow links
are left out, because the fabric has the bandwidth of the others. Whoever runs them takes the
fastest of a few repetitions: other work of the machine only makes a probe slower.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.planning.proof import check_probe
from meshmend.schedule.table import COPY, Collective, Rows, Schedule, schedule_of
from meshmend.topology.fabric import Fabric, Processors
from meshmend.topology.mesh import Mesh
from meshmend.transport.event_loop import HEADER_BYTES

PIECE_BYTES: Final = 2048
PING_HOPS: Final = 100
TIMES_LONGER: Final = 3
_N_COLOURS: Final = 3
_PING_BYTES: Final = 4  # of a message
_LEAST_BYTE_S: Final = 1e-12


@dataclass(frozen=True)
class LinkProbe:
    """A schedule that measures links, and how many bytes it needs on every rank."""

    name: str
    schedule: Schedule
    n_bytes: int


def fabric_probes(
    mesh: Mesh, n_pieces: int, most_pairs: int | None = None
) -> tuple[LinkProbe, ...]:
    """Return the probes whose times `fabric_from` takes, in its order."""
    n_long = TIMES_LONGER * n_pieces
    return (
        ping(mesh, most_pairs),
        flood(mesh, "short", 1, n_pieces * PIECE_BYTES),
        flood(mesh, "long", 1, n_long * PIECE_BYTES),
        flood(mesh, "stream", n_long, PIECE_BYTES),
    )


def fabric_from(
    mesh: Mesh, ping_s: float, short_s: float, long_s: float, stream_s: float, *, n_pieces: int
) -> Fabric:
    """Return the fabric on which the probes take these times; the short probe has `n_pieces`.

    The bandwidth is that of a link of full speed, also if the mesh has none. If noise makes the
    difference of long and short too small, the long probe alone gives the bandwidth. What a message
    costs is at least what the link takes for its header.
    """
    n_long = TIMES_LONGER * n_pieces
    more_bytes, more_s = (n_long - n_pieces) * PIECE_BYTES, long_s - short_s
    if more_s <= 0.5 * long_s * (1 - 1 / TIMES_LONGER):
        more_bytes, more_s = n_long * PIECE_BYTES, long_s
    hop_s = ping_s / PING_HOPS
    bandwidth = more_bytes / more_s / float(mesh.link_speeds.max())
    header_s = HEADER_BYTES / bandwidth
    overhead_s = max(header_s, min(hop_s, (stream_s - long_s) / (n_long - 1)))
    return Fabric(
        "measured",
        bandwidth,
        hop_latency_s=max(0.0, hop_s - overhead_s),
        message_overhead_s=overhead_s,
        source="measured on the network itself, through the sockets that sums use",
    )


def processor_probes(mesh: Mesh) -> tuple[LinkProbe, ...]:
    """Return the probes that `on_processors` takes beside those of the fabric, in its order."""
    return ping(mesh, name="pings"), flood(mesh, "start", 1, _PING_BYTES)


def on_processors(
    fabric: Fabric, n: int, probes: Sequence[LinkProbe], busy_s: Sequence[float]
) -> Fabric:
    """Return a measured fabric with its `n` processors, which these probes kept busy so long.

    A chip of a probe starts, and a message keeps a processor busy at both ends. In a schedule some
    messages find their chip awake and others wake it, so a message takes the geometric mean of what
    these take: that is within a tenth of what sums of 64 KiB to 1 MiB took on 12 and on 60 chips.
    The latency of a hop is without what processors then take of it.
    """
    works = {probe.name: _works(probe) for probe in probes}
    took_s = dict(zip(works, busy_s, strict=True))
    names = ("start", "long", "stream")
    start_s, awake_s, byte_s = np.linalg.solve(
        np.stack([works[name] for name in names]), [took_s[name] for name in names]
    ).clip(0.0)
    n_chips, n_ends, n_bytes = works["pings"]
    woken_s = (took_s["pings"] - n_chips * start_s - n_bytes * byte_s) / n_ends
    message_s = math.sqrt(awake_s * max(awake_s, woken_s))
    bytes_per_s = float(1 / max(byte_s, _LEAST_BYTE_S))
    processors = Processors(n, message_s, bytes_per_s, float(start_s))
    latency_s = max(0.0, fabric.hop_latency_s - 2 * message_s)
    return replace(fabric, hop_latency_s=latency_s, processors=processors)


def _works(probe: LinkProbe) -> tuple[float, float, float]:
    """Return how many chips a probe has, and at how many ends of messages how many bytes are."""
    schedule = probe.schedule
    n_chips = len(np.union1d(schedule.src, schedule.dst))
    return (
        n_chips,
        2.0 * schedule.n_rows,
        2.0 * float(schedule.row_fractions().sum()) * probe.n_bytes,
    )


def ping(mesh: Mesh, most_pairs: int | None = None, *, name: str = "ping") -> LinkProbe:
    """Return messages of one element to and fro between the pairs of a matching, in a chain."""
    pairs = _matching(mesh)[:most_pairs]
    to_and_fro = np.concatenate([pairs, pairs[:, ::-1]])
    src, dst = np.tile(to_and_fro, (PING_HOPS // 2, 1)).T
    pair = np.tile(np.arange(len(pairs)), PING_HOPS)
    rows = Rows(src, dst, pair, pair + 1, COPY)
    return _probe(mesh, name, rows, len(pairs), _PING_BYTES * len(pairs))


def _matching(mesh: Mesh) -> NDArray[np.int64]:
    """Return a maximal matching: links of which no two share a chip."""
    taken: set[int] = set()
    chosen = []
    for pair in mesh.links.tolist():
        if taken.isdisjoint(pair):
            taken.update(pair)
            chosen.append(pair)
    return np.array(chosen, dtype=np.int64)


def flood(mesh: Mesh, name: str, n_pieces: int, piece_bytes: int) -> LinkProbe:
    """Return `n_pieces` messages over every link in each direction; no message waits for another.

    A rank sends one set of chunks, one for each port, and receives those of its neighbours: the
    sets are colours of chips, and no two neighbours have one colour.
    """
    is_live = mesh.neighbor_ranks >= 0
    sender, port = np.nonzero(is_live & (mesh.port_speeds >= mesh.link_speeds.max()))
    receiver = mesh.neighbor_ranks[sender, port].astype(np.int64)
    n_ports = mesh.neighbor_ranks.shape[1]
    first = (_colours(mesh)[sender] * n_ports + port) * n_pieces
    chunk = (first + np.arange(n_pieces)[:, None]).reshape(-1)
    src, dst = np.tile(sender, n_pieces), np.tile(receiver, n_pieces)
    n_chunks = _N_COLOURS * n_ports * n_pieces
    rows = Rows(src, dst, chunk, chunk + 1, COPY)
    return _probe(mesh, name, rows, n_chunks, n_chunks * piece_bytes)


def _colours(mesh: Mesh) -> NDArray[np.int64]:
    """Return a colour of three for each rank, such that neighbours differ.

    Along an axis colours alternate, and the last chip of an odd ring has the third one. The sum
    over the axes differs wherever one axis does.
    """
    place = np.array(mesh.live)
    is_odd_end = (place == np.array(mesh.shape) - 1) & (place % 2 == 0)
    along = np.where(is_odd_end, _N_COLOURS - 1, place % 2)
    colours: NDArray[np.int64] = along.sum(axis=1) % _N_COLOURS
    return colours


def _probe(mesh: Mesh, name: str, rows: Rows, n_chunks: int, n_bytes: int) -> LinkProbe:
    schedule = schedule_of(
        [(name, rows)],
        algorithm=name,
        collective=Collective.ALL_GATHER,  # in name only: nobody uses the data of a probe
        owners=np.zeros(n_chunks, dtype=np.int64),
        n_ranks=mesh.n_live,
    )
    check_probe(mesh, schedule)
    return LinkProbe(name, schedule, n_bytes)
