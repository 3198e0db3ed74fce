"""The search for slices, the trace file, and the baselines."""

import gzip
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from meshmend.errors import InputError
from meshmend.planning.pricing import on_ranks, program_on_part
from meshmend.schedule.algorithms import algorithm
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.table import Collective
from meshmend.simulator.limit import limit
from meshmend.simulator.network_program import Program, program_of
from meshmend.simulator.rules import simulate
from meshmend.simulator.slices import best_slices
from meshmend.simulator.trace import save_trace, trace_events
from meshmend.topology.fabric import fabric
from meshmend.topology.mesh import Mesh
from meshmend.topology.routes import routes_for
from meshmend.topology.submesh import largest_box, without_lines
from meshmend.topology.text import parse_mesh

REFERENCE = fabric("reference")


def program_named(name: str, mesh: Mesh) -> Program:
    schedule = algorithm(name).build(mesh, Collective.ALLREDUCE)
    routes = routes_for(mesh, schedule.src, schedule.dst)
    return program_of(schedule, hazards_of(schedule), routes)


ROW_PAIR = program_named("row-pair", parse_mesh("4x4"))
RANK_RING = program_named("rank-ring", parse_mesh("4x4", fail=["2x2@1,1"]))


@pytest.mark.parametrize("payload_bytes", [1e2, 1e4, 1e5, 1e6, 1e7, 1e8])
@pytest.mark.parametrize("program", [ROW_PAIR, RANK_RING], ids=["row-pair", "rank-ring"])
def test_the_search_is_at_most_five_percent_off_the_best_of_many_numbers(
    program: Program, payload_bytes: float
) -> None:
    found = best_slices(program, REFERENCE, payload_bytes=payload_bytes)

    least = min(
        simulate(program, REFERENCE, payload_bytes=payload_bytes, slices=slices).time_s
        for slices in (*range(1, 17), 20, 24, 28, 32, 48, 64, 96, 128)
    )
    assert found.time_s <= 1.05 * least


def test_a_tiny_payload_takes_one_slice_and_a_large_one_takes_many() -> None:
    tiny = best_slices(ROW_PAIR, REFERENCE, payload_bytes=64)
    large = best_slices(ROW_PAIR, REFERENCE, payload_bytes=1e7)

    assert tiny.slices == 1
    assert large.slices > 4
    assert large.time_s < simulate(ROW_PAIR, REFERENCE, payload_bytes=1e7, slices=1).time_s


def test_the_search_stays_within_its_messages_but_for_the_first_attempt() -> None:
    told: list[float] = []

    only_one = best_slices(ROW_PAIR, REFERENCE, payload_bytes=1e7, max_messages=1)
    two = best_slices(
        ROW_PAIR,
        REFERENCE,
        payload_bytes=1e7,
        max_messages=3 * ROW_PAIR.n_rows,
        progress=told.append,
    )

    assert only_one.slices == 1
    assert two.slices == 2
    assert told == pytest.approx([1 / 3, 1.0])


def test_no_messages_at_all_are_refused() -> None:
    with pytest.raises(InputError, match="max_messages of 1 or more, but got 0"):
        best_slices(ROW_PAIR, REFERENCE, payload_bytes=1, max_messages=0)


@pytest.mark.parametrize("name", ["ring-1d", "two-d", "row-pair", "rank-ring"])
@pytest.mark.parametrize("payload_bytes", [1e3, 1e6, 1e9])
def test_no_algorithm_beats_the_limit(name: str, payload_bytes: float) -> None:
    mesh = parse_mesh("4x4")

    result = best_slices(program_named(name, mesh), REFERENCE, payload_bytes=payload_bytes)

    assert result.time_s >= limit(mesh, REFERENCE, payload_bytes).time_s


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_file_has_a_named_track_for_every_bar(tmp_path: Path, name: str) -> None:
    mesh = parse_mesh("4x4", fail=["2x2@0,0"])
    program = program_named("rank-ring", mesh)
    result = simulate(program, REFERENCE, payload_bytes=1e6, slices=2, trace=True)

    save_trace(result, mesh, tmp_path / name)

    raw = (tmp_path / name).read_bytes()
    read = json.loads(gzip.decompress(raw) if name.endswith(".gz") else raw)
    bars = [event for event in read["traceEvents"] if event["ph"] == "X"]
    names = [event for event in read["traceEvents"] if event["ph"] == "M"]
    assert len(bars) == 2 * program.n_hops
    assert {bar["pid"] for bar in bars} == {n["pid"] for n in names if n["name"] == "process_name"}
    tracks = {(n["pid"], n["tid"]): n["args"]["name"] for n in names if n["name"] == "thread_name"}
    assert tracks.keys() == {(bar["pid"], bar["tid"]) for bar in bars}
    assert tracks[1, 4] == "to (0, 3)"
    assert {bar["args"]["op"] for bar in bars} == {"reduce", "copy"}
    assert max(bar["ts"] + bar["dur"] for bar in bars) == pytest.approx(
        (result.time_s - REFERENCE.hop_latency_s) * 1e6, abs=1e-3
    )


@pytest.mark.parametrize("payload_bytes", [1e3, 1e6])
def test_a_trace_keeps_the_rules_of_the_trace_event_format(payload_bytes: float) -> None:
    """What Perfetto needs: bars of a track that do not overlap in whole ns, and no process 0."""
    mesh = parse_mesh("4x4")
    result = simulate(
        program_named("row-pair", mesh),
        REFERENCE,
        payload_bytes=payload_bytes,
        slices=7,
        trace=True,
    )

    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in trace_events(result, mesh):
        assert event["ph"] in {"M", "X"}
        assert event["pid"] >= 1
        assert event.get("tid", 1) >= 1
        assert isinstance(event["name"], str)
        if event["ph"] == "X":
            start, length = event["ts"] * 1000, event["dur"] * 1000
            assert (start, length) == pytest.approx((round(start), round(length)), abs=1e-6)
            bars = tracks.setdefault((event["pid"], event["tid"]), [])
            bars.append((round(start), round(start) + round(length)))
    assert tracks
    for bars in tracks.values():
        bars.sort()
        assert all(before[1] <= after[0] and before[0] >= 0 for before, after in pairwise(bars))


def test_a_channel_never_carries_two_messages_at_once() -> None:
    mesh = parse_mesh("4x4")
    result = simulate(
        program_named("rank-ring", mesh), REFERENCE, payload_bytes=1e6, slices=3, trace=True
    )

    assert result.trace is not None
    order = np.lexsort((result.trace.start_s, result.trace.channel))
    channel, start = result.trace.channel[order], result.trace.start_s[order]
    overlap = result.trace.end_s[order][:-1] - start[1:]
    assert np.all(overlap[channel[1:] == channel[:-1]] <= 1e-15)


def test_a_trace_is_refused_without_times_or_with_another_mesh() -> None:
    mesh = parse_mesh("4x4")
    bare = simulate(ROW_PAIR, REFERENCE, payload_bytes=1, slices=1)
    traced = simulate(ROW_PAIR, REFERENCE, payload_bytes=1, slices=1, trace=True)

    with pytest.raises(InputError, match="simulate with trace=True"):
        trace_events(bare, mesh)
    with pytest.raises(InputError, match="with 64 channels, but 2x2 has 16"):
        trace_events(traced, parse_mesh("2x2"))


def test_a_baseline_uses_the_chips_of_its_part_and_takes_as_long_as_the_part_alone() -> None:
    mesh = parse_mesh("8x8", fail=["2x2@2,2"])
    box = largest_box(mesh)

    on_part = program_on_part(box, mesh, "row-pair", Collective.ALLREDUCE)

    alone = program_named("row-pair", box.mesh)
    ranks = set(on_part.schedule.src.tolist()) | set(on_part.schedule.dst.tolist())
    assert ranks == set(box.ranks.tolist())
    one, other = (
        simulate(program, REFERENCE, payload_bytes=1e6, slices=4) for program in (on_part, alone)
    )
    assert one.time_s == other.time_s


def test_dropped_rows_forward_what_the_rows_beside_them_send() -> None:
    mesh = parse_mesh("8x8", fail=["2x2@2,2"])

    program = program_on_part(without_lines(mesh), mesh, "row-pair", Collective.ALLREDUCE)

    routes = routes_for(mesh, program.schedule.src, program.schedule.dst)
    assert routes.max_hops > 1
    alone = program_named("row-pair", parse_mesh("6x8"))
    one, other = (
        simulate(each, REFERENCE, payload_bytes=1e6, slices=4) for each in (program, alone)
    )
    assert one.time_s > other.time_s


def test_a_schedule_on_other_ranks_moves_the_same_chunks_between_the_named_ranks() -> None:
    schedule = algorithm("ring-1d").build(parse_mesh("2x2"), Collective.ALLREDUCE)
    ranks = np.array([7, 3, 5, 1], dtype=np.int32)

    moved = on_ranks(schedule, ranks, 8)

    assert moved.n_ranks == 8
    assert moved.src.tolist() == [int(ranks[rank]) for rank in schedule.src]
    assert moved.owners.tolist() == [int(ranks[rank]) for rank in schedule.owners]
    assert moved.lo.tolist() == schedule.lo.tolist()
