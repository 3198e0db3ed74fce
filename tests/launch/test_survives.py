"""Training goes on: real processes are killed, stopped and cut off at every moment of a step."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_job import check_same_losses, elastic, losses, of_kind
from waiting import HANG_S


def check_nothing_lost(result: dict[str, Any], *, steps: int, batch: int = 48) -> None:
    """Every step counts once, every sample is used once, and all replicas are equal."""
    assert result["finished"], result["why"]
    found = result["audit"]
    assert (found["steps"], found["used"]) == (steps, steps * batch)
    assert (found["lost"], found["repeated"], found["split"]) == (0, 0, [])
    assert found["hashed"] == steps


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The losses of one chip alone: those of any mesh, because the batch is the same."""
    return elastic(tmp_path_factory.mktemp("run"), mesh="1x1", steps=60)


def test_a_board_killed_at_any_moment_of_a_step_costs_no_sample_and_no_bit(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    boards = ("2x2@0,2", "2x2@2,0", "2x2@0,0", "2x2@2,2")
    moments = ("forward", "reduce", "update", "recovery")
    inject = []
    for number, (board, moment) in enumerate(zip(boards, moments, strict=True)):
        at = 5 + 12 * number
        inject += [f"kill {board} at {at} in {moment}", f"repair {board} at {at + 6}"]
    # A recovery to be killed in needs something to recover from.
    inject.append("kill 1,1 at 40")

    result = elastic(tmp_path, mesh="4x4", steps=60, inject=inject)

    check_nothing_lost(result, steps=60)
    check_same_losses(result, undisturbed)
    assert min(result["chips"]) <= 12


def test_a_chip_killed_with_each_bucket_in_flight_in_turn_costs_no_sample_and_no_bit(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    """Its backward pass is under way: some sums have begun, others have not."""
    inject = []
    for bucket, chip in enumerate(("0,1", "1,1", "1,0")):
        at = 5 + 15 * bucket
        inject += [f"kill {chip} at {at} in bucket {bucket}", f"repair {chip} at {at + 6}"]

    result = elastic(tmp_path, mesh="2x2", steps=60, bucket_bytes=1000, inject=inject)

    check_nothing_lost(result, steps=60)
    check_same_losses(result, undisturbed)
    kills = [each for each in result["faults"] if each["kind"] == "kill"]
    assert len(kills) == 3
    # A chip that is repaired may be back after the last step, on a busy machine.
    assert all(each["recovered_s"] is not None for each in kills)


def test_a_chip_that_hangs_is_turned_away_and_comes_back(tmp_path: Path) -> None:
    result = elastic(
        tmp_path,
        mesh="2x2",
        steps=60,
        heartbeat_timeout_s=8.0,  # on a busy machine the others are silent for seconds, too
        inject=["hang 1,1 at 20 for 14s"],
        gate=[40, [["turned away", None], ["arrived", None]]],
    )

    check_nothing_lost(result, steps=60)
    (fault,) = result["faults"]
    assert fault["detected_s"] is not None
    away = [(event["chip"], event["why"]) for event in of_kind(result, "turned away")]
    assert {tuple(chip) for chip, _ in away} == {(1, 1)}
    assert all("silent" in why for _, why in away)
    assert result["chips"] == [4, 3, 4]


def test_a_cut_link_is_routed_around_and_nobody_leaves(tmp_path: Path) -> None:
    inject = ["cut link:0,0-0,1 at 10", "repair link:0,0-0,1 at 30"]

    gate = [40, [["generation", 4], ["fault", None]] * 2]
    result = elastic(tmp_path, mesh="2x2", steps=60, inject=inject, gate=gate)

    check_nothing_lost(result, steps=60)
    assert result["chips"] == [4, 4, 4]
    assert [event["cut"] for event in of_kind(result, "generation")] == [[], ["link:0,0-0,1"], []]
    assert not of_kind(result, "left")


def test_training_goes_on_without_its_coordinator_and_a_later_failure_is_handled(
    tmp_path: Path,
) -> None:
    inject = ["kill coordinator at 10", "kill 2x2@0,2 at 40"]

    gate = [30, [["coordinator", None]] * 2]
    result = elastic(tmp_path, mesh="2x4", steps=60, inject=inject, gate=gate)

    check_nothing_lost(result, steps=60)
    assert [event["state"] for event in of_kind(result, "coordinator")] == ["lost", "back"]
    assert result["chips"] == [8, 4]


def test_training_goes_on_while_its_coordinator_is_frozen(tmp_path: Path) -> None:
    inject = ["freeze coordinator at 10 for 1s"]

    gate = [60, [["recovered", None]]]
    result = elastic(
        tmp_path, mesh="2x2", steps=70, heartbeat_timeout_s=20.0, inject=inject, gate=gate
    )

    check_nothing_lost(result, steps=70)
    (fault,) = result["faults"]
    assert fault["fault"] == "freeze coordinator"
    assert fault["recovered_s"] is not None
    assert not of_kind(result, "coordinator")  # it was neither lost nor started again
    assert result["chips"] == [4]


def test_a_coordinator_that_stays_frozen_is_replaced_and_a_later_failure_is_handled(
    tmp_path: Path,
) -> None:
    inject = ["freeze coordinator at 10 for 600s", "kill 0,1 at 15"]

    gate = [20, [["coordinator", None]] * 2]
    result = elastic(
        tmp_path, mesh="2x2", steps=60, heartbeat_timeout_s=3.0, inject=inject, gate=gate
    )

    check_nothing_lost(result, steps=60)
    assert [event["state"] for event in of_kind(result, "coordinator")] == ["lost", "back"]
    assert result["chips"][-1] == 3


def test_a_failure_and_the_coordinator_s_death_at_once_are_survived(tmp_path: Path) -> None:
    inject = ["kill coordinator at 20", "kill 2x2@0,2 at 20"]

    result = elastic(tmp_path, mesh="2x4", steps=60, inject=inject)

    check_nothing_lost(result, steps=60)
    assert result["chips"][-1] == 4


def test_the_smaller_part_of_a_mesh_that_is_cut_in_two_waits_and_says_so(tmp_path: Path) -> None:
    inject = ["kill 2x2@0,2 at 10", "repair 2x2@0,2 at 25"]

    gate = [35, [["generation", 8]] + [["arrived", None]] * 4]
    result = elastic(tmp_path, mesh="2x8", steps=45, inject=inject, gate=gate)

    check_nothing_lost(result, steps=45)
    assert result["chips"] == [16, 8, 16]
    waiting = of_kind(result, "waiting")
    assert waiting[0]["chips"] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert "cut off" in waiting[0]["why"]


@pytest.mark.parametrize(
    ("inject", "chips"),
    [
        (["kill 2x2@0,0 at 10", "kill 2x2@2,2 at 10"], 8),  # these two leave a diagonal: 4 wait
        (["kill 2x4@0,0 at 10"], 8),
        (["kill 2x4@0,0 at 10", "kill 2x2@2,0 at 10"], 4),
    ],
    ids=["two boards at once", "half the mesh", "all but one board"],
)
@pytest.mark.slow
def test_large_losses_are_survived(tmp_path: Path, inject: list[str], chips: int) -> None:
    result = elastic(tmp_path, mesh="4x4", steps=40, inject=inject)

    check_nothing_lost(result, steps=40)
    assert result["chips"][-1] in (chips, 4)


def test_batch_statistics_stay_equal_and_checkpoints_resume_on_another_mesh(tmp_path: Path) -> None:
    first = elastic(
        tmp_path / "a",
        mesh="2x2",
        steps=30,
        save_every=10,
        batch_norm=True,
        inject=["kill 1,1 at 15"],
    )
    check_nothing_lost(first, steps=30)
    newest = sorted((tmp_path / "a" / "checkpoints").glob("step-*"))[-1]
    shard = sorted(newest.glob("shard-*"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])

    again = elastic(
        tmp_path / "b",
        mesh="3x2",
        fail=["1,1"],
        steps=40,
        batch_norm=True,
        resume=str(tmp_path / "a" / "checkpoints"),
    )

    assert again["finished"], again["why"]
    assert str(shard) in again["stderr"] or newest.name in again["stderr"]
    assert min(losses(again)) == 21
    assert again["audit"]["split"] == []


def test_a_shrinking_batch_uses_every_sample_once_too(tmp_path: Path) -> None:
    result = elastic(
        tmp_path, mesh="2x2", steps=40, policy="shrink", batch=48, inject=["kill 1,1 at 10"]
    )

    found = result["audit"]
    assert (found["lost"], found["repeated"], found["split"]) == (0, 0, [])
    samples = {event["step"]: event["samples"] for event in of_kind(result, "step")}
    assert samples[5] == 48
    assert samples[39] == 36


def test_more_chips_than_samples_leave_some_without_a_share(tmp_path: Path) -> None:
    result = elastic(tmp_path, mesh="2x4", steps=20, batch=5)

    check_nothing_lost(result, steps=20, batch=5)


def trained(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run `meshmend train` and return what it prints, and its losses by step."""
    command = [sys.executable, "-m", "meshmend", "train", "resnet", "--norm", "group", "--json"]
    command += ["--steps", "100", "--check-every-step", "--run-dir", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return answer | {"events": events}


@pytest.mark.slow
def test_the_loss_of_a_resnet_without_batch_statistics_does_not_know_of_a_failure(
    tmp_path: Path,
) -> None:
    faults = ("kill 2x2@0,2 at 30", "repair 2x2@0,2 at 60", "kill 2x2@2,0 at 80 in reduce")

    calm = trained(tmp_path / "calm")
    hurt = trained(tmp_path / "hurt", *(word for each in faults for word in ("--inject", each)))

    assert hurt["replicas_equal"]
    assert hurt["samples"] == calm["samples"] == {"used": 6400, "lost": 0, "repeated": 0}
    assert hurt["chips"] == [16, 12, 16, 12]
    one, other = losses(calm), losses(hurt)
    assert len(other) >= 95
    for step, loss in other.items():
        assert loss == pytest.approx(one[step], rel=1e-4)
    assert len(hurt["faults"]) == 3
    assert all(fault["recovered_s"] > 0 for fault in hurt["faults"])
    assert Path(hurt["report"]).stat().st_size > 10_000
