"""The comparison with the slow simulator finds mistakes in the walk: mutants, each of them found.

The kernels are run as plain Python, from their own source with one line changed.
"""

import inspect
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from forecasts import DAY_S, WALK_CASES, prices_of
from meshmend.forecast import intact_box, tile_count, walk
from meshmend.forecast.forecasting import (
    FOUR,
    YearRunner,
    answer_named,
    outages_of_year,
    year_runner,
)
from meshmend.forecast.machine import Ints, machine_of
from meshmend.forecast.walk_arrays import (
    FIRST_RULE,
    N_CAUSES,
    N_RULES,
)
from slow_forecast import slow_totals

pytestmark = pytest.mark.slow  # each mutant compiles the walk anew

MODULES: tuple[ModuleType, ...] = (intact_box, tile_count, walk)
ANSWERS = (*FOUR, answer_named("fault-tolerant:1+spares"))
MUTANTS = {
    "lost work is kept": ("state[USEFUL] -= state[UNSAVED_NS]", "state[USEFUL] -= 0"),
    "a checkpoint saves nothing": (
        "state[UNSAVED_NS] = min(useful, np.int64(np.rint(min(since, interval) * figures[RATE])))",
        "state[UNSAVED_NS] += useful",
    ),
    "a fall back keeps its cycle": (
        "    state[UNSAVED_NS] = 0\n    state[CYCLE_NS] = 0\n\n\n@inner_kernel\ndef go_back",
        "    state[UNSAVED_NS] = 0\n\n\n@inner_kernel\ndef go_back",
    ),
    "no time to detect": ("DETECT, state[DETECTION_NS])", "DETECT, 0)"),
    "waiting counts as restart": ("state[WAITING] += passed", "state[RESTART] += passed"),
    "dead chips stay dead": ("state[dead] -= 1", "state[dead] -= 0"),
    "overlapping holes count twice": (
        "1 if state[dead] == 0 else 0\n        state[dead] += 1",
        "1\n        state[dead] += 1",
    ),
    "a repair is not used": ("state[RECHECK] = 1", "state[RECHECK] = 0"),
    "boxes never grow": (
        "state[BETWEEN_FAILURES_NS] > pause_ns",
        "state[BETWEEN_FAILURES_NS] > 2**62",
    ),
    "a box is hit from outside": ("if state[CONFIG] != IN_BOX:", "if state[CONFIG] != NOWHERE:"),
    "a box is never hit": (
        "if state[CONFIG] != IN_BOX:\n        return took_any",
        "return state[CONFIG] != IN_BOX and took_any",
    ),
    "a box that was hit is kept": (
        "state[IS_HIT], state[NONE_OF] = 1,",
        "state[IS_HIT], state[NONE_OF] = 0,",
    ),
    "a box is never larger again": ("    state[CAME_BACK] = hole\n", "    pass\n"),
    "what came back is in no box": (
        "state[CAME_BACK] if state[NONE_OF] <=",
        "0 if state[NONE_OF] <=",
    ),
    "nothing lies behind a hole": ("if (left * across >= rest[3]) &", "if False &"),
    "nothing lies around the end": ("if length * across >= rest[3]:", "if False:"),
    "a cut leaves too little to later axes": ("min(latest, last)", "min(latest, last - 1)"),
    "spares are free": ("(state[SWITCH_IN_NS] if was_switched else 0)", "-state[RESTART_NS]"),
    "spares come too early": (
        "state[N_HOLES] > state[HOLES_BEFORE_SPARES]:",
        "state[N_HOLES] > 0:",
    ),
    "idle spares never fail": ("_add_idle(state, unit, -1)\n            return", "return"),
    "one hole is priced": (
        "extra += state[state[HOLE_EXTRA_NS]",
        "extra = state[state[HOLE_EXTRA_NS]",
    ),
    "the batch shrinks": ("if state[KEEPS_BATCH]:", "if not state[KEEPS_BATCH]:"),
    "cut meshes go on whole": ("n_live = _largest_part(state)", "pass"),
    "wrong work is kept": ("go_back(state, saved)\n    if", "pass\n    if"),
    "checkpoints since a chip went wrong are used": (
        "state[at] = state[USEFUL] - state[UNSAVED_NS]",
        "state[at] = state[USEFUL]",
    ),
    "what another chip has lost is lost once more": ("state[at] = min(state[at], saved)", "pass"),
    "work from before the year is never lost": (
        "0 if state[each] == IS_RIGHT else state[USEFUL]",
        "0 if state[each] == IS_RIGHT else state[each]",
    ),
    "checks are free": (
        "figures[CHECK_RATE] = part * step / (longer * checked + sum_ns)",
        "figures[CHECK_RATE] = part * step / (longer + sum_ns)",
    ),
    "a wrong chip that a box does not use counts": (
        "if not is_hit(state, hole, took_any):\n        return\n    if saved != IS_RIGHT:\n"
        "        go_back(state, saved)",
        "if saved != IS_RIGHT:\n        go_back(state, saved)\n"
        "    if not is_hit(state, hole, took_any):\n        return",
    ),
    "chips in no tile count": ("if state[N_COLOURS] > 1:", "if state[N_COLOURS] > 99:"),
    "bands go one way": ("2 if state[SHAPE] == 1 else 6", "1"),
    "a band looks at its first line": (
        "for j in range(state[TILE + bands]):",
        "for j in range(1):",
    ),
    "a band has gaps": ("n, free = n + 1, 0", "n, free = n + 1, -1"),
    "a box is all tiles": (
        "state[FOUND + 3 + axis] // state[TILE + axis] * state[TILE + axis]",
        "state[FOUND + 3 + axis]",
    ),
    "slow parts are free": ("figures[RATE] = part * step / (longer * checked + sum_ns)", "pass"),
    "speeds change with the next failure": ("_set_rates(state, figures)\n        return", "return"),
    "another part is fast again": ("state[at] = state[first + state[N_SLOW]]", "pass"),
    "a slow chip that died counts": (
        "state[state[DEAD] + state[state[HOLE_CHIPS] + state[state[HOLE_FIRST] + domain]]] == 0",
        "True",
    ),
    "a slow link of a dead chip counts": (" and n_dead == 0", ""),
    "a slow link that is cut counts": ("state[state[DOWN_LINKS] + link] == 0 and", "True and"),
    "a slow part outside a box counts": (" or not is_hit(state, domain, True)", ""),
    "a slow spare that is idle counts": (
        "return state[state[UNIT_SLOT] + unit] >= 0",
        "return True",
    ),
    "plans know no slow links": ("sum_ns = known if", "sum_ns = unknown if"),
    "shares know no slow chips": ("/ (chips - missing) if is_known", "/ chips if is_known"),
    "one slow link is planned for": ("n_links * figures[SLOW_LINK_NS]", "figures[SLOW_LINK_NS]"),
    "going on loses work": (
        "if state[CONFIG] != ON_MESH:\n        fall_back(state)",
        "fall_back(state)",
    ),
}


def plain_walk(change: tuple[str, str] | None = None) -> Callable[..., None]:
    """Return `walk_year` as plain Python, with one piece of its source changed."""
    source = "\n".join(inspect.getsource(module) for module in MODULES)
    if change is not None:
        assert source.count(change[0]) == 1, "a mutant changes one place"
        source = source.replace(*change)
    names_of_others = (
        r"from meshmend\.forecast\.(?!walk_arrays|machine|outages)\w+ import (\([^)]*\)|[^(\n]*)\n"
    )
    source = re.sub(names_of_others, "", source)
    source = re.sub(r"from meshmend\.kernels import .*\n", "", source)
    kernels = ("inner_kernel", "plain_kernel", "inlined")
    names: dict[str, Any] = {kernel: lambda f: f for kernel in kernels}
    exec(compile(source, "walk", "exec"), names)
    found: Callable[..., None] = names["walk_year"]
    return found


@dataclass(frozen=True, eq=False)
class Prepared:
    """Transitions of one machine, and what the slow simulator says of each answer."""

    runner: YearRunner
    events: Ints
    expected: dict[str, list[int]]


@cache
def prepared(case: str, year: int) -> Prepared:
    asked = WALK_CASES[case]
    runner = year_runner(machine_of(asked), prices_of(asked, extra_s=0.002), year_s=40 * DAY_S)
    outages, n = outages_of_year(runner, runner.outages(with_spares=True), 3, year)
    events = outages.events[: 3 * n].copy()
    slow = {
        answer.name: slow_totals(runner, asked, answer, events, *MEASURED) for answer in ANSWERS
    }
    return Prepared(runner, events, slow)


MEASURED = (20 * round(DAY_S * 1e9), 60 * round(DAY_S * 1e9))
CASES = (
    *(("chips and boards", 0), ("chips and boards", 4), ("a line", 0), ("torus", 0)),
    *(("wrong chips", 0), ("wrong chips", 1), ("wrong chips and checks", 0)),
    *(("tiles", 0), ("tiles on three axes", 0)),
    *(("slow parts", 0), ("slow parts", 1), ("slow parts that are known", 0)),
)


def is_right(walk_year: Callable[..., None]) -> bool:
    """Whether a walk agrees with the slow simulator in every answer."""
    for (name, year), answer in itertools.product(CASES, ANSWERS):
        case = prepared(name, year)
        state = case.runner.state
        state[FIRST_RULE : FIRST_RULE + N_RULES] = case.runner.rules_of(answer)
        try:
            walk_year(state, case.runner.figures, case.events, len(case.events) // 3, *MEASURED)
        except (IndexError, ZeroDivisionError):
            return False
        if max(abs(state[:N_CAUSES] - np.array(case.expected[answer.name]))) > 20_000:
            return False
    return True


def test_the_walk_as_it_is_agrees_with_the_slow_simulator() -> None:
    assert is_right(plain_walk())


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_in_the_walk_is_found(name: str) -> None:
    assert not is_right(plain_walk(MUTANTS[name]))
