"""A disk that fails in any way, at any byte of a checkpoint, costs that checkpoint and no chip."""

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bad_disks import BadDisk
from elastic_job import elastic, of_kind
from meshmend.files import DRAFT
from meshmend.train.core.worker_environment import WorkerEnvironment
from meshmend.train.state.checkpoint import Saving, complete_steps, load_step
from meshmend.train.state.checkpoint_writer import CheckpointWriter, WriteFailures
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
    saving = Saving(folder, every=2, keep=4)
    failures = WriteFailures(WorkerEnvironment())
    writer = CheckpointWriter(saving, ARRAYS, failures, lambda step, at: None)
    state = {"weights": np.arange(n_bytes // 8, dtype=np.float64)}
    for step in DUE:
        writer.note_step(step, 0)
        writer.begin(lambda: state, step=step, generation=0, shard=0, n_shards=1)
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
    shards, damage = TORCH if is_torch else ARRAYS, list[Any]()
    for step in complete_steps(folder):
        assert load_step(folder, step, shards, on_damage=lambda *why: damage.append(why)), damage
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
