"""Made-up events of training runs, as a run tells them and writes them to `events.jsonl`."""

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any

from meshmend.membership.events import (
    CheckpointSaved,
    CoordinatorChanged,
    CoordinatorState,
    Event,
    FaultHappened,
    FaultRecovered,
    GenerationBegan,
    RunEnded,
    RunStarted,
    SampleCounts,
    StepFinished,
    TimedEvent,
    event_line,
)
from meshmend.membership.faults.fault import FaultKind, parse_fault
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh

BOARDS = ("2x2@0,0", "2x2@0,2", "2x2@2,0", "2x2@2,2")


def lines(events: Iterable[TimedEvent]) -> list[str]:
    return [event_line(event) for event in events]


def at(t: float, event: Event) -> TimedEvent:
    return TimedEvent(t, event)


def start(steps: int = 100, mesh: str = "4x4", **more: Any) -> TimedEvent:
    facts: dict[str, Any] = {
        "date": "2026-11-15T04:00:00+00:00", "batch": 64, "model": "resnet", "size": "tiny",
        "policy": "constant", "parameters": 19466, **more,
    }  # fmt: skip
    return at(0.0, RunStarted(mesh=mesh, steps=steps, **facts))


def chips_without(mesh: str, *fail: str) -> tuple[Chip, ...]:
    return tuple(parse_mesh(mesh, fail=fail).live)


def generation(t: float, number: int, chips: Sequence[Chip], **more: Any) -> TimedEvent:
    facts = {"step": 1, "why": "the job starts", **more}
    return at(t, GenerationBegan(number=number, chips=tuple(chips), **facts))


def step(t: float, number: int, loss: float | None, **more: Any) -> TimedEvent:
    facts = {"generation": 1, "samples": 64, "chips": 16, **more}
    return at(t, StepFinished(step=number, loss=loss, **facts))


def fault(t: float, words: str, at_step: int = 2) -> TimedEvent:
    """A fault as `--inject` names it, without its time: `kill 2x2@0,2`."""
    kind, chips = kind_and_chips(words)
    return at(t, FaultHappened(words, at_step, kind, chips))


def recovered(t: float, words: str, at_step: int, *, detected: float, took: float) -> TimedEvent:
    kind, chips = kind_and_chips(words)
    return at(t, FaultRecovered(words, at_step, detected, took, kind, chips))


def kind_and_chips(words: str) -> tuple[FaultKind, tuple[Chip, ...]]:
    injected = parse_fault(f"{words} at 1", Mesh((16, 16)))
    return injected.kind, injected.chips()


def end(t: float, steps: int, first: float, final: float, **more: Any) -> TimedEvent:
    samples = SampleCounts(used=64 * steps, lost=0, repeated=0)
    facts = {"replicas_equal": True, "samples": samples, "chips": (16,), **more}
    return at(t, RunEnded(steps=steps, first_loss=first, final_loss=final, **facts))


def losses(events: Iterable[TimedEvent]) -> list[float]:
    """The losses of all steps; each has one in these runs."""
    own = [each.event.loss for each in events if isinstance(each.event, StepFinished)]
    return [loss for loss in own if loss is not None]


def random_loss(rng: random.Random, number: int, scale: float) -> float:
    return 2.1 * math.exp(-number / scale) + 0.18 + rng.gauss(0, 0.05)


def short_run() -> list[TimedEvent]:
    """A tiny ResNet on 4x4: 100 steps, board 2x2@0,2 killed in step 30, back in step 60."""
    rng = random.Random(1)
    hole, full = chips_without("4x4", "2x2@0,2"), chips_without("4x4")
    events = [start(), generation(0.61, 1, full)]
    t, chips, number = 0.61, full, 1
    kill, back = "kill 2x2@0,2", "repair 2x2@0,2"
    for k in range(1, 101):
        if k == 30:
            number, chips = 2, hole
            events.append(fault(t + 0.02, kill, 30))
            events.append(generation(t + 0.09, 2, hole, step=30, why="chip (0, 2) hung up"))
            events.append(recovered(t + 0.43, kill, 30, detected=0.021, took=0.41))
            t += 0.38
        if k == 60:
            number, chips = 3, full
            events.append(fault(t + 0.01, back, 60))
            events.append(generation(t + 1.62, 3, full, step=60, why="board 2x2@0,2 is back"))
            t += 1.65
        t += (0.068 if len(chips) == 16 else 0.079) * rng.uniform(0.9, 1.15)
        loss = round(random_loss(rng, k, 32), 5)
        events.append(step(round(t, 3), k, loss, generation=number, chips=len(chips)))
        if k == 60:
            events.append(recovered(t, back, 60, detected=0.004, took=1.7))
        if k == 50:
            events.append(at(t, CheckpointSaved(50, "runs/1/step-50")))
    first, *_, final = losses(events)
    held_back = {"accuracy": 0.93}
    events.append(end(t + 0.3, 100, first, final, chips=(16, 12, 16), evaluation=held_back))
    return events


def long_run(n_steps: int = 10_000, n_faults: int = 60, mesh: str = "4x4") -> list[TimedEvent]:
    """Many steps and faults: kills, hangs, cuts, lost coordinators, and repairs of each."""
    rng = random.Random(2)
    events = [start(n_steps, mesh), generation(0.6, 1, chips_without(mesh))]
    every = n_steps // n_faults
    t, number, broken, cut = 0.6, 1, [], []  # type: float, int, list[str], list[str]
    for k in range(1, n_steps + 1):
        if k % every == every // 2 and k // every < n_faults:
            more, t, number = _random_fault(rng, mesh, (t, k, number), (broken, cut))
            events += more
        n_chips = len(chips_without(mesh, *broken))
        t += 0.06 * rng.uniform(0.9, 1.2)
        loss = round(random_loss(rng, k, n_steps / 5), 5)
        events.append(step(round(t, 3), k, loss, generation=number, chips=n_chips))
        if k % 500 == 0:
            events.append(at(t, CheckpointSaved(k, f"runs/1/step-{k}")))
    first, *_, final = losses(events)
    events.append(end(t + 0.3, n_steps, first, final))
    return events


def _random_fault(
    rng: random.Random, mesh: str, now: tuple[float, int, int], state: tuple[list[str], list[str]]
) -> tuple[list[TimedEvent], float, int]:
    (t, k, number), (broken, cut) = now, state
    if rng.random() < 0.1:
        lost = at(t, CoordinatorChanged(CoordinatorState.LOST))
        back = at(t + 0.2, CoordinatorChanged(CoordinatorState.BACK))
        return [fault(t, "kill coordinator", k), lost, back], t, number
    if (broken or cut) and rng.random() < 0.55:
        own = cut if cut else broken
        what = f"repair {own.pop(0)}"
        took = rng.uniform(0.8, 2.2)
    elif rng.random() < 0.25 and not cut:
        cut.append("link:0,1-1,1")
        what, took = f"cut {cut[-1]}", rng.uniform(0.1, 0.4)
    else:
        broken.append(rng.choice([board for board in BOARDS if board not in broken][:3]))
        what = f"{rng.choice(['kill', 'kill', 'hang'])} {broken[-1]}"
        took = rng.uniform(2.2, 2.9) if what.startswith("hang") else rng.uniform(0.2, 0.9)
        del broken[:-2]
    chips = chips_without(mesh, *broken)
    return [
        fault(t, what, k),
        generation(t + 0.1, number + 1, chips, step=k, why=what, cut=tuple(cut)),
        recovered(t + took, what, k, detected=0.1 * took, took=took),
    ], t + took, number + 1  # fmt: skip


def all_chips(shape: tuple[int, ...]) -> list[Chip]:
    return list(itertools.product(*map(range, shape)))
