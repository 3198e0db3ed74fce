"""One training run as a value, read back from its events: steps, generations, faults, figures.

A run that was killed is a run too: what its events do not tell is `None` or not a number (NaN).
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshmend.errors import InputError
from meshmend.report.training_events import (
    Event,
    chips_of,
    read_events,
    real,
    texts_of,
    whole,
    whole_or_real,
    words,
)
from meshmend.report.training_parts import Floats, RunFault, RunGeneration, SampleCounts, Steps
from meshmend.topology.failures import Link, parse_failure
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh


@dataclass(frozen=True, eq=False)
class TrainingRun:
    """Everything that a report shows of a run; `end` is `None` for one that was cut short."""

    start: Event
    mesh: Mesh
    n_steps: int
    duration_s: float
    steps: Steps
    generations: tuple[RunGeneration, ...]
    faults: tuple[RunFault, ...]
    others: tuple[Event, ...]
    end: Event | None

    @property
    def n_done(self) -> int:
        """The last step that was finished."""
        return int(self.steps.step[-1]) if len(self.steps) else 0

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
        """Whether all chips ended with the same weights, bit for bit; `None`: not told."""
        value = self.end.get("replicas_equal") if self.end else None
        return value if isinstance(value, bool) else None

    @property
    def samples(self) -> SampleCounts:
        """The ledger as the run closed it, else the samples of the steps seen."""
        told = self.end.get("samples") if self.end else None
        if isinstance(told, dict):
            ledger: Event = {"event": "end", **told}
            return SampleCounts(*(whole(ledger, name) for name in ("used", "lost", "repeated")))
        return SampleCounts(int(self.steps.samples.sum()), None, None)

    @property
    def evaluation(self) -> Mapping[str, float]:
        """What the model reached on data it had not seen, by name."""
        told = self.end.get("evaluation") if self.end else None
        own = told if isinstance(told, dict) else {}
        return {str(k): float(v) for k, v in own.items() if isinstance(v, int | float)}

    @property
    def chips(self) -> tuple[int, ...]:
        """How many chips worked, one number for every change: 16, 12, 16."""
        counts = (len(generation.chips) for generation in self.generations)
        return tuple(count for count, _ in itertools.groupby(counts))

    @property
    def recoveries_s(self) -> tuple[float, ...]:
        """The recovery times of all faults that were got over; repairs do not count."""
        return tuple(f.recovered_s for f in self.faults if f.is_recovered and not f.is_repair)

    @property
    def median_recovery_s(self) -> float:
        """The median of the recovery times, NaN without any."""
        return statistics.median(self.recoveries_s) if self.recoveries_s else math.nan

    @property
    def worst_recovery_s(self) -> float:
        """The longest of the recovery times, NaN without any."""
        return max(self.recoveries_s, default=math.nan)

    @cached_property
    def first_work_s(self) -> float:
        """When the first set of chips began to work."""
        return self.generations[0].at_s if self.generations else 0.0

    @property
    def mean_samples_per_s(self) -> float:
        """Samples of the steps that count over the time from the first work to the last step."""
        time_s = float(self.steps.at_s[-1]) - self.first_work_s if len(self.steps) else 0.0
        return float(self.steps.samples.sum()) / time_s if time_s > 0 else math.nan


def training_run(lines: Iterable[str]) -> TrainingRun:
    """Return the run that the lines of an `events.jsonl` tell.

    A step told twice counts as told last. A torn last line is left out. Where a run was resumed
    into the same file, its times go on from those before.

    Raises:
        InputError: a line that is no event, an event without what its kind needs.
    """
    events = _on_one_clock(read_events(lines))
    start = events[0]
    if whole(start, "steps") < 0:
        raise InputError(f"a start event needs steps of zero or more, but got {start['steps']}")
    mesh = parse_mesh(
        words(start, "mesh"), wrap=words(start, "wrap") or "none", fail=texts_of(start, "fail")
    )
    bounds = [event for event in events if event["event"] in {"start", "end"}]
    return TrainingRun(
        start=start,
        mesh=mesh,
        n_steps=max(whole(event, "steps") for event in events if event["event"] == "start"),
        duration_s=max(whole_or_real(event, "t") for event in events),
        steps=_steps(events),
        generations=tuple(_generation(e, mesh) for e in events if e["event"] == "generation"),
        faults=_faults(events),
        others=tuple(event for event in events if event["event"] != "step"),
        end=bounds[-1] if bounds[-1]["event"] == "end" else None,
    )


def smoothing_s(run: TrainingRun) -> float:
    """Return the window of `samples_per_s`: a sixtieth of the run, or four steps if longer."""
    times = np.sort(np.append(run.steps.at_s, run.first_work_s))
    return max(float(times[-1] - times[0]) / 60, 4 * float(np.median(np.diff(times))))


def samples_per_s(run: TrainingRun, *, n_points: int = 400) -> tuple[Floats, Floats]:
    """Return times and the samples per second around each: the mean over a window of time."""
    steps = run.steps
    if not len(steps) or steps.at_s[-1] <= run.first_work_s:
        return np.empty(0), np.empty(0)
    order = np.argsort(steps.at_s, kind="stable")
    at_s = np.concatenate([[run.first_work_s], steps.at_s[order]])
    total = np.concatenate([[0.0], np.cumsum(steps.samples[order], dtype=np.float64)])
    first, last = at_s[0], at_s[-1]
    half = smoothing_s(run) / 2
    times = np.linspace(first, last, n_points)
    low, high = np.maximum(times - half, first), np.minimum(times + half, last)
    rate = (np.interp(high, at_s, total) - np.interp(low, at_s, total)) / (high - low)
    return times, rate


def _on_one_clock(events: Iterable[Event]) -> tuple[Event, ...]:
    """Return the events with the times of a resumed run put after those before it."""
    offset, last, result = 0.0, 0.0, []
    for event in events:
        if event["event"] == "start":
            offset = last
        last = max(last, offset + whole_or_real(event, "t"))
        result.append({**event, "t": offset + whole_or_real(event, "t")})
    return tuple(result)


def _steps(events: Iterable[Event]) -> Steps:
    latest = {whole(event, "step"): event for event in events if event["event"] == "step"}
    own = [latest[step] for step in sorted(latest)]
    return Steps(
        np.array([whole(event, "step") for event in own], dtype=np.int64),
        np.array([real(event, "t") for event in own], dtype=np.float64),
        np.array([real(event, "loss") for event in own], dtype=np.float64),
        np.array([whole(event, "samples") for event in own], dtype=np.int64),
        np.array([whole(event, "chips") for event in own], dtype=np.int64),
    )


def _generation(event: Event, mesh: Mesh) -> RunGeneration:
    chips = frozenset(chips_of(event, "chips"))
    waiting = frozenset(chips_of(event, "waiting"))
    everywhere = set(itertools.product(*map(range, mesh.shape)))
    if not chips or not chips | waiting <= everywhere:
        strange = sorted((chips | waiting) - everywhere)
        raise InputError(
            f"generation {event.get('number')} needs chips inside the mesh {mesh}, but got "
            f"{strange[:4] or 'none at all'}"
        )
    cut = (parse_failure(text) for text in texts_of(event, "cut"))
    links = mesh.failed_links | {link for link in cut if isinstance(link, Link)}
    broken = Mesh(mesh.shape, mesh.wrap, frozenset(everywhere - chips - waiting), links)
    why, at_s = words(event, "why"), real(event, "t")
    number, step = whole(event, "number"), whole(event, "step")
    return RunGeneration(number, at_s, step, broken, chips, waiting, why)


def _faults(events: Iterable[Event]) -> tuple[RunFault, ...]:
    """Return the faults in order of time, each with the first later recovery of its name."""
    result: list[RunFault] = []
    for event in events:
        if event["event"] not in {"fault", "recovered"}:
            continue
        name, at_s = words(event, "fault"), real(event, "t")
        at_step = whole(event, "at_step") if event.get("at_step") is not None else None
        if event["event"] == "fault":
            result.append(RunFault(name, at_s, at_step))
            continue
        times = real(event, "detected_s"), whole_or_real(event, "recovered_s")
        open_ones = [
            i for i, f in enumerate(result) if (f.fault, f.at_step) == (name, at_step)
            and not f.is_recovered
        ]  # fmt: skip
        if open_ones:
            result[open_ones[0]] = RunFault(name, result[open_ones[0]].at_s, at_step, *times)
        else:
            result.append(RunFault(name, max(0.0, at_s - times[1]), at_step, *times))
    return tuple(sorted(result, key=lambda fault: fault.at_s))
