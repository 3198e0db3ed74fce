"""Probes of links measure what they say, and no message of a flood waits for another."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.planning.link_probes import (
    PIECE_BYTES,
    PING_HOPS,
    fabric_from,
    fabric_probes,
    flood,
    on_processors,
    ping,
    processor_probes,
)
from meshmend.schedule.hazards import hazards_of
from meshmend.topology.fabric import Fabric
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from meshmend.transport.event_loop import HEADER_BYTES


@given(
    st.floats(1e4, 1e10),
    st.floats(0, 1e-2),
    st.floats(0, 1e-3),
    st.integers(16, 512),
)
def test_figures_come_back_out_of_the_times_that_they_cause(
    bandwidth: float, latency_s: float, more_s: float, n_pieces: int
) -> None:
    piece_s = PIECE_BYTES / bandwidth
    overhead_s = HEADER_BYTES / bandwidth + more_s
    start_s = latency_s + overhead_s
    ping_s = PING_HOPS * start_s
    short_s, long_s = start_s + n_pieces * piece_s, start_s + 3 * n_pieces * piece_s
    stream_s = start_s + 3 * n_pieces * piece_s + (3 * n_pieces - 1) * overhead_s

    fabric = fabric_from(Mesh((2, 2)), ping_s, short_s, long_s, stream_s, n_pieces=n_pieces)

    if start_s < n_pieces * piece_s:  # else the bytes are lost in the latency
        assert fabric.link_bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=1e-6)
        assert fabric.message_overhead_s == pytest.approx(overhead_s, rel=1e-6, abs=1e-9)
        assert fabric.hop_latency_s == pytest.approx(latency_s, rel=1e-6, abs=1e-9)


def test_a_message_is_never_cheaper_than_its_header() -> None:
    """Where a bucket lets short messages pass, and noise hides what pieces cost, that is known."""
    fabric = fabric_from(
        Mesh((2, 2)), ping_s=1e-3, short_s=0.1, long_s=0.3, stream_s=0.29, n_pieces=48
    )

    rate = 2 * 48 * PIECE_BYTES / 0.2
    assert fabric.message_overhead_s == pytest.approx(HEADER_BYTES / rate)
    assert fabric.hop_latency_s == 0


@given(
    st.floats(1e-6, 1e-3),
    st.floats(1e-7, 1e-5),
    st.floats(1, 10),
    st.floats(1e7, 1e10),
)
def test_processors_come_back_out_of_the_work_that_they_do(
    start_s: float, awake_s: float, times_longer: float, bytes_per_s: float
) -> None:
    mesh, links = parse_mesh("4x4", fail=["2x2@0,2"]), Fabric("links", 1e6, 1e-3, 1e-5)
    probes = (*fabric_probes(mesh, 64, 2), *processor_probes(mesh))

    def busy_s(name: str, n_rows: int, n_sent: float) -> float:
        message_s = awake_s * (times_longer if name == "pings" else 1)
        return 12 * start_s + 2 * n_rows * message_s + 2 * n_sent / bytes_per_s

    found = on_processors(
        links,
        2,
        probes,
        [
            busy_s(
                each.name, each.schedule.n_rows, each.schedule.row_fractions().sum() * each.n_bytes
            )
            for each in probes
        ],
    )

    assert found.processors is not None
    message_s = awake_s * times_longer**0.5
    assert found.processors.n == 2
    assert found.processors.start_s == pytest.approx(start_s, rel=1e-3, abs=1e-9)
    assert found.processors.message_s == pytest.approx(message_s, rel=1e-3)
    assert found.processors.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-3)
    assert found.hop_latency_s == pytest.approx(1e-3 - 2 * message_s, rel=1e-6)
    assert found.link_bandwidth_bytes_per_s == links.link_bandwidth_bytes_per_s


def test_no_more_pairs_ping_than_there_are_processors() -> None:
    few, all_pairs = ping(parse_mesh("4x4"), 2).schedule, ping(parse_mesh("4x4")).schedule

    assert (few.n_rows, all_pairs.n_rows) == (2 * PING_HOPS, 8 * PING_HOPS)


@pytest.mark.parametrize(
    "mesh",
    [
        parse_mesh("3x4", fail=["1,1"]),
        parse_mesh("3", wrap="all"),
        parse_mesh("3x5x4", wrap="all", fail=["0,0,0"]),
        parse_mesh("1x2"),
    ],
    ids=str,
)
def test_a_flood_fills_every_link_both_ways_and_waits_for_nothing(mesh: Mesh) -> None:
    probe = flood(mesh, "flood", 5, 64)

    pairs, counts = np.unique(
        np.stack([probe.schedule.src, probe.schedule.dst]), axis=1, return_counts=True
    )
    assert pairs.shape[1] == 2 * len(mesh.links)
    assert set(counts.tolist()) == {5}
    hazards, rows = hazards_of(probe.schedule), range(probe.schedule.n_rows)
    assert not any(hazards.before_send(row) or hazards.before_write(row) for row in rows)


def test_a_flood_leaves_out_slow_links() -> None:
    mesh = parse_mesh("2x3", slow=["link:0,0-0,1=0.5", "link:0,1-0,2=0.9"])

    probe = flood(mesh, "flood", 2, 64)

    ends = probe.schedule.src.tolist(), probe.schedule.dst.tolist()
    links = {tuple(sorted(pair)) for pair in zip(*ends, strict=True)}
    assert len(links) == len(mesh.links) - 2
    assert not links & {(0, 1), (1, 2)}


def test_a_ping_goes_to_and_fro_between_pairs_that_share_no_chip() -> None:
    mesh = parse_mesh("3x4", fail=["1,1"])

    probe = ping(mesh)

    ends = np.sort(np.stack([probe.schedule.src, probe.schedule.dst]), axis=0)
    pairs, counts = np.unique(ends, axis=1, return_counts=True)
    assert len(np.unique(pairs)) == 2 * pairs.shape[1] == 10
    assert set(counts.tolist()) == {PING_HOPS}
    hazards = hazards_of(probe.schedule)
    waits = [len(hazards.before_send(row)) for row in range(probe.schedule.n_rows)]
    assert waits == [0] * pairs.shape[1] + [1] * (probe.schedule.n_rows - pairs.shape[1])
