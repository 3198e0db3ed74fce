"""One training run as a value, made from its events: steps, generations, faults, figures.

A run that was killed can be read too: values that its events lack are `None` or NaN.
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.membership.events import (
    FabricMeasured,
    GenerationBegan,
    RunEnded,
    RunStarted,
    SampleCounts,
    StateRestored,
    StepFinished,
    TimedEvent,
    WriteFailed,
    read_events,
)
from meshmend.membership.faults.fault import FaultKind
from meshmend.membership.job_view import JobView
from meshmend.topology.failures import Chip, parse_link
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_N_POINTS = 400  # of a curve


@dataclass(frozen=True, eq=False)
class Steps:
    """The steps that count, in order; of a step that was done twice, only the last time counts."""

    step: Ints
    at_s: Floats
    loss: Floats
    samples: Ints
    chips: Ints

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True)
class RunGeneration:
    """The chips that train together from `step` on, and those alive but waiting.

    All other chips of `mesh` are failed.
    """

    number: int
    at_s: float
    step: int
    mesh: Mesh
    chips: frozenset[Chip]
    waiting: frozenset[Chip]
    why: str


@dataclass(frozen=True)
class RunFault:
    """One fault or repair of a run, when it was detected, and when the run had recovered.

    `kind` is None for a worker that died without an injected fault. `detected_s` and `recovered_s`
    are seconds since the fault, NaN if the run did not detect it or did not recover.
    """

    fault: str
    at_s: float
    at_step: int | None
    kind: FaultKind | None = None
    chips: tuple[Chip, ...] = ()
    detected_s: float = math.nan
    recovered_s: float = math.nan

    @property
    def kind_words(self) -> str:
        """The kind of the fault without its place: `kill`, `kill coordinator`, `not injected`."""
        if self.kind is None:
            return "not injected"
        return f"{self.kind.value} coordinator" if self.is_of_coordinator else self.kind.value

    @property
    def is_repair(self) -> bool:
        """Whether this is a repair, not a fault."""
        return self.kind is FaultKind.REPAIR

    @property
    def is_recovered(self) -> bool:
        """Whether the run recovered from this fault."""
        return math.isfinite(self.recovered_s)

    @property
    def is_of_coordinator(self) -> bool:
        """Whether this killed or froze the coordinator; training goes on without it."""
        return self.kind in (FaultKind.KILL, FaultKind.FREEZE) and not self.chips


@dataclass(frozen=True, eq=False)
class TrainingRun:
    """Everything that a report shows of a run.

    `n_steps` is `None` if only the script knows it. `other_events` are all events but the steps.
    `end` is `None` if the run was stopped or still runs.
    """

    start: RunStarted
    mesh: Mesh
    n_steps: int | None
    duration_s: float
    steps: Steps
    generations: tuple[RunGeneration, ...]
    faults: tuple[RunFault, ...]
    other_events: tuple[TimedEvent, ...]
    end: RunEnded | None

    @property
    def n_done(self) -> int:
        """The last step that was finished.

        Of a step that came to count when chips died, nobody tells the loss: only the generation
        that began after it tells of it.
        """
        if not len(self.steps):
            return 0
        return max(int(self.steps.step[-1]), *(each.step for each in self.generations[-1:]), 0)

    @property
    def resumed_after(self) -> int:
        """The step of the checkpoint that the run began with; 0 if it began anew."""
        if not self.generations or not len(self.steps):
            return 0
        return min(self.generations[0].step, int(self.steps.step[0]) - 1)

    @property
    def first_loss(self) -> float:
        """The loss of the first step."""
        return float(self.steps.loss[0]) if len(self.steps) else math.nan

    @property
    def final_loss(self) -> float:
        """The loss of the last step."""
        return float(self.steps.loss[-1]) if len(self.steps) else math.nan

    @property
    def replicas_equal(self) -> bool | None:
        """Whether all chips ended with the same weights, bit for bit; `None`: unknown."""
        return self.end.replicas_equal if self.end else None

    @property
    def restores(self) -> tuple[StateRestored, ...]:
        """When the job went back to an earlier step, because no chip had the newest state.

        From the ledgers of a finished run, else from the events.
        """
        if self.end and self.end.restores:
            return self.end.restores
        events = (timed.event for timed in self.other_events)
        return tuple(event for event in events if isinstance(event, StateRestored))

    @property
    def history_faults(self) -> tuple[str, ...]:
        """What the ledgers prove to be wrong, as sentences."""
        return self.end.history_faults if self.end else ()

    @property
    def unchecked(self) -> tuple[str, ...]:
        """What the ledgers could not prove, as sentences."""
        return self.end.unchecked if self.end else ()

    @property
    def fabric(self) -> FabricMeasured | None:
        """What the chips have measured of their links; `None` if they did not."""
        events = (timed.event for timed in self.other_events)
        return next((each for each in events if isinstance(each, FabricMeasured)), None)

    @property
    def missing_checkpoints(self) -> tuple[int, ...]:
        """The steps whose checkpoints could not be written."""
        events = (timed.event for timed in self.other_events)
        failed = (event.step for event in events if isinstance(event, WriteFailed))
        return tuple(sorted({step for step in failed if step is not None}))

    @property
    def samples(self) -> SampleCounts:
        """The numbers of samples, from the ledgers of a finished run, else from its steps."""
        if self.end and self.end.samples:
            return self.end.samples
        return SampleCounts(used=int(self.steps.samples.sum()))

    @property
    def evaluation(self) -> Mapping[str, float]:
        """The scores of the model on held-out samples, by name."""
        return self.end.evaluation if self.end else {}

    @property
    def chips(self) -> tuple[int, ...]:
        """How many chips worked, one number after each change: 16, 12, 16."""
        counts = (len(generation.chips) for generation in self.generations)
        return tuple(count for count, _ in itertools.groupby(counts))

    @property
    def recoveries_s(self) -> tuple[float, ...]:
        """The recovery times of all faults that the run recovered from; repairs do not count."""
        return tuple(f.recovered_s for f in self.faults if f.is_recovered and not f.is_repair)

    @property
    def median_recovery_s(self) -> float:
        """The median of the recovery times, NaN if there are none."""
        return statistics.median(self.recoveries_s) if self.recoveries_s else math.nan

    @property
    def worst_recovery_s(self) -> float:
        """The longest of the recovery times, NaN if there are none."""
        return max(self.recoveries_s, default=math.nan)

    @property
    def repairs_s(self) -> tuple[float, ...]:
        """How long each repair took until its chips trained again."""
        return tuple(f.recovered_s for f in self.faults if f.is_recovered and f.is_repair)

    @cached_property
    def first_work_s(self) -> float:
        """The time at which the first generation began to work."""
        return self.generations[0].at_s if self.generations else 0.0

    @property
    def mean_samples_per_s(self) -> float:
        """Samples per second from the first generation to the last step, without lost steps."""
        time_s = float(self.steps.at_s[-1]) - self.first_work_s if len(self.steps) else 0.0
        return float(self.steps.samples.sum()) / time_s if time_s > 0 else math.nan


def training_run(lines: Iterable[str]) -> TrainingRun:
    """Return the run that the lines of an `events.jsonl` describe.

    If a step occurs twice, the last one counts; a lost step does not count. An incomplete last line
    is ignored. If a run was resumed into the same file, its times continue the earlier ones; what
    it did on a mesh of another shape is left out.

    Raises:
        InputError: a line is not an event, or an event lacks a field.
    """
    events = _on_one_clock(_on_last_mesh(read_events(lines)))
    starts = [timed.event for timed in events if isinstance(timed.event, RunStarted)]
    start = starts[0]
    mesh = parse_mesh(start.mesh, wrap=start.wrap or "none", fail=start.fail)
    steps = _steps(events)
    last = [each.event for each in events if isinstance(each.event, RunStarted | RunEnded)][-1]
    return TrainingRun(
        start=start,
        mesh=mesh,
        n_steps=max(each.steps for each in starts) or None,
        duration_s=max(timed.t for timed in events),
        steps=steps,
        generations=tuple(
            _generation(timed.event, timed.t, mesh)
            for timed in events
            if isinstance(timed.event, GenerationBegan)
        ),
        faults=_faults(events),
        other_events=tuple(timed for timed in events if not isinstance(timed.event, StepFinished)),
        end=last if isinstance(last, RunEnded) else None,
    )


def smoothing_s(run: TrainingRun) -> float:
    """Return the window of `samples_per_s`: a sixtieth of the run, at least four steps."""
    times = np.sort(np.append(run.steps.at_s, run.first_work_s))
    return max(float(times[-1] - times[0]) / 60, 4 * float(np.median(np.diff(times))))


def samples_per_s(run: TrainingRun) -> tuple[Floats, Floats]:
    """Return times, and the samples per second at each: the mean over a window around it."""
    steps = run.steps
    if not len(steps) or steps.at_s[-1] <= run.first_work_s:
        return np.empty(0), np.empty(0)
    order = np.argsort(steps.at_s, kind="stable")
    at_s = np.concatenate([[run.first_work_s], steps.at_s[order]])
    total = np.concatenate([[0.0], np.cumsum(steps.samples[order], dtype=np.float64)])
    first, last = at_s[0], at_s[-1]
    half = smoothing_s(run) / 2
    times = np.linspace(first, last, _N_POINTS)
    low, high = np.maximum(times - half, first), np.minimum(times + half, last)
    rate = (np.interp(high, at_s, total) - np.interp(low, at_s, total)) / (high - low)
    return times, rate


def _on_last_mesh(events: Iterable[TimedEvent]) -> list[TimedEvent]:
    """Return the events since the run has the mesh that it had last."""
    kept: list[TimedEvent] = []
    mesh = None
    for timed in events:
        if isinstance(timed.event, RunStarted):
            before, mesh = mesh, (timed.event.mesh, timed.event.wrap)
            if mesh != before:
                kept.clear()
        kept.append(timed)
    return kept


def _on_one_clock(events: Iterable[TimedEvent]) -> tuple[TimedEvent, ...]:
    """Return the events with the times of a resumed run moved after those of the run before."""
    offset, last, result = 0.0, 0.0, []
    for timed in events:
        if isinstance(timed.event, RunStarted):
            offset = last
        last = max(last, offset + timed.t)
        result.append(TimedEvent(offset + timed.t, timed.event))
    return tuple(result)


def _steps(events: Iterable[TimedEvent]) -> Steps:
    latest: dict[int, tuple[float, StepFinished]] = {}
    for timed in events:
        if isinstance(timed.event, StepFinished):
            latest[timed.event.step] = (timed.t, timed.event)
        elif isinstance(timed.event, StateRestored):
            lost = [step for step in latest if step > timed.event.step]
            for step in lost:
                del latest[step]
    kept = [latest[step] for step in sorted(latest)]
    return Steps(
        np.array([event.step for _, event in kept], dtype=np.int64),
        np.array([t for t, _ in kept], dtype=np.float64),
        np.array([_or_nan(event.loss) for _, event in kept], dtype=np.float64),
        np.array([event.samples for _, event in kept], dtype=np.int64),
        np.array([event.chips for _, event in kept], dtype=np.int64),
    )


def _generation(event: GenerationBegan, at_s: float, mesh: Mesh) -> RunGeneration:
    chips, waiting = frozenset(event.chips), frozenset(event.waiting)
    everywhere = set(itertools.product(*map(range, mesh.shape)))
    if not chips or not chips | waiting <= everywhere:
        outside = sorted((chips | waiting) - everywhere)
        raise InputError(
            f"generation {event.number} needs chips inside the mesh {mesh}, but got "
            f"{outside[:4] or 'no chips'}"
        )
    links = mesh.failed_links | {parse_link(text) for text in event.cut}
    broken = Mesh(mesh.shape, mesh.wrap, frozenset(everywhere - chips - waiting), links)
    return RunGeneration(event.number, at_s, event.step, broken, chips, waiting, event.why)


def _faults(events: Iterable[TimedEvent]) -> tuple[RunFault, ...]:
    """Return the faults in order of time, each with its recovery if there is one."""
    view = JobView()
    for timed in events:
        view.take(timed.t, timed.event)
    faults = (
        RunFault(
            each.fault,
            each.at,
            each.at_step,
            each.kind,
            each.chips,
            _or_nan(each.detected_s),
            _or_nan(each.recovered_s),
        )
        for each in view.faults
    )
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
