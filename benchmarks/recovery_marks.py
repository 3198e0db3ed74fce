"""What a worker of a recovery benchmark did and when, written down so that others can read it.

Every worker appends lines to a file of its own; all clocks are this machine's monotonic one.
Nothing here imports torch: workers note their start before they do.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from meshmend.errors import BenchmarkError

MESH = "4x4"
N_WORKERS = 16
BATCH = 64
BOARD = "2x2@0,2"
KILLED = (2, 3, 6, 7)  # the ranks of that board
SURVIVORS = tuple(rank for rank in range(N_WORKERS) if rank not in KILLED)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

_POLL_S = 0.01


@dataclass(frozen=True)
class Mark:
    """One thing a worker did: `what` is a word, `step` the steps done, `among` how many work."""

    rank: int
    pid: int
    what: str
    at: float
    step: int = 0
    among: int = 0


class Marks:
    """The file of one worker."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank = rank
        # Kept open to the end of the process, whichever way that comes.
        self._stream = (folder / f"{rank}.jsonl").open("a", encoding="utf-8", buffering=1)

    def note(self, what: str, *, step: int = 0, among: int = 0) -> None:
        """Write down that this worker did something just now."""
        fields = (self._rank, os.getpid(), what, time.monotonic(), step, among)
        self._stream.write(json.dumps(fields) + "\n")


def marks_in(folder: Path, ranks: Sequence[int] = range(N_WORKERS)) -> list[Mark]:
    """Return what these workers have noted so far."""
    found = []
    for rank in ranks:
        path = folder / f"{rank}.jsonl"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        found += [
            Mark(*json.loads(line)) for line in text.splitlines(keepends=True) if "\n" in line
        ]
    return found


@dataclass(frozen=True)
class Strike:
    """A kill: when it was, and the most steps that any worker had done by then."""

    at: float
    step: int


def strike(folder: Path) -> Strike:
    """Kill the workers of the board, and return when that was."""
    latest = {mark.rank: mark.pid for mark in marks_in(folder, KILLED)}
    at = time.monotonic()
    for pid in latest.values():
        _kill(pid, folder)
    done = [mark.step for mark in marks_in(folder) if mark.what == "step" and mark.at <= at]
    return Strike(at, max(done))


def await_step(folder: Path, step: int, *, leader: subprocess.Popen[bytes], for_s: float) -> None:
    """Return as soon as rank 0 has done a step, and all workers take part.

    Raises:
        BenchmarkError: it does not, or the process that leads the job ends before.
    """

    def is_done() -> bool:
        steps = [mark for mark in marks_in(folder, [0]) if mark.what == "step"]
        return bool(steps) and steps[-1].step >= step and steps[-1].among == N_WORKERS

    await_that(is_done, f"step {step} with all workers", leader=leader, for_s=for_s)


def await_that(
    is_so: Callable[[], bool], what: str, *, leader: subprocess.Popen[bytes], for_s: float
) -> None:
    """Return as soon as something is so.

    Raises:
        BenchmarkError: it does not become so, or the process that leads the job ends before.
    """
    deadline = time.monotonic() + for_s
    while not is_so():
        if leader.poll() is not None:
            raise BenchmarkError(f"it ended with code {leader.returncode} before {what}")
        if time.monotonic() > deadline:
            raise BenchmarkError(f"it did not reach {what} in {for_s:.0f} s")
        time.sleep(_POLL_S)


def output_of(command: Sequence[str], *, for_s: float) -> str:
    """Return what a command writes to its standard output.

    Raises:
        BenchmarkError: it fails, or does not end in time.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=for_s,
            check=False,
            env={**os.environ, **ENVIRONMENT},
        )
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"it did not end in {for_s:.0f} s") from None
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["nothing was said"]
        raise BenchmarkError(f"it ended with code {done.returncode}: {last[0]}")
    return done.stdout


def step_s(marks: Sequence[Mark], *, until: float) -> float:
    """Return the median time between two steps of rank 0, the first few left out."""
    ends = [
        mark.at for mark in marks if mark.rank == 0 and mark.what == "step" and mark.at <= until
    ]
    pauses = [after - before for before, after in pairwise(ends[2:])]
    return median(pauses) if pauses else float("nan")


@contextmanager
def started(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] = ENVIRONMENT
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the process that leads a job, what it writes in `output`; in the end kill all of it."""
    with (folder / "output").open("wb") as output:
        leader = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **environment},
        )
    try:
        yield leader
    finally:
        _end(leader)
        for pid in {mark.pid for mark in marks_in(folder)}:
            _kill(pid, folder)


def _end(leader: subprocess.Popen[bytes]) -> None:
    """End a process that was started in a session of its own, and all that it started there."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(leader.pid, number)
            leader.wait(5)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def _kill(pid: int, folder: Path) -> None:
    """Kill a worker, unless it is gone: a number may be another process's by now."""
    try:
        if str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return
