"""A torchft job of 4x4 replica groups that random faults hit, written down as events of a run.

    .venv-torchft/bin/python torchft_kills.py FOLDER SEED N_FAULTS BATCH TIMEOUT_S

Writes `events.jsonl` as `meshmend train` does, and `done.jsonl`: what each worker has done. A
worker that ends by itself counts as a fault that nobody injected, and is started again.
"""

import json
import os
import random
import select
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path

import torch

from meshmend.errors import BenchmarkError
from meshmend.lab.workloads.workload import preload
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
from torchft_worker import Done, Training, Worker, start_lighthouse, train

MESH = parse_mesh("4x4")
_STALL_S = 120.0
_POLL_S = 0.02
_RESTART_S = 1.0  # from the end of a worker to the next one
_OFFERED = (FaultKind.KILL, FaultKind.HANG, FaultKind.SLOW, FaultKind.REPAIR)


@dataclass
class OpenFault:
    """A fault that the job has not recovered from yet."""

    told: FaultHappened
    at: float


class TorchftJob:
    """The workers of a job: a `JobControl`. What they do comes through one pipe."""

    def __init__(self, folder: Path, training: Training, timeout_s: float) -> None:
        self._training, self._timeout_s = training, timeout_s
        self._lighthouse = start_lighthouse(timeout_s, least=1)
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
                worker = Worker(rank, self._lighthouse, self._timeout_s, least=1)
                train(worker, self._training, partial(self._note, rank))
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
    """Whether torchft has what a fault hits: it has no links, and its lighthouse is one process."""
    return fault.kind in _OFFERED and bool(fault.chips())


def main() -> int:
    folder, numbers = Path(sys.argv[1]), [float(each) for each in sys.argv[2:]]
    seed, n_faults, batch = (int(each) for each in numbers[:3])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    torch.set_num_threads(1)
    preload()
    work = small_gpt(seed)
    job = TorchftJob(folder, Training(work, work.model(), batch, seed), numbers[3])
    source = FaultSource(MESH, board_shape(2), random.Random(seed))
    driver = FaultDriver(source, n_faults, is_offered)
    injector = FaultInjector((), job, heartbeat_timeout_s=numbers[3], note=job.note_fault)
    try:
        while True:
            job.poll()
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


if __name__ == "__main__":
    sys.exit(main())
