"""`auto`: never behind a named algorithm by more than 2 %, and free when asked again."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend.errors import UnsupportedError
from meshmend.planning import choose as choosing
from meshmend.planning.choose import (
    Choice,
    choose,
    chosen_schedule,
    decode_choice,
    encode_choice,
    forget,
    payload_class_bytes,
)
from meshmend.planning.comparison import compared
from meshmend.planning.packed_trees import TreeShape, packing_of, trees_of
from meshmend.planning.pricing import price, supported_names
from meshmend.planning.target import Question
from meshmend.planning.tree_formula import Pipeline
from meshmend.schedule.algorithms import algorithm
from meshmend.schedule.contributions import check_contributions
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.placement import placed
from meshmend.schedule.priority import remaining_hops
from meshmend.schedule.table import SUMS, Collective
from meshmend.simulator.network_program import program_of
from meshmend.simulator.rules import simulate
from meshmend.topology.fabric import Fabric, fabric
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from sweeps import spread

REFERENCE = fabric("reference")
MESHES = [
    parse_mesh("1x2"),
    parse_mesh("4x4"),
    parse_mesh("3x5", fail=["1,1"]),
    parse_mesh("8x8", fail=["2x2@2,2"]),
    parse_mesh("6x6", wrap="all"),
    parse_mesh("3x3x3"),
]
FABRICS = [
    REFERENCE,
    fabric("tpu-v3"),
    Fabric("slow start", 1e9, 1e-4, 1e-5),
    Fabric("no overhead", 1e11, 1e-7, 0.0),
    Fabric("slow chips", 1e11, 1e-6, 1e-7, 5e10),
]


def time_of(
    mesh: Mesh,
    choice: Choice,
    machine: Fabric,
    payload_bytes: float,
    collective: Collective = Collective.ALLREDUCE,
) -> float:
    """Return what a choice costs, built and simulated from nothing but the choice."""
    schedule = chosen_schedule(mesh, choice, collective)
    hazards, routes = hazards_of(schedule), placed(mesh, schedule).routes
    return simulate(
        program_of(schedule, hazards, routes),
        machine,
        payload_bytes=payload_bytes,
        slices=choice.pipeline.slices,
        delay_slices=choice.pipeline.delays(schedule, remaining_hops(schedule, hazards, routes)),
    ).time_s


def check_none_is_faster(
    mesh: Mesh,
    machine: Fabric,
    payload_bytes: float,
    collective: Collective = Collective.ALLREDUCE,
    *,
    most: float = 1.02,
) -> None:
    choice = choose(Question(mesh, payload_bytes, machine, collective))
    chosen_s = time_of(mesh, choice, machine, payload_bytes, collective)
    for name in supported_names(mesh, collective):
        named = price(Question(mesh, payload_bytes, machine, collective), name)
        assert chosen_s <= most * named.time_s, name


@pytest.mark.parametrize(
    ("mesh", "collective", "payload_bytes"),
    spread(MESHES, SUMS[1:], [7e2, 1.3e5, 3.1e7], one_in=5),
)
def test_it_is_at_most_4_percent_behind_for_collectives_with_owners(
    mesh: Mesh, collective: Collective, payload_bytes: float
) -> None:
    """With few messages on each link a payload of 0.8 % less may take 2 % longer."""
    for machine in (REFERENCE, FABRICS[2]):
        check_none_is_faster(mesh, machine, payload_bytes, collective, most=1.04)


@pytest.mark.parametrize(
    ("mesh", "machine", "payload_bytes"),
    spread(MESHES, FABRICS[:3], [7e2, 1.3e5], one_in=3),
)
def test_it_is_at_most_2_percent_behind_every_named_algorithm(
    mesh: Mesh, machine: Fabric, payload_bytes: float
) -> None:
    check_none_is_faster(mesh, machine, payload_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("machine", FABRICS, ids=lambda machine: machine.name)
@pytest.mark.parametrize("payload_bytes", [1e4, 1.1e6, 3.1e7])
def test_it_is_at_most_2_percent_behind_on_other_machines_and_payloads(
    mesh: Mesh, machine: Fabric, payload_bytes: float
) -> None:
    check_none_is_faster(mesh, machine, payload_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [parse_mesh("16x16"), parse_mesh("12x16", fail=["4x2@4,4"])])
@pytest.mark.parametrize("payload_bytes", [1e3, 1e5, 1e6, 1e7, 1e8])
def test_it_is_at_most_2_percent_behind_on_larger_meshes(mesh: Mesh, payload_bytes: float) -> None:
    check_none_is_faster(mesh, REFERENCE, payload_bytes)


@given(st.floats(1, 1e12))
def test_payloads_of_a_class_differ_by_little(payload_bytes: float) -> None:
    typical = payload_class_bytes(payload_bytes)

    assert max(typical / payload_bytes, payload_bytes / typical) < 1.0146
    assert payload_class_bytes(typical) == pytest.approx(typical, rel=1e-12)


def test_a_second_question_needs_no_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = parse_mesh("8x8", fail=["2x2@4,4"])
    first = choose(Question(mesh, 1e7, REFERENCE), cache_dir=tmp_path)
    monkeypatch.setattr(choosing, "_search", None)  # whoever searches now fails

    from_memory = choose(Question(mesh, 1.001e7, REFERENCE), cache_dir=tmp_path)
    forget()
    from_disk = choose(Question(mesh, 1e7, REFERENCE), cache_dir=tmp_path)

    assert first == from_memory == from_disk


def test_trees_that_keep_apart_in_time_are_pipelined_for_the_payload_itself(
    tmp_path: Path,
) -> None:
    mesh = parse_mesh("8x8", fail=["2x2@2,2"])

    choices = [
        choose(Question(mesh, size, REFERENCE), cache_dir=tmp_path) for size in (1e6, 1.001e6)
    ]

    assert choices[0].shape == choices[1].shape
    assert choices[0].shape is not None
    assert choices[0].shape.window is not None
    assert choices[0].pipeline != choices[1].pipeline
    result = compared(mesh, REFERENCE, 1e6, ["trees", "auto"])
    trees, auto = (price.time_s for price in result.prices)
    assert auto <= 1.02 * trees


def test_it_remembers_by_mesh_payload_and_figures_but_not_by_the_fabrics_name(
    tmp_path: Path,
) -> None:
    mesh = parse_mesh("3x3")
    forget()
    choose(Question(mesh, 1e4, REFERENCE), cache_dir=tmp_path)
    for other_mesh, machine, payload_bytes in (
        (mesh.without("0,0"), REFERENCE, 1e4),
        (mesh, REFERENCE.with_(hop_latency_s=1e-3), 1e4),
        (mesh, REFERENCE, 2e4),
    ):
        choose(Question(other_mesh, payload_bytes, machine), cache_dir=tmp_path)

    assert len(list(tmp_path.iterdir())) == 4
    forget()
    renamed = Fabric("mine", *list(asdict(REFERENCE).values())[1:5])
    choose(Question(mesh, 1e4, renamed), cache_dir=tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        json.dumps({"algorithm": "magic", "pipeline": {"slices": 1, "skew": 0}, "shape": None}),
        json.dumps({"algorithm": "trees", "pipeline": {"slices": 1, "skew": 0}, "shape": {"a": 1}}),
    ],
)
def test_a_damaged_answer_on_disk_is_found_anew(tmp_path: Path, text: str) -> None:
    mesh = parse_mesh("3x4")
    forget()
    right = choose(Question(mesh, 1e4, REFERENCE), cache_dir=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    forget()

    assert choose(Question(mesh, 1e4, REFERENCE), cache_dir=tmp_path) == right
    assert json.loads(file.read_text())["algorithm"] == right.algorithm


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    forget()

    question = Question(parse_mesh("2x2"), 1e3, REFERENCE)
    assert choose(question, cache_dir=blocked / "folder").slices >= 1


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(MESHES), st.sampled_from(list(Collective)))
def test_a_choice_builds_the_same_schedule_again(mesh: Mesh, collective: Collective) -> None:
    choice = choose(Question(mesh, 1e5, REFERENCE, collective))
    one = chosen_schedule(mesh, choice, collective)
    trees_of.cache_clear()

    other = chosen_schedule(mesh, choice, collective)

    assert (one.src == other.src).all()
    assert (one.lo == other.lo).all()
    check_contributions(other)


def test_a_choice_from_disk_has_trees_that_need_not_carry_alike() -> None:
    mesh, shape = MESHES[3], TreeShape(2, window=13)
    packing = packing_of(mesh, shape)
    choice = Choice("trees", Pipeline(4, 0.5), shape, packing)

    again = decode_choice(mesh, encode_choice(choice))

    assert again == choice
    assert again.packing is not None
    assert np.ptp(packing.weights) > 0
    assert np.array_equal(packing.weights, again.packing.weights)
    assert np.array_equal(packing.parents, again.packing.parents)
    assert np.array_equal(packing.roots, again.packing.roots)


def test_without_trees_the_choice_is_the_algorithms_own_schedule() -> None:
    schedule = chosen_schedule(
        parse_mesh("4x4"), Choice("two-d", Pipeline(2)), Collective.ALLREDUCE
    )

    assert schedule.algorithm == "two-d"


def test_it_goes_past_an_algorithm_whose_table_has_too_many_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A ring through 128x128 had half a billion rows, and so there was no reduce-scatter at all."""
    monkeypatch.setattr("meshmend.schedule.table.MAX_ROWS", 5000)
    mesh = parse_mesh("8x8", slow=["link:0,0-0,1=0.96875"])  # a mesh that no other test asks for

    with pytest.raises(UnsupportedError, match="ring-1d needs a table of at most 5,000 rows"):
        algorithm("ring-1d").build(mesh, Collective.REDUCE_SCATTER)
    question = Question(mesh, 1e8, REFERENCE, Collective.REDUCE_SCATTER)
    choice = choose(question)
    assert chosen_schedule(mesh, choice, Collective.REDUCE_SCATTER).n_rows <= 5000

    monkeypatch.setattr("meshmend.schedule.table.MAX_ROWS", 4000)
    with pytest.raises(UnsupportedError, match="trees needs a table of at most 4,000 rows"):
        price(question, "trees")


@pytest.mark.parametrize(("payload_bytes", "most"), [(1e7, 1.07), (1e9, 1.008)])
def test_rings_of_a_torus_with_a_short_axis_leave_no_link_idle(
    payload_bytes: float, most: float
) -> None:
    """Without delays they take 1.098 and 1.025 of the limit."""
    mesh, machine = Mesh((4, 4, 2), (True, True, True)), fabric("tpu-v4")

    result = compared(mesh, machine, payload_bytes, ["rings-nd"])

    assert result.ratio(result.winner) <= most
    assert choose(Question(mesh, payload_bytes, machine)).algorithm == "rings-nd"


def test_rings_go_without_delays_where_these_cost_time() -> None:
    """With them 7 MB on this torus take 1.374 of the limit."""
    mesh, machine = Mesh((15, 5), (True, True)), fabric("dgx-spark")

    result = compared(mesh, machine, 7215762, ["rings-nd"])

    assert result.ratio(result.winner) <= 1.33
    assert result.winner.pipeline.skew == 0


def test_regions_are_tried_wherever_they_may_be_faster() -> None:
    """Where chips add slowly, regions on a mesh with a middle take 0.82 times as long as trees."""
    choice = choose(Question(MESHES[3], 1.1e6, FABRICS[4]))

    assert choice.algorithm == "regions-2"
    check_none_is_faster(MESHES[3], FABRICS[4], 1.1e6)


def test_trees_from_everywhere_keep_links_of_a_broken_torus_busy_from_the_start() -> None:
    """Trees from few roots took 1.92 times the limit."""
    mesh = parse_mesh("14x9", wrap="all", fail=["link:0,3-0,4", "link:4,0-4,8", "link:9,6-10,6"])
    choice = choose(Question(mesh, 512e3, fabric("wormhole-galaxy")))

    found = compared(mesh, fabric("wormhole-galaxy"), 512e3, ["auto"])

    assert choice.shape is not None
    assert choice.shape.spread
    assert found.ratio(found.winner) < 1.72


@pytest.mark.parametrize(
    ("mesh", "machine", "payload_bytes", "most"),
    [
        (parse_mesh("4x5x7", wrap="all", fail=["0,0,0"]), "reference", 1.3e6, 1.66),  # 1.87 before
        (parse_mesh("15x9", wrap="all", fail=["14,5"]), "dojo", 2e7, 1.69),  # 1.80
    ],
    ids=str,
)
def test_trees_from_everywhere_do_not_wait_for_each_other_at_every_hop(
    mesh: Mesh, machine: str, payload_bytes: float, most: float
) -> None:
    """Before, a link's load counted in all, not by what has to leave first."""
    found = compared(mesh, fabric(machine), payload_bytes, ["auto"])

    assert found.ratio(found.winner) < most
