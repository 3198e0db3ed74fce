"""Runs an elastic job: starts its processes, injects its faults, and reports its events.

The launcher imports what the workers need and makes the first plans, then forks all workers. When
a board is repaired, it forks the board's workers again. It learns of events as an observer of the
coordinator. A step needs neither the launcher nor the coordinator.
"""

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from meshmend.config import Timing
from meshmend.errors import InputError, TerminatedError
from meshmend.lab.testbed.bed import Testbed
from meshmend.launch.job_page import PageRequest, start_page
from meshmend.launch.job_processes import (
    GAVE_UP,
    ElasticJob,
    JobProcesses,
    ProcessControl,
    in_testbed,
    testbed_of,
)
from meshmend.launch.journal import EVENTS, end_event, reported
from meshmend.launch.observer import Observer
from meshmend.launch.run_log import EventSink, RunLog
from meshmend.launch.supervisor import (
    Child,
    Ending,
    ProcessSpec,
    RestartPolicy,
)
from meshmend.launch.worker_ends import WorkerEnds
from meshmend.membership.events import (
    CoordinatorChanged,
    CoordinatorState,
    Event,
    FaultHappened,
    FaultMissed,
    GenerationBegan,
    JobFailed,
    JobFinished,
    RunEnded,
    RunStarted,
    StepFinished,
    TimedEvent,
    WorkerStepped,
)
from meshmend.membership.faults.fault import parse_fault
from meshmend.membership.faults.fault_injector import FaultInjector, InjectedFault
from meshmend.membership.job_view import JobView, Recovery
from meshmend.membership.messages import Absent, Finish
from meshmend.pages.report.event_words import chips_words
from meshmend.pages.report.training_run import TrainingRun, training_run
from meshmend.planning.environment import Environment
from meshmend.planning.plan_cache import plan_losses
from meshmend.planning.plan_request import PlanRequest, SumSizes
from meshmend.topology.failures import Chip
from meshmend.train.data.audit import Audit, audit
from meshmend.train.state.checkpoint import LAUNCHER_NOTICE, newest_complete
from meshmend.train.state.digest import load_hash
from meshmend.transport.event_loop import load_event_loop
from meshmend.transport.listener import listening
from meshmend.units import counted


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    `why` is the first failure in words, and empty if the job finished. `chips` counts the chips of
    each generation. `never_trained` says of each chip that died, without an injected fault, before
    its first step, and did not come back, how it died: such a job ran on fewer chips than it was
    started on from its first step to its last, which is no success. `is_refused` says that no step
    was done because of bad input: the script asked for what cannot be done, or its arguments are
    wrong.
    """

    is_finished: bool
    why: str
    recoveries: tuple[Recovery, ...]
    chips: tuple[int, ...]
    never_trained: tuple[str, ...] = ()
    is_refused: bool = False

    @property
    def fewer_chips(self) -> str:
        """Return, in one line, that chips never trained and why; empty if all did."""
        if not self.never_trained:
            return ""
        n = len(self.never_trained)
        return (
            f"{counted(n, 'chip')} of this job died before the first step and never came back: "
            f"{self.never_trained[0]}{f', and {n - 1} more' if n > 1 else ''}"
        )


_log = logging.getLogger(__name__)

_POLL_S: Final = 0.02
_IDLE_POLL_S: Final = 0.1  # when no fault is due at a time
_COORDINATOR_POLICY: Final = RestartPolicy(first_s=0.2, longest_s=0.2)
_LINGER_S: Final = 3.0  # for the remaining workers to end after the job is over
_LAST_EVENTS_S: Final = 1.0  # for the coordinator to report the end, once a worker exited with 0
_FIRST_ANSWER_S: Final = 10.0  # for the coordinator to answer for the first time
_SAVE_S: Final = 20.0  # less than what Kubernetes and systemd give a process to end
_FIRST_PLANS_S: Final = 2.0  # for planning before the first worker starts


def run_elastic(job: ElasticJob) -> Outcome:
    """Run a job until all its chips have finished, none is left, or nothing moves for too long.

    The job has finished only if the coordinator reports so. On an exception, such as Ctrl-C, all
    workers are ended before it is passed on.
    """
    load_event_loop()  # forked workers inherit both; each would spend most of a second on them
    load_hash()
    with testbed_of(job.config) as bed:
        if bed is not None:
            job = replace(job, config=in_testbed(job.config, bed.address(job.mesh.live[0])))
        if job.sums:
            request = PlanRequest(job.mesh, job.board, job.algorithm, tuple(job.sums))
            plan_losses(request, for_s=_FIRST_PLANS_S)
        launcher = _Launcher(job, bed)
        try:
            launcher.start()
            launcher.until_over()
            launcher.report_missed()
        except TerminatedError:
            launcher.save_before_end()
            raise
        finally:
            launcher.close()
    return launcher.outcome()


@dataclass(frozen=True)
class RecordedRun:
    """A job that was run and written down: how it ended, and what ledgers and events tell of it."""

    outcome: Outcome
    audit: Audit
    end: RunEnded
    run: TrainingRun


def run_recorded(
    job: ElasticJob,
    start: RunStarted,
    *,
    sink: EventSink | None = None,
    evaluation: Callable[[], Mapping[str, float]] = dict,
) -> RecordedRun:
    """Run a job as `run_elastic` does, and write its events, from `start` on, into its folder.

    `sink` gets all events as well. `evaluation()` returns the scores of the model at the end.
    """
    members: list[Event] = []  # of this run; an earlier one in this file has other ledgers
    with closing(RunLog(job.run_dir / EVENTS, sink)) as log:

        def on_event(event: TimedEvent) -> None:
            log.add(event)
            job.on_event(event)
            if isinstance(event.event, GenerationBegan | StepFinished):
                members.append(event.event)

        on_event(TimedEvent(0.0, start))
        outcome = run_elastic(replace(job, on_event=on_event))
        found, so_far = audit(job.run_dir / "ledger", members), training_run(log.lines())
        end = end_event(outcome.recoveries, outcome.chips, found, so_far, evaluation())
        on_event(TimedEvent(log.last_t, end))
    return RecordedRun(outcome, found, end, training_run(log.lines()))


class _Launcher:
    """The state of a running job in the process that started it."""

    def __init__(self, job: ElasticJob, bed: Testbed | None) -> None:
        name, self._secret = f"{os.getpid()}-{secrets.token_hex(4)}", secrets.token_hex(32)
        self._job = job
        self._listener = listening("127.0.0.1")
        address = self._listener.getsockname()[:2]
        common = Environment(
            job.config.with_({"job.name": name}), coordinator=address, secret=self._secret
        )
        self._processes = JobProcesses(job, common, self._listener, bed)
        self._observer = Observer(
            name, address, self._secret.encode(), self._handle_event, self._processes.supervisor
        )
        self._control = ProcessControl(self._processes, self._observer.send, bed)
        self._injector = FaultInjector(
            [parse_fault(text, job.mesh) for text in job.config.local.inject],
            self._control,
            heartbeat_timeout_s=job.config.timing.heartbeat_timeout_s,
            note=lambda injected: self._record_injected(injected, time.monotonic()),
        )
        self._view = JobView(now=time.monotonic())
        self._started = time.monotonic()
        self._step = 0
        self._sums: SumSizes = job.sums
        self._saves_to: Path | None = None  # the folder of the job's checkpoints
        self._chip_counts: list[int] = []
        self._handled_pids: set[int] = set()  # processes whose end was handled
        self._ends = WorkerEnds()
        self._standstill = Standstill(self._view, job.config.timing)
        self._why_failed = ""  # not empty: the whole job has failed
        self._over_since: float | None = None
        self._finished_at = 0.0  # when the coordinator reported the end, by its clock
        self._has_sent_finish = False

    def start(self) -> None:
        """Start the coordinator and a worker for each live chip."""
        spec = ProcessSpec(
            "the coordinator",
            self._start_coordinator,
            self._judge_coordinator,
            _COORDINATOR_POLICY,
            tell=lambda line: None,  # events tell it
        )
        self._processes.coordinator = self._processes.supervisor.keep(spec)
        self._processes.supervisor.restart_due()
        deadline = time.monotonic() + _FIRST_ANSWER_S
        while not self._observer.is_connected and time.monotonic() < deadline:
            # Before the workers start, so that no event is missed.
            self._observer.connect_and_send()
        if self._job.page is not None:
            self._start_page(self._job.page)
        self._control.restart(self._job.mesh.live, self._injector.self_injected)

    def _start_page(self, request: PageRequest) -> None:
        """Start the live page; without it, the job runs all the same."""
        address = self._listener.getsockname()[:2]
        supervisor, mesh = self._processes.supervisor, self._job.mesh
        try:
            start_page(request, supervisor, address, self._secret, mesh, self._inject_clicked)
        except OSError as error:
            _log.warning("the live page cannot be started: %s", error)

    def _inject_clicked(self, words: str) -> None:
        """Inject a fault that was clicked on the live page, at once."""
        try:
            fault = parse_fault(f"{words} at {self._step}", self._job.mesh)
        except InputError as error:
            _log.warning("a fault that was clicked is not injected: %s", error)
            return
        self._injector.add(fault)

    def until_over(self) -> None:
        """Watch processes and inject faults until no worker is left or the time to end is over."""
        while self._running() or self._injector.awaits_repair():
            is_idle = self._job.more_faults is None and not self._injector.is_timed()
            self._processes.supervisor.serve(_IDLE_POLL_S if is_idle else _POLL_S)
            self._supervise_coordinator()
            self._handle_ended_workers()
            self._ask_for_faults()
            self._injector.inject_due(self._step, self._elapsed_s())
            self._finish_when_time_is_up()
            self._fail_standstill()
            if self._is_out_of_time():
                break
        self._await_last_events()
        self._handle_ended_workers(is_last=True)
        if self._over_since is not None and not self._why_failed:
            self._ends.tell_failures()

    def save_before_end(self) -> None:
        """Let the workers save a checkpoint if the job writes any: SIGTERM or SIGHUP ends it now.

        Ends when a step since then is saved, or after `_SAVE_S`; Ctrl-C ends it at once.
        """
        folder, since = self._saves_to, self._step
        if folder is None or self._over_since is not None:
            return
        _log.warning("ended by a signal; saving a checkpoint first, for up to %.0f s", _SAVE_S)
        for child in self._running():
            with suppress(ProcessLookupError):  # not its group: processes of the script's may be in
                os.kill(child.pid, LAUNCHER_NOTICE)
        deadline = time.monotonic() + _SAVE_S
        while self._running() and self._over_since is None and time.monotonic() < deadline:
            self._processes.supervisor.serve(_POLL_S)
            self._supervise_coordinator()
            self._handle_ended_workers()
            newest = newest_complete(folder)
            if newest is not None and newest >= since:
                _log.warning("saved step %d in %s; --resume goes on from there", newest, folder)
                return
        _log.warning("no checkpoint of step %d or later; the newest one stays", since)

    def report_missed(self) -> None:
        """Report the faults that were not injected because the job was over before."""
        for fault in self._injector.missed():
            self._report(FaultMissed(fault.words))

    def close(self) -> None:
        """End everything that still runs."""
        self._observer.disconnect()
        self._processes.close()
        self._listener.close()

    def outcome(self) -> Outcome:
        """Return how the job ended."""
        why = self._why_failed
        if not why and self._over_since is None:
            why = self._ends.why
        return Outcome(
            is_finished=not why,
            why=why,
            recoveries=self._view.faults,
            chips=tuple(self._chip_counts),
            never_trained=self._ends.never_trained,
            is_refused=self._ends.was_refused_first(why),
        )

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
        """Whether the job is over or has failed, and the remaining workers had time to end.

        Where the script was refused they get none, or they would train on with the same script.
        """
        if self._ends.is_refusal(self._why_failed):
            return True
        if self._over_since is None or time.monotonic() < self._over_since + _LINGER_S:
            return False
        return bool(self._why_failed) or not self._is_member_running()

    def _await_last_events(self) -> None:
        """If no worker is left, wait a while for the event that the job has finished."""
        deadline = time.monotonic() + _LAST_EVENTS_S
        while self._over_since is None and not self._running() and time.monotonic() < deadline:
            self._processes.supervisor.serve(_POLL_S)
            self._supervise_coordinator()

    def _fail_standstill(self) -> None:
        """Fail the job if nothing has moved for too long."""
        waits = self._over_since is not None or self._injector.awaits_repair()
        if not waits and self._standstill.is_too_long(time.monotonic()):
            running = [
                chip for chip, child in self._processes.workers.items() if child.code is None
            ]
            self._handle_event(time.monotonic(), JobFailed(self._standstill.words(running)))

    def _ask_for_faults(self) -> None:
        """Take up the faults that depend on what the job does, or the wish to end it."""
        if self._job.more_faults is None or self._over_since is not None:
            return
        asked = self._job.more_faults(self._view, self._elapsed_s())
        if asked is None:
            self._finish()
            return
        for fault in asked:
            self._injector.add(fault)

    def _finish_when_time_is_up(self) -> None:
        """Finish the job once its time `for_s` is over."""
        if self._job.for_s is not None and self._elapsed_s() > self._job.for_s:
            self._finish()

    def _finish(self) -> None:
        """Ask the coordinator to finish the job, once."""
        if not self._has_sent_finish:
            self._has_sent_finish = True
            self._observer.send(Finish())

    def _supervise_coordinator(self) -> None:
        """Restart the coordinator when it has died, kill a silent one, and stay connected to it."""
        kept = self._processes.coordinator
        if kept is None:
            return
        if kept.is_running and not self._is_coordinator_leaving():
            self._observer.connect_and_send()
        self._processes.supervisor.restart_due()
        if kept.is_done and kept.child is not None:
            if kept.child.code == 0:
                self._mark_over(kept.child.ended)
            else:
                self._mark_failed(kept.child.ended, "the coordinator has given up the job")

    def _is_coordinator_leaving(self) -> bool:
        """Whether the coordinator has said that the job is over, and hung up to end.

        Who calls it now waits in vain: this process listens at its address too.
        """
        over = self._over_since
        if over is None or self._observer.is_connected:
            return False
        return time.monotonic() < over + _LAST_EVENTS_S

    def _start_coordinator(self) -> Child:
        process = self._processes.start_coordinator()
        process.probe = self._probe_coordinator
        if self._processes.workers:  # it is not the first one
            for chip, worker in self._processes.workers.items():
                if worker.code is not None:
                    self._observer.send(Absent(chip))  # so that it does not wait for that one
            self._report(CoordinatorChanged(CoordinatorState.BACK))
        return process

    def _probe_coordinator(self, now: float) -> str:
        return "is silent" if self._observer.is_silent(self._coordinator_timeout_s()) else ""

    def _judge_coordinator(self, process: Child) -> Ending:
        if process.code in (0, GAVE_UP):
            return Ending.DONE
        if process.traceback:
            _log.error("the coordinator failed:\n%s", process.traceback)
        self._report(CoordinatorChanged(CoordinatorState.LOST))
        return Ending.FAILED

    def _coordinator_timeout_s(self) -> float:
        """Return how long the coordinator may be silent: longer before its first answer."""
        timeout_s = self._job.config.timing.heartbeat_timeout_s
        return timeout_s if self._observer.is_connected else max(timeout_s, _FIRST_ANSWER_S)

    def _handle_event(self, clock: float, event: Event) -> None:
        """Handle an event of the coordinator, and report what users want to see."""
        for at, each in reported(self._view, clock, event, now=time.monotonic()):
            self._report(each, at=at)
        match event:
            case GenerationBegan():
                self._chip_counts.append(len(event.chips))
                self._ends.note_generation(event.step, event.chips)
                self._step = max(self._step, event.step)  # nobody may have reported that one
                self._plan_ahead()
            case WorkerStepped():
                self._handle_step(event)
            case JobFinished():
                self._finished_at = self._finished_at or clock
                self._mark_over(clock)
            case JobFailed(why=why):
                self._mark_failed(clock, why)

    def _mark_over(self, at: float) -> None:
        """Note that the job is over."""
        self._over_since = at if self._over_since is None else self._over_since

    def _mark_failed(self, at: float, why: str) -> None:
        """Note that the whole job has failed, and is over."""
        self._why_failed = self._why_failed or why
        self._mark_over(at)

    def _handle_step(self, event: WorkerStepped) -> None:
        """Handle a step that a worker has finished."""
        self._ends.note_step(event.chip, self._processes.workers.get(event.chip))
        if event.saves_to:
            self._saves_to = Path(event.saves_to)
        if event.sums and not self._sums:
            self._sums = event.sums
            self._plan_ahead()
        self._step = max(self._step, event.step)

    def _plan_ahead(self) -> None:
        if self._view.generation and self._sums:
            self._processes.plan_ahead(self._view.generation, self._sums)

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
        return frozenset(self._view.generation.chips if self._view.generation else ())

    def _handle_death(self, chip: Chip, child: Child) -> None:
        is_silent = child.code != 0 and not child.traceback
        injected = self._injector.pop_self_injected(chip, self._step) if is_silent else None
        if injected is not None:
            self._control.expect_deaths(injected.chips)
            self._record_injected(injected, child.ended)
            return
        is_over = self._over_since is not None
        words = self._ends.add(chip, child, is_over=is_over)
        if self._ends.fails_job(child):
            self._mark_failed(child.ended, self._ends.last_failure)
        if is_over and child.code != 0 and chip in self._members():
            # No other worker repeats its work after the last step, such as the evaluation.
            self._mark_failed(child.ended, f"after the last step {self._ends.last_failure}")
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
        self._view.measure(fault)
        happened = FaultHappened(fault.fault, fault.at_step, fault.kind, fault.chips)
        self._report(happened, at=fault.at)


@dataclass(frozen=True)
class Standstill:
    """Says whether the job of a view stands still, and where its workers are.

    The coordinator removes a single worker that keeps the others waiting. If all workers wait, as
    before the first step, it finds no such worker: the launcher must end the job. If
    `straggler_timeout_s` is 0, no standstill is too long.
    """

    view: JobView
    timing: Timing

    def is_too_long(self, now: float) -> bool:
        """Whether nothing has moved for too long."""
        # The coordinator starts to count at the next heartbeat, and should act before the launcher.
        margin_s = self.timing.heartbeat_timeout_s
        return 0 < self.timing.straggler_timeout_s < now - self.view.moved_at - margin_s

    def words(self, running: Iterable[Chip]) -> str:
        """Return one line that says where each running worker is."""
        chips_at: dict[str, list[Chip]] = {}
        for chip in running:
            chips_at.setdefault(self._position(chip), []).append(chip)
        places = "; ".join(f"{chips_words(chips)} {place}" for place, chips in chips_at.items())
        return (
            f"no step was finished and no chip joined or left for "
            f"{self.timing.straggler_timeout_s:g} s: {places or 'no worker is left'}"
        )

    def _position(self, chip: Chip) -> str:
        view = self.view
        if chip in view.waiting:
            return f"waits: {view.waiting[chip]}"
        forming, began = view.forming, view.generation
        if forming and chip in forming.chips and (not began or began.number < forming.number):
            return f"prepares generation {forming.number}"
        if began and chip in began.chips:
            return f"is in generation {began.number} after step {view.step}"
        if chip in view.connected:
            return "is connected, in no generation"
        return "has not connected to the coordinator" if not began else "is cut off"
