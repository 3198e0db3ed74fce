"""Injects faults into a running job, each once, when its step is done or its time has come.

A `FaultInjector` decides, without a clock; a `JobControl` acts. The launcher's `JobControl` uses
signals and messages. Faults that hit one part of a step exactly are injected by the worker itself.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, assert_never

from meshmend.membership.faults.fault import (
    COORDINATOR,
    Fault,
    FaultKind,
    Moment,
    Part,
    Process,
)
from meshmend.topology.failures import Chip, Failure, Link

SLOW_CYCLE_S: Final = 0.3  # a slow worker is stopped, then runs, in each cycle
SLOW_STOPPED_S: Final = 0.2  # of each cycle
DEFAULT_SLOW_S: Final = 5.0

_INTO_THE_SUM_S: Final = 0.002  # a fault in `reduce` or `gather` kills this long after it begins
_THROTTLED: Final = 3  # times as long
WRONG_EVERY: Final = 5  # steps: a chip that is wrong is so in one of them
_TAKES_TIME: Final = (Moment.REDUCE, Moment.GATHER)


class JobControl(Protocol):
    """What a fault injector can do to a job. A call for a process that has ended does nothing."""

    def kill(self, process: Process) -> None:
        """Kill a process."""

    def stop(self, process: Process) -> None:
        """Stop a process, as SIGSTOP does."""

    def resume(self, process: Process) -> None:
        """Let a stopped process go on."""

    def restart(self, chips: Sequence[Chip], self_injected: Sequence[Fault]) -> None:
        """Replace the workers of these chips; the new ones inject `self_injected` themselves."""

    def cut(self, failure: Failure) -> None:
        """Break a link, or in a testbed all links of some chips."""

    def mend(self, failure: Failure) -> None:
        """Undo `cut`."""


@dataclass(frozen=True)
class InjectedFault:
    """A fault that was injected, and the last step before it.

    A fault that `is_quiet` needs no new generation: the job has recovered when it finishes a step.
    """

    fault: Fault
    at_step: int
    is_quiet: bool = False

    @property
    def kind(self) -> FaultKind:
        """The kind of the fault."""
        return self.fault.kind

    @property
    def chips(self) -> tuple[Chip, ...]:
        """The chips whose workers the fault acted on."""
        return self.fault.chips()

    @property
    def words(self) -> str:
        """The fault's name in reports; it includes the moment of a step, if there is one."""
        return self.fault.words if self.fault.moment else str(self.fault)


@dataclass(frozen=True)
class _Pause:
    """When a process is stopped: all the time, or for a part of each cycle."""

    since_s: float
    until_s: float
    in_cycles: bool = False

    def stops_at(self, now_s: float) -> bool:
        if now_s >= self.until_s:
            return False
        return not self.in_cycles or (now_s - self.since_s) % SLOW_CYCLE_S < SLOW_STOPPED_S


class FaultInjector:
    """Injects faults when they are due; knows which processes are stopped now.

    A fault with a moment of a step is injected by the worker itself: `self_injected` holds those
    that have not happened yet. So are wrong numbers and slow chips, which have a step alone.
    `note` is called just before each other fault is injected.
    """

    def __init__(
        self,
        faults: Iterable[Fault],
        control: JobControl,
        *,
        heartbeat_timeout_s: float,
        note: Callable[[InjectedFault], None],
    ) -> None:
        faults = tuple(faults)
        self._pending = [fault for fault in faults if fault.moment is None]
        self.self_injected = [each for each in faults if each.moment or each.is_in_loop]
        self._control = control
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._note = note
        self._pauses: dict[Process, list[_Pause]] = {}
        self._stopped: set[Process] = set()

    def add(self, fault: Fault) -> None:
        """Inject one more fault when it is due; it has no moment of a step."""
        is_own = fault.moment is not None or fault.is_in_loop
        assert not is_own, "a worker that runs already injects no fault itself"
        self._pending.append(fault)

    def is_timed(self) -> bool:
        """Whether a fault or the end of a pause depends on the time, not on a step."""
        has_end = any(pause.until_s < math.inf for each in self._pauses.values() for pause in each)
        return has_end or any(fault.at_s is not None for fault in self._pending)

    def awaits_repair(self) -> bool:
        """Whether a repair at a time is pending; it happens even if no worker is left."""
        return any(fault.returned() and fault.at_s is not None for fault in self._pending)

    def hung(self) -> frozenset[Process]:
        """Return the processes that hang now; slow processes do not count."""
        return frozenset(
            process
            for process, pauses in self._pauses.items()
            if any(not pause.in_cycles for pause in pauses)
        )

    def missed(self) -> tuple[Fault, ...]:
        """Return the faults that have not happened."""
        return (*self._pending, *(each for each in self.self_injected if each.moment))

    def inject_due(self, step: int, now_s: float) -> None:
        """Inject each fault that is due after this step, `now_s` seconds after the start."""
        for fault in [each for each in self._pending if each.is_due(step, now_s)]:
            self._pending.remove(fault)
            if fault in self.self_injected:
                self.self_injected.remove(fault)
            is_quiet = fault.is_quiet(self._heartbeat_timeout_s)
            self._note(InjectedFault(fault, step, is_quiet))
            self._inject(fault, now_s)
        self._stop_and_resume(now_s)

    def pop_self_injected(self, chip: Chip, step: int) -> InjectedFault | None:
        """Return and forget the fault by which the worker of a chip has killed itself, if any.

        If there are several, the one with the nearest step is meant. The chips of a block die one
        after another; the fault counts as injected when the first one dies.
        """
        candidates = [
            fault for fault in self.self_injected if fault.moment and chip in fault.chips()
        ]
        if not candidates:
            return None
        fault = min(candidates, key=lambda fault: abs((fault.at_step or 0) - step))
        self.self_injected.remove(fault)
        return InjectedFault(fault, step)

    def _inject(self, fault: Fault, now_s: float) -> None:
        match fault.kind:
            case FaultKind.KILL | FaultKind.CUT:
                self._forget_pauses(fault.processes())
                for process in fault.processes():
                    self._control.kill(process)
                if fault.target != COORDINATOR:
                    self._control.cut(fault.target)
            case FaultKind.HANG | FaultKind.FREEZE:
                until_s = math.inf if fault.for_s is None else now_s + fault.for_s
                self._pause(fault.processes(), _Pause(now_s, until_s))
            case FaultKind.SLOW:
                until_s = now_s + (fault.for_s or DEFAULT_SLOW_S)
                self._pause(fault.processes(), _Pause(now_s, until_s, in_cycles=True))
            case FaultKind.REPAIR:
                self._forget_pauses(fault.processes())
                if fault.target != COORDINATOR:
                    self._control.mend(fault.target)
                if fault.chips():
                    self._control.restart(fault.chips(), self.self_injected)
            case FaultKind.FLIP | FaultKind.WRONG | FaultKind.THROTTLE | FaultKind.CORRUPT:
                pass  # the workers were told when they started
            case _:
                assert_never(fault.kind)

    def _pause(self, processes: Iterable[Process], pause: _Pause) -> None:
        for process in processes:
            self._pauses.setdefault(process, []).append(pause)

    def _forget_pauses(self, processes: Iterable[Process]) -> None:
        """Forget the pauses of processes that end; the processes that replace them run."""
        for process in processes:
            self._pauses.pop(process, None)
            self._stopped.discard(process)

    def _stop_and_resume(self, now_s: float) -> None:
        """Stop each process that has a pause now, and resume each that has none any more."""
        for process, pauses in list(self._pauses.items()):
            is_stopped = any(pause.stops_at(now_s) for pause in pauses)
            if is_stopped and process not in self._stopped:
                self._stopped.add(process)
                self._control.stop(process)
            elif not is_stopped and process in self._stopped:
                self._stopped.remove(process)
                self._control.resume(process)
            self._pauses[process] = [pause for pause in pauses if now_s < pause.until_s]
            if not self._pauses[process]:
                del self._pauses[process]


def _corrupts(chip: Chip, fault: Fault) -> bool:
    is_link = fault.kind is FaultKind.CORRUPT and isinstance(fault.target, Link)
    return is_link and fault.target.first == chip  # type: ignore[union-attr]  # it is a link


class SelfInjection:
    """Injects into the worker of one chip the faults that have a moment of a step, each once.

    `flips` says whether to flip a bit: once for each flip, again and again on a chip that is wrong.
    `throttle` lets a chip compute slowly.
    `corrupted` says what the link to a chip changes from now on: what comes from it.
    """

    def __init__(self, chip: Chip, faults: Iterable[Fault]) -> None:
        mine = [fault for fault in faults if chip in fault.chips() or _corrupts(chip, fault)]
        self._pending = [fault for fault in mine if fault.moment]
        wrong = (FaultKind.FLIP, FaultKind.WRONG, FaultKind.CORRUPT)
        self._wrong = [fault for fault in mine if fault.kind in wrong]
        self._throttled = [fault for fault in mine if fault.kind is FaultKind.THROTTLE]
        self._since: dict[Fault, float] = {}  # when a chip began to be slow

    @property
    def has_wrong_numbers(self) -> bool:
        """Whether a bit is still to be flipped."""
        return bool(self._wrong)

    def flips(self, part: Part, step: int) -> bool:
        """Whether to flip a bit of a part now, after this step."""
        for fault in self._wrong:
            assert fault.at_step is not None, "wrong numbers come at a step"
            since = step - fault.at_step
            if fault.part is part and since == 0:
                self._wrong.remove(fault)
                return True
            is_steady = fault.kind is FaultKind.WRONG and part is Part.GRADIENT
            if is_steady and since >= 0 and since % WRONG_EVERY == 0:
                return True
        return False

    def throttle(self, step: int, computed_s: float) -> None:
        """Wait after this chip has computed for so long, if it is slow after this step."""
        for fault in self._throttled:
            now = time.monotonic()
            if step >= (fault.at_step or 0):
                since = self._since.setdefault(fault, now)
                if now < since + (math.inf if fault.for_s is None else fault.for_s):
                    time.sleep((_THROTTLED - 1) * computed_s)
                    return

    def corrupted(self, step: int) -> Chip | None:
        """Return the chip whose bytes are to change on their way to this one, from this step on."""
        for fault in self._wrong:
            if isinstance(fault.target, Link) and fault.is_due(step, 0.0):
                self._wrong.remove(fault)
                return fault.target.second
        return None

    def at(self, moment: Moment, step: int, *, bucket: int | None = None) -> None:
        """Kill this process if a fault has this moment and step; 2 ms later in what takes time."""
        for fault in self._pending:
            if (fault.moment, fault.at_step, fault.bucket) == (moment, step, bucket):
                self._pending.remove(fault)
                kill = (os.getpid(), signal.SIGKILL)
                if moment in _TAKES_TIME:
                    threading.Timer(_INTO_THE_SUM_S, os.kill, kill).start()
                else:
                    os.kill(*kill)
                return
