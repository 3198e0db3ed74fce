"""Plans: proved on the holes of the paper's setting, and refused with a way out where not."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from numpy.testing import assert_array_equal

import meshmend
from meshmend import Fabric, Mesh, load_plan, plan
from meshmend.errors import InputError, UnsupportedError
from meshmend.planning.plan import Plan
from meshmend.planning.pricing import BASELINES, supported_names
from meshmend.schedule.algorithm_names import ALGORITHM_NAMES, BASELINE_NAMES
from meshmend.schedule.algorithms import ALGORITHMS
from meshmend.schedule.contributions import check_contributions
from meshmend.schedule.table import SUMS, Collective
from meshmend.topology.deadlock import check_deadlock_free
from meshmend.topology.graph import largest_part, stranded
from strategies import broken_meshes

AROUND_HOLES = ("ring-1d", "ft-two-d", "rank-ring")
TALL_AND_WIDE = [
    # middle, edge, corner, two at once
    ("16x32", "4x2@6,14"),
    ("16x32", "4x2@0,14"),
    ("16x32", "4x2@12,30"),
    ("16x32", "2x4@6,14"),
    ("16x32", "2x4@6,0"),
    ("16x32", "2x4@0,0"),
    ("16x32", "4x2@6,14 2x4@0,0"),
    ("32x32", "4x2@14,14"),
    ("32x32", "4x2@14,30"),
    ("32x32", "4x2@0,0"),
    ("32x32", "2x4@14,14"),
    ("32x32", "2x4@30,14"),
    ("32x32", "2x4@30,28"),
    ("32x32", "4x2@14,14 4x2@6,20"),
    ("32x32", "4x2@14,14 2x4@28,0"),
]


def check_plan(proved: Plan, name: str, holes: str) -> None:
    """What `plan` claims to have proved, asked once more, and the figures of the summary."""
    facts = proved.summary()

    assert facts["algorithm"] == name
    assert facts["mesh"]["failed"] == 8 * len(holes.split())
    assert facts["mesh"]["live"] == facts["ranks"] == proved.mesh.n_live
    assert facts["mesh"]["stranded"] == []
    assert facts["verified"] is facts["deadlock_free"] is True
    assert facts["virtual_channels"] <= 2
    assert facts["max_hops"] >= 1
    check_deadlock_free(proved.placement.mesh, proved.placement.routes)
    if name == "ring-1d":
        assert facts["max_hops"] == 1
        n_halves = 2 if facts["collective"] in ("allreduce", "sharded-update") else 1
        assert facts["max_link_load"] == pytest.approx(n_halves / 2 * (1 - 1 / facts["ranks"]))


def mesh_of(shape: str, holes: str) -> Mesh:
    rows, cols = map(int, shape.split("x"))
    return Mesh((rows, cols)).without(*holes.split())


@pytest.mark.parametrize(("shape", "holes"), TALL_AND_WIDE)
def test_the_fault_tolerant_scheme_at_scale(shape: str, holes: str) -> None:
    for collective in SUMS:
        proved = plan(mesh_of(shape, holes), "ft-two-d", collective=collective)

        check_plan(proved, "ft-two-d", holes)


@pytest.mark.parametrize(("shape", "holes"), TALL_AND_WIDE[:7])
def test_the_hamiltonian_ring_at_scale(shape: str, holes: str) -> None:
    check_plan(plan(mesh_of(shape, holes), "ring-1d"), "ring-1d", holes)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "holes"), TALL_AND_WIDE)
@pytest.mark.parametrize("collective", list(SUMS))
@pytest.mark.parametrize("name", ["ring-1d", "rank-ring"])
def test_both_rings_at_scale(name: str, collective: Collective, shape: str, holes: str) -> None:
    check_plan(plan(mesh_of(shape, holes), name, collective=collective), name, holes)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["16x32", "32x32"])
@pytest.mark.parametrize("name", ["two-d", "row-pair", "ft-two-d", "ring-1d", "rank-ring"])
def test_full_meshes_at_scale(name: str, shape: str) -> None:
    for collective in SUMS:
        check_plan(plan(mesh_of(shape, ""), name, collective=collective), name, "")


@settings(max_examples=60)
@given(broken_meshes())
def test_any_mesh_gets_a_plan_for_its_largest_part(mesh: Mesh) -> None:
    proved = plan(mesh, "rank-ring")

    assert proved.mesh == mesh
    assert proved.stranded == stranded(mesh)
    assert proved.placement.mesh == largest_part(mesh)
    assert proved.schedule.n_ranks == mesh.n_live - len(stranded(mesh))
    check_deadlock_free(proved.placement.mesh, proved.placement.routes)
    check_contributions(proved.schedule, exact=True)


@settings(max_examples=30)
@given(broken_meshes())
def test_every_algorithm_that_says_it_does_a_mesh_is_proved_on_it(mesh: Mesh) -> None:
    names = list(supported_names(largest_part(mesh)))

    assert "rank-ring" in names
    for name in names:
        assert plan(mesh, name).schedule.algorithm == name
    assert plan(mesh).schedule.algorithm in names


def test_five_lines_from_a_mesh_to_a_sum() -> None:
    mesh = Mesh((8, 8)).without("2x2@2,2")
    arrays = [np.full(1000, rank) for rank in range(mesh.n_live)]

    results = plan(mesh, "ft-two-d").run(arrays)

    for result in results:
        assert_array_equal(result, sum(range(60)))
    assert_array_equal(plan(mesh).run(arrays, combine=np.maximum)[7], 59)


def test_chips_that_are_cut_off_are_named_and_take_no_part() -> None:
    proved = plan(Mesh((4, 4)).without("0,1", "1,0"), "rank-ring")

    assert proved.stranded == ((0, 0),)
    assert proved.schedule.n_ranks == 13
    assert proved.summary()["mesh"]["stranded"] == [[0, 0]]
    assert proved.summary()["mesh"]["live"] == 14


def test_the_steps_are_named_as_they_begin() -> None:
    told: list[tuple[str, float | None]] = []
    proved = plan(
        Mesh((2, 2)), "ring-1d", progress=lambda step, part=None: told.append((step, part))
    )

    assert [step for step, _ in told] == list(proved.seconds)
    assert told[0] == ("build", 0.0)
    assert told[-1] == ("deadlock", 0.8)


DEAD = ["2x2@0,0", "2x2@2,2", "2x2@0,2"]
REFUSALS = [
    ("two-d", Mesh((8, 8)).without("2x2@2,2"), "two-d needs a full mesh, but got 8x8 less 2x2@2,2"),
    ("row-pair", Mesh((8, 8)).without("0,0"), "row-pair needs a full mesh, but got 8x8 less 0,0"),
    ("row-pair", Mesh((3, 5)), "row-pair needs an even number of rows or columns, but got 3x5"),
    ("ring-1d", Mesh((3, 5)), "ring-1d needs an even side, but got 3x5"),
    ("ft-two-d", Mesh((3, 5)), "ft-two-d needs an even number of rows or columns, but got 3x5"),
    ("ft-two-d", Mesh((3, 5)).without("0,0"), "ft-two-d needs even sides .* but got 3x5"),
    ("ft-two-d", Mesh((7, 8)).without("2x2@0,0"), "ft-two-d needs even sides .* but got 7x8"),
    ("ring-1d", Mesh((7, 8)).without("2x2@0,0"), "ring-1d needs even sides .* but got 7x8"),
    ("ft-two-d", Mesh((8, 8)).without("2x2@1,2"), r"ft-two-d needs .* block at \(0, 2\) still has"),
    ("ring-1d", Mesh((8, 8)).without("2x2@2,3"), r"ring-1d needs .* block at \(2, 2\) still has"),
    ("ft-two-d", Mesh((8, 8)).without("3x2@2,2"), r"ft-two-d needs .* block at \(4, 2\) still has"),
    ("ring-1d", Mesh((8, 8)).without("2x1@2,2"), r"ring-1d needs .* block at \(2, 2\) still has"),
    ("ft-two-d", Mesh((8, 8)).without("3,3"), r"ft-two-d needs .* block at \(2, 2\) still has"),
    ("ft-two-d", Mesh((4, 4)).without(*DEAD), "every pair is broken"),
    ("ring-1d", Mesh((4, 4)).without("link:0,0-0,1"), "crosses link:0,0-0,1"),
    ("ring-1d", Mesh((1, 6)), "ring-1d needs"),
    *(
        (name, mesh, f"{name} needs a 2-D mesh, but got {len(mesh.shape)} axes")
        for name in ("ring-1d", "two-d", "row-pair", "ft-two-d")
        for mesh in (Mesh((6,)), Mesh((2, 2, 4)), Mesh((4, 4, 4), (True,) * 3).without("0,0,0"))
    ),
]


@pytest.mark.parametrize(("name", "mesh", "message"), REFUSALS)
def test_a_mesh_that_an_algorithm_does_not_do_is_refused_with_one_that_does(
    name: str, mesh: Mesh, message: str
) -> None:
    for collective in SUMS:
        with pytest.raises(UnsupportedError, match=message) as caught:
            plan(mesh, name, collective=collective)
        named = re.search(r"; use '([a-z0-9-]+)'$", str(caught.value))
        assert named is not None
        other = plan(mesh, named[1], collective=collective)
        assert other.schedule.algorithm == named[1] != name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"algorithm": "three-d"}, "there is no algorithm 'three-d'; choose one of trees, ring-1d"),
        ({"algorithm": ""}, "there is no algorithm ''"),
        (
            {"collective": "gossip"},
            "no collective 'gossip'; choose one of allreduce, reduce-scatter, all-gather",
        ),
    ],
)
def test_unknown_names_are_refused(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan(Mesh((2, 2)), **arguments)  # type: ignore[arg-type]


def test_the_names_that_the_command_line_checks_are_those_of_the_builders() -> None:
    assert tuple(ALGORITHMS) == ALGORITHM_NAMES
    assert tuple(BASELINES) == BASELINE_NAMES


def test_the_package_names_its_public_surface() -> None:
    assert meshmend.__all__ == [
        "Fabric",
        "Mesh",
        "MeshmendError",
        "Plan",
        "__version__",
        "limit",
        "load_plan",
        "plan",
        "simulate",
    ]
    for name in meshmend.__all__:
        assert getattr(meshmend, name) is not None
    with pytest.raises(AttributeError, match="module 'meshmend' has no attribute 'plot'"):
        _ = meshmend.plot


@pytest.mark.parametrize("number", [np.int64, np.float32, np.uint8, np.float64])
def test_numbers_of_numpy_are_numbers_of_a_question(
    number: type[np.integer] | type[np.floating], tmp_path: Path
) -> None:
    """Such as the bytes of a shape, `np.prod(shape) * 4`."""
    machine = Fabric("own", np.float64(128), np.float64(1), np.float64(0.5))

    mesh = Mesh((np.int64(2), 3))  # type: ignore[arg-type]
    made = plan(mesh, payload=number(200), fabric=machine)  # type: ignore[arg-type]
    made.save(tmp_path / "plan.json")

    known = load_plan(tmp_path / "plan.json")
    usual = Mesh((2, 3)), 200, Fabric("own", 128.0, 1.0, 0.5)
    assert (known.mesh, known.target.payload_bytes, known.target.fabric) == usual
    assert json.loads(json.dumps(made.summary()))["mesh"]["shape"] == [2, 3]
    assert known.predicted().time_s == made.predicted().time_s


@pytest.mark.parametrize("number", [np.float32, np.int64, str])
def test_figures_of_a_fabric_that_are_no_floats_are_refused(number: Any) -> None:
    """Of 32 bits the limit had eight digits, and the plan could not be saved."""
    with pytest.raises(InputError, match=r"needs a positive link_bandwidth_bytes_per_s, but got "):
        Fabric("own", number(128), 1.0, 0.5)


def test_a_folder_to_keep_answers_in_may_be_a_text(tmp_path: Path) -> None:
    plan(Mesh((2, 2)), payload=12345, cache_dir=str(tmp_path / "kept"))

    assert any((tmp_path / "kept").rglob("*"))


@pytest.mark.parametrize(
    ("path", "mesh", "needed"),
    [
        (None, None, "load_plan needs the path of a plan file, but got None"),
        ("plan.json", "2x2", "load_plan needs a Mesh such as .*, but got '2x2'"),
    ],
)
def test_what_is_no_path_or_no_mesh_is_refused(path: Any, mesh: Any, needed: str) -> None:
    with pytest.raises(InputError, match=needed):
        load_plan(path, mesh=mesh)
