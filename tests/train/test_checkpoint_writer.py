"""Checkpoints are written while training goes on; each is whole or does not count."""

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forked_script import run_forked
from waiting import HANG_S, until

pytest.importorskip("torch")

import torch

from meshmend.train.core.worker_environment import WorkerEnvironment
from meshmend.train.state import checkpoint
from meshmend.train.state.checkpoint import Saving, complete_steps, load, read_step
from meshmend.train.state.checkpoint_writer import CheckpointWriter
from meshmend.train.state.torch_state import TORCH


class Disk:
    """Flushes to disk wait until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.goes_on = threading.Event()
        self.n_flushes = 0
        flush = os.fsync

        def slow(descriptor: int) -> None:
            self.n_flushes += 1
            assert self.goes_on.wait(HANG_S)
            flush(descriptor)

        monkeypatch.setattr(os, "fsync", slow)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(monkeypatch)
    yield disk
    disk.goes_on.set()


class Chip:
    """One chip that saves a state whose tensor changes from step to step."""

    def __init__(self, folder: Path, shard: int = 0, n_shards: int = 1) -> None:
        self.weights = torch.zeros(1000)
        self.saved: list[int] = []
        self._shard, self._n_shards = shard, n_shards
        self.writer = CheckpointWriter(
            Saving(folder, every=1),
            TORCH,
            WorkerEnvironment(),
            on_saved=lambda step, at: self.saved.append(step),
        )

    def begin(self, step: int, generation: int = 1) -> None:
        self.weights.fill_(step)
        self.writer.save(
            lambda: {"weights": self.weights},
            step=step,
            generation=generation,
            shard=self._shard,
            n_shards=self._n_shards,
        )


def test_the_next_step_does_not_wait_for_the_disk_and_changes_nothing_on_it(
    tmp_path: Path, disk: Disk
) -> None:
    chip = Chip(tmp_path)
    chip.begin(1)
    chip.weights.fill_(99.0)  # the next step
    chip.writer.note_step(2, 1)

    assert complete_steps(tmp_path) == []
    assert chip.saved == []
    disk.goes_on.set()
    chip.writer.wait()

    assert chip.saved == [1]
    found = read_step(tmp_path, 1, TORCH)
    assert torch.equal(found.state["weights"], torch.ones(1000))


def test_a_checkpoint_waits_for_the_one_before(tmp_path: Path, disk: Disk) -> None:
    chip = Chip(tmp_path)
    chip.begin(1)
    until(lambda: disk.n_flushes == 1)
    later = threading.Thread(target=chip.begin, args=[2])
    later.start()
    later.join(0.1)

    assert later.is_alive()
    assert disk.n_flushes == 1
    disk.goes_on.set()
    later.join()
    chip.writer.wait()
    assert complete_steps(tmp_path) == [1, 2]


def test_a_failure_to_write_is_reported_once_and_the_next_checkpoint_is_tried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "file"
    folder.touch()
    chip = Chip(folder)
    for step in (1, 2):
        chip.begin(step)
        chip.writer.wait()
    assert caplog.text.count("cannot write its part of a checkpoint") == 1

    folder.unlink()
    chip.begin(3)
    chip.writer.wait()

    assert chip.saved == [3]

    shutil.rmtree(folder)
    folder.touch()
    chip.begin(4)
    chip.writer.wait()
    assert caplog.text.count("cannot write its part of a checkpoint") == 2


def test_a_state_that_cannot_be_stored_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chip = Chip(tmp_path)

    chip.writer.save(lambda: {"x": object()}, step=1, generation=1, shard=0, n_shards=1)
    chip.writer.wait()

    assert "a training state needs tensors, numbers, texts" in caplog.text
    assert chip.saved == []


def test_an_error_of_ours_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(checkpoint, "write_shard", broken)
    chip = Chip(tmp_path)
    chip.begin(1)

    with pytest.raises(ZeroDivisionError):
        chip.writer.wait()


def test_a_folder_that_hosts_do_not_share_is_reported_after_the_second_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chip = Chip(tmp_path, n_shards=2)  # the other chip writes to another disk
    for step in (1, 2):
        chip.begin(step)
    chip.writer.note_step(3, 1)
    chip.writer.wait()

    assert chip.saved == [1]
    assert "all hosts must see this folder" in caplog.text


def test_a_slow_chip_is_not_taken_for_one_with_another_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The chip writes step 1 while the first one has begun step 2; then step 3 is done."""
    first, second = Chip(tmp_path, n_shards=2), Chip(tmp_path, shard=1, n_shards=2)
    first.begin(1)
    first.begin(2)
    first.writer.wait()
    second.begin(1)
    second.begin(2)
    second.writer.wait()
    first.writer.note_step(3, 1)

    assert "all hosts must see this folder" not in caplog.text
    assert first.saved == [1, 2]


KILLED = """
import os, sys
from pathlib import Path
import torch
from meshmend.train import Saving
from meshmend.train.state.checkpoint_writer import CheckpointWriter
from meshmend.train.state.torch_state import TORCH
from meshmend.train.core.worker_environment import WorkerEnvironment

folder, flush = Path(sys.argv[1]), os.fsync
alone = WorkerEnvironment()
writer = CheckpointWriter(Saving(folder, 1), TORCH, alone)
for step in (1, 2):
    if step == 2:
        os.fsync = lambda descriptor: os._exit(9)  # dies in the middle of the second
    state = {"weights": torch.full((100,), float(step))}
    writer.save(lambda: state, step=step, generation=0, shard=0, n_shards=1)
    writer.wait()
"""


def test_a_chip_that_dies_while_it_writes_leaves_no_checkpoint_that_looks_complete(
    tmp_path: Path,
) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "checkpoints"
    script.write_text(KILLED)
    done = run_forked(str(script), str(folder))

    assert done.returncode == 9, done.stderr
    assert complete_steps(folder) == [1]
    found, _ = load(folder, TORCH)
    assert found is not None
    assert found.step == 1
