"""A folder of checkpoints belongs to one run: two are never mixed, and one command goes on."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from meshmend.errors import InputError
from meshmend.train.state.checkpoint import Saving, complete_steps, load, save_shard, write_shard
from meshmend.train.state.shards import Origin, cut_shard
from meshmend.train.state.torch_state import TORCH
from meshmend.train.torch.job import Job

DATA = [(torch.ones(3) * number, torch.zeros(1)) for number in range(12)]


def trained(
    folder: Path, steps: int, after_step: Callable[[Job], object] | None = None, **more: Any
) -> Job:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    more.setdefault("saving", Saving(folder, every=10, keep=3))
    job = Job(model, optimizer, DATA, batch=4, steps=steps, **more)
    for inputs, wanted in job:
        optimizer.zero_grad()
        loss = (model(inputs) - wanted).square().mean()
        loss.backward()
        job.step(loss)
        if after_step is not None:
            after_step(job)
    return job


def test_a_new_run_into_the_folder_of_another_is_refused_and_the_old_checkpoints_stay(
    tmp_path: Path,
) -> None:
    trained(tmp_path, 60)

    with pytest.raises(
        InputError, match=r'those of another run, up to step 60; go on from them with resume="auto"'
    ):
        trained(tmp_path, 35)
    assert complete_steps(tmp_path) == [40, 50, 60]


def test_auto_starts_goes_on_and_says_that_the_job_is_finished(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    straight = trained(tmp_path / "straight", 60)
    assert trained(tmp_path / "one", 35, resume="auto").step_number == 35

    resumed = trained(tmp_path / "one", 60, resume="auto")
    with caplog.at_level(logging.WARNING):
        trained(tmp_path / "one", 60, resume="auto")

    weights = [job.state()["model"]["weight"] for job in (resumed, straight)]
    assert torch.equal(*weights)
    assert complete_steps(tmp_path / "one") == [40, 50, 60]
    assert "finished: 60 of 60 steps" in caplog.text


def test_the_last_step_is_saved_whatever_its_number(tmp_path: Path) -> None:
    """So that the same command, given again, has nothing to do again."""
    first = trained(tmp_path, 25, resume="auto")
    again = trained(tmp_path, 25, resume="auto")

    assert complete_steps(tmp_path) == [10, 20, 25]
    assert again.step_number == 25
    assert torch.equal(*(job.state()["model"]["weight"] for job in (first, again)))


def _lower_rate(job: Job) -> None:
    """Change what the optimizer does, as a loop may after it has evaluated."""
    if job.step_number == 20:
        cast(torch.optim.Optimizer, job.optimizer).param_groups[0]["lr"] *= 0.1


def _freeze(job: Job) -> None:
    if job.step_number == 20:
        cast(torch.nn.Linear, job.model).bias.requires_grad_(False)


@pytest.mark.parametrize("change", [_lower_rate, _freeze])
def test_what_the_loop_changes_after_a_step_is_in_the_checkpoint_of_that_step(
    tmp_path: Path, change: Callable[[Job], object]
) -> None:
    straight = trained(tmp_path / "straight", 40, change)

    trained(tmp_path / "one", 20, change)
    resumed = trained(tmp_path / "one", 40, change, resume="auto")
    unchanged = trained(tmp_path / "two", 40)

    ends = [job.state()["model"] for job in (straight, resumed, unchanged)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert not all(torch.equal(ends[0][name], ends[2][name]) for name in ends[0])


def test_auto_needs_a_folder_and_a_first_start_with_a_folder_names_the_way_out(
    tmp_path: Path,
) -> None:
    with pytest.raises(InputError, match="needs the folder of the job's checkpoints"):
        trained(tmp_path, 10, saving=None, resume="auto")
    with pytest.raises(InputError, match=r'but it has none; resume="auto" begins anew') as raised:
        trained(tmp_path, 10, resume=tmp_path)
    assert "\n" not in str(raised.value)


def test_a_damaged_later_checkpoint_does_not_crowd_out_what_is_saved_now(tmp_path: Path) -> None:
    trained(tmp_path, 60)
    (damaged,) = (tmp_path / "step-00000060").glob("shard-*")
    damaged.write_bytes(b"rotten")

    saving = Saving(tmp_path, every=3, keep=1)
    trained(tmp_path, 54, saving=saving, resume="auto")

    found, _ = load(tmp_path, TORCH)
    assert found is not None
    assert found.step == 54


def stored(folder: Path, origins: list[Origin]) -> None:
    state = {"weights": torch.arange(1000.0)}
    for number, origin in enumerate(origins):
        place = {"step": 10, "shard": number, "n_shards": len(origins)}
        write_shard(folder, cut_shard(state, TORCH, **place, origin=origin))


@pytest.mark.parametrize(
    ("digests", "names"),
    [
        ("aab", r"chip \(0, 2\) had another state than the others"),
        ("ab", r"chips \(0, 0\), \(0, 1\) had different states"),
    ],
)
def test_a_checkpoint_of_replicas_that_differ_is_not_whole_and_names_the_chips(
    tmp_path: Path, digests: str, names: str
) -> None:
    origins = [Origin("run", 1, 2, (0, at), digest) for at, digest in enumerate(digests)]
    stored(tmp_path, origins)

    found, ((_, why),) = load(tmp_path, TORCH)

    assert found is None
    assert re.search(names, why)


def test_shards_of_two_histories_share_no_file_and_are_not_put_together(tmp_path: Path) -> None:
    stored(tmp_path, [Origin("run", 1, 2, (0, 0), "x"), Origin("run", 1, 3, (0, 1), "x")])
    save_shard(tmp_path, {"weights": torch.zeros(3)}, TORCH, step=9, shard=0, n_shards=1)

    found, ((_, why),) = load(tmp_path, TORCH)

    assert found is not None
    assert found.step == 9
    assert len(list((tmp_path / "step-00000010").iterdir())) == 2
    assert "1 of 2 shards" in why
