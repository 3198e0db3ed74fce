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
from meshmend.forecast.machine import machine_of
from meshmend.forecast.records import Ints
from slow_forecast import slow_totals

pytestmark = pytest.mark.slow  # each mutant compiles the walk anew

MODULES: tuple[ModuleType, ...] = (intact_box, tile_count, walk)
ANSWERS = (*FOUR, answer_named("fault-tolerant:1+spares"))
MUTANTS = {
    "lost work is kept": ("walk.spent[USEFUL] -= walk.unsaved_ns", "walk.spent[USEFUL] -= 0"),
    "a checkpoint saves nothing": (
        "walk.unsaved_ns = min(useful, np.int64(np.rint(min(since, interval) * walk.rate)))",
        "walk.unsaved_ns += useful",
    ),
    "a fall back keeps its cycle": (
        "    walk.unsaved_ns = 0\n    walk.cycle_ns = 0\n\n\n@inner_kernel\ndef go_back",
        "    walk.unsaved_ns = 0\n\n\n@inner_kernel\ndef go_back",
    ),
    "no time to detect": ("DETECT, walk.detection_ns)", "DETECT, 0)"),
    "waiting counts as restart": ("walk.spent[WAITING] += passed", "walk.spent[RESTART] += passed"),
    "dead chips stay dead": ("cells[dead] -= 1", "cells[dead] -= 0"),
    "overlapping holes count twice": (
        "1 if cells[dead] == 0 else 0\n        cells[dead] += 1",
        "1\n        cells[dead] += 1",
    ),
    "a repair is not used": ("walk.recheck = 1", "walk.recheck = 0"),
    "boxes never grow": (
        "walk.between_failures_ns > pause_ns",
        "walk.between_failures_ns > 2**62",
    ),
    "a box is hit from outside": ("if walk.config != IN_BOX:", "if walk.config != NOWHERE:"),
    "a box is never hit": (
        "if walk.config != IN_BOX:\n        return took_any",
        "return walk.config != IN_BOX and took_any",
    ),
    "a box that was hit is kept": (
        "walk.is_hit, walk.none_of = 1,",
        "walk.is_hit, walk.none_of = 0,",
    ),
    "a box is never larger again": ("    walk.came_back = hole\n", "    pass\n"),
    "what came back is in no box": (
        "walk.came_back if walk.none_of <=",
        "0 if walk.none_of <=",
    ),
    "nothing lies behind a hole": ("if (left * across >= rest[3]) &", "if False &"),
    "nothing lies around the end": ("if length * across >= rest[3]:", "if False:"),
    "a cut leaves too little to later axes": ("min(latest, last)", "min(latest, last - 1)"),
    "spares are free": ("(walk.switch_in_ns if was_switched else 0)", "-walk.restart_ns"),
    "spares come too early": (
        "walk.n_holes > walk.holes_before_spares:",
        "walk.n_holes > 0:",
    ),
    "idle spares never fail": ("_add_idle(walk, cells, unit, -1)\n            return", "return"),
    "one hole is priced": (
        "extra += cells[walk.hole_extra_ns",
        "extra = cells[walk.hole_extra_ns",
    ),
    "the batch shrinks": ("if walk.keeps_batch:", "if not walk.keeps_batch:"),
    "cut meshes go on whole": ("n_live = _largest_part(walk, cells)", "pass"),
    "wrong work is kept": ("go_back(walk, cells, saved)\n    if", "pass\n    if"),
    "checkpoints since a chip went wrong are used": (
        "cells[at] = walk.spent[USEFUL] - walk.unsaved_ns",
        "cells[at] = walk.spent[USEFUL]",
    ),
    "what another chip has lost is lost once more": ("cells[at] = min(cells[at], saved)", "pass"),
    "work from before the year is never lost": (
        "0 if cells[each] == IS_RIGHT else walk.spent[USEFUL]",
        "0 if cells[each] == IS_RIGHT else cells[each]",
    ),
    "checks are free": (
        "walk.check_rate = part * step / (longer * checked + sum_ns)",
        "walk.check_rate = part * step / (longer + sum_ns)",
    ),
    "a wrong chip that a box does not use counts": (
        "if not is_hit(walk, cells, hole, took_any):\n        return\n    if saved != IS_RIGHT:\n"
        "        go_back(walk, cells, saved)",
        "if saved != IS_RIGHT:\n        go_back(walk, cells, saved)\n"
        "    if not is_hit(walk, cells, hole, took_any):\n        return",
    ),
    "chips in no tile count": ("if walk.n_colours > 1:", "if walk.n_colours > 99:"),
    "bands go one way": ("2 if walk.extents[0] == 1 else 6", "1"),
    "a band looks at its first line": (
        "for j in range(walk.tile[bands]):",
        "for j in range(1):",
    ),
    "a band has gaps": ("n, free = n + 1, 0", "n, free = n + 1, -1"),
    "a box is all tiles": (
        "cells[walk.found + 3 + axis] // walk.tile[axis] * walk.tile[axis]",
        "cells[walk.found + 3 + axis]",
    ),
    "slow parts are free": ("walk.rate = part * step / (longer * checked + sum_ns)", "pass"),
    "speeds change with the next failure": ("_set_rates(walk, cells)\n        return", "return"),
    "another part is fast again": ("cells[at] = cells[first + walk.n_slow]", "pass"),
    "a slow chip that died counts": (
        "cells[walk.dead + cells[walk.hole_chips + cells[walk.hole_first + domain]]] == 0",
        "True",
    ),
    "a slow link of a dead chip counts": (" and n_dead == 0", ""),
    "a slow link that is cut counts": ("cells[walk.down_links + link] == 0 and", "True and"),
    "a slow part outside a box counts": (" or not is_hit(walk, cells, domain, True)", ""),
    "a slow spare that is idle counts": (
        "return cells[walk.unit_slot + unit] >= 0",
        "return True",
    ),
    "plans know no slow links": ("sum_ns = known if", "sum_ns = unknown if"),
    "shares know no slow chips": ("/ (chips - missing) if is_known", "/ chips if is_known"),
    "one slow link is planned for": ("n_links * walk.slow_link_ns", "walk.slow_link_ns"),
    "going on loses work": (
        "if walk.config != ON_MESH:\n        fall_back(walk)",
        "fall_back(walk)",
    ),
}


def plain_walk(change: tuple[str, str] | None = None) -> Callable[..., None]:
    """Return `walk_year` as plain Python, with one piece of its source changed."""
    source = "\n".join(inspect.getsource(module) for module in MODULES)
    if change is not None:
        assert source.count(change[0]) == 1, "a mutant changes one place"
        source = source.replace(*change)
    names_of_others = (
        r"from meshmend\.forecast\.(?!walk_arrays|records|outages)\w+ import (\([^)]*\)|[^(\n]*)\n"
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
        arrays = case.runner.arrays
        arrays.set_rules(case.runner.rules_of(answer))
        try:
            walk_year(arrays.walk, arrays.cells, case.events, len(case.events) // 3, *MEASURED)
        except (IndexError, ZeroDivisionError):
            return False
        if max(abs(arrays.spent() - np.array(case.expected[answer.name]))) > 20_000:
            return False
    return True


def test_the_walk_as_it_is_agrees_with_the_slow_simulator() -> None:
    assert is_right(plain_walk())


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_in_the_walk_is_found(name: str) -> None:
    assert not is_right(plain_walk(MUTANTS[name]))
