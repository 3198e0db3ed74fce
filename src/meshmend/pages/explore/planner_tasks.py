"""What a planner process can do for the page, by name: each task yields JSON values."""

import base64
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.pages.explore.explorer_answers import (
    SEARCHED,
    PricedPlan,
    first_answers,
    first_plan,
    heat_answers,
    searched_answers,
    searched_plan,
    usual_rows,
    whole_channels,
)
from meshmend.pages.explore.explorer_question import ExplorerQuestion, question_of
from meshmend.pages.explore.planner_process import PlannerTask
from meshmend.planning.plan import Plan
from meshmend.planning.progress import ProgressCallback
from meshmend.planning.tree_formula import Pipeline
from meshmend.simulator.rules import Simulation, Trace
from meshmend.topology.failures import Chip
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh
from meshmend.topology.tables import (
    Demand,
    all_pairs_tables,
    next_ports,
    shortest_ports,
    table_hops,
)

Answers = Iterator[dict[str, Any]]
Doer = Callable[[PlannerTask, ProgressCallback], Answers]

_searched: dict[ExplorerQuestion, PricedPlan] = {}  # the last one


def _warm_up(task: PlannerTask, progress: ProgressCallback) -> Answers:
    """Load or compile the kernels that a first answer needs, by giving one."""
    for _ in first_answers(question_of(task.question)):
        progress("warm up")
    yield {"kind": "warm"}


def _timeline(task: PlannerTask, progress: ProgressCallback) -> Answers:
    number = task.question.get("slice")
    if not (number is None or (isinstance(number, int) and not isinstance(number, bool))):
        raise InputError(f"a timeline needs `slice` as a number or null, but got {number!r}")
    found = timeline_of(_shown_plan(task, progress).plan, slice_number=number)
    yield {
        "kind": "timeline",
        "time_s": found.time_s,
        "slices": found.n_slices,
        "shown": found.n_shown,
        "frames": N_FRAMES,
        "busy": base64.b64encode(found.busy.tobytes()).decode(),
    }


def _next_hops(task: PlannerTask, progress: ProgressCallback) -> Answers:
    chip = task.question.get("chip")
    if not isinstance(chip, list) or not all(isinstance(at, int) for at in chip):
        raise InputError(f"a next-hop table needs `chip` as a list of numbers, but got {chip!r}")
    yield {"kind": "next-hops", **next_hops(question_of(task.question).mesh, tuple(chip))}


def _plan_file(task: PlannerTask, progress: ProgressCallback) -> Answers:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        _shown_plan(task, progress).plan.save(path)
        yield {"kind": "plan-file", "document": json.loads(path.read_text(encoding="utf-8"))}


def _shown_plan(task: PlannerTask, progress: ProgressCallback) -> PricedPlan:
    """Return the plan that the page shows: the first one, or the searched one."""
    question = question_of(task.question)
    if task.question.get("stage") != SEARCHED:
        return first_plan(question)
    if question not in _searched:
        _searched.clear()
        _searched[question] = searched_plan(question, task.cache_dir, progress)
    return _searched[question]


TASKS: Final[Mapping[str, Doer]] = {
    "warm up": _warm_up,
    "first": lambda task, progress: first_answers(question_of(task.question)),
    "usual": lambda task, progress: iter(usual_rows(question_of(task.question))),
    "heat": lambda task, progress: heat_answers(question_of(task.question), progress),
    "search": lambda task, progress: searched_answers(
        question_of(task.question), task.cache_dir, progress
    ),
    "timeline": _timeline,
    "next-hops": _next_hops,
    "plan-file": _plan_file,
}


# When each channel is busy: the simulated schedule cut into frames, for an animation.

N_FRAMES: Final = 120
_MOST_MESSAGES: Final = 600_000  # simulated with a trace, which takes 28 bytes a message and hop
_USUAL_SLICES: Final = 8  # of a plan without a pipeline of its own


@dataclass(frozen=True, eq=False)
class Timeline:
    """Frames of equal length: `busy[frame, channel]` is the busy part of the frame, 0 to 255.

    Channels are numbered as `whole_channels` does. `n_shown` slices are simulated; a plan with more
    of them is shown with these, each larger. `slice_number` None: all slices together.
    """

    time_s: float
    n_slices: int
    n_shown: int
    slice_number: int | None
    busy: NDArray[np.uint8]


def timeline_of(plan: Plan, *, slice_number: int | None = None) -> Timeline:
    """Return the frames of a plan in its pipeline, or of one of its slices alone.

    Raises:
        InputError: there is no such slice.
    """
    n_slices = plan.pipeline.slices if plan.pipeline else _USUAL_SLICES
    n_shown = max(1, min(n_slices, _MOST_MESSAGES // max(1, plan.schedule.n_rows)))
    if slice_number is not None and not 0 <= slice_number < n_shown:
        raise InputError(f"a slice needs a number from 0 to {n_shown - 1}, but got {slice_number}")
    pipeline = replace(plan.pipeline or Pipeline(n_slices), slices=n_shown)
    simulation = plan.in_pipeline(pipeline, trace=True)
    trace = simulation.trace
    assert trace is not None, "simulated with a trace"
    busy = _frames(trace, simulation, slice_number)
    mesh = plan.placement.mesh
    whole = np.zeros((N_FRAMES, mesh.n_chips * 2 * len(mesh.shape)), dtype=np.uint8)
    whole[:, whole_channels(mesh)] = busy
    return Timeline(simulation.time_s, n_slices, n_shown, slice_number, whole)


def _frames(trace: Trace, simulation: Simulation, slice_number: int | None) -> NDArray[np.uint8]:
    """Return the busy part of each frame and channel.

    A channel that is busy from a to b is busy for what is left of the time after a, less what is
    left after b. Both are sums over frames, so each message costs four additions however long it
    is.
    """
    n_channels = simulation.channel_busy_s.size
    picked = slice(None) if slice_number is None else trace.slice == slice_number
    channel = trace.channel[picked].astype(np.int64)
    frames_per_s = N_FRAMES / simulation.time_s if simulation.time_s else 0.0
    change = np.zeros((N_FRAMES + 2) * n_channels)
    for times_s, sign in ((trace.start_s[picked], 1.0), (trace.end_s[picked], -1.0)):
        at = np.clip(times_s * frames_per_s, 0.0, float(N_FRAMES))
        frame = at.astype(np.int64)
        left = frame + 1.0 - at
        place = frame * n_channels + channel
        size = change.size
        change += sign * np.bincount(place, left, size)
        change += sign * np.bincount(place + n_channels, 1.0 - left, size)
    busy = np.cumsum(change.reshape(N_FRAMES + 2, n_channels), axis=0)[:N_FRAMES]
    frames: NDArray[np.uint8] = np.rint(np.clip(busy, 0.0, 1.0) * 255).astype(np.uint8)
    return frames


# The next-hop table of one chip: by which port it sends messages for every other chip.

_MOST_ALL_PAIRS: Final = 1500  # chips whose deadlock-free tables are built at once


def next_hops(mesh: Mesh, chip: Chip) -> dict[str, Any]:
    """Return the table of a chip as a JSON value: one port and virtual channel a destination.

    `ports` has one entry for each chip of the shape, -1 for the chip itself and for those that it
    cannot reach. On more than 1500 chips the table is of shortest routes, without virtual channels.

    Raises:
        InputError: the chip is not alive, or is cut off.
    """
    part = largest_part(mesh)
    if chip not in part.rank_of:
        raise InputError(
            f"a next-hop table needs a live chip that is not cut off from {mesh}, but got {chip}"
        )
    rank = part.rank_of[chip]
    channels = None
    if part.n_live <= _MOST_ALL_PAIRS:
        ports, channels = _deadlock_free(part, rank)
    else:
        ports = _shortest(part, rank)
    hops = _hops(part, rank)
    return {
        "chip": list(chip),
        "ports": _spread(part, ports),
        "hops": _spread(part, hops),
        "virtual_channels": None if channels is None else _spread(part, channels),
    }


def _deadlock_free(part: Mesh, rank: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    tables = all_pairs_tables(part)
    channel = tables.virtual_channel.reshape(part.n_live, part.n_live)[:, rank].astype(np.int64)
    ports = np.stack(tables.ports)[channel, np.arange(part.n_live), rank]
    return ports.astype(np.int64), channel


def _shortest(part: Mesh, rank: int) -> NDArray[np.int64]:
    everyone = np.arange(part.n_live, dtype=np.int32)
    sources = np.full(part.n_live, rank, dtype=np.int32)
    demand = Demand(everyone, np.arange(part.n_live + 1, dtype=np.int64), sources)
    ports: NDArray[np.int64] = shortest_ports(part, demand)[:, rank].astype(np.int64)
    return ports


def _hops(part: Mesh, rank: int) -> NDArray[np.int64]:
    """Return the hops to every rank: as many as from there, because links go both ways."""
    here = np.array([rank])
    hops: NDArray[np.int64] = table_hops(part, here, next_ports(part, here))[0].astype(np.int64)
    return hops


def _spread(part: Mesh, values: NDArray[np.int64]) -> list[int]:
    """Return the values of ranks as a list over all chips of the shape, -1 for the others."""
    whole = np.full(part.shape, -1, dtype=np.int64)
    whole[tuple(part.coordinates.T)] = values
    spread: list[int] = whole.reshape(-1).tolist()
    return spread
