"""The watch over the first node of a Slurm job: it notices a lost supervisor, and nothing else."""

import os
import signal
import stat
import threading
from pathlib import Path

import pytest

from meshmend.launch import slurm_watch
from meshmend.launch.slurm_watch import SupervisorBeat, SupervisorWatch, requeue, start_watch
from waiting import until


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_watch, "_BEAT_S", 0.01)
    monkeypatch.setattr(slurm_watch, "_LOST_S", 0.05)
    monkeypatch.setattr(slurm_watch, "_SPREAD_S", 0.0)


def slurm(folder: Path, monkeypatch: pytest.MonkeyPatch, shown: str) -> Path:
    """Make programs of Slurm that say this about a job; return the file of what they were asked."""
    asked = folder / "asked"
    for name in ("scontrol", "scancel"):
        program = folder / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> "{asked}"\necho "{shown}"\n')
        program.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return asked


def test_a_supervisor_that_writes_no_more_is_lost_once_its_coordinator_does_not_answer(
    tmp_path: Path,
) -> None:
    answers = threading.Event()
    asked = threading.Event()

    def is_answered() -> bool:
        asked.set()
        return not answers.is_set()

    watch = SupervisorWatch(SupervisorBeat(tmp_path), is_answered, lost_after_s=0.05)
    waiting = threading.Thread(target=watch.wait, daemon=True)
    waiting.start()
    assert asked.wait(60)
    assert waiting.is_alive()  # the coordinator still answers

    answers.set()

    waiting.join(60)
    assert not waiting.is_alive()


def test_a_supervisor_that_writes_is_not_lost_although_its_coordinator_is_silent(
    tmp_path: Path,
) -> None:
    beat = SupervisorBeat(tmp_path)
    beat.write()
    texts = {beat.read()}
    watch = SupervisorWatch(SupervisorBeat(tmp_path), lambda: False, lost_after_s=60.0)
    waiting = threading.Thread(target=watch.wait, daemon=True)
    waiting.start()

    def has_beaten() -> bool:
        beat.write()
        texts.add(beat.read())
        return len(texts) > 3

    until(has_beaten)
    assert waiting.is_alive()


def test_the_supervisor_of_a_job_that_is_over_is_not_missed(tmp_path: Path) -> None:
    beat, n_read = SupervisorBeat(tmp_path), 0
    beat.end()

    class Counted(SupervisorBeat):
        def read(self) -> str | None:
            nonlocal n_read
            n_read += 1
            return super().read()

    watch = SupervisorWatch(Counted(tmp_path), lambda: False, lost_after_s=0.0)
    waiting = threading.Thread(target=watch.wait, daemon=True)
    waiting.start()

    until(lambda: n_read > 10)
    assert waiting.is_alive()


def test_a_folder_that_cannot_be_written_stops_no_supervisor(tmp_path: Path) -> None:
    beat = SupervisorBeat(tmp_path / "nowhere")

    beat.write()

    assert beat.read() is None


@pytest.mark.parametrize(
    ("shown", "command", "said"),
    [
        ("JobId=7 JobState=RUNNING Requeue=1", "scontrol requeue 7", "the job is requeued"),
        ("JobId=7 JobState=RUNNING Requeue=0", "scancel 7", "the job is cancelled, because"),
        ("JobId=7 JobState=COMPLETING Requeue=1", None, "Slurm has ended the job already"),
    ],
)
def test_a_running_job_is_requeued_or_cancelled_as_its_user_wants(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shown: str,
    command: str | None,
    said: str,
) -> None:
    asked = slurm(tmp_path, monkeypatch, shown)

    assert requeue("7").startswith(said)
    commands = asked.read_text().splitlines()
    assert commands == ["scontrol show job 7 --oneliner", *([command] if command else [])]


def test_a_job_that_slurm_does_not_know_any_more_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")

    assert requeue("7").startswith("the job stands still, because meshmend needs scontrol")


def test_the_process_that_watches_requeues_the_job_of_a_lost_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = slurm(tmp_path, monkeypatch, "JobState=RUNNING")
    pid = os.fork()
    if pid == 0:  # the agent, whose child watches, and dies with it
        start_watch("7", tmp_path, ("127.0.0.1", 1), b"only the chips of this test know")
        signal.pause()
    try:
        until(lambda: asked.exists() and "scontrol requeue 7" in asked.read_text())
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
