"""Samples made by loader workers: none is lost, repeated or wrong when chips are killed."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from commanding import Command, commands
from elastic_job import check_same_losses, elastic
from waiting import until

pytest.importorskip("torch")

KILLS = ["kill 0,1 at 6", "repair 0,1 at 12", "kill 1,0 at 20 in reduce", "repair 1,0 at 24"]
BACK = (16, [("generation", 3), ("arrived", None)])  # the first is back before the second dies


def check_all_samples_used_once(result: dict[str, Any], *, steps: int) -> None:
    assert result["finished"], result["why"] + result["stderr"]
    found = result["audit"]
    assert (found["steps"], found["used"]) == (steps, steps * 48)
    assert (found["lost"], found["repeated"], found["split"], found["faults"]) == (0, 0, [], [])


@pytest.mark.parametrize(
    ("kind", "alone"),
    [
        ("loader", "augmented"),
        pytest.param("stream", "stream alone", marks=pytest.mark.slow),
    ],
)
def test_a_job_with_loader_workers_and_kills_sees_the_samples_of_one_chip_without_any(
    tmp_path: Path, kind: str, alone: str
) -> None:
    """The random noise of each sample is the same too, or the losses would differ."""
    undisturbed = elastic(tmp_path / "alone", mesh="1x1", steps=30, data=alone)

    result = elastic(tmp_path / "mesh", mesh="2x2", steps=30, data=kind, inject=KILLS, gate=BACK)

    check_all_samples_used_once(result, steps=30)
    check_same_losses(result, undisturbed)
    assert min(result["chips"]) == 3


SLOW = """
import os, sys, time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset
from meshmend.train import Job

folder = Path(sys.argv[1])


class Slow(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        (folder / f"loader-{os.getpid()}").write_text(str(os.getppid()))
        while (folder / "hang").exists():
            time.sleep(0.01)
        return torch.zeros(1)


model = torch.nn.Linear(1, 1)
job = Job(
    model,
    torch.optim.SGD(model.parameters(), lr=0.1),
    DataLoader(Slow(), 4, num_workers=2, timeout=int(sys.argv[2])),
    steps=1000000,
)
for inputs in job:
    (folder / f"worker-{os.getpid()}").touch()
    loss = model(inputs).square().mean()
    loss.backward()
    job.step(loss)
"""


def loaders_of(folder: Path, worker: int | None = None) -> list[int]:
    """Return the loader workers that live, of one worker or of all."""
    found = []
    for path in folder.glob("loader-*"):
        pid = int(path.name.split("-")[1])
        if worker in (None, int(path.read_text() or 0)) and Path(f"/proc/{pid}").exists():
            found.append(pid)
    return found


def is_stepping(folder: Path) -> bool:
    return any(folder.glob("worker-*")) and len(loaders_of(folder)) >= 2


def script_in(folder: Path) -> Path:
    script = folder / "slow data.py"
    script.write_text(SLOW)
    return script


def inet_sockets_of(pid: int) -> set[str]:
    """Return the inodes of the connected TCP sockets that a process holds."""
    connected = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "01":  # established
            connected.add(fields[9])
    held = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            name = str(fd.readlink())
        except FileNotFoundError:
            continue
        if name.startswith("socket:["):
            held.add(name.removeprefix("socket:[").removesuffix("]"))
    return held & connected


def start_elastic(start: Any, folder: Path, *, mesh: str = "1x2", timeout: int = 0) -> Command:
    arguments = ["run", "--elastic", "--mesh", mesh, script_in(folder), folder, str(timeout)]
    command: Command = start("run", *arguments)
    until(lambda: is_stepping(folder) or command.has_ended, why=lambda: command.err)
    assert not command.has_ended, command.err
    return command


def test_loader_workers_hold_no_connection_of_their_worker_and_die_with_it(tmp_path: Path) -> None:
    with commands(tmp_path) as start:
        start_elastic(start, tmp_path)
        until(lambda: len(loaders_of(tmp_path)) == 4)
        worker = int(next(tmp_path.glob("worker-*")).name.split("-")[1])
        mine = loaders_of(tmp_path, worker)
        (tmp_path / "hang").touch()  # so that they do not look for a dead parent themselves

        assert inet_sockets_of(worker)
        assert all(not inet_sockets_of(pid) for pid in mine)
        os.kill(worker, signal.SIGKILL)

        until(lambda: not loaders_of(tmp_path, worker))
        (tmp_path / "hang").unlink()


def test_a_loader_worker_that_is_killed_is_told_in_one_line(tmp_path: Path) -> None:
    with commands(tmp_path) as start:
        command = start_elastic(start, tmp_path, mesh="1x1")
        os.kill(loaders_of(tmp_path)[0], signal.SIGKILL)

        assert command.end() == 1

    told = next(line for line in command.err.splitlines() if "failed: meshmend" in line)
    assert "LoaderError: Job needs its loader workers, but a DataLoader worker (pid" in told
    assert "is killed by signal: Killed; if memory is short, use fewer num_workers" in told
    assert not loaders_of(tmp_path)


def test_a_loader_worker_that_hangs_is_told_after_the_timeout_of_the_loader(tmp_path: Path) -> None:
    with commands(tmp_path) as start:
        command = start_elastic(start, tmp_path, mesh="1x1", timeout=5)
        (tmp_path / "hang").touch()

        assert command.end() == 1
        until(lambda: not loaders_of(tmp_path))

    assert "DataLoader timed out after 5 seconds" in command.err


def test_loader_workers_outlive_a_notice_to_save(tmp_path: Path) -> None:
    with commands(tmp_path) as start:
        start_elastic(start, tmp_path, mesh="1x1")
        seen = loaders_of(tmp_path)
        for pid in seen:
            os.kill(pid, signal.SIGTERM)
        steps = next(tmp_path.glob("worker-*"))
        before = steps.stat().st_mtime_ns

        until(lambda: steps.stat().st_mtime_ns > before)
        assert loaders_of(tmp_path) == seen


DIFFERENT = """
import os

import torch
from torch.utils.data import DataLoader, IterableDataset
from meshmend.train import Job


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.full((10, 1), float(os.getppid())))


model = torch.nn.Linear(1, 1)
job = Job(
    model,
    torch.optim.SGD(model.parameters(), lr=0.1),
    DataLoader(Stream(), 4, num_workers=1),
    steps=5,
)
for inputs in job:
    loss = model(inputs).mean()
    loss.backward()
    job.step(loss)
"""


def test_a_chip_that_reads_another_stream_is_refused_and_the_other_trains_alone(
    tmp_path: Path,
) -> None:
    script = tmp_path / "different.py"
    script.write_text(DIFFERENT)

    with commands(tmp_path) as start:
        command = start("run", "run", "--elastic", "--mesh", "1x2", script)
        assert command.end() == 1, "a chip of this job never trained"

    assert "the digest of a few samples is" in command.err
    assert "samples: 20 used, 0 lost, 0 repeated" in command.err
