"""What the page is told: a first answer at once, then the searched plan, a table and a curve.

Each function yields JSON values in the order in which the page shows them; `kind` names what a
value is. Knows plans and prices, not processes and not the page.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import TopologyError, UnsupportedError
from meshmend.pages.explore.explorer_question import ExplorerQuestion
from meshmend.pages.explore.single_holes import broken_meshes, hole_of
from meshmend.planning.choose import Choice, chosen_schedule
from meshmend.planning.colour_comparison import INDEPENDENT, compared_colours
from meshmend.planning.colour_search import fastest_colours, quick_colours
from meshmend.planning.comparison import compared, refusals
from meshmend.planning.packed_trees import with_equal_links
from meshmend.planning.plan import AUTO, Plan, plan, planned
from meshmend.planning.pricing import BASELINES, TREES, Price, price, supported_names
from meshmend.planning.progress import ProgressCallback, no_progress
from meshmend.planning.quick_plan import QuickPlan, quick_plan, retargeted
from meshmend.planning.target import Target
from meshmend.schedule.algorithms import algorithm
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.placement import placed
from meshmend.schedule.table import REDUCE, Collective, Colours, Phase, Schedule
from meshmend.simulator.colour_limit import colour_limit
from meshmend.simulator.limit import limit
from meshmend.simulator.network_program import Program, program_of
from meshmend.simulator.slices import best_slices
from meshmend.topology.fabric import Fabric
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh
from meshmend.topology.symmetry import stand_in

FIRST: Final = "first"
SEARCHED: Final = "searched"
_FEW_CHIPS: Final = 256  # up to here the first answer is of the algorithm that was asked for
_FEW_SEARCHED: Final = 64  # up to here a search for relays or for colours takes tenths of a second
_MOST_USUAL_CHIPS: Final = 300  # up to here the baselines take tenths of a second
_FEW_MESSAGES: Final = 200_000  # of the price of a first answer
PAYLOADS_BYTES: Final = tuple(10.0**power for power in range(3, 10))
_MOST_ROWS: Final = 400_000  # of a table that is simulated seven times
_MOST_MESSAGES: Final = 500_000

Document = dict[str, Any]


@dataclass(frozen=True, eq=False)
class PricedPlan:
    """A plan, its time, and in how many slices; `note` says what the reader must know of both.

    `price` is the searched price, if there is one.
    """

    plan: Plan
    time_s: float
    slices: int
    note: str = ""
    price: Price | None = None


@lru_cache(maxsize=8)
def first_plan(question: ExplorerQuestion) -> PricedPlan:
    """Return a proved plan that takes a fraction of a second to find, and its price.

    It is of the algorithm that was asked for where that is quick, else of trees; an all-to-all on
    many chips sends every block straight.

    Raises:
        TopologyError: no tile fits.
    """
    mesh, target, name = question.mesh, question.target, question.algorithm
    if question.tile:
        return _first_colours(question)
    if question.collective is Collective.ALL_TO_ALL:
        is_many = name == AUTO and largest_part(mesh).n_live > _FEW_SEARCHED
        return _plainly_priced(_planned(question, "pairs" if is_many else name))
    if name not in {AUTO, "trees"} and mesh.n_live <= _FEW_CHIPS:
        try:
            return _plainly_priced(_planned(question, name))
        except UnsupportedError:
            return _quick(mesh, target)
    return _quick(mesh, target)


def _planned(
    question: ExplorerQuestion,
    name: str,
    cache_dir: Path | None = None,
    progress: ProgressCallback = no_progress,
) -> Plan:
    return plan(
        question.mesh,
        name,
        tile=question.tile or None,
        collective=question.collective,
        payload=question.target.payload_bytes,
        fabric=question.target.fabric,
        cache_dir=cache_dir,
        progress=progress,
    )


def _plainly_priced(made: Plan) -> PricedPlan:
    """Return a plan and its time: in its own pipeline, or in as many slices as are fastest."""
    if made.pipeline is not None:
        found = made.predicted()
    else:
        found = best_slices(
            program_of(made.schedule, made.hazards, made.placement.routes),
            made.target.fabric,
            payload_bytes=made.target.payload_bytes,
            max_messages=max(_FEW_MESSAGES, 3 * made.schedule.n_rows),
        )
    return PricedPlan(made, found.time_s, found.slices)


def _first_colours(question: ExplorerQuestion) -> PricedPlan:
    tiling = question.mesh.tiles(question.tile)
    if tiling.mesh.n_live <= _FEW_SEARCHED or tiling.n_colours == 1:
        return _plainly_priced(_planned(question, AUTO))
    made = planned(question.mesh, quick_colours(tiling), question.target)
    return _plainly_priced(replace(made, tiling=tiling))


@lru_cache(maxsize=8)
def _quick(mesh: Mesh, target: Target) -> PricedPlan:
    quick: QuickPlan = quick_plan(mesh, target)
    assert quick.plan.pipeline is not None, "a quick plan has one"
    note = "Estimated from its first slices" if quick.is_estimate else ""
    return PricedPlan(quick.plan, quick.time_s, quick.plan.pipeline.slices, note)


def searched_plan(
    question: ExplorerQuestion, cache_dir: Path | None, progress: ProgressCallback
) -> PricedPlan:
    """Return the plan that a full search finds, as `meshmend plan` and `simulate` do.

    Raises:
        UnsupportedError: the algorithm does not support this mesh.
    """
    mesh, target, name = question.mesh, question.target, question.algorithm
    if question.tile:
        return _plainly_priced(_planned(question, name, cache_dir, progress))
    found = _searched_price(question, name, cache_dir, progress)
    if name == AUTO:
        made = _planned(question, name, cache_dir, progress)
    elif found.shape is not None:
        choice = Choice(name, found.pipeline, found.shape)
        schedule = chosen_schedule(largest_part(mesh), choice, question.collective)
        made = replace(planned(mesh, schedule, target), pipeline=found.pipeline)
    else:
        made = replace(_planned(question, name), pipeline=found.pipeline)
    words = found.detail.removeprefix(made.schedule.algorithm).strip(" ,")
    return PricedPlan(made, found.time_s, found.figures.slices, words, found)


def _searched_price(
    question: ExplorerQuestion, name: str, cache_dir: Path | None, progress: ProgressCallback
) -> Price:
    return compared(
        question.mesh,
        question.target.fabric,
        question.target.payload_bytes,
        [name],
        collective=question.collective,
        cache_dir=cache_dir,
        progress=progress,
    ).prices[0]


def first_answers(question: ExplorerQuestion) -> Iterator[Document]:
    """Yield the first plan, then what the hole costs, both within a fraction of a second."""
    found = first_plan(question)
    yield plan_answer(found, FIRST)
    if question.mesh != question.full_mesh:
        full = first_plan(replace(question, mesh=question.full_mesh))
        yield hole_answer(question, found, full.time_s, FIRST)


def usual_rows(question: ExplorerQuestion) -> list[Document]:
    """Return what a broken mesh costs without meshmend, where tenths of a second are enough.

    `rank-ring` is what a library does that does not know the mesh. The baselines leave out live
    chips until no hole is left. `instead` says in words what a row does without.
    """
    part, target = largest_part(question.mesh), question.target
    if question.tile or part.n_live > _MOST_USUAL_CHIPS:
        return []  # the search tells them later
    rows: list[Document] = []
    if question.collective is Collective.ALL_TO_ALL:
        straight = _row(price(question.on(part), "pairs"))
        return [{**straight, "instead": "With every block straight"}]
    if part.has_slow:
        rows.append(_row_of_unknown_speeds(question.mesh, target))
    # A link costs so little that nobody would leave out chips for it.
    for name in (*BASELINES, "rank-ring") if question.mesh.failed else ():
        rows.append({**_row(price(question.on(part), name)), "instead": "Without meshmend"})
    return rows


def _row_of_unknown_speeds(mesh: Mesh, target: Target) -> Document:
    """Return what the trees cost that one gets without knowing how fast links are."""
    quick = quick_plan(with_equal_links(mesh), target)
    part = largest_part(mesh)
    made = replace(quick.plan, mesh=mesh, placement=placed(part, quick.plan.schedule))
    found = made.predicted()
    return {
        "kind": "row",
        "name": "speeds-unknown",
        "time_s": found.time_s,
        "slices": found.slices,
        "chips": part.n_live,
        "busiest": found.max_link_utilisation,
        "detail": "trees that take every link to be as fast as the others",
        "instead": "Without knowing the speeds",
    }


def heat_answers(question: ExplorerQuestion, progress: ProgressCallback) -> Iterator[Document]:
    """Yield what the loss of each chip and each link alone would cost, by first answers.

    Failures that mirrors and turns of the mesh map onto each other cost the same.
    """
    full = question.full_mesh
    full_s = first_plan(replace(question, mesh=full)).time_s
    known: dict[Mesh, float] = {}
    for unit in ("chip", "link"):
        for mesh in broken_meshes(full, unit):
            like = stand_in(mesh, same_axes=True).mesh
            if like not in known:
                progress(f"what the loss of a {unit} costs")
                try:
                    known[like] = first_plan(replace(question, mesh=like)).time_s
                except TopologyError:  # no tile is left
                    continue
            hole = hole_of(mesh)
            yield {
                "kind": "heat",
                "unit": unit,
                "hole": hole,
                "time_s": known[like],
                "full_s": full_s,
            }


def searched_answers(
    question: ExplorerQuestion, cache_dir: Path | None, progress: ProgressCallback
) -> Iterator[Document]:
    """Yield the searched plan, what the hole costs, a row for each algorithm, and the curve."""
    mesh, name = question.mesh, question.algorithm
    found = None
    try:
        found = searched_plan(question, cache_dir, progress)
        yield plan_answer(found, SEARCHED)
    except UnsupportedError as error:
        yield {"kind": "refused", "algorithm": name, "why": str(error)}
    if found is not None and mesh != question.full_mesh:
        full = _full_time_s(question, cache_dir, progress)
        yield hole_answer(question, found, full, SEARCHED)
    yield from _rows(question, found, progress)
    yield from curve_points(question, progress)


def _full_time_s(
    question: ExplorerQuestion, cache_dir: Path | None, progress: ProgressCallback
) -> float:
    """Return what the algorithm takes on the mesh without failures; `auto` supports every mesh."""
    full = replace(question, mesh=question.full_mesh)
    if question.tile:
        return searched_plan(full, cache_dir, progress).time_s
    for name in (question.algorithm, AUTO):
        try:
            return _searched_price(full, name, cache_dir, progress).time_s
        except UnsupportedError:
            continue
    raise AssertionError("auto supports every connected mesh")


def _rows(
    question: ExplorerQuestion, found: PricedPlan | None, progress: ProgressCallback
) -> Iterator[Document]:
    """Yield what each algorithm costs, and why the others do not support this mesh."""
    part, target = largest_part(question.mesh), question.target
    if question.tile:
        asked_of = (question.mesh, question.tile, target.fabric, target.payload_bytes)
        for each in compared_colours(*asked_of, progress=progress).prices:
            is_apart = each.name == INDEPENDENT
            yield _row(each) | ({"instead": "With a plan for each colour"} if is_apart else {})
        return
    for name, why in refusals(part, question.collective).items():
        yield {"kind": "row", "name": name, "why": why}
    has_baselines = question.mesh.failures() and question.collective is Collective.ALLREDUCE
    names = supported_names(part, question.collective)
    for name in (*names, *(BASELINES if has_baselines else ())):
        if found is not None and found.price and name == found.plan.schedule.algorithm:
            yield _row(replace(found.price, name=name, detail=found.note))
            continue
        try:
            result = price(question.on(part), name, progress=progress)
        except UnsupportedError as error:
            yield {"kind": "row", "name": name, "why": str(error)}
            continue
        yield _row(result)


def _row(result: Price) -> Document:
    return {
        "kind": "row",
        "name": result.name,
        "time_s": result.time_s,
        "slices": result.figures.slices,
        "chips": result.n_chips,
        "busiest": result.figures.max_link_utilisation,
        "detail": result.detail,
    }


def hole_answer(
    question: ExplorerQuestion, found: PricedPlan, full_s: float, stage: str
) -> Document:
    """Return what a hole costs, next to the time of the mesh without failures."""
    lost = question.full_mesh.n_chips - found.plan.schedule.n_ranks
    words, reason = hole_words(full_s, found.time_s)
    reason = reason if lost else ""
    return {
        "kind": "hole",
        "stage": stage,
        "full_s": full_s,
        "time_s": found.time_s,
        "lost_chips": lost,
        "words": words,
        "reason": reason,
    }


def hole_words(full_s: float, time_s: float) -> tuple[str, str]:
    """Return what a hole costs, and, where it costs nothing, why a broken mesh can be as fast."""
    percent = f"{100 * (time_s / full_s - 1):.1f}" if full_s else "0.0"
    if float(percent) > 0:
        return f"+{percent} %", ""
    faster = f"{percent.lstrip('-')} % less" if float(percent) < 0 else "as long"
    return "nothing", f"fewer chips sum, which takes {faster} here"


def plan_answer(found: PricedPlan, stage: str) -> Document:
    """Return a plan as the page draws it: its price, its proof, its loads and its flows."""
    made, part = found.plan, found.plan.placement.mesh
    least = made.limit()
    loads = np.zeros(part.n_chips * 2 * len(part.shape))
    loads[whole_channels(part)] = made.channel_loads
    return {
        "kind": "plan",
        "stage": stage,
        "algorithm": made.schedule.algorithm,
        "note": found.note,
        "time_s": found.time_s,
        "slices": found.slices,
        "limit_s": least.time_s,
        "bandwidth_limit_s": least.bandwidth_s,
        "limit_words": least.describe(),
        "ranks": made.schedule.n_ranks,
        "rows": made.schedule.n_rows,
        "chunks": made.schedule.n_chunks,
        "proof": made.proof.method,
        "virtual_channels": made.placement.routes.n_virtual_channels,
        "max_hops": made.placement.routes.max_hops,
        "max_load": float(loads.max(initial=0.0)),
        "stranded": [list(chip) for chip in made.stranded],
        "loads": np.round(loads, 4).tolist(),
        "tiling": _tiling_answer(made),
        "flows": [
            {"name": flow.name, "kind": flow.kind, "parts": flow.parts} for flow in flows_of(made)
        ],
    }


def _tiling_answer(made: Plan) -> Document | None:
    """Return the tile and the colour of each chip of the shape, -1 for none; None without tiles."""
    if made.tiling is None:
        return None
    tiling, part = made.tiling, made.placement.mesh
    chips = np.ravel_multi_index(tuple(part.coordinates.T), part.shape)
    tile, colour = np.full((2, part.n_chips), -1)
    tile[chips], colour[chips] = tiling.tile_of, tiling.colour_of
    return {
        "words": str(tiling),
        "tiles": tiling.n_tiles,
        "colours": tiling.n_colours,
        "tile_of": tile.tolist(),
        "colour_of": colour.tolist(),
    }


# The payload curve: about what each algorithm costs from 1 KB to 1 GB, next to the limit. Prices of
# a whole sweep would take minutes on a thousand chips, so each is found with a bounded number of
# simulated messages. The table of the page has the searched prices of one payload.


def curve_points(
    question: ExplorerQuestion, progress: ProgressCallback
) -> Iterator[dict[str, Any]]:
    """Yield the limit's curve, then one curve for each algorithm whose table is not too large."""
    part, target = largest_part(question.mesh), question.target
    targets = [replace(target, payload_bytes=size) for size in PAYLOADS_BYTES]
    if question.tile:
        yield from _colour_curves(question, targets, progress)
        return
    collective = question.collective
    limits = [limit(part, each.fabric, each.payload_bytes, collective).time_s for each in targets]
    yield _curve("limit", limits)
    if collective is Collective.ALLREDUCE:
        progress("payload curve: trees")
        quick = quick_plan(part, target)
        yield _curve(TREES, [retargeted(quick, each).time_s for each in targets])
    for name in supported_names(part, collective):
        if name == TREES:
            continue
        program = _program(part, name, collective)
        if program is None:
            continue
        times = []
        for each in targets:
            progress(f"payload curve: {name}")
            times.append(_time_s(program, each))
        yield _curve(name, times)


def _curve(name: str, times_s: list[float]) -> Document:
    return {"kind": "curve", "name": name, "payloads": PAYLOADS_BYTES, "times": times_s}


def _colour_curves(
    question: ExplorerQuestion, targets: list[Target], progress: ProgressCallback
) -> Iterator[Document]:
    tiling = question.mesh.tiles(question.tile)
    yield _curve("limit", [colour_limit(tiling, *_sizes(each)).time_s for each in targets])
    times = []
    for each in targets:
        progress("payload curve: colours")
        packed, pipeline = fastest_colours(tiling, *_sizes(each))
        times.append(packed.simulated(*_sizes(each), pipeline).time_s)
    yield _curve("colours", times)


def _sizes(target: Target) -> tuple[Fabric, float]:
    return target.fabric, target.payload_bytes


def _program(part: Mesh, name: str, collective: Collective) -> Program | None:
    """Return an algorithm's program, or None where its table would be too large."""
    if name in {"ring-1d", "rank-ring"} and 4 * part.n_live**2 > _MOST_ROWS:
        return None  # known before it is built: 2 (n - 1) steps of n ranks, both ways round
    try:
        schedule = algorithm(name).build(part, collective)
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


# What a plan draws over its mesh: the trees, rings or routes of each phase, as channels. Everything
# comes from the table and the routes, so each picture shows the plan that was proved. Channels are
# numbered over all chips of the shape, dead ones included: `chip x ports + port`. So a page that
# knows the shape alone can draw them.


@dataclass(frozen=True)
class Flow:
    """A phase of the sum and its parts: trees or rings, each a tuple of channels.

    `channels` of a part are in no order; arrows show where each leads.
    """

    name: str
    kind: str  # "tree" or "ring": what a part is
    parts: tuple[tuple[int, ...], ...]


def flows_of(plan: Plan) -> tuple[Flow, ...]:
    """Return the flows of the reducing phases; the phases after them go the same ways back.

    Each colour of a tiling has a flow of its own. An all-to-all has none.
    """
    schedule = plan.schedule
    if schedule.collective is Collective.ALL_TO_ALL:
        return ()
    if schedule.colours is not None:
        return _colour_flows(plan, schedule.colours)
    reducing = [each for each in schedule.phases if _is_shown(schedule, each)]
    is_trees = schedule.algorithm == "trees"
    return tuple(
        Flow(
            phase.name,
            "tree" if is_trees else "ring",
            _parts(plan, _tree_pairs(plan, phase) if is_trees else _ring_pairs(plan, phase)),
        )
        for phase in reducing
    )


def _colour_flows(plan: Plan, colours: Colours) -> tuple[Flow, ...]:
    if not plan.schedule.phases:  # one tile has nothing to sum
        return ()
    trees = _tree_pairs(plan, plan.schedule.phases[0])
    of_colour = [
        [tree for tree, its in zip(trees, colours.of_chunk, strict=True) if its == colour]
        for colour in range(int(colours.of_chunk.max()) + 1)
    ]
    return tuple(
        Flow(f"colour {colour}", "tree", _parts(plan, its)) for colour, its in enumerate(of_colour)
    )


def _is_shown(schedule: Schedule, phase: Phase) -> bool:
    """Whether a phase sums between chips, or sends sums to the scratch of others."""
    if schedule.dst_buffer is None:
        return bool(schedule.op[phase.start] == REDUCE)
    rows = slice(phase.start, phase.stop)
    if schedule.is_local[rows].all():
        return False
    return bool(schedule.op[phase.start] == REDUCE or schedule.dst_buffer[rows].any())


def whole_channels(mesh: Mesh) -> NDArray[np.int64]:
    """Return the number over all chips of the shape of each channel of a mesh's live ranks."""
    chips = np.ravel_multi_index(tuple(mesh.coordinates.T), mesh.shape)
    n_ports = mesh.neighbor_ranks.shape[1]
    numbers: NDArray[np.int64] = (chips[:, None] * n_ports + np.arange(n_ports)).reshape(-1)
    return numbers


Pairs = NDArray[np.int64]  # (pairs, 2): source and destination ranks


def _parts(plan: Plan, groups: list[Pairs]) -> tuple[tuple[int, ...], ...]:
    routes, numbers = plan.placement.routes, whole_channels(plan.placement.mesh)
    known = routes.src.astype(np.int64) * routes.n_ranks + routes.dst  # rises: routes are sorted
    parts = []
    for pairs in groups:
        at = np.searchsorted(known, pairs[:, 0] * routes.n_ranks + pairs[:, 1])
        hops = routes.hops[at]
        first = np.repeat(routes.hop_ptr[at] - np.cumsum(hops) + hops, hops)
        channels = routes.channels[first + np.arange(len(first))]
        parts.append(tuple(np.unique(numbers[channels]).tolist()))
    return tuple(parts)


def _tree_pairs(plan: Plan, phase: Phase) -> list[Pairs]:
    """Return the links of each tree: a tree carries a chunk of its own."""
    table, rows = plan.schedule, slice(phase.start, phase.stop)
    chunk = table.lo[rows]
    pairs = np.stack([table.src[rows], table.dst[rows]], axis=1).astype(np.int64)
    return [pairs[chunk == number] for number in np.unique(chunk)]


def _ring_pairs(plan: Plan, phase: Phase) -> list[Pairs]:
    """Return the pairs of each ring: those of ranks that send to each other, directly or not."""
    table, rows = plan.schedule, slice(phase.start, phase.stop)
    keys = np.unique(table.src[rows].astype(np.int64) * table.n_ranks + table.dst[rows])
    pairs = np.stack(np.divmod(keys, table.n_ranks), axis=1)
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]  # local rows take no link
    label = np.arange(table.n_ranks)
    while True:
        least = np.minimum(label[pairs[:, 0]], label[pairs[:, 1]])
        before = label.copy()
        np.minimum.at(label, pairs[:, 0], least)
        np.minimum.at(label, pairs[:, 1], least)
        label = label[label]
        if np.array_equal(before, label):
            break
    ring = label[pairs[:, 0]]
    return [pairs[ring == number] for number in np.unique(ring)]
