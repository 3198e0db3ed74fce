"""Lets faults happen to a running job: signals to its workers, words to its coordinator."""

import signal
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from meshmend.faults.fault import COORDINATOR, Fault, FaultKind
from meshmend.launch.children import Child
from meshmend.launch.elastic_job import ElasticJob
from meshmend.launch.job_processes import JobProcesses
from meshmend.launch.recoveries import Recovery
from meshmend.net.channel import Message
from meshmend.topology.failures import Block, Chip, Link

_SLOW_TURN_S: Final = (0.2, 0.1)  # stopped, running
_SLOW_S: Final = 5.0


class FaultInjector:
    """The faults that are still to come. `say` tells the coordinator, `note` that one has come."""

    def __init__(
        self,
        job: ElasticJob,
        processes: JobProcesses,
        *,
        say: Callable[[Message], None],
        note: Callable[[Recovery], None],
    ) -> None:
        self._job = job
        self._processes = processes
        self._say = say
        self._note = note
        self._pending = [fault for fault in job.faults if fault.moment is None]
        self._own = [fault for fault in job.faults if fault.moment is not None]
        self._later: list[tuple[float, Callable[[], None]]] = []
        self.stopped: set[Chip] = set()

    def is_timed(self) -> bool:
        """Whether something is to happen by the clock, not after a step."""
        return bool(self._later) or any(fault.at_s is not None for fault in self._pending)

    def awaits_repair(self) -> bool:
        """Whether a board is to come back although nobody may be left."""
        return any(
            fault.kind is FaultKind.REPAIR and fault.at_s is not None for fault in self._pending
        )

    def missed(self) -> list[str]:
        """Return the faults that have not come, as `--inject` writes them."""
        return [fault.words for fault in (*self._pending, *self._own)]

    def start_worker(self, chip: Chip) -> None:
        """Start a worker, and tell it what it is to do to itself."""
        self.stopped.discard(chip)
        self._processes.start_worker(
            chip, [each.words for each in self._own if chip in each.chips()]
        )

    def own_doing(self, chip: Chip) -> str | None:
        """Return what a worker that died was told to do to itself, if it was.

        Each chip of a block does it in its own moment: the fault begins with the first, and the
        others are expected to follow.
        """
        done = [fault for fault in self._own if chip in fault.chips()]
        for fault in done:
            self._own.remove(fault)
            for other in fault.chips():
                if other in self._processes.workers:
                    self._processes.workers[other].was_ended = True
        return done[0].words if done else None

    def happen(self, step: int, elapsed_s: float) -> None:
        """Let happen what is due."""
        now = time.monotonic()
        for entry in [entry for entry in self._later if entry[0] <= now]:
            self._later.remove(entry)
            entry[1]()
        for fault in [each for each in self._pending if each.is_due(step, elapsed_s)]:
            self._pending.remove(fault)
            self._note(self._noted(fault, step))
            self._commit(fault)

    def _noted(self, fault: Fault, step: int) -> Recovery:
        patience_s = self._job.timing.heartbeat_timeout_s
        is_short = fault.kind is FaultKind.HANG and (fault.for_s or patience_s) < patience_s
        is_quiet = is_short or fault.kind is FaultKind.SLOW or fault.target == COORDINATOR
        back = fault.chips() if fault.kind is FaultKind.REPAIR else ()
        victims = fault.chips() if fault.kind in (FaultKind.KILL, FaultKind.HANG) else ()
        return Recovery(
            str(fault),
            step,
            time.monotonic(),
            is_quiet=is_quiet,
            victims=frozenset(victims),
            back=frozenset(back),
        )

    def _commit(self, fault: Fault) -> None:
        target, coordinator = fault.target, self._processes.coordinator
        if target == COORDINATOR and coordinator is not None:
            coordinator.was_ended = True
            coordinator.signal(signal.SIGKILL)
        elif isinstance(target, Link):
            self._say(
                {"kind": "mend" if fault.kind is FaultKind.REPAIR else "cut", "link": str(target)}
            )
        elif fault.kind is FaultKind.REPAIR:
            self._processes.kill_workers(fault.chips())
            for chip in fault.chips():
                self.start_worker(chip)
        else:
            self._strike(fault, self._living(fault.chips()))
        network = self._job.network
        if (
            network
            and isinstance(target, Block | Link)
            and fault.kind not in (FaultKind.HANG, FaultKind.SLOW)
        ):
            network(fault.kind, target)

    def _living(self, chips: Iterable[Chip]) -> list[tuple[Chip, Child]]:
        workers = self._processes.workers
        return [
            (chip, workers[chip])
            for chip in chips
            if chip in workers and workers[chip].code is None
        ]

    def _strike(self, fault: Fault, victims: Iterable[tuple[Chip, Child]]) -> None:
        """Kill, stop or slow down workers."""
        for chip, child in victims:
            if fault.kind is FaultKind.KILL:
                child.was_ended = True
                child.signal(signal.SIGKILL)
            elif fault.kind is FaultKind.HANG:
                self.stopped.add(chip)
                child.signal(signal.SIGSTOP)
                if fault.for_s is not None:
                    self._in(fault.for_s, partial(self._let_go, chip, child))
            else:
                self._slow(child, time.monotonic() + (fault.for_s or _SLOW_S))

    def _let_go(self, chip: Chip, child: Child) -> None:
        self.stopped.discard(chip)
        child.signal(signal.SIGCONT)

    def _slow(self, child: Child, until: float) -> None:
        stopped_s, running_s = _SLOW_TURN_S
        child.signal(signal.SIGSTOP)
        self._in(stopped_s, partial(child.signal, signal.SIGCONT))
        if time.monotonic() + stopped_s + running_s < until:
            self._in(stopped_s + running_s, partial(self._slow, child, until))

    def _in(self, seconds: float, action: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, action))
