"""Lowers a plan to lockstep, and says what that costs next to the schedule that runs freely.

A lockstep program waits in each step for its slowest link, and a step costs at least a hop and a
message. So it wants fewer and larger pieces than the same plan on sockets: slices and width are
chosen here, by the price. A step is priced by the rules of the simulator: all pairs of the
program exchange one span each, at the same time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np

from meshmend.errors import InputError
from meshmend.planning.plan import Plan
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
from meshmend.simulator.network_program import program_of
from meshmend.simulator.rules import simulate
from meshmend.topology.fabric import Fabric

MOST_SLICES: Final = 256
_MOST_FIXED_SLICES: Final = 1 << 16
_MOST_ROWS: Final = 1 << 20  # rows x slices: beyond this lowering takes seconds
_MOST_FIXED_ROWS: Final = 1 << 24  # if the user fixed the slices: beyond this it takes gigabytes


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
    if slices is not None and slices < 1:
        raise InputError(f"lowering a plan needs one slice or more, but got {slices}")
    if slices is not None and slices > _MOST_FIXED_SLICES:
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
