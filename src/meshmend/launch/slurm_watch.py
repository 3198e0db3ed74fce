"""Signs of life between the supervisor of a Slurm job and the agents on its nodes.

An agent prints a line every second, and one with its exit code when it ends (`AgentLine`): what a
scheduler says about a step cannot be relied on, and srun of Slurm 22.05 goes on long after its node
has died.

The other way round, Slurm does not requeue a job with --no-kill whose first node has died: such a
job goes on without its batch script, and so without its supervisor and its coordinator, until its
time is up. So the supervisor writes a new text into a file of the run's folder every few seconds
(`SupervisorBeat`), and each agent starts a process that reads it (`start_watch`). If the text stays
the same and the coordinator does not answer either, that process asks Slurm to requeue the job,
which then goes on from its checkpoint.

Clocks of hosts are not compared. A host that is cut off from the others does not reach Slurm.
"""

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshmend.errors import InputError
from meshmend.launch.hosts import is_coordinator_answering
from meshmend.launch.supervisor import say
from meshmend.processes import die_with_parent
from meshmend.transport.listener import Address

ALIVE_EVERY_S: Final = 1.0
_LINE: Final = re.compile(rb"meshmend-agent (?:alive|ended (\d{1,3}))\r?")
_BEAT_S: Final = 2.0
_LOST_S: Final = 20.0  # without a new text, and without an answer of the coordinator
_SPREAD_S: Final = 5.0  # so that not all hosts ask Slurm at once
_ASK_S: Final = 30.0  # for an answer of Slurm
_OVER: Final = "over\n"


@dataclass(frozen=True)
class AgentLine:
    """An agent lives; if it has an exit code, it has ended with it."""

    exit_code: int | None = None


def read_agent_line(line: bytes) -> AgentLine | None:
    """Return what a line says about the agent that printed it; None for any other line."""
    found = _LINE.fullmatch(line)
    if found is None:
        return None
    return AgentLine(int(found[1]) if found[1] else None)


def print_agent_line(exit_code: int | None = None) -> None:
    """Print that this agent lives, or its exit code; a supervisor that is gone does not matter."""
    words = "alive" if exit_code is None else f"ended {exit_code}"
    sys.stdout.flush()
    try:
        os.write(sys.stdout.fileno(), f"meshmend-agent {words}\n".encode())
    except OSError:
        return


class SupervisorBeat:
    """The file by which the supervisor of a job tells that it lives."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / "supervisor"
        self._next_at = 0.0

    def write(self) -> None:
        """Write a new text, if that is due; a full disk does not matter."""
        now = time.monotonic()
        if now >= self._next_at:
            self._next_at = now + _BEAT_S
            with suppress(OSError):
                self._file.write_text(f"{os.getpid()} {now}\n", encoding="utf-8")

    def end(self) -> None:
        """Write that the job is over: from now on the supervisor is not missed."""
        with suppress(OSError):
            self._file.write_text(_OVER, encoding="utf-8")

    def read(self) -> str | None:
        """Return the text, or None if it cannot be read."""
        try:
            return self._file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None


@dataclass(frozen=True)
class SupervisorWatch:
    """Waits until the supervisor of a job is lost; `is_answered` asks the job's coordinator."""

    beat: SupervisorBeat
    is_answered: Callable[[], bool]
    lost_after_s: float = _LOST_S

    def wait(self) -> None:
        """Return when neither supervisor nor coordinator has given a sign of life for a while."""
        last, since = self.beat.read(), time.monotonic()
        while True:
            time.sleep(_BEAT_S)
            text = self.beat.read()
            if text != last or text == _OVER:
                last, since = text, time.monotonic()
            elif time.monotonic() > since + self.lost_after_s:
                if not self.is_answered():
                    return
                since = time.monotonic()


def start_watch(job_id: str, run_dir: Path, coordinator: Address, secret: bytes) -> None:
    """Start a process that requeues a Slurm job when its supervisor is lost.

    It ends with this process. Call it before torch is imported, so that it takes little memory.
    """
    parent = os.getpid()
    if os.fork():
        return
    try:
        die_with_parent(parent)
        lost_after_s = _LOST_S + random.uniform(0.0, _SPREAD_S)
        watch = SupervisorWatch(
            SupervisorBeat(run_dir),
            lambda: is_coordinator_answering(coordinator, secret),
            lost_after_s,
        )
        while True:
            watch.wait()
            say(f"the first node of job {job_id} is lost: {requeue(job_id)}")
    finally:
        os._exit(1)


def is_ending(run_dir: Path, coordinator: Address, secret: bytes) -> bool:
    """Return whether Slurm has ended the coordinator before the job was over: its record is left.

    Agents ask that when they get SIGTERM, which may also mean that the job will be preempted soon.
    """
    has_record = record_in(run_dir).exists()
    return has_record and not is_coordinator_answering(coordinator, secret)


def record_in(run_dir: Path) -> Path:
    """Return the file of the coordinator's record, which is deleted when the job has finished."""
    return run_dir / "coordinator.json"


def requeue(job_id: str) -> str:
    """Requeue a job, or cancel it if its user does not want that; return what was done."""
    try:
        job = ask_slurm("scontrol", "show", "job", job_id, "--oneliner").split()
        if "JobState=RUNNING" not in job:
            return "Slurm has ended the job already"
        if "Requeue=0" in job:
            ask_slurm("scancel", job_id)
            return "the job is cancelled, because it must not be requeued"
        ask_slurm("scontrol", "requeue", job_id)
    except InputError as error:
        return f"the job stands still, because {error}"
    return "the job is requeued, to go on from its newest checkpoint"


def ask_slurm(*command: str) -> str:
    """Return what a command of Slurm prints.

    Raises:
        InputError: it is not installed, fails, or does not answer.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"meshmend needs {command[0]} of Slurm, but: {error}") from None
    if done.returncode != 0:
        raise InputError(f"{' '.join(command[:3])} of Slurm failed: {done.stderr.strip()}")
    return done.stdout
