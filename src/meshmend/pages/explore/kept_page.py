"""The explorer in one file: its page, and the answers that it would ask a server for.

A hole that a symmetry of the mesh maps onto another is not planned and kept twice: the page mirrors
and turns the plan that the file has. Knows questions and answers, not the command line.
"""

import base64
import html
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from meshmend.errors import InputError, TopologyError, UnsupportedError
from meshmend.pages.explore.explorer_answers import (
    FIRST,
    SEARCHED,
    Document,
    PricedPlan,
    first_plan,
    hole_answer,
    plan_answer,
    searched_answers,
    searched_plan,
    usual_rows,
)
from meshmend.pages.explore.explorer_question import PAGE, ExplorerQuestion, page_start
from meshmend.pages.explore.planner_tasks import N_FRAMES, timeline_of
from meshmend.pages.explore.single_holes import (
    SLOW,
    UNITS,
    Hole,
    broken_meshes,
    hole_of,
    what_is_broken,
)
from meshmend.planning.progress import ProgressCallback
from meshmend.topology.mesh import Mesh
from meshmend.topology.symmetry import stand_in
from meshmend.units import format_bytes

_FRAMES_KEPT: Final = 2  # one frame of so many, and a sixteenth of the shades: a tenth of the bytes
_SHADE: Final = 17
_PLANS_SHARE: Final = 0.7  # of the time that a page takes; the others are schedules
_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)


@dataclass(frozen=True)
class KeptPage:
    """A page as text; `holes` of each unit can be clicked, `left_out` had no room in it."""

    text: str
    holes: dict[str, int]
    left_out: dict[str, int]


def kept_page(
    question: ExplorerQuestion,
    *,
    most_bytes: int,
    search: bool = False,
    cache_dir: Path | None = None,
    progress: ProgressCallback,
) -> KeptPage:
    """Return the explorer's page for a question and for each single unit that one can click dead.

    With `search` every plan is searched for, as `meshmend plan` does; else it is proved, but found
    without a search. Units are planned in the order of `UNITS`, as many as the bytes allow.

    Raises:
        InputError: the bytes do not even allow the question.
    """
    stage = SEARCHED if search else FIRST

    def answered(mesh: Mesh) -> PricedPlan:
        asked = replace(question, mesh=mesh)
        if search:
            with suppress(UnsupportedError):  # then trees, as the served page shows them
                return searched_plan(asked, cache_dir, _no_part(progress))
        return first_plan(asked)

    full = question.full_mesh
    progress("the mesh without failures", 0.0)
    whole = answered(full)
    draft = _Draft(question, stage, whole.time_s, most_bytes - len(_page_text(question, {}, "")))
    is_room = draft.add(full, whole)
    if question.mesh != full:
        progress("the mesh as asked", 0.0)
        is_room = is_room and draft.add(question.mesh, answered(question.mesh))
    if not is_room:
        raise InputError(
            f"a page for {question.mesh} needs more than {format_bytes(most_bytes)}; "
            "allow more with --export-size"
        )
    wanted = [(unit, mesh) for unit in UNITS for mesh in broken_meshes(full, unit)]
    for place, (unit, mesh) in enumerate(wanted):
        progress(f"{unit} {what_is_broken(mesh)}", _PLANS_SHARE * place / len(wanted))
        draft.add_unit(unit, mesh, answered)
    if search:
        draft.add_search(searched_answers(question, cache_dir, _no_part(progress)))
    for place, kept in enumerate(list(draft.plans)):
        part = _PLANS_SHARE + (1 - _PLANS_SHARE) * place / len(draft.plans)
        progress("schedules to play", part)
        draft.add_timeline(kept)
    return draft.page()


def _no_part(progress: ProgressCallback) -> ProgressCallback:
    """Return a callback whose parts, those of one search, do not move the bar of all."""
    return lambda step, part=None, /: progress(step)


class _Draft:
    """The answers so far, and the room that is left for more."""

    def __init__(
        self, question: ExplorerQuestion, stage: str, full_s: float, most_bytes: int
    ) -> None:
        self._question, self._stage, self._full_s = question, stage, full_s
        self._room = most_bytes
        self._lines: list[str] = []
        self._holes: dict[str, int] = dict.fromkeys(UNITS, 0)
        self._left_out: dict[str, int] = dict.fromkeys(UNITS, 0)
        self._heat: dict[str, list[Any]] = {}
        self.plans: dict[Hole, PricedPlan] = {}

    def add(self, mesh: Mesh, found: PricedPlan) -> bool:
        """Keep the plan of a mesh, and return whether there is room for it."""
        asked = replace(self._question, mesh=mesh)
        answers = [_compact(plan_answer(found, self._stage))]
        if mesh != asked.full_mesh:
            answers.append(hole_answer(asked, found, self._full_s, self._stage))
            answers += usual_rows(asked)
        hole = hole_of(mesh)
        if not self._put(hole, json.dumps(answers, separators=(",", ":")).encode()):
            return False
        self.plans[hole] = found
        return True

    def add_unit(self, unit: str, mesh: Mesh, plan_of: Callable[[Mesh], PricedPlan]) -> None:
        """Keep the plan of a mesh that lost one unit, or rather of the mesh that stands for it."""
        like = stand_in(mesh, same_axes=True).mesh
        kept = hole_of(like)
        try:
            if kept not in self.plans and (self._room <= 0 or not self.add(like, plan_of(like))):
                self._left_out[unit] += 1
                return
        except TopologyError:  # no tile is left; the page says so
            return
        self._holes[unit] += 1
        if unit == SLOW:
            return
        heat = [hole_of(mesh), float(f"{self.plans[kept].time_s:.4g}")]
        self._heat.setdefault(unit, []).append(heat)
        self._room -= len(json.dumps(heat))

    def add_search(self, answers: Iterator[Document]) -> None:
        """Keep the table of algorithms and the payload curve of the question."""
        told = [each for each in answers if each["kind"] in {"row", "curve"}]
        self._put(f"{hole_of(self._question.mesh)}#search", json.dumps(told).encode())

    def add_timeline(self, hole: Hole) -> None:
        """Keep when each link is busy under a plan, if there is room."""
        if self._room <= 0:
            return
        found = timeline_of(self.plans[hole].plan)
        head = {
            "kind": "timeline",
            "time_s": found.time_s,
            "slices": found.n_slices,
            "shown": found.n_shown,
            "frames": N_FRAMES // _FRAMES_KEPT,
        }
        shades = np.rint(found.busy[::_FRAMES_KEPT] / _SHADE).astype(np.uint8)
        self._put(f"{hole}#timeline", json.dumps(head).encode() + b"\n" + shades.T.tobytes())

    def _put(self, key: str, answer: bytes) -> bool:
        line = f"{key} {base64.b64encode(zlib.compress(answer, 9)).decode()}"
        if len(line) >= self._room:
            self._room = 0
            return False
        self._lines.append(line)
        self._room -= len(line) + 1
        return True

    def page(self) -> KeptPage:
        kept = {"units": self._holes, "heat": self._heat, "full_s": self._full_s}
        text = _page_text(self._question, kept, "\n".join(self._lines))
        return KeptPage(text, self._holes, {k: n for k, n in self._left_out.items() if n})


def _compact(answer: Document) -> Document:
    """Return a plan's answer in fewer bytes: differences of channels, and numbers of loads."""
    values = sorted(set(answer["loads"]))
    number = {value: place for place, value in enumerate(values)}
    flows = [
        {**flow, "parts": [np.diff(part, prepend=0).tolist() for part in flow["parts"]]}
        for flow in answer["flows"]
    ]
    loads = [number[value] for value in answer["loads"]]
    return {**answer, "flows": flows, "load_values": values, "loads": loads}


# The file: style, modules and answers inside the page. Modules are data addresses in a map of
# imports, so they stay the files that the server serves; only `asker.js` is another one.


def _page_text(question: ExplorerQuestion, kept: dict[str, Any], answers: str) -> str:
    start = {**page_start(question), "kept": kept, "warm": True}
    modules = {path.name: path.read_text(encoding="utf-8") for path in sorted(PAGE.glob("*.js"))}
    modules["asker.js"] = modules.pop("kept_asker.js")
    imports = {  # modules name each other as the map of imports does
        name: _data("text/javascript", code.replace('from "./', 'from "'))
        for name, code in modules.items()
    }
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    for before, after in (
        ('<meta charset="utf-8">', f'<meta charset="utf-8">\n{_policy()}'),
        ('href="icon.svg"', f'href="{_data("image/svg+xml", (PAGE / "icon.svg").read_text())}"'),
        (
            '<link rel="stylesheet" href="page.css">',
            f"<style>\n{(PAGE / 'page.css').read_text(encoding='utf-8')}</style>",
        ),
        (
            '<script type="module" src="main.js"></script>',
            f'<script type="importmap">{json.dumps({"imports": imports})}</script>\n'
            '<script type="module">import "main.js";</script>',
        ),
        (
            "</body>",
            f'<script type="application/json" id="kept-start">{_inert(start)}</script>\n'
            f'<script type="text/plain" id="kept-answers">{answers}</script>\n</body>',
        ),
    ):
        assert page.count(before) == 1, f"the page has one {before}"
        page = page.replace(before, after)
    return page


def _policy() -> str:
    return (
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(_POLICY, quote=False)}">'
    )


def _data(kind: str, text: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(text.encode()).decode()}"


def _inert(value: Any) -> str:
    """Return JSON that cannot end the element that it stands in."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
