"""Writes down a job as its coordinator sees it: the events of the run, and at the end its report.

`reported` turns what a coordinator tells into the events of a run. The launcher of a job on one
machine uses it, and so does `Journal`, which the coordinator of a job on several hosts keeps.
"""

import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from msgspec import structs

from meshmend.errors import InputError
from meshmend.files import write_whole
from meshmend.launch.run_log import RunLog
from meshmend.membership import events
from meshmend.membership.events import Event, TimedEvent, read_events
from meshmend.membership.faults.fault import FaultKind
from meshmend.membership.job import JobSpec
from meshmend.membership.job_view import JobView, Recovery
from meshmend.pages.report.training_page import training_page
from meshmend.pages.report.training_run import TrainingRun, training_run
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import mesh_words
from meshmend.train.data.audit import Audit, audit

_log = logging.getLogger(__name__)

EVENTS = "events.jsonl"


def reported(
    view: JobView, clock: float, event: Event, *, now: float | None = None
) -> Iterator[tuple[float, Event]]:
    """Follow an event of a coordinator, and yield what a run writes down of it, and at what time.

    Of all workers that have finished a step, the one that leads is enough.
    """
    for recovery in view.take(clock, event, now=now).recoveries:
        yield clock, recovery.event()
    match event:
        case events.GenerationForming() | events.JobFinished():
            pass  # the first when it has begun; the last event of the run tells of the second
        case events.GenerationBegan():
            why = view.forming.why if view.forming else ""
            yield clock, structs.replace(event, why=why)
        case events.WorkerSaved():
            yield event.at, events.CheckpointSaved(event.step, event.path)
        case events.WorkerStepped():
            if event.leads:
                n_chips = len(view.generation.chips) if view.generation else 1
                done = (event.step, event.generation, n_chips, event.loss, event.samples)
                yield event.at, events.StepFinished(*done)
        case _:
            yield clock, event


def start_event(mesh: Mesh, model: str) -> events.RunStarted:
    """Return the first event of a run, whose script alone may know how many steps there are."""
    words, date = mesh_words(mesh), datetime.now(UTC).isoformat(timespec="seconds")
    return events.RunStarted(
        mesh=words["shape"],
        wrap=words["wrap"],
        fail=tuple(words["fail"]),
        steps=0,
        batch=0,
        date=date,
        model=model,
    )


def end_event(
    faults: Sequence[Recovery],
    chip_counts: Sequence[int],
    found: Audit,
    so_far: TrainingRun,
    evaluation: Mapping[str, float],
) -> events.RunEnded:
    """Return the last event of a run, with its figures from its events and its ledgers.

    `chip_counts` has the number of chips of each generation.
    """
    chips = [count for count, _ in itertools.groupby(chip_counts)]
    return events.RunEnded(
        steps=so_far.n_done,
        first_loss=so_far.first_loss,
        final_loss=so_far.final_loss,
        replicas_equal=found.replicas_equal,
        samples=_sample_counts(found),
        chips=tuple(chips),
        faults=tuple(fault.event() for fault in faults),
        evaluation=evaluation,
        redone=found.redone,
        restores=tuple(events.StateRestored(each.step, each.lost) for each in found.restores),
        history_faults=found.faults,
        unchecked=found.unchecked,
        missing_checkpoints=so_far.missing_checkpoints,
    )


def _sample_counts(found: Audit) -> events.SampleCounts | None:
    """Return the counts of samples; None if there is no ledger, and none was counted.

    If a ledger is incomplete and nothing else is wrong, only the used samples are known: the result
    has no counts of lost and repeated samples.
    """
    if found.unchecked and not found.lost and not found.repeated:
        return events.SampleCounts(found.used) if found.used else None
    return events.SampleCounts(found.used, found.lost, found.repeated)


def write_report(run: TrainingRun, folder: Path) -> str | None:
    """Write the report and return its path; if it cannot be written, log why and return None."""
    path = folder / "report.html"
    try:
        write_whole(path, training_page(run), is_durable=False)
    except OSError as error:
        _log.error("the report cannot be written to %s: %s", path, error.strerror)
        return None
    return str(path)


class Journal:
    """What a coordinator writes to the folder of a run on several hosts.

    Nobody tells a coordinator of faults: a member that leaves is one, and a chip that joins later
    is the repair. All times are by the coordinator's clock. One that is started again goes on in
    the same file, and its times go on after the last one there.

    Raises:
        InputError: the folder cannot be made.
    """

    def __init__(self, folder: Path, spec: JobSpec) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"--run-dir needs a folder to write to, but {folder} cannot be made: "
                f"{error.strerror}"
            ) from None
        self._folder = folder
        self._file = RunLog(folder / EVENTS)
        self._view = JobView()
        self._follow_earlier()
        self._started = time.monotonic()
        self._file.add(TimedEvent(0.0, start_event(spec.mesh, spec.job)))

    def _follow_earlier(self) -> None:
        """Learn from the file what the coordinators before this one have told."""
        try:
            for timed in read_events(self._file.lines()) if any(self._file.lines()) else ():
                self._view.take(timed.t, timed.event)
        except InputError as error:
            _log.error("what earlier coordinators wrote cannot be read: %s", error)

    def take(self, clock: float, event: Event) -> None:
        """Write down an event of the coordinator, and the fault or repair that it tells of."""
        if isinstance(event, events.WorkerStepped | events.WorkerSaved):
            event = structs.replace(event, at=clock)  # its own time is by the clock of its host
        if (fault := self._fault(clock, event)) is not None:
            self._view.measure(fault)
            happened = events.FaultHappened(fault.fault, fault.at_step, fault.kind, fault.chips)
            self._add(clock, happened)
        for at, each in reported(self._view, clock, event):
            self._add(at, each)

    def _fault(self, clock: float, event: Event) -> Recovery | None:
        if self._view.generation is None:
            return None
        step, members = self._view.step, self._view.generation.chips
        match event:
            case events.WorkerLeft() | events.WorkerTurnedAway() if event.chip in members:
                lost = (event.chip,)
                return Recovery(event.why, step, clock, chips=lost, victims=frozenset(lost))
            case events.WorkerArrived(chip=chip) if chip not in members:
                words, kind, back = f"chip {chip} joined", FaultKind.REPAIR, (chip,)
                return Recovery(words, step, clock, kind, back, repaired=frozenset(back))
        return None

    def end(self, *, is_over: bool) -> str | None:
        """Write the last event, if the job is over, and the report; return the report's path.

        There is no report of a run without a step.
        """
        try:
            if is_over:
                so_far = training_run(self._file.lines())
                found, faults = self._audited(), self._view.faults
                ended = end_event(faults, so_far.chips, found, so_far, {})
                self._add(time.monotonic(), ended)
            run = training_run(self._file.lines())
        except InputError as error:
            _log.error("the report cannot be made: %s", error)
            return None
        finally:
            self._file.close()
        return write_report(run, self._folder) if run.n_done else None

    def _audited(self) -> Audit:
        """Return what the ledgers of all hosts prove, as far as they are in this folder."""
        told = (timed.event for timed in read_events(self._file.lines()))
        return audit(self._folder / "ledger", told)

    def _add(self, clock: float, event: Event) -> None:
        self._file.add(TimedEvent(max(0.0, clock - self._started), event))
