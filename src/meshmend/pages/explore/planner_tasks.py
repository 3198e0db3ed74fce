"""What a planner process can do for the page, by name: each task yields JSON values."""

import base64
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from meshmend.errors import InputError
from meshmend.pages.explore.explorer_answers import (
    SEARCHED,
    PricedPlan,
    first_answers,
    first_plan,
    searched_answers,
    searched_plan,
)
from meshmend.pages.explore.explorer_question import ExplorerQuestion, question_of
from meshmend.pages.explore.next_hops import next_hops
from meshmend.pages.explore.planner_process import PlannerTask
from meshmend.pages.explore.timeline import N_FRAMES, timeline_of
from meshmend.planning.progress import ProgressCallback

Answers = Iterator[dict[str, Any]]
Doer = Callable[[PlannerTask, ProgressCallback], Answers]

_searched: dict[ExplorerQuestion, PricedPlan] = {}  # the last one


def _warm_up(task: PlannerTask, progress: ProgressCallback) -> Answers:
    """Load or compile the kernels that a first answer needs, by giving one."""
    for _ in first_answers(question_of(task.question)):
        progress("warm up")
    yield {"kind": "warm"}


def _first(task: PlannerTask, progress: ProgressCallback) -> Answers:
    return first_answers(question_of(task.question))


def _search(task: PlannerTask, progress: ProgressCallback) -> Answers:
    return searched_answers(question_of(task.question), task.cache_dir, progress)


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
    "first": _first,
    "search": _search,
    "timeline": _timeline,
    "next-hops": _next_hops,
    "plan-file": _plan_file,
}
