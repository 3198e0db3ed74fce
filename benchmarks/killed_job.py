"""A job of another program on 4x4 processes that random faults hit, written down as a run's events.

Writes `events.jsonl` as `meshmend train` does, and `done.jsonl`: what each worker has done. A
worker that ends by itself counts as a fault that nobody injected, and is started again.
"""

import json
import logging
import os
import random
import select
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from meshmend.errors import BenchmarkError
from meshmend.lab.workloads.workload import Workload, preload
from meshmend.membership.events import (
    Event,
    FaultHappened,
    FaultRecovered,
    GenerationBegan,
    RunStarted,
    StepFinished,
    TimedEvent,
    event_line,
)
from meshmend.membership.faults.fault import COORDINATOR, Fault, FaultKind, Process
from meshmend.membership.faults.fault_injector import FaultInjector, InjectedFault
from meshmend.topology.failures import Chip, Failure, board_shape
from meshmend.topology.text import parse_mesh
from random_faults import FaultDriver, FaultSource
from small_gpt import small_gpt

MESH = parse_mesh("4x4")
_STALL_S = 120.0
_POLL_S = 0.02
_RESTART_S = 1.0  # from the end of a worker to the next one
_OFFERED = (FaultKind.KILL, FaultKind.HANG, FaultKind.SLOW, FaultKind.REPAIR)


@dataclass(frozen=True)
class Training:
    """What is trained: a workload, its model before the first step, the global batch."""

    work: Workload
    model: torch.nn.Module
    batch: int
    seed: int = 0


@dataclass(frozen=True)
class Done:
    """What a worker has done: joined, a step that counts, or one that does not (`no commit`).

    `share` is its number among those that took part, `digest` a checksum of its model.
    """

    what: str
    step: int = 0
    among: int = 0
    share: int = 0
    loss: float = 0.0
    digest: int = 0


Note = Callable[[Done], None]
Work = Callable[[int, Note], None]


def digest_of(model: torch.nn.Module) -> int:
    """Return a checksum of a model's parameters."""
    found = 0
    for parameter in model.parameters():
        found = zlib.crc32(parameter.detach().numpy().tobytes(), found)
    return found


def live(name: str, work: Callable[[], None]) -> NoReturn:
    """In a new process: work until killed, or until the process that started this one is gone."""
    threading.Thread(target=_die_with, args=[os.getppid()], daemon=True).start()
    logging.disable(logging.WARNING)
    try:
        work()
    except BaseException as error:
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def _die_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


@dataclass
class OpenFault:
    """A fault that the job has not recovered from yet."""

    told: FaultHappened
    at: float


class KilledJob:
    """The workers of a job: a `JobControl`. What they do comes through one pipe.

    `work(rank, note)` is a worker's life; it calls `note` with what it has done.
    """

    def __init__(self, folder: Path, training: Training, work: Work) -> None:
        self._training, self._work = training, work
        self._reading, self._writing = os.pipe()
        self._events = (folder / "events.jsonl").open("a", encoding="utf-8", buffering=1)
        self._done = (folder / "done.jsonl").open("a", encoding="utf-8", buffering=1)
        self._pids: dict[Chip, int] = {}
        self._stopped: set[Chip] = set()
        self._ended: dict[Chip, float] = {}  # workers that ended by themselves, and when
        self._latest: dict[Chip, tuple[float, int]] = {}  # when the last step ended, among how many
        self._open: list[OpenFault] = []
        self._began = self._moved = time.monotonic()
        self._half = b""
        self._among = 0
        self.step = 0
        words = RunStarted(str(MESH), 0, training.batch, model=training.work.name)
        self._tell(words, self._began)
        self.restart(MESH.live, ())

    # What a fault injector does.

    def kill(self, process: Process) -> None:
        if process != COORDINATOR and (pid := self._pids.pop(process, 0)):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._stopped.discard(process)
            self._latest.pop(process, None)

    def stop(self, process: Process) -> None:
        self._signal(process, signal.SIGSTOP)
        if process != COORDINATOR:
            self._stopped.add(process)

    def resume(self, process: Process) -> None:
        self._signal(process, signal.SIGCONT)
        if process != COORDINATOR:
            self._stopped.discard(process)

    def restart(self, chips: Sequence[Chip], self_injected: Sequence[Fault]) -> None:
        for chip in chips:
            self.kill(chip)
            self._ended.pop(chip, None)
            if (pid := os.fork()) == 0:
                rank = MESH.rank_of[chip]
                live(f"worker {rank}", partial(self._work, rank, partial(self._note, rank)))
            self._pids[chip] = pid

    def cut(self, failure: Failure) -> None:
        """Do nothing: a chip's links die with its process."""

    def mend(self, failure: Failure) -> None:
        """Do nothing."""

    def _signal(self, process: Process, number: int) -> None:
        if process != COORDINATOR and process in self._pids:
            os.kill(self._pids[process], number)

    # What goes on.

    @property
    def has_recovered(self) -> bool:
        """Whether all chips that can train do so together since the last fault."""
        return not self._open

    @property
    def pids(self) -> Mapping[int, int]:
        """The processes of the workers by rank, also of those that hang."""
        return {MESH.rank_of[chip]: pid for chip, pid in self._pids.items()}

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def note_fault(self, injected: InjectedFault) -> None:
        """Write down that a fault was injected."""
        self._begin_fault(
            FaultHappened(injected.words, injected.at_step, injected.kind, injected.chips)
        )

    def poll(self) -> None:
        """Take up what the workers have done.

        Raises:
            BenchmarkError: no step for too long.
        """
        if select.select([self._reading], [], [], _POLL_S)[0]:
            *lines, self._half = (self._half + os.read(self._reading, 1 << 16)).split(b"\n")
            for line in lines:
                self._done.write(line.decode() + "\n")
                at, rank, done = json.loads(line)
                self._take(at, MESH.live[rank], Done(*done))
        self._notice_ended()
        if time.monotonic() > self._moved + _STALL_S:
            raise BenchmarkError(f"no step for {_STALL_S:g} s after step {self.step}")

    def close(self) -> None:
        """End all workers."""
        for chip in list(self._pids):
            self.kill(chip)

    def _note(self, rank: int, done: Done) -> None:
        """In a worker: tell the process that leads the job."""
        line = json.dumps([time.monotonic(), rank, astuple(done)]) + "\n"
        os.write(self._writing, line.encode())  # short enough to stay in one piece

    def _take(self, at: float, chip: Chip, done: Done) -> None:
        if done.what != "step":
            return
        self._latest[chip] = at, done.among
        self._moved = time.monotonic()
        if done.step > self.step:
            if done.among != self._among:
                self._among = done.among
                chips = tuple(sorted(self._pids))[: done.among]  # who they are is not told
                self._tell(GenerationBegan(done.step, chips, done.step - 1), at)
            self.step = done.step
            samples = self._training.batch
            self._tell(StepFinished(done.step, done.step, done.among, done.loss, samples), at)
        for fault in [each for each in self._open if self._is_over(each)]:
            self._open.remove(fault)
            told, took_s = fault.told, at - fault.at
            self._tell(
                FaultRecovered(told.fault, told.at_step, took_s, took_s, told.kind, told.chips), at
            )

    def _is_over(self, fault: OpenFault) -> bool:
        """Whether everybody who can has done a step together since a fault; for a slow one, any."""
        if fault.told.kind is FaultKind.SLOW:
            return any(at > fault.at for at, _ in self._latest.values())
        expected = [chip for chip in self._pids if chip not in self._stopped]
        since = [self._latest.get(chip, (0.0, 0)) for chip in expected]
        return all(at > fault.at and among == len(expected) for at, among in since)

    def _notice_ended(self) -> None:
        for chip, pid in list(self._pids.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self._pids[chip]
                self._latest.pop(chip, None)
                self._ended[chip] = time.monotonic()
                self._begin_fault(FaultHappened(f"chip {chip} ended", self.step, None, (chip,)))
        for chip, at in list(self._ended.items()):
            if time.monotonic() > at + _RESTART_S:
                self.restart([chip], ())

    def _begin_fault(self, told: FaultHappened) -> None:
        now = time.monotonic()
        self._open.append(OpenFault(told, now))
        self._tell(told, now)

    def _tell(self, event: Event, at: float) -> None:
        self._events.write(event_line(TimedEvent(max(0.0, at - self._began), event)))


def is_offered(fault: Fault) -> bool:
    """Whether another program has what a fault hits: it has no links, and one coordinator."""
    return fault.kind in _OFFERED and bool(fault.chips())


def run(make_work: Callable[[Training, float], tuple[Work, Callable[[KilledJob], None]]]) -> int:
    """Run a job through faults; what it is comes from the command line: see `thousand_kills.py`.

    `make_work(training, timeout_s)` returns a worker's life, and what the process that leads the
    job does at each turn.
    """
    folder, numbers = Path(sys.argv[1]), [float(each) for each in sys.argv[2:]]
    (seed, n_faults, batch), timeout_s = (int(each) for each in numbers[:3]), numbers[3]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    torch.set_num_threads(1)
    preload()
    workload = small_gpt(seed)
    training = Training(workload, workload.model(), batch, seed)
    work, lead = make_work(training, timeout_s)
    job = KilledJob(folder, training, work)
    source = FaultSource(MESH, board_shape(2), random.Random(seed))
    driver = FaultDriver(source, n_faults, is_offered)
    injector = FaultInjector((), job, heartbeat_timeout_s=timeout_s, note=job.note_fault)
    try:
        while True:
            job.poll()
            lead(job)
            faults = driver.next_faults(job.step, job.elapsed_s, has_recovered=job.has_recovered)
            if faults is None:
                return 0
            for fault in faults:
                injector.add(fault)
            injector.inject_due(job.step, job.elapsed_s)
    except BenchmarkError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        job.close()
