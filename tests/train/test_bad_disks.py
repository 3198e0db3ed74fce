"""A disk that fails in any way, at any byte of a checkpoint, costs that checkpoint and no chip."""

import errno
import logging
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from bad_disks import BadDisk
from elastic_job import elastic, of_kind
from meshmend.files import DRAFT
from meshmend.train.core.worker_environment import WorkerEnvironment
from meshmend.train.state.checkpoint import Saving, complete_steps, read_step
from meshmend.train.state.checkpoint_writer import CheckpointWriter
from meshmend.train.state.state_tree import ARRAYS
from meshmend.train.state.torch_state import TORCH
from meshmend.train.torch.job import Job
from small_disks import small_disk

N_DISKS, N_SMALL = 188, 12  # in-process ones, and jobs of processes on a disk of their own: 200
DUE = [2, 4, 6, 8]
DISKS = [
    pytest.param(seed, marks=[] if seed < 16 else [pytest.mark.slow]) for seed in range(N_DISKS)
]
SMALL_DISKS = [
    pytest.param(seed, marks=[] if seed < 1 else [pytest.mark.slow]) for seed in range(N_SMALL)
]
OPTIMIZER_COPIES = 3  # weights, and what the optimizer keeps of them


def trained(folder: Path, n_bytes: int) -> None:
    """Train a job of eight steps that saves every second one, with a state of so many bytes."""
    model = torch.nn.Linear(max(1, n_bytes // 4 // OPTIMIZER_COPIES), 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = [torch.zeros(1)] * 8
    saving = Saving(folder, every=2, keep=4)
    job = Job(model, optimizer, data, batch=2, steps=DUE[-1], saving=saving)
    for _ in job:
        optimizer.zero_grad()
        loss = model.weight.square().mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's stubs
        job.step(loss)
    assert job.step_number == DUE[-1]


def written(folder: Path, n_bytes: int) -> list[int]:
    """Write the same checkpoints of a state of arrays; return the steps that are missing."""
    saving, alone = Saving(folder, every=2, keep=4), WorkerEnvironment()
    writer = CheckpointWriter(saving, ARRAYS, alone)
    state = {"weights": np.arange(n_bytes // 8, dtype=np.float64)}
    for step in DUE:
        writer.save(lambda: state, step=step, generation=0, shard=0, n_shards=1)
    writer.wait()
    return writer.missing


@pytest.mark.parametrize("seed", DISKS)
def test_a_bad_disk_costs_the_checkpoints_it_could_not_take_and_they_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    folder, disk = tmp_path / "checkpoints", BadDisk.of(seed)
    is_torch = seed % 4 != 3
    with disk.mounted(folder), caplog.at_level(logging.WARNING):
        if is_torch:
            trained(folder, disk.n_bytes)
            words = re.search(r"could not be written: of steps ([\d, ]+)", caplog.text)
            missing = [int(step) for step in words[1].split(", ")] if words else []
        else:
            missing = written(folder, disk.n_bytes)

    assert sorted([*missing, *complete_steps(folder)]) == DUE
    assert bool(missing) or disk.call == "mkdir"  # a folder that is there is not made again
    for step in complete_steps(folder):
        assert read_step(folder, step, TORCH if is_torch else ARRAYS)
    if not disk.keeps_drafts:
        assert not list(folder.rglob(f"*{DRAFT}"))


@pytest.mark.parametrize("seed", SMALL_DISKS)
def test_a_job_on_a_disk_that_fills_ends_as_if_it_had_room(tmp_path: Path, seed: int) -> None:
    room = 4096 * (1 + 3 * seed)  # for no checkpoint, or for some of the four
    (tmp_path / "run").mkdir()
    with small_disk(tmp_path / "run" / "checkpoints", n_bytes=room) as disk:
        result = elastic(tmp_path / "run", mesh="1x2", steps=12, save_every=3)
        whole = complete_steps(disk)

    assert result["finished"], result["why"]
    assert result["chips"] == [2]
    assert result["faults"] == []
    failed = {event["step"] for event in of_kind(result, "unwritten")}
    assert failed
    assert failed.isdisjoint(whole)
    assert result["audit"]["unchecked"] == []
    assert result["audit"]["lost"] == 0


def test_checkpoints_that_cannot_be_set_aside_are_told_in_a_line_and_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving, alone = Saving(tmp_path, every=5), WorkerEnvironment()
    writer = CheckpointWriter(saving, ARRAYS, alone)

    def save(step: int) -> None:
        state = {"weights": np.arange(8.0)}
        writer.save(lambda: state, step=step, generation=0, shard=0, n_shards=1)
        writer.wait()

    def refuse(path: Path, target: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for step in (5, 10, 15):
        save(step)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Path, "rename", refuse)
        for _ in range(2):
            writer.set_aside(after=5)

    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "chip (0,) cannot write the new names of checkpoints that may hold wrong numbers: "
        "Read-only file system; delete those of steps 10, 15 before you resume"
    )
    assert complete_steps(tmp_path) == [5, 10, 15]
    assert writer.newest() == 5
    save(10)
    assert writer.newest() == 10


@pytest.mark.slow
@pytest.mark.parametrize("n_checkpoints", [0, 3, 5])
def test_a_job_with_a_wrong_chip_on_a_disk_that_fills_loses_nothing_that_was_written(
    tmp_path: Path, n_checkpoints: int
) -> None:
    (tmp_path / "run").mkdir()
    room = 4096 * (1 + 9 * n_checkpoints)  # a checkpoint has four files, in a folder
    with small_disk(tmp_path / "run" / "checkpoints", n_bytes=room) as disk:
        result = elastic(
            tmp_path / "run",
            mesh="2x2",
            steps=80,
            check_shares=5,
            save_every=5,
            dtype="float64",
            inject=["wrong 0,1 from 50"],
        )
        whole = complete_steps(disk)
        assert all(read_step(disk, step, TORCH) for step in whole)

    assert result["finished"], result["why"]
    assert [event["chip"] for event in of_kind(result, "turned away")] == [[0, 1]]
    assert of_kind(result, "unwritten")
    (wrong,) = of_kind(result, "wrong-result")
    back = [event["step"] for event in of_kind(result, "restored")]
    assert all(step <= wrong["right_until"] for step in back)
    assert result["audit"]["faults"] == []
    assert (result["audit"]["lost"], result["audit"]["repeated"]) == (0, 0)
