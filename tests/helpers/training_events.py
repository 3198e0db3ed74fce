"""Made-up events of training runs, as a run writes them to `events.jsonl`."""

import itertools
import json
import math
import random
from collections.abc import Iterable
from typing import Any

from meshmend.topology.failures import Chip
from meshmend.topology.text import parse_mesh

BOARDS = ("2x2@0,0", "2x2@0,2", "2x2@2,0", "2x2@2,2")


def lines(events: Iterable[dict[str, Any]]) -> list[str]:
    return [json.dumps(event) + "\n" for event in events]


def start(steps: int = 100, mesh: str = "4x4", **more: Any) -> dict[str, Any]:
    return {
        "event": "start", "t": 0, "date": "2026-11-15T04:00:00Z", "mesh": mesh, "wrap": "none",
        "fail": [], "steps": steps, "batch": 64, "model": "resnet", "size": "tiny", "seed": 0,
        "policy": "constant", "parameters": 19466, **more,
    }  # fmt: skip


def chips_without(mesh: str, *fail: str) -> list[list[int]]:
    return [list(chip) for chip in parse_mesh(mesh, fail=fail).live]


def generation(t: float, number: int, chips: list[list[int]], **more: Any) -> dict[str, Any]:
    rest = {"waiting": [], "cut": [], "step": 1, "why": "the job starts", **more}
    return {"event": "generation", "t": t, "number": number, "chips": chips, **rest}


def step(t: float, number: int, loss: float, **more: Any) -> dict[str, Any]:
    rest = {"generation": 1, "loss": loss, "samples": 64, "chips": 16, **more}
    return {"event": "step", "t": t, "step": number, **rest}


def end(t: float, steps: int, first: float, final: float, **more: Any) -> dict[str, Any]:
    samples = {"used": 64 * steps, "lost": 0, "repeated": 0}
    rest = {"replicas_equal": True, "samples": samples, "chips": [16], "evaluation": {}, **more}
    return {"event": "end", "t": t, "steps": steps, "first_loss": first, "final_loss": final} | rest


def random_loss(rng: random.Random, number: int, scale: float) -> float:
    return 2.1 * math.exp(-number / scale) + 0.18 + rng.gauss(0, 0.05)


def short_run() -> list[dict[str, Any]]:
    """A tiny ResNet on 4x4: 100 steps, board 2x2@0,2 killed in step 30, back in step 60."""
    rng = random.Random(1)
    hole, full = chips_without("4x4", "2x2@0,2"), chips_without("4x4")
    events = [start(), generation(0.61, 1, full)]
    t, chips, number = 0.61, full, 1
    for k in range(1, 101):
        if k == 30:
            kill = {"fault": "kill 2x2@0,2", "at_step": 30}
            events.append({"event": "fault", "t": t + 0.02, **kill})
            why = "chip (0, 2) hung up"
            number, chips = 2, hole
            events.append(generation(t + 0.09, 2, hole, step=30, why=why))
            events.append(
                {"event": "recovered", "t": t + 0.43, **kill, "detected_s": 0.021}
                | {"recovered_s": 0.41}
            )
            t += 0.38
        if k == 60:
            back = {"fault": "repair 2x2@0,2", "at_step": 60}
            number, chips = 3, full
            events.append({"event": "fault", "t": t + 0.01, **back})
            events.append(generation(t + 1.62, 3, full, step=60, why="board 2x2@0,2 is back"))
            t += 1.65
        t += (0.068 if len(chips) == 16 else 0.079) * rng.uniform(0.9, 1.15)
        loss = round(random_loss(rng, k, 32), 5)
        events.append(step(round(t, 3), k, loss, generation=number, chips=len(chips)))
        if k == 60:
            events.append(
                {"event": "recovered", "t": t, **back, "detected_s": 0.004, "recovered_s": 1.7}
            )
        if k == 50:
            events.append({"event": "checkpoint", "t": t, "step": 50, "path": "runs/1/step-50"})
    losses = [event["loss"] for event in events if event["event"] == "step"]
    events.append(
        end(t + 0.3, 100, losses[0], losses[-1], chips=[16, 12, 16])
        | {"evaluation": {"accuracy": 0.93}}
    )
    return events


def long_run(n_steps: int = 10_000, n_faults: int = 60, mesh: str = "4x4") -> list[dict[str, Any]]:
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
            events.append({"event": "checkpoint", "t": t, "step": k, "path": f"runs/1/step-{k}"})
    losses = [event["loss"] for event in events if event["event"] == "step"]
    events.append(end(t + 0.3, n_steps, losses[0], losses[-1]))
    return events


def _random_fault(
    rng: random.Random, mesh: str, now: tuple[float, int, int], state: tuple[list[str], list[str]]
) -> tuple[list[dict[str, Any]], float, int]:
    (t, k, number), (broken, cut) = now, state
    if rng.random() < 0.1:
        gone = {"event": "fault", "t": t, "fault": "kill coordinator", "at_step": k}
        states = [
            {"event": "coordinator", "t": t + at, "state": word}
            for at, word in ((0, "lost"), (0.2, "back"))
        ]
        return [gone, *states], t, number
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
    fault = {"fault": what, "at_step": k}
    chips = chips_without(mesh, *broken)
    return [
        {"event": "fault", "t": t, **fault},
        generation(t + 0.1, number + 1, chips, step=k, why=what, cut=list(cut)),
        {"event": "recovered", "t": t + took, **fault, "detected_s": 0.1 * took}
        | {"recovered_s": took},
    ], t + took, number + 1  # fmt: skip


def all_chips(shape: tuple[int, ...]) -> list[Chip]:
    return list(itertools.product(*map(range, shape)))
