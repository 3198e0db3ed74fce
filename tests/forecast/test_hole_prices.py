"""What holes cost: priced on the very mesh, kept on disk, and a rule for those not priced."""

from dataclasses import replace
from pathlib import Path

import pytest

from forecasts import DAY_S, scenario
from meshmend.errors import UnsupportedError
from meshmend.forecast.hole_prices import step_prices
from meshmend.forecast.machine import machine_of
from meshmend.forecast.scenario import FailureModel, JobModel, RepairModel, Scenario
from meshmend.planning import comparison
from meshmend.planning.comparison import compared
from meshmend.planning.plan import plan
from meshmend.topology.fabric import fabric
from meshmend.topology.mesh import Mesh

PAYLOAD = 10_000_000


def asked(mesh: str = "8x8", algorithm: str = "trees", **more: str) -> Scenario:
    job = JobModel(payload_bytes=PAYLOAD, algorithm=algorithm)
    return scenario(
        mesh,
        per_1000_days={"board": 1.0},
        repair=RepairModel(DAY_S),
        job=job,
        unit=(2, 2),
        **more,  # type: ignore[arg-type]  # wrap alone
    )


def exact(mesh: Mesh, name: str = "trees") -> float:
    return compared(mesh, fabric("reference"), PAYLOAD, [name]).prices[0].time_s


def test_a_priced_hole_costs_what_the_simulator_says_and_its_mirror_images_the_same() -> None:
    prices = step_prices(machine_of(asked("4x4")))

    mesh = Mesh((4, 4))
    extra = exact(mesh.without("2x2@0,0")) - exact(mesh)
    assert prices.words.startswith("1 of ")
    assert prices.full_s == exact(mesh)
    assert prices.extra_s == pytest.approx(max(0.0, extra), abs=1e-15)
    assert prices.compute_s == pytest.approx(prices.full_s * 94 / 6)


def test_with_tiles_a_hole_costs_what_the_plans_of_colours_say() -> None:
    question = asked("4x4", "auto")
    question = replace(question, job=replace(question.job, tile=(1, 2)))

    prices = step_prices(machine_of(question))

    mesh = Mesh((4, 4))
    full_s, broken_s = (
        plan(each, tile="1x2", payload=PAYLOAD).predicted().time_s
        for each in (mesh, mesh.without("2x2@0,0"))
    )
    assert prices.full_s == full_s
    assert prices.extra_s == pytest.approx(max(0.0, broken_s - full_s), abs=1e-15)


def test_prices_are_kept_and_a_damaged_file_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = step_prices(machine_of(asked("4x4")), cache_dir=tmp_path)
    files = sorted((tmp_path / "prices").glob("*.json"))
    assert len(files) == 2
    with monkeypatch.context() as patched:
        patched.setattr(comparison, "price", None)
        again = step_prices(machine_of(asked("4x4")), cache_dir=tmp_path)
    files[0].write_text("{")

    mended = step_prices(machine_of(asked("4x4")), cache_dir=tmp_path)

    assert first.extra_s.tolist() == again.extra_s.tolist() == mended.extra_s.tolist()


def test_on_a_torus_all_places_are_one_and_boxes_without_wrap_links_sum_slower() -> None:
    prices = step_prices(machine_of(asked("4x4", wrap="all")))

    assert prices.words.startswith("1 of ")
    assert prices.box_s[7] == prices.full_s
    assert prices.box_s[1] > prices.full_s


def test_an_algorithm_that_does_not_support_a_hole_says_so() -> None:
    one = asked("4x4", "ft-two-d")
    chips = replace(one, failures=replace(one.failures, per_1000_days={"chip": 1.0, "board": 1.0}))

    supported = step_prices(machine_of(chips), n_most=2).is_supported

    assert not any(supported[:16])  # single chips
    assert all(supported[16:20])  # boards


def test_an_algorithm_that_does_not_support_the_mesh_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="2-D"):
        step_prices(
            machine_of(
                replace(
                    asked("4x4", "ft-two-d"),
                    mesh=Mesh((2, 2, 2)),
                    board=(2, 2, 1),
                    host=(2, 2, 1),
                    rack=(2, 2, 2),
                    spares=replace(asked("4x4").spares, unit=(2, 2, 1)),
                )
            )
        )


@pytest.mark.parametrize("algorithm", ["trees", "ft-two-d"])
def test_the_rule_for_holes_that_were_not_priced_errs_little(algorithm: str) -> None:
    """Of a step in which the sum takes 6 %: at most 1 % for single holes and pairs of them."""
    machine = machine_of(asked("8x8", algorithm))
    prices, mesh = step_prices(machine, n_most=2), Mesh((8, 8))
    step_s = prices.compute_s + prices.full_s
    assert prices.words.startswith("2 of ")
    holes = [str(domain.failure) for domain in machine.domains]
    for numbers in ((0,), (5,), (6,), (1, 10), (5, 15), (0, 9)):
        told = prices.full_s + sum(prices.extra_s[number] for number in numbers)

        true = exact(mesh.without(*(holes[number] for number in numbers)), algorithm)

        assert abs(told - true) / step_s < 0.01


def test_a_slow_link_is_no_hole_and_costs_what_a_plan_for_it_takes() -> None:
    slow = replace(asked("4x4"), failures=FailureModel({"slow-link": 1.0, "slow-chip": 1.0}))

    prices = step_prices(machine_of(slow))

    mesh = Mesh((4, 4))
    known = exact(mesh.slowed("link:1,2-2,2=0.25"))
    assert prices.words.startswith("1 of ")  # the slot of a spare
    assert prices.slow_link_s == pytest.approx(known - exact(mesh), abs=1e-15)
    assert 0.0 < prices.slow_link_s < 3 * prices.full_s
    assert step_prices(machine_of(asked("4x4"))).slow_link_s == 0.0
