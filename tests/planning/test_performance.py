"""`simulate` and `limit` as users call them, and what a plan says of itself."""

import doctest
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshmend
from meshmend import Fabric, Mesh, limit, load_plan, plan, simulate
from meshmend.errors import InputError
from meshmend.planning.comparison import compared
from meshmend.planning.target import Target
from meshmend.simulator.limit import limit as limit_of_mesh
from meshmend.topology.fabric import FABRICS
from meshmend.topology.graph import largest_part

HOLE = Mesh((4, 4)).without("2x2@0,2")
CUT = Mesh((4, 4)).without("0,1", "1,0")
OWN = Fabric("own", 1e9, hop_latency_s=1e-6, message_overhead_s=0.0)


@pytest.mark.parametrize(
    "module", ["meshmend", "meshmend.planning.plan", "meshmend.planning.performance"]
)
def test_the_examples_of_the_docstrings_print_what_they_say(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    found = doctest.testmod(import_module(module))

    assert found.attempted
    assert not found.failed


@pytest.mark.parametrize("mesh", [HOLE, CUT, Mesh((2, 3))])
def test_a_mesh_costs_what_its_fastest_plan_costs(mesh: Mesh) -> None:
    part = largest_part(mesh)
    price = compared(mesh, FABRICS["tpu-v3"], 1e6, ["auto"]).prices[0]

    by_words, by_number = simulate(mesh, "1MB", "tpu-v3"), simulate(mesh, 1e6, FABRICS["tpu-v3"])

    assert by_words.time_s == by_number.time_s == price.time_s
    least = limit(mesh, "1MB", "tpu-v3").time_s
    assert least == limit_of_mesh(part, FABRICS["tpu-v3"], 1e6).time_s <= by_words.time_s


def test_a_plan_is_priced_for_what_it_was_made_for_unless_told_otherwise() -> None:
    mended = plan(HOLE, payload="1MB", fabric=OWN)
    assert mended.pipeline is not None

    own = mended.predicted()
    other = simulate(mended, "10MB", "tpu-v3")

    assert (own.payload_bytes, own.fabric, own.slices) == (1e6, OWN, mended.pipeline.slices)
    assert simulate(mended) is own
    assert (other.payload_bytes, other.fabric) == (1e7, FABRICS["tpu-v3"])
    assert limit(mended).time_s == mended.limit("1MB", OWN).time_s <= own.time_s


def test_a_plan_of_a_named_algorithm_runs_in_the_slices_that_are_best() -> None:
    rings = plan(HOLE, "ft-two-d")

    assert rings.pipeline is None
    price = compared(HOLE, FABRICS["reference"], 100e6, ["ft-two-d"]).prices[0]
    assert rings.predicted().time_s == price.time_s


def test_the_summary_says_the_predicted_time_and_the_limit_where_that_is_quick() -> None:
    mended = plan(HOLE, payload="1MB")
    facts, half = mended.summary(), plan(HOLE, collective="all-gather", payload="1MB").summary()

    assert (facts["payload_bytes"], facts["fabric"]) == (1e6, "reference")
    assert facts["predicted_s"] == mended.predicted().time_s
    assert facts["limit_s"] == mended.limit().time_s
    assert half["predicted_s"] > 0
    assert half["limit_s"] == limit(HOLE, "1MB", collective="all-gather").time_s
    assert plan(HOLE, "ring-1d").summary()["predicted_s"] is None


def test_a_file_keeps_what_the_plan_was_made_for(tmp_path: Path) -> None:
    mended = plan(HOLE, payload="1MB", fabric=OWN)
    mended.save(tmp_path / "plan.json")

    loaded = load_plan(tmp_path / "plan.json")

    assert loaded.target == mended.target == Target(1e6, OWN)
    assert loaded.predicted().time_s == mended.predicted().time_s


@pytest.mark.parametrize(
    ("payload", "fabric", "message"),
    [
        ("foo", None, "a size needs a number and a unit, but got 'foo'"),
        (-1, None, "a payload needs to be 0 bytes or more, at most 1e.46, but got -1"),
        (float("nan"), None, "a payload needs to be 0 bytes or more, .* but got nan"),
        (10**400, None, "a payload needs to be 0 bytes or more, .* but got 1000"),
        ([], None, r"a number of bytes, or a text such as '25MB', but got \[\]"),
        (None, "abacus", "one of reference, .* but got 'abacus'"),
        (None, 5, "a Fabric, or the name of a preset such as 'tpu-v3', but got 5"),
    ],
)
def test_a_payload_or_fabric_that_is_none_is_refused(
    payload: Any, fabric: Any, message: str
) -> None:
    for ask in (plan(HOLE, "rank-ring").predicted, plan(HOLE, "rank-ring").limit):
        with pytest.raises(InputError, match=message):
            ask(payload, fabric)
    for call in (simulate, limit):
        with pytest.raises(meshmend.MeshmendError, match=message):
            call(HOLE, payload, fabric)
    with pytest.raises(InputError, match=message):
        plan(HOLE, payload=payload, fabric=fabric)


@pytest.mark.parametrize("collective", ["reduce-scatter", "all-gather", "sharded-update"])
def test_a_plan_of_another_collective_has_a_limit_of_its_own(collective: str) -> None:
    theirs, whole = plan(HOLE, collective=collective), limit(HOLE)

    assert limit(theirs).time_s == limit(HOLE, collective=collective).time_s
    assert limit(theirs).time_s <= theirs.predicted().time_s <= 1.25 * limit(theirs).time_s
    assert (limit(theirs).time_s < whole.time_s) == (collective != "sharded-update")


def test_a_plan_in_which_ranks_own_unequal_parts_has_the_limit_of_these() -> None:
    forwards = plan(HOLE, "ft-two-d", collective="reduce-scatter")

    assert forwards.schedule.shares.min() == 0  # a yellow corner sends all of the payload
    assert limit(forwards).time_s > limit(HOLE, collective="reduce-scatter").time_s


def test_what_is_no_mesh_is_refused_in_words() -> None:
    for call, message in (
        (plan, "plan needs a Mesh"),
        (simulate, "simulate needs a Plan or a Mesh"),
    ):
        with pytest.raises(InputError, match=f"{message}.*, but got '4x4'"):
            call("4x4")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="limit needs a Plan or a Mesh, but got 4"):
        limit(4)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"a tile such as '2x2', or a Tiling, but got \(2, 2\)"):
        plan(HOLE, tile=(2, 2))  # type: ignore[arg-type]


def test_arrays_and_ufuncs_of_another_kind_are_refused() -> None:
    made = plan(Mesh((1, 2)), "ring-1d")

    with pytest.raises(InputError, match=r"a NumPy array of rank 0, but got \[1, 2\]"):
        made.run([[1, 2], [3, 4]])  # type: ignore[list-item]
    with pytest.raises(InputError, match=r"a ufunc such as np\.add to combine by, but got 'add'"):
        made.run([np.ones(2)] * 2, combine="add")  # type: ignore[arg-type]


def test_simulate_takes_a_collective() -> None:
    slow = FABRICS["reference"].with_(update_bytes_per_s=1e9)
    plain = simulate(HOLE, "1MB", collective="sharded-update").time_s

    assert simulate(HOLE, "1MB", collective="reduce-scatter").time_s < plain
    assert simulate(HOLE, "1MB", slow, collective="sharded-update").time_s > plain
    with pytest.raises(InputError, match="there is no collective 'sum'"):
        simulate(HOLE, collective="sum")
