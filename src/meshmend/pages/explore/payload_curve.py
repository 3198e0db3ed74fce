"""The payload curve: about what each algorithm costs from 1 KB to 1 GB, next to the limit.

Prices of a whole sweep would take minutes on a thousand chips, so each is found with a bounded
number of simulated messages. The table of the page has the searched prices of one payload.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from meshmend.errors import UnsupportedError
from meshmend.pages.explore.explorer_question import ExplorerQuestion
from meshmend.planning.pricing import TREES, supported_names
from meshmend.planning.progress import ProgressCallback
from meshmend.planning.quick_plan import quick_plan, retargeted
from meshmend.planning.target import Target
from meshmend.schedule.algorithms import algorithm
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.placement import placed
from meshmend.schedule.table import Collective
from meshmend.simulator.limit import limit
from meshmend.simulator.network_program import Program, program_of
from meshmend.simulator.slices import best_slices
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh

PAYLOADS_BYTES: Final = tuple(10.0**power for power in range(3, 10))
_MOST_ROWS: Final = 400_000  # of a table that is simulated seven times
_MOST_MESSAGES: Final = 500_000


def curve_points(
    question: ExplorerQuestion, progress: ProgressCallback
) -> Iterator[dict[str, Any]]:
    """Yield the limit's curve, then one curve for each algorithm whose table is not too large."""
    part, target = largest_part(question.mesh), question.target
    targets = [replace(target, payload_bytes=size) for size in PAYLOADS_BYTES]
    limits = [limit(part, each.fabric, each.payload_bytes).time_s for each in targets]
    yield {"kind": "curve", "name": "limit", "payloads": PAYLOADS_BYTES, "times": limits}
    progress("payload curve: trees")
    quick = quick_plan(part, target)
    times = [retargeted(quick, each).time_s for each in targets]
    yield {"kind": "curve", "name": TREES, "payloads": PAYLOADS_BYTES, "times": times}
    for name in supported_names(part):
        if name == TREES:
            continue
        program = _program(part, name)
        if program is None:
            continue
        times = []
        for each in targets:
            progress(f"payload curve: {name}")
            times.append(_time_s(program, each))
        yield {"kind": "curve", "name": name, "payloads": PAYLOADS_BYTES, "times": times}


def _program(part: Mesh, name: str) -> Program | None:
    """Return an algorithm's program, or None where its table would be too large."""
    if name in {"ring-1d", "rank-ring"} and 4 * part.n_live**2 > _MOST_ROWS:
        return None  # known before it is built: 2 (n - 1) steps of n ranks, both ways round
    try:
        schedule = algorithm(name).build(part, Collective.ALLREDUCE)
    except UnsupportedError:
        return None
    if schedule.n_rows > _MOST_ROWS:
        return None
    return program_of(schedule, hazards_of(schedule), placed(part, schedule).routes)


def _time_s(program: Program, target: Target) -> float:
    return best_slices(
        program,
        target.fabric,
        payload_bytes=target.payload_bytes,
        max_messages=max(_MOST_MESSAGES, 3 * program.n_rows),
    ).time_s
