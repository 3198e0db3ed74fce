"""Lowers a plan to lockstep, and says what that costs next to the schedule that runs freely.

A lockstep program waits in each step for its slowest link, and a step costs at least a hop and a
message. So it wants fewer and larger pieces than the same plan on sockets: slices and width are
chosen here, by the price. A step is priced by the rules of the simulator: all pairs of the
program exchange one span each, at the same time.

Few trees leave links idle while the first cells travel to the farthest chip and back. More trees
mean more and smaller cells, which fill these steps, until the price of a step is all latency. A
plan that runs freely need not care: its rows wait for nobody. So `lockstep_plan` chooses the number
of trees again, together with the slices.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from pathlib import Path
from typing import Any, Final

import numpy as np

from meshmend.errors import InputError
from meshmend.planning.plan import AUTO, Plan, plan, planned
from meshmend.planning.progress import ProgressCallback, ProgressShares, no_progress
from meshmend.planning.target import Payload, Target
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.lockstep_program import (
    CellSchedule,
    LockstepProgram,
    in_pieces,
    lockstep_program,
    row_widths,
    with_equal_cells,
)
from meshmend.schedule.step_packing import RowGraph, row_graph
from meshmend.schedule.table import REDUCE, Collective, Rows, schedule_of
from meshmend.schedule.trees import tree_schedule, usual_tree_count
from meshmend.simulator.network_program import program_of
from meshmend.simulator.rules import simulate
from meshmend.topology.fabric import Fabric
from meshmend.topology.figures import mesh_figures
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh
from meshmend.trees.tree_counts import least_load
from meshmend.trees.tree_packing import tree_packing

MOST_SLICES: Final = 256
_MOST_FIXED_SLICES: Final = 1 << 16
_MOST_ROWS: Final = 1 << 20  # rows x slices: beyond this lowering takes seconds
_MOST_FIXED_ROWS: Final = 1 << 24  # if the user fixed the slices: beyond this it takes gigabytes
MOST_TREES: Final = 64  # twice as many gain 1 % on 16x16, and tables grow with them
_N_TRIED: Final = 4  # packings that are built and priced; the formula ranks all others behind
_SHALLOW_SLACK: Final = 1  # of a packing that is tried beside those
_USUAL_SLACK: Final = 2  # hops by which the trees of an even packing are deeper than the radius


@dataclass(frozen=True, eq=False)
class Lowered:
    """A plan as a lockstep program, and its price for a payload on the plan's fabric."""

    plan: Plan
    program: LockstepProgram
    payload_bytes: float
    step_s: float

    @property
    def span_bytes(self) -> float:
        """What one pair moves in one step."""
        return self.payload_bytes * self.program.width / self.program.n_cells

    @property
    def time_s(self) -> float:
        """How long all steps take."""
        return self.step_s * self.program.n_steps

    def summary(self) -> dict[str, Any]:
        """Return the figures of the lowering as a JSON value; times are predictions."""
        program = self.program
        cell_bytes = self.payload_bytes / program.n_cells
        return {
            "steps": program.n_steps,
            "permutes_per_step": program.n_permutations,
            "slices": program.slices,
            "cells": program.n_cells,
            "cells_per_permute": program.width,
            "link_bound": program.busiest,
            "depth_chain": program.depth,
            "steps_bound": program.bound,
            "bytes_per_permute": self.span_bytes,
            "bytes_per_link": {
                "needed": float(program.cells_moved().max(initial=0)) * cell_bytes,
                "moved": self.span_bytes * program.n_steps,
            },
            "routed_pairs": int((self.plan.placement.routes.hops > 1).sum()),
            "step_s": self.step_s,
            "predicted_s": self.time_s,
            "free_running_s": self.plan.predicted(self.payload_bytes).time_s,
            "limit_s": self.plan.limit(self.payload_bytes).time_s,
        }


@dataclass(frozen=True, eq=False)
class _Form:
    """A plan's rows in pieces of one width, and what bounds their steps."""

    cells: CellSchedule
    graph: RowGraph

    def steps(self, slices: int) -> int:
        """Return about how many steps so many slices take, without packing them."""
        return self.graph.depth + self.graph.busiest * slices


def lowered(
    plan: Plan, *, payload_bytes: float | None = None, slices: int | None = None
) -> Lowered:
    """Return a plan as a lockstep program, in the slices that are fastest for the payload.

    The payload is the plan's own unless given. `slices` fixes their number. Deterministic.

    Raises:
        InputError: slices below one, or more than a program of this plan can have.
    """
    check_slices(slices)
    if slices is not None and slices * plan.schedule.n_rows > _MOST_FIXED_ROWS:
        raise InputError(
            f"lowering a plan needs rows x slices of at most {_MOST_FIXED_ROWS}, but this plan has "
            f"{plan.schedule.n_rows} rows and {slices} slices; use "
            f"{max(1, _MOST_FIXED_ROWS // plan.schedule.n_rows)} slices or fewer"
        )
    payload_bytes = plan.target.payload_bytes if payload_bytes is None else float(payload_bytes)
    _, width, slices = _chosen(plan, payload_bytes, slices)
    program = _program(plan, width, slices)
    span_bytes = payload_bytes * width / program.n_cells
    return Lowered(plan, program, payload_bytes, _step_time(plan, span_bytes))


def check_slices(slices: int | None) -> None:
    """Raise InputError unless the number of slices is left open, or one that a program can have."""
    if slices is None:
        return
    if not isinstance(slices, Integral) or slices < 1:  # of parts of a slice it would never end
        raise InputError(f"lowering a plan needs one slice or more, but got {slices!r:.60}")
    if slices > _MOST_FIXED_SLICES:
        raise InputError(
            f"lowering a plan needs at most {_MOST_FIXED_SLICES} slices, but got {slices}; without "
            "--slices the fastest number is found"
        )


def lowered_price_s(plan: Plan, slices: int | None = None) -> float:
    """Return about how long a plan takes in lockstep for its own payload, without packing steps."""
    return _chosen(plan, plan.target.payload_bytes, slices)[0]


def _chosen(plan: Plan, payload_bytes: float, slices: int | None) -> tuple[float, int, int]:
    """Return the smallest price in seconds, and its width and slices."""
    best = (float("inf"), 1, slices or 1)
    for width in row_widths(with_equal_cells(plan.schedule)):
        form = _form(plan, width)
        n_cells = form.cells.schedule.n_chunks
        for number in [slices] if slices else slices_to_try(form.cells.schedule.n_rows):
            span_bytes = payload_bytes * width / (number * n_cells)
            price_s = form.steps(number) * _step_time(plan, span_bytes)
            best = min(best, (price_s, width, number))
    return best


def slices_to_try(n_rows: int) -> Iterator[int]:
    """Yield 1, 2, 3, 4, 6, 8, 12, ... as far as lowering stays quick."""
    for number in sorted({1 << k for k in range(9)} | {3 << k for k in range(7)}):
        if number == 1 or (number <= MOST_SLICES and number * n_rows <= _MOST_ROWS):
            yield number


# Programs are traced many times with the same plan: once for each type of leaves, and under `grad`.
@lru_cache(maxsize=64)
def _form(plan: Plan, width: int) -> _Form:
    cells = in_pieces(with_equal_cells(plan.schedule), width)
    return _Form(cells, row_graph(cells.schedule, hazards_of(cells.schedule)))


@lru_cache(maxsize=64)
def _program(plan: Plan, width: int, slices: int) -> LockstepProgram:
    form = _form(plan, width)
    return lockstep_program(form.cells, slices, graph=form.graph)


def _step_time(plan: Plan, span_bytes: float) -> float:
    """Return how long a step takes in which every pair exchanges one span."""
    fixed_s, per_byte_s = _step_rates(plan, plan.target.fabric)
    return fixed_s + per_byte_s * span_bytes


@lru_cache(maxsize=64)
def _step_rates(plan: Plan, fabric: Fabric) -> tuple[float, float]:
    """Return the time of a step of empty spans, and what each byte of a span adds.

    Between neighbours no two spans share a link and time is linear in the bytes; on routed pairs
    it is a line through two simulated sizes.
    """
    if not plan.schedule.n_rows:
        return 0.0, 0.0
    empty_s = _simulated_step(plan, fabric, 0.0)
    large_bytes = 1e6
    return empty_s, (_simulated_step(plan, fabric, large_bytes) - empty_s) / large_bytes


def _simulated_step(plan: Plan, fabric: Fabric, span_bytes: float) -> float:
    """Return the simulated time of one span for every pair of the plan at once."""
    routes = plan.placement.routes
    pair = np.arange(routes.n_pairs)
    step = schedule_of(
        [("step", Rows(routes.src, routes.dst, pair, pair + 1, REDUCE))],
        algorithm="one step",
        collective=Collective.ALLREDUCE,
        owners=np.zeros(routes.n_pairs, dtype=np.int32),
        n_ranks=routes.n_ranks,
    )
    program = program_of(step, hazards_of(step), routes)
    payload_bytes = span_bytes * routes.n_pairs
    return simulate(program, fabric, payload_bytes=payload_bytes, slices=1).time_s


def lockstep_plan(
    mesh: Mesh,
    algorithm: str = AUTO,
    *,
    payload: Payload | None = None,
    fabric: Fabric | str | None = None,
    slices: int | None = None,
    cache_dir: Path | None = None,
    progress: ProgressCallback = no_progress,
) -> Lowered:
    """Return the plan that sums a payload fastest in lockstep, proved and lowered.

    The arguments are those of `plan`. `slices` fixes their number; the trees are then the fastest
    for it. With `auto` or `trees` it is never slower than what `plan` returns; any other algorithm
    has one schedule, which is lowered as it is. Deterministic.

        >>> low = lockstep_plan(Mesh((8, 8)).without("2x2@2,2"), slices=8)
        >>> low.program.n_steps <= 1.25 * low.program.busiest
        True

    Raises:
        InputError: slices that no program can have, a payload that cannot be read, or an unknown
            fabric.
        UnsupportedError: the algorithm does not support the mesh.
    """
    check_slices(slices)
    target = Target().with_(payload, fabric)
    shares = ProgressShares(progress, 2)
    usual = plan(
        mesh,
        algorithm,
        payload=target.payload_bytes,
        fabric=target.fabric,
        cache_dir=cache_dir,
        progress=shares.of(0),
    )
    if algorithm == AUTO and usual.schedule.has_scratch:  # permutes have no scratch
        usual = plan(mesh, "trees", payload=target.payload_bytes, fabric=target.fabric)
    tried = [usual]
    has_choice = algorithm in {AUTO, "trees"} and usual.schedule.n_rows > 0
    counts = _promising(largest_part(mesh), target, slices) if has_choice else []
    progress = shares.of(1)
    for place, n_trees in enumerate(counts):
        progress(f"{n_trees} trees in lockstep", place / len(counts))
        tried.append(_with_trees(usual, n_trees))
    if has_choice:
        # The usual plan may have trees whose leaves come last; in lockstep none can wait.
        few = usual_tree_count(usual.placement.mesh)
        tried.append(_with_trees(usual, few, depth_slack=_SHALLOW_SLACK))
    fastest = min(tried, key=lambda made: lowered_price_s(made, slices))
    # A price without packing is off by a few percent, so the usual plan is packed too.
    finalists = dict.fromkeys([usual, fastest])
    return min((lowered(made, slices=slices) for made in finalists), key=lambda low: low.time_s)


def _with_trees(usual: Plan, n_trees: int, *, depth_slack: int | None = None) -> Plan:
    """Return a proved plan of so many trees for the mesh and the target of another."""
    packing = tree_packing(usual.placement.mesh, n_trees=n_trees, depth_slack=depth_slack)
    schedule = tree_schedule(packing, Collective.ALLREDUCE)
    return planned(usual.mesh, schedule, usual.target)


def _promising(part: Mesh, target: Target, slices: int | None) -> list[int]:
    """Return the numbers of trees that a formula finds fastest, few before many."""
    figures, fabric = mesh_figures(part), target.fabric
    depth = 2 * (figures.radius + _USUAL_SLACK)
    priced = []
    for n_trees in range(1, MOST_TREES + 1):
        load, n_rows = least_load(figures, n_trees), 2 * n_trees * (part.n_live - 1)
        numbers: Iterable[int] = [slices] if slices else slices_to_try(n_rows)
        for number in numbers:
            cell_s = target.payload_bytes / (n_trees * number) / fabric.link_bandwidth_bytes_per_s
            step_s = fabric.hop_latency_s + fabric.message_overhead_s + cell_s
            priced.append(((depth + load * number) * step_s, n_trees))
    fastest = dict.fromkeys(n_trees for _, n_trees in sorted(priced))
    return sorted(list(fastest)[:_N_TRIED])
