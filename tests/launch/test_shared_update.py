"""A job whose chips share the optimizer's state survives, on real processes."""

import re
from pathlib import Path
from typing import Any

import pytest

from elastic_job import elastic, losses, of_kind

pytest.importorskip("torch")

STEPS = 24


def trained(folder: Path, *inject: str, **options: Any) -> dict[str, Any]:
    """Train on two boards of four chips, with a shared optimizer unless told otherwise."""
    folder.mkdir()
    given = {"mesh": "2x4", "steps": STEPS, "shard_optimizer": True} | options
    return elastic(folder, inject=inject, **given)


def check(result: dict[str, Any], *, redone: int = 0) -> None:
    """Check that the job finished, with equal replicas and every sample used once."""
    assert result["finished"], result["why"]
    found = result["audit"]
    assert (found["lost"], found["repeated"], found["split"]) == (0, 0, [])
    assert found["hashed"] >= STEPS
    assert found["redone"] == redone
    assert found["faults"] == []


def test_losses_are_bit_for_bit_those_of_a_job_that_is_not_shared(tmp_path: Path) -> None:
    shared = trained(tmp_path / "shared", mesh="2x2", steps=8)
    plain = trained(tmp_path / "plain", mesh="2x2", steps=8, shard_optimizer=False)

    assert losses(shared) == losses(plain)
    assert shared["audit"]["split"] == plain["audit"]["split"] == []


def test_a_board_dies_in_the_gather_and_comes_back(tmp_path: Path) -> None:
    result = trained(
        tmp_path / "run",
        "kill 2x2@0,2 at 6 in gather",
        "repair 2x2@0,2 at 10",
        gate=(16, [("generation", 4), *[("arrived", None)] * 4]),
    )

    check(result)
    assert result["chips"] == [8, 4, 8]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_lars_and_lamb_have_the_loss_curve_of_a_job_that_is_not_shared(
    tmp_path: Path, name: str
) -> None:
    shared = trained(tmp_path / "shared", mesh="2x2", steps=8, optimizer=name)
    plain = trained(tmp_path / "plain", mesh="2x2", steps=8, optimizer=name, shard_optimizer=False)

    assert losses(shared) == pytest.approx(losses(plain), rel=1e-6)
    assert shared["audit"]["split"] == plain["audit"]["split"] == []


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["reduce", "gather", "update"])
@pytest.mark.parametrize(
    "options", [{"optimizer": "lamb"}, {"optimizer": "lars"}, {"masters": True}]
)
def test_a_board_dies_and_comes_back_with_norms_and_with_masters(
    tmp_path: Path, moment: str, options: dict[str, Any]
) -> None:
    result = trained(
        tmp_path / "run",
        f"kill 2x2@0,2 at 6 in {moment}",
        "repair 2x2@0,2 at 10",
        gate=(16, [("generation", 4), *[("arrived", None)] * 4]),
        **options,
    )
    plain = losses(trained(tmp_path / "plain", shard_optimizer=False, **options))

    check(result)
    assert result["chips"] == [8, 4, 8]
    found = losses(result)
    near = 1e-5 if "optimizer" in options else 5e-3  # bfloat16 has eight bits
    assert found == pytest.approx({step: plain[step] for step in found}, rel=near)


@pytest.mark.slow
def test_masters_are_shared_and_resume_without_sharing(tmp_path: Path) -> None:
    plain = losses(trained(tmp_path / "plain", mesh="2x2", masters=True, shard_optimizer=False))
    first = tmp_path / "first"
    trained(first, mesh="2x2", masters=True, steps=12, save_every=6)
    again = trained(
        tmp_path / "again",
        mesh="2x2",
        masters=True,
        shard_optimizer=False,
        resume=str(first / "checkpoints"),
    )

    found = losses(again)
    assert max(found) == STEPS
    assert found == {step: plain[step] for step in found}


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["forward", "reduce", "gather", "update"])
def test_a_board_dies_in_each_part_of_a_step(tmp_path: Path, moment: str) -> None:
    result = trained(tmp_path / "run", f"kill 2x2@0,0 at 6 in {moment}")
    plain = trained(tmp_path / "plain", shard_optimizer=False)

    check(result)
    wanted = losses(plain)
    assert losses(result) == pytest.approx(
        {step: wanted[step] for step in losses(result)}, rel=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["recovery", "refill"])
def test_a_second_chip_dies_while_the_loss_of_the_first_is_mended(
    tmp_path: Path, moment: str
) -> None:
    """The two chips keep no share together: rank 4 mirrors rank 0, and rank 5 mirrors rank 1."""
    result = trained(
        tmp_path / "run",
        "kill 2,0 at 6 in update",
        f"kill 0,1 at 7 in {moment}",
        mesh="6x2",
    )

    check(result)
    assert result["chips"][-1] == 10


@pytest.mark.slow
def test_two_boards_die_one_after_another_and_come_back(tmp_path: Path) -> None:
    result = trained(
        tmp_path / "run",
        "kill 2x2@0,0 at 5",
        "kill 2x2@0,2 at 9",
        "repair 2x2@0,0 at 12",
        "repair 2x2@0,2 at 12",
        mesh="2x6",
        gate=(18, [("generation", 4), *[("arrived", None)] * 8]),
    )

    check(result)
    assert result["chips"][0] == result["chips"][-1] == 12


@pytest.mark.slow
def test_the_loss_of_owner_and_mirror_is_told_and_the_newest_checkpoint_is_used(
    tmp_path: Path,
) -> None:
    """On one board, rank 1 mirrors rank 0."""
    result = trained(
        tmp_path / "run",
        "kill 0,0 at 13",
        "kill 0,1 at 13",
        mesh="2x2",
        save_every=5,
        holder_timeout_s=0.5,
    )

    check(result, redone=of_kind(result, "restored")[0]["lost"] - 10)
    # On a fast machine the next step is done before the chips die.
    assert re.search(r"of the parameters after step 1[34] is lost", result["stderr"])
    assert len(of_kind(result, "lost")) >= 1


@pytest.mark.slow
def test_checkpoints_resume_with_and_without_sharing_and_on_other_meshes(tmp_path: Path) -> None:
    plain = losses(trained(tmp_path / "plain", mesh="2x2", shard_optimizer=False))
    saved = {"mesh": "2x2", "steps": 12, "save_every": 6}
    for shard_optimizer in (True, False):
        first = tmp_path / f"first {shard_optimizer}"
        trained(first, **saved, shard_optimizer=shard_optimizer)
        for number, (mesh, is_shared) in enumerate(
            (("2x2", not shard_optimizer), ("2x3", shard_optimizer), ("1x1", True))
        ):
            folder = tmp_path / f"again {shard_optimizer} {number}"
            again = trained(
                folder, mesh=mesh, shard_optimizer=is_shared, resume=str(first / "checkpoints")
            )
            found = losses(again)
            assert set(found) <= set(range(13, STEPS + 1))
            assert found == pytest.approx({step: plain[step] for step in found}, rel=1e-5)
