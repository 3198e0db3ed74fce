"""A job runs the plan, and the slices, that `plan` returns for the fabric that it is given."""

from collections.abc import Callable
from pathlib import Path

import pytest

from meshmend.config import SumConfig
from meshmend.errors import InputError
from meshmend.planning import catalogue
from meshmend.planning.catalogue import (
    Catalogue,
    CollectiveCall,
    auto_on,
    default_slices,
    payload_class,
    planned_pipeline,
)
from meshmend.planning.plan import Plan, plan
from meshmend.planning.plan_cache import load_plans, packed_plan, remember_packed, store_plans
from meshmend.planning.proof import prove
from meshmend.planning.settings import settings_of
from meshmend.schedule.priority import remaining_hops
from meshmend.schedule.table import Schedule
from meshmend.simulator.network_program import program_of
from meshmend.simulator.rules import simulate
from meshmend.topology.fabric import FABRICS
from meshmend.topology.fabric import fabric as fabric_named
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh

SUM = CollectiveCall("allreduce")
FIGURES = "6.15MB/s,44us,12us"
SLOW = parse_mesh("4x4", slow=["link:0,0-0,1=0.25"])


def on(mesh: Mesh, n_bytes: int, algorithm: str) -> tuple[Schedule, int]:
    """Return the schedule and the slices that a rank runs for a sum."""
    task = Catalogue(mesh, algorithm, 0, 0).task(SUM, n_bytes // 4, "float32")
    return task.program.schedule, task.layout.n_slices


def test_ranks_run_what_plan_returns_for_the_fabric() -> None:
    n_bytes = payload_class(SUM, 1 << 20)
    made = plan(SLOW, payload=n_bytes, fabric=fabric_named(FIGURES))

    schedule, slices = on(SLOW, n_bytes, auto_on(FIGURES))

    assert made.pipeline is not None
    assert schedule.digest == made.schedule.digest
    assert slices == made.pipeline.slices
    assert slices > default_slices(schedule, n_bytes)


@pytest.mark.parametrize("n_bytes", [1 << 16, 3 << 18, 1 << 20])
def test_that_is_faster_there_than_what_they_run_without_one(n_bytes: int) -> None:
    fabric = FABRICS["testbed-50mbit"]

    def time_s(algorithm: str) -> float:
        schedule, slices = on(SLOW, n_bytes, algorithm)
        proved = prove(SLOW, schedule)
        program = program_of(schedule, proved.hazards, proved.placement.routes)
        return simulate(program, fabric, payload_bytes=n_bytes, slices=slices).time_s

    assert time_s(auto_on(fabric.name)) < 0.93 * time_s("auto")


def test_slices_travel_with_a_plan_to_the_folder_and_to_other_chips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, sums = auto_on(FIGURES), [(1 << 18, "float32")]
    class_bytes = payload_class(SUM, 1 << 20)
    store_plans(tmp_path, SLOW, name, sums)
    packed = packed_plan(SLOW, name, SUM, class_bytes)
    schedule, slices = on(SLOW, 1 << 20, name)
    reads: list[Callable[[], None]] = [
        lambda: load_plans(tmp_path, SLOW, name, sums),
        lambda: remember_packed(SLOW, name, SUM, class_bytes, packed),
    ]
    for read in reads:
        monkeypatch.setattr(catalogue, "_remembered", {})
        read()
        assert catalogue.is_remembered(SLOW, name, SUM, class_bytes)
        assert planned_pipeline(SLOW, name, SUM, class_bytes) is not None
        found, again = on(SLOW, 1 << 20, name)
        assert (found.digest, again) == (schedule.digest, slices)


def test_without_a_fabric_nothing_changes() -> None:
    schedule, slices = on(SLOW, 1 << 20, "auto")

    assert slices == default_slices(schedule, 1 << 20)
    assert planned_pipeline(SLOW, "auto", SUM, payload_class(SUM, 1 << 20)) is None


def test_a_fabric_wins_over_one_host_and_is_refused_where_it_means_nothing() -> None:
    def settings(**more: str) -> SumConfig:
        return SumConfig(**more)  # type: ignore[arg-type]  # texts only

    mesh = Mesh((2, 2))
    assert settings_of(settings(fabric="tpu-v3"), mesh).planned_algorithm == "auto on tpu-v3"
    for more, why in (
        ({"fabric": "tpu-v33"}, "needs one of reference, .* but got 'tpu-v33'"),
        ({"fabric": "6MB/s,3us"}, "a link's bandwidth, a hop's latency and a message's overhead"),
        ({"fabric": "6MB/s,3us,x"}, "a time needs a number"),
        ({"fabric": "tpu-v3", "algorithm": "trees"}, "is what 'auto' plans for, but got 'trees'"),
    ):
        with pytest.raises(InputError, match=why):
            settings_of(settings(**more), mesh)


@pytest.mark.parametrize(
    ("fabric", "asked", "window"),
    [
        ("", 0, 0),  # the kernel decides
        (FIGURES, 0, 20_000),  # 6.15 MB/s for four hops of 44 us are 1,082 bytes
        ("10GB/s,25us,1us", 0, 1_000_000),
        ("10GB/s,25us,1us", 65_536, 65_536),
        ("", 65_536, 65_536),
    ],
)
def test_a_peer_may_send_two_round_trips_of_a_known_link_ahead(
    fabric: str, asked: int, window: int
) -> None:
    config = SumConfig(fabric=fabric, window_bytes=asked)

    assert settings_of(config, Mesh((2, 2))).window == window


def test_figures_of_your_own_are_a_fabric() -> None:
    fabric = fabric_named(FIGURES)

    assert fabric.link_bandwidth_bytes_per_s == 6.15e6
    assert (fabric.hop_latency_s, fabric.message_overhead_s) == (44e-6, 12e-6)


def test_auto_that_knows_the_processors_of_a_host_sends_fewer_messages() -> None:
    mesh, links = parse_mesh("4x4", fail=["2x2@0,2"]), fabric_named("6.13MB/s,15us,11us")
    shared = fabric_named("6.13MB/s,15us,11us,2,3us,865MB/s,247us")
    unaware, aware = (plan(mesh, payload=1 << 16, fabric=each) for each in (links, shared))

    def on_processors(made: Plan) -> float:
        routes, pipeline = made.placement.routes, made.pipeline
        assert pipeline is not None
        remaining = remaining_hops(made.schedule, made.hazards, routes)
        return simulate(
            program_of(made.schedule, made.hazards, routes),
            shared,
            payload_bytes=1 << 16,
            slices=pipeline.slices,
            delay_slices=pipeline.delays(made.schedule, remaining),
        ).time_s

    assert unaware.pipeline
    assert aware.pipeline
    n_unaware = unaware.schedule.n_rows * unaware.pipeline.slices
    assert aware.schedule.n_rows * aware.pipeline.slices < n_unaware
    assert on_processors(aware) == aware.predicted().time_s < 0.95 * on_processors(unaware)
    assert aware.predicted().time_s > unaware.predicted().time_s > aware.limit().time_s
