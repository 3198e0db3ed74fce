"""Runs a job that survives: starts everyone, listens, and tells what happens.

This process has imported what the workers need and made the first plans, then forks them all; a
board that is repaired is forked from it again. It watches the coordinator as any observer does:
neither is needed for a step.
"""

import logging
import os
import secrets
import signal
import time
from dataclasses import replace
from typing import Final

from meshmend.faults.fault_injector import FaultInjector, InjectedFault
from meshmend.launch.children import Child
from meshmend.launch.elastic_job import ElasticJob, Outcome
from meshmend.launch.job_processes import GAVE_UP, JobProcesses
from meshmend.launch.observer import Observer
from meshmend.launch.process_control import ProcessControl
from meshmend.launch.recoveries import Recoveries, Recovery
from meshmend.launch.standstill import Standstill
from meshmend.membership.events import (
    CheckpointSaved,
    CoordinatorChanged,
    CoordinatorState,
    Event,
    FaultHappened,
    FaultMissed,
    GenerationBegan,
    GenerationForming,
    JobFailed,
    JobFinished,
    StepFinished,
    TimedEvent,
    WorkerSaved,
    WorkerStepped,
)
from meshmend.membership.messages import Absent, Finish
from meshmend.net.listener import listening
from meshmend.planning.plan_cache import plan_losses
from meshmend.planning.plan_request import PlanRequest, SumSizes
from meshmend.topology.failures import Chip, board_shape

_log = logging.getLogger(__name__)

_TURN_S: Final = 0.02
_CALM_TURN_S: Final = 0.1  # when nothing is to happen by the clock
_RESTART_S: Final = 0.2  # a coordinator that died is started again after so long
_LINGER_S: Final = 3.0  # for workers that are left when the job is over
_NEWS_S: Final = 1.0  # for the word that the job is over, once a worker has ended well
_MEETING_S: Final = 10.0  # for the coordinator to answer for the first time
_FIRST_PLANS_S: Final = 2.0  # for plans that are made before the first worker starts


def run_elastic(job: ElasticJob) -> Outcome:
    """Run a job until all its chips have finished, none is left, or it stands still for too long.

    It has finished only if the coordinator says so. Interrupted, all workers are ended first.
    """
    settings = job.settings
    if not settings.secret:
        settings = replace(settings, secret=secrets.token_hex(32))
    job = replace(job, settings=settings, board=job.board or board_shape(len(settings.mesh.shape)))
    if job.sums:
        request = PlanRequest(settings.mesh, job.board, settings.algorithm, tuple(job.sums))
        plan_losses(request, for_s=_FIRST_PLANS_S)
    launcher = _Launcher(job)
    try:
        launcher.start()
        launcher.until_over()
        launcher.tell_missed()
    finally:
        launcher.close()
    return launcher.outcome()


class _Launcher:
    """A job under way, as the process sees it that has started it."""

    def __init__(self, job: ElasticJob) -> None:
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        secret = job.settings.secret.encode()
        self._job = job
        self._listener = listening("127.0.0.1")
        self._processes = JobProcesses(job, name, self._listener)
        self._observer = Observer(name, self._listener.getsockname()[:2], secret, self._hear)
        self._control = ProcessControl(job, self._processes, self._observer.say)
        self._injector = FaultInjector(
            job.faults,
            self._control,
            heartbeat_timeout_s=job.timing.heartbeat_timeout_s,
            note=lambda injected: self._note_injected(injected, time.monotonic()),
        )
        self._recoveries = Recoveries()
        self._restart_at: float | None = None
        self._started = time.monotonic()
        self._step = 0
        self._sums: SumSizes = job.sums
        self._formed: GenerationBegan | None = None
        self._why_forming = ""
        self._counts: list[int] = []
        self._ended: set[int] = set()  # processes whose end has been taken up
        self._failures: list[str] = []
        self._left_early: list[str] = []
        self._standstill = Standstill(job.timing, time.monotonic())
        self._why_failed = ""  # the job as a whole
        self._over_since: float | None = None
        self._finished_at = 0.0  # by the coordinator's clock, if it said so
        self._is_called_off = False

    def start(self) -> None:
        """Start the coordinator and a worker for each live chip."""
        self._processes.start_coordinator()
        deadline = time.monotonic() + _MEETING_S
        while not self._observer.is_connected and time.monotonic() < deadline:
            self._observer.attend(self._processes.children)  # so that nothing is missed
        self._control.restart(self._job.settings.mesh.live, self._injector.self_injected)

    def until_over(self) -> None:
        """Watch, and let happen what is to happen, until no worker is left or all is lost."""
        while self._running() or self._injector.awaits_repair():
            self._processes.children.handle(_TURN_S if self._injector.is_timed() else _CALM_TURN_S)
            self._look_after_coordinator()
            self._notice_deaths()
            self._injector.inject_due(self._step, self._elapsed_s())
            self._end_in_time()
            self._end_standstill()
            if self._is_out_of_time():
                break
        self._await_last_news()
        self._notice_deaths(is_last=True)

    def tell_missed(self) -> None:
        """Tell of faults that were to come, but the job was over before."""
        for fault in self._injector.missed():
            self._tell(FaultMissed(fault.words))

    def close(self) -> None:
        """End everything that still runs."""
        self._observer.drop(self._processes.children)
        self._processes.close()
        self._listener.close()

    def outcome(self) -> Outcome:
        """Return how it went."""
        why = self._why_failed
        if not why and self._over_since is None:
            why = [*self._failures, *self._left_early, "no worker is left"][0]
        return Outcome(not why, why, tuple(self._recoveries.faults), tuple(self._counts))

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def _running(self) -> list[Child]:
        return [child for child in self._processes.workers.values() if child.code is None]

    def _works_on(self) -> bool:
        """Whether a worker is still busy with what comes after its job, such as evaluation.

        A job is over when all its members have done the last step. A worker that is no member,
        because it came late or is cut off, waits for nothing.
        """
        busy = self._members() - self._injector.hung()
        return any(self._processes.workers[chip].code is None for chip in busy)

    def _is_out_of_time(self) -> bool:
        """Whether the job is over, or has failed, and those that are left had time to end."""
        if self._over_since is None or time.monotonic() < self._over_since + _LINGER_S:
            return False
        return bool(self._why_failed) or not self._works_on()

    def _await_last_news(self) -> None:
        """Hear the coordinator out when no worker is left: it may still say that all is well."""
        deadline = time.monotonic() + _NEWS_S
        while self._over_since is None and not self._running() and time.monotonic() < deadline:
            self._processes.children.handle(_TURN_S)
            self._look_after_coordinator()

    def _end_standstill(self) -> None:
        """End a job in which nothing moves any more."""
        waits = self._over_since is not None or self._injector.awaits_repair()
        if not waits and self._standstill.is_too_long(time.monotonic()):
            running = [
                chip for chip, child in self._processes.workers.items() if child.code is None
            ]
            self._hear(time.monotonic(), JobFailed(self._standstill.words(running)))

    def _end_in_time(self) -> None:
        """Send everyone home when the time is over."""
        for_s = self._job.for_s
        if for_s is not None and self._elapsed_s() > for_s and not self._is_called_off:
            self._is_called_off = True
            self._observer.say(Finish())

    def _look_after_coordinator(self) -> None:
        """Start it again when it has died, and keep a line to it."""
        coordinator = self._processes.coordinator
        if coordinator is None:
            return
        if coordinator.code is None:
            self._observer.attend(self._processes.children)
            if self._observer.is_silent(self._coordinator_timeout_s()):
                coordinator.signal(signal.SIGKILL)  # one that is frozen hears no other signal
        elif coordinator.code == 0:
            self._end(coordinator.ended)
        elif coordinator.code == GAVE_UP:
            self._fail(coordinator.ended, "the coordinator has given it up")
        elif self._restart_at is None:
            self._restart_at = time.monotonic() + _RESTART_S
            if coordinator.traceback:
                _log.error("the coordinator failed:\n%s", coordinator.traceback)
            self._tell(CoordinatorChanged(CoordinatorState.LOST))
        elif time.monotonic() >= self._restart_at:
            self._restart_at = None
            self._processes.start_coordinator()
            self._tell(CoordinatorChanged(CoordinatorState.BACK))

    def _coordinator_timeout_s(self) -> float:
        """How long the coordinator may be silent: longer before it answers for the first time."""
        timeout_s = self._job.timing.heartbeat_timeout_s
        return timeout_s if self._observer.is_connected else max(timeout_s, _MEETING_S)

    def _hear(self, clock: float, event: Event) -> None:
        """Take up an event of the coordinator, and pass on what users want to see."""
        self._standstill.take(time.monotonic(), event)
        for recovery in self._recoveries.take(clock, event):
            self._tell(recovery.event())
        match event:
            case GenerationForming(why=why):
                self._why_forming = why
            case GenerationBegan():
                self._counts.append(len(event.chips))
                self._formed = event
                self._plan_ahead()
                self._tell(replace(event, why=self._why_forming), at=clock)
            case WorkerSaved():
                self._tell(CheckpointSaved(event.step, event.path), at=event.at)
            case WorkerStepped():
                self._hear_step(event)
            case JobFinished():
                self._finished_at = self._finished_at or clock
                self._end(clock)
            case JobFailed(why=why):
                self._fail(clock, why)
                self._tell(event, at=clock)
            case _:
                self._tell(event, at=clock)

    def _end(self, at: float) -> None:
        """Take up that the job is over."""
        self._over_since = at if self._over_since is None else self._over_since

    def _fail(self, at: float, why: str) -> None:
        """Take up that the job as a whole has failed."""
        self._why_failed = self._why_failed or why
        self._end(at)

    def _hear_step(self, event: WorkerStepped) -> None:
        """Take up a step that a worker has done."""
        if event.sums and not self._sums:
            self._sums = event.sums
            self._plan_ahead()
        self._step = max(self._step, event.step)
        if event.leads:
            n_chips = self._counts[-1] if self._counts else 1
            done = StepFinished(event.step, event.generation, n_chips, event.loss, event.samples)
            self._tell(done, at=event.at)

    def _plan_ahead(self) -> None:
        if self._formed and self._sums:
            self._processes.plan_ahead(self._formed, self._sums)

    def _tell(self, event: Event, *, at: float | None = None) -> None:
        moment = time.monotonic() if at is None else at
        self._job.on_event(TimedEvent(max(0.0, moment - self._started), event))

    def _notice_deaths(self, *, is_last: bool = False) -> None:
        """Take up workers that ended: by a fault of ours, by another's hand, or well."""
        for chip, child in self._processes.workers.items():
            if child.code is None or child.pid in self._ended:
                continue
            is_over = self._over_since is not None
            is_well = child.code == 0 and child.ended >= self._finished_at
            if is_well and not (is_over or is_last or time.monotonic() > child.ended + _NEWS_S):
                continue  # the word that the job is over may still come
            self._ended.add(child.pid)
            if is_over and (is_well or self._why_failed):
                continue
            if not self._counts:  # who died before the first generation is not waited for
                self._observer.say(Absent(chip))
            if not child.was_ended:
                self._note_death(chip, child)

    def _members(self) -> frozenset[Chip]:
        return frozenset(self._formed.chips if self._formed else ())

    def _note_death(self, chip: Chip, child: Child) -> None:
        if child.code == 0:
            what = f"chip {chip} ended before the job was over: exit code 0"
            self._left_early.append(what)
        elif child.traceback:
            what = f"chip {chip} failed: {child.traceback.strip().splitlines()[-1]}"
            self._failures.append(f"{what}\n{child.traceback}")
        elif (injected := self._injector.pop_self_injected(chip, self._step)) is not None:
            self._control.expect_deaths(injected.chips)
            self._note_injected(injected, child.ended)
            return
        else:
            what = f"chip {chip} died: {child.how_it_ended}"
            self._failures.append(what)
        if self._over_since is not None and chip in self._members():
            # Nobody does again what it had to do after the last step, such as evaluation.
            self._fail(child.ended, f"after the last step {self._failures[-1]}")
        self._happened(Recovery(what, self._step, child.ended, chips=(chip,)))

    def _note_injected(self, injected: InjectedFault, at: float) -> None:
        self._happened(
            Recovery(
                injected.words,
                injected.at_step,
                at,
                kind=injected.kind,
                chips=injected.chips,
                is_quiet=injected.is_quiet,
                victims=injected.fault.lost(),
                back=injected.fault.returned(),
            )
        )

    def _happened(self, fault: Recovery) -> None:
        self._recoveries.happened(fault)
        happened = FaultHappened(fault.fault, fault.at_step, fault.kind, fault.chips)
        self._tell(happened, at=fault.at)
