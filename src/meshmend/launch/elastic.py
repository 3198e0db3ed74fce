"""Runs an elastic job: starts its processes, injects its faults, and reports its events.

The launcher imports what the workers need and makes the first plans, then forks all workers. When
a board is repaired, it forks the board's workers again. It learns of events as an observer of the
coordinator. A step needs neither the launcher nor the coordinator.
"""

import logging
import os
import secrets
import signal
import time
from dataclasses import replace
from functools import partial
from typing import Final

from msgspec import structs

from meshmend.errors import InputError
from meshmend.launch.children import Child
from meshmend.launch.elastic_job import ElasticJob, Outcome
from meshmend.launch.forked_worker import BAD_INPUT
from meshmend.launch.job_page import JobPage, LineReader, PageRequest
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
from meshmend.membership.faults.fault import parse_fault
from meshmend.membership.faults.fault_injector import FaultInjector, InjectedFault
from meshmend.membership.messages import Absent, Finish
from meshmend.planning.plan_cache import plan_losses
from meshmend.planning.plan_request import PlanRequest, SumSizes
from meshmend.topology.failures import Chip, board_shape
from meshmend.transport.listener import listening

_log = logging.getLogger(__name__)

_POLL_S: Final = 0.02
_IDLE_POLL_S: Final = 0.1  # when no fault is due at a time
_RESTART_S: Final = 0.2  # from the death of a coordinator until it is started again
_LINGER_S: Final = 3.0  # for the remaining workers to end after the job is over
_LAST_EVENTS_S: Final = 1.0  # for the coordinator to report the end, once a worker exited with 0
_FIRST_ANSWER_S: Final = 10.0  # for the coordinator to answer for the first time
_FIRST_PLANS_S: Final = 2.0  # for planning before the first worker starts


def run_elastic(job: ElasticJob) -> Outcome:
    """Run a job until all its chips have finished, none is left, or nothing moves for too long.

    The job has finished only if the coordinator reports so. On an exception, such as Ctrl-C, all
    workers are ended before it is passed on.
    """
    settings = job.settings
    if not settings.secret:
        settings = replace(settings, secret=secrets.token_hex(32))
    if job.address_of is not None:
        settings = replace(settings, bind=job.address_of(settings.mesh.live[0]))
    job = replace(job, settings=settings, board=job.board or board_shape(len(settings.mesh.shape)))
    if job.sums:
        request = PlanRequest(settings.mesh, job.board, settings.planned_algorithm, tuple(job.sums))
        plan_losses(request, for_s=_FIRST_PLANS_S)
    launcher = _Launcher(job)
    try:
        launcher.start()
        launcher.until_over()
        launcher.report_missed()
    finally:
        launcher.close()
    return launcher.outcome()


class _Launcher:
    """The state of a running job in the process that started it."""

    def __init__(self, job: ElasticJob) -> None:
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        secret = job.settings.secret.encode()
        self._job = job
        self._listener = listening("127.0.0.1")
        self._processes = JobProcesses(job, name, self._listener)
        self._observer = Observer(
            name, self._listener.getsockname()[:2], secret, self._handle_event
        )
        self._control = ProcessControl(job, self._processes, self._observer.send)
        self._injector = FaultInjector(
            job.faults,
            self._control,
            heartbeat_timeout_s=job.timing.heartbeat_timeout_s,
            note=lambda injected: self._record_injected(injected, time.monotonic()),
        )
        self._recoveries = Recoveries()
        self._page: JobPage | None = None
        self._restart_at: float | None = None
        self._started = time.monotonic()
        self._step = 0
        self._sums: SumSizes = job.sums
        self._generation: GenerationBegan | None = None
        self._why_forming = ""
        self._chip_counts: list[int] = []
        self._handled_pids: set[int] = set()  # processes whose end was handled
        self._failures: list[str] = []
        self._refusals: list[str] = []  # those of the failures that are of bad input
        self._left_early: list[str] = []
        self._trained: set[Chip] = set()  # chips that have finished a step
        self._lost_early: dict[Chip, str] = {}  # how chips died that had finished none by then
        self._standstill = Standstill(job.timing, time.monotonic())
        self._why_failed = ""  # not empty: the whole job has failed
        self._over_since: float | None = None
        self._finished_at = 0.0  # when the coordinator reported the end, by its clock
        self._has_sent_finish = False

    def start(self) -> None:
        """Start the coordinator and a worker for each live chip."""
        self._processes.start_coordinator()
        deadline = time.monotonic() + _FIRST_ANSWER_S
        while not self._observer.is_connected and time.monotonic() < deadline:
            self._observer.connect_and_send(self._processes.children)  # so that no event is missed
        if self._job.page is not None:
            self._start_page(self._job.page)
        self._control.restart(self._job.settings.mesh.live, self._injector.self_injected)

    def _start_page(self, request: PageRequest) -> None:
        """Start the live page; without it, the job runs all the same."""
        settings, address = self._job.settings, self._listener.getsockname()[:2]
        try:
            self._page = JobPage(
                request, address, settings.secret, settings.mesh, self._inject_clicked
            )
        except OSError as error:
            _log.warning("the live page cannot be started: %s", error)
            return
        children = self._processes.children
        for reader in self._page.readers:
            children.watch(reader.fd, partial(self._read_page, reader))

    def _read_page(self, reader: LineReader) -> None:
        if not reader.read():
            self._processes.children.unwatch(reader.fd)
            os.close(reader.fd)

    def _inject_clicked(self, words: str) -> None:
        """Inject a fault that was clicked on the live page, at once."""
        try:
            fault = parse_fault(f"{words} at {self._step}", self._job.settings.mesh)
        except InputError as error:
            _log.warning("a fault that was clicked is not injected: %s", error)
            return
        self._injector.add(fault)

    def until_over(self) -> None:
        """Watch processes and inject faults until no worker is left or the time to end is over."""
        while self._running() or self._injector.awaits_repair():
            self._processes.children.handle(_POLL_S if self._injector.is_timed() else _IDLE_POLL_S)
            self._supervise_coordinator()
            self._handle_ended_workers()
            self._injector.inject_due(self._step, self._elapsed_s())
            self._finish_when_time_is_up()
            self._fail_standstill()
            if self._is_out_of_time():
                break
        self._await_last_events()
        self._handle_ended_workers(is_last=True)

    def report_missed(self) -> None:
        """Report the faults that were not injected because the job was over before."""
        for fault in self._injector.missed():
            self._report(FaultMissed(fault.words))

    def close(self) -> None:
        """End everything that still runs."""
        if self._page is not None:
            self._page.close()
        self._observer.disconnect(self._processes.children)
        self._processes.close()
        self._listener.close()

    def outcome(self) -> Outcome:
        """Return how the job ended."""
        why = self._why_failed
        if not why and self._over_since is None:
            why = [*self._failures, *self._left_early, "no worker is left"][0]
        never = [words for chip, words in self._lost_early.items() if chip not in self._trained]
        is_refused = why in self._refusals and not self._trained
        recoveries, chips = tuple(self._recoveries.faults), tuple(self._chip_counts)
        return Outcome(not why, why, recoveries, chips, tuple(never), is_refused)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def _running(self) -> list[Child]:
        return [child for child in self._processes.workers.values() if child.code is None]

    def _is_member_running(self) -> bool:
        """Whether a member still runs after the last step, for example to evaluate the model.

        A job is over when all its members have done the last step. Other workers, which joined late
        or are cut off, have nothing left to do.
        """
        busy = self._members() - self._injector.hung()
        return any(self._processes.workers[chip].code is None for chip in busy)

    def _is_out_of_time(self) -> bool:
        """Whether the job is over or has failed, and the remaining workers had time to end."""
        if self._over_since is None or time.monotonic() < self._over_since + _LINGER_S:
            return False
        return bool(self._why_failed) or not self._is_member_running()

    def _await_last_events(self) -> None:
        """If no worker is left, wait a while for the event that the job has finished."""
        deadline = time.monotonic() + _LAST_EVENTS_S
        while self._over_since is None and not self._running() and time.monotonic() < deadline:
            self._processes.children.handle(_POLL_S)
            self._supervise_coordinator()

    def _fail_standstill(self) -> None:
        """Fail the job if nothing has moved for too long."""
        waits = self._over_since is not None or self._injector.awaits_repair()
        if not waits and self._standstill.is_too_long(time.monotonic()):
            running = [
                chip for chip, child in self._processes.workers.items() if child.code is None
            ]
            self._handle_event(time.monotonic(), JobFailed(self._standstill.words(running)))

    def _finish_when_time_is_up(self) -> None:
        """Ask the coordinator to finish the job once its time `for_s` is over."""
        for_s = self._job.for_s
        if for_s is not None and self._elapsed_s() > for_s and not self._has_sent_finish:
            self._has_sent_finish = True
            self._observer.send(Finish())

    def _supervise_coordinator(self) -> None:
        """Restart the coordinator when it has died, kill a silent one, and stay connected to it."""
        coordinator = self._processes.coordinator
        if coordinator is None:
            return
        if coordinator.code is None:
            self._observer.connect_and_send(self._processes.children)
            if self._observer.is_silent(self._coordinator_timeout_s()):
                coordinator.signal(signal.SIGKILL)  # a stopped process acts on no other signal
        elif coordinator.code == 0:
            self._mark_over(coordinator.ended)
        elif coordinator.code == GAVE_UP:
            self._mark_failed(coordinator.ended, "the coordinator has given up the job")
        elif self._restart_at is None:
            self._restart_at = time.monotonic() + _RESTART_S
            if coordinator.traceback:
                _log.error("the coordinator failed:\n%s", coordinator.traceback)
            self._report(CoordinatorChanged(CoordinatorState.LOST))
        elif time.monotonic() >= self._restart_at:
            self._restart_at = None
            self._processes.start_coordinator()
            for chip, child in self._processes.workers.items():
                if child.code is not None:
                    self._observer.send(Absent(chip))  # so that it does not wait for that one
            self._report(CoordinatorChanged(CoordinatorState.BACK))

    def _coordinator_timeout_s(self) -> float:
        """Return how long the coordinator may be silent: longer before its first answer."""
        timeout_s = self._job.timing.heartbeat_timeout_s
        return timeout_s if self._observer.is_connected else max(timeout_s, _FIRST_ANSWER_S)

    def _handle_event(self, clock: float, event: Event) -> None:
        """Handle an event of the coordinator, and report what users want to see."""
        self._standstill.handle(time.monotonic(), event)
        for recovery in self._recoveries.handle(clock, event):
            self._report(recovery.event())
        match event:
            case GenerationForming(why=why):
                self._why_forming = why
            case GenerationBegan():
                self._chip_counts.append(len(event.chips))
                self._generation = event
                self._plan_ahead()
                self._report(structs.replace(event, why=self._why_forming), at=clock)
            case WorkerSaved():
                self._report(CheckpointSaved(event.step, event.path), at=event.at)
            case WorkerStepped():
                self._handle_step(event)
            case JobFinished():
                self._finished_at = self._finished_at or clock
                self._mark_over(clock)
            case JobFailed(why=why):
                self._mark_failed(clock, why)
                self._report(event, at=clock)
            case _:
                self._report(event, at=clock)

    def _mark_over(self, at: float) -> None:
        """Note that the job is over."""
        self._over_since = at if self._over_since is None else self._over_since

    def _mark_failed(self, at: float, why: str) -> None:
        """Note that the whole job has failed, and is over."""
        self._why_failed = self._why_failed or why
        self._mark_over(at)

    def _handle_step(self, event: WorkerStepped) -> None:
        """Handle a step that a worker has finished."""
        self._trained.add(event.chip)
        if event.sums and not self._sums:
            self._sums = event.sums
            self._plan_ahead()
        self._step = max(self._step, event.step)
        if event.leads:
            n_chips = self._chip_counts[-1] if self._chip_counts else 1
            done = StepFinished(event.step, event.generation, n_chips, event.loss, event.samples)
            self._report(done, at=event.at)

    def _plan_ahead(self) -> None:
        if self._generation and self._sums:
            self._processes.plan_ahead(self._generation, self._sums)

    def _report(self, event: Event, *, at: float | None = None) -> None:
        clock_s = time.monotonic() if at is None else at
        self._job.on_event(TimedEvent(max(0.0, clock_s - self._started), event))

    def _handle_ended_workers(self, *, is_last: bool = False) -> None:
        """Handle workers that ended: by an injected fault, by a failure, or with success."""
        for chip, child in self._processes.workers.items():
            if child.code is None or child.pid in self._handled_pids:
                continue
            is_over = self._over_since is not None
            has_succeeded = child.code == 0 and child.ended >= self._finished_at
            if has_succeeded and not (
                is_over or is_last or time.monotonic() > child.ended + _LAST_EVENTS_S
            ):
                continue  # the event that the job is over may still arrive
            self._handled_pids.add(child.pid)
            if is_over and (has_succeeded or self._why_failed):
                continue
            if not self._chip_counts:  # the first generation does not wait for a dead worker
                self._observer.send(Absent(chip))
            if not child.is_end_expected:
                self._handle_death(chip, child)

    def _members(self) -> frozenset[Chip]:
        return frozenset(self._generation.chips if self._generation else ())

    def _handle_death(self, chip: Chip, child: Child) -> None:
        if child.code == 0:
            words = f"chip {chip} ended before the job was over: exit code 0"
            self._left_early.append(words)
        elif child.traceback:
            words = f"chip {chip} failed: {child.traceback.strip().splitlines()[-1]}"
            is_line = child.traceback.strip().count("\n") == 0
            self._failures.append(words if is_line else f"{words}\n{child.traceback}")
        elif (injected := self._injector.pop_self_injected(chip, self._step)) is not None:
            self._control.expect_deaths(injected.chips)
            self._record_injected(injected, child.ended)
            return
        else:
            words = f"chip {chip} died: {child.how_it_ended}"
            self._failures.append(words)
        if child.code == BAD_INPUT:
            self._refusals.append(self._failures[-1])
        if self._over_since is None and chip not in self._trained:
            self._lost_early[chip] = words
        if self._over_since is not None and chip in self._members():
            # No other worker repeats its work after the last step, such as the evaluation.
            self._mark_failed(child.ended, f"after the last step {self._failures[-1]}")
        self._record_fault(Recovery(words, self._step, child.ended, chips=(chip,)))

    def _record_injected(self, injected: InjectedFault, at: float) -> None:
        self._record_fault(
            Recovery(
                injected.words,
                injected.at_step,
                at,
                kind=injected.kind,
                chips=injected.chips,
                is_quiet=injected.is_quiet,
                victims=injected.fault.lost(),
                repaired=injected.fault.returned(),
            )
        )

    def _record_fault(self, fault: Recovery) -> None:
        self._recoveries.add(fault)
        happened = FaultHappened(fault.fault, fault.at_step, fault.kind, fault.chips)
        self._report(happened, at=fault.at)
