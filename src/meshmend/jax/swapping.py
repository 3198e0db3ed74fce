"""One executable for many plans: its permutes are all links of a mesh, and the plan is an argument.

The pairs of a permute are compiled in, the tables need not be. So a program over all links of a
mesh runs every plan between neighbours of that mesh: when a link fails, or a chip is to be left
out whose device still answers, other tables go in, and nothing is compiled. A device that is gone
takes the executable with it; then compile a program over the devices that are left.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.jax.collectives import as_numbers, axis_size, by_type
from meshmend.jax.permutes import AxisName, StepTables, filled_buffer, run_steps
from meshmend.planning.plan import Plan
from meshmend.schedule.lockstep_program import (
    LockstepProgram,
    Pairs,
    in_pieces,
    lockstep_program,
    permutations_of,
    with_equal_cells,
)
from meshmend.schedule.table import Collective
from meshmend.topology.mesh import Mesh


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FrameTables:
    """A plan's tables for the chips of a frame, which they name: those of another sum wrong."""

    tables: StepTables
    frame: "SumFrame" = field(metadata={"static": True})


_ROOM_CELLS = 32  # more than `n_cells`, so that slices of any number of trees fill them


@dataclass(frozen=True)
class SumFrame:
    """The fixed part of an executable that sums by any plan: a mesh, and room for steps and cells.

    The payload is cut into `n_cells` cells. A plan must fit into `n_steps` steps; what it does not
    need is idle, and costs time, so take few more than the first plan needs (`steps_of`).
    """

    mesh: Mesh
    n_steps: int
    n_cells: int

    def __post_init__(self) -> None:
        if min(self.n_steps, self.n_cells) < 1:
            raise InputError(
                f"SumFrame needs one step and one cell or more, but got {self.n_steps} and "
                f"{self.n_cells}"
            )

    @cached_property
    def permutations(self) -> tuple[Pairs, ...]:
        """All links of the mesh, both ways, as few permutations."""
        src, port = np.nonzero(self.mesh.neighbor_ranks >= 0)
        return permutations_of(src, self.mesh.neighbor_ranks[src, port])

    def steps_of(self, plan: Plan) -> int:
        """Return how many steps a plan takes in this frame."""
        return self._program(plan).n_steps

    def tables(self, plan: Plan) -> FrameTables:
        """Return a plan's tables for all chips of the mesh, each an array (chips, steps, permutes).

        Put them on the devices sharded along the chips. Chips that are no ranks of the plan idle.

        Raises:
            InputError: the plan is of another mesh or collective, has pairs that are no links of
                the mesh, or needs more steps or cells than the frame has.
        """
        program = self._program(plan)
        if program.n_steps > self.n_steps:
            raise InputError(
                f"SumFrame has room for {self.n_steps} steps, but {plan!r} needs "
                f"{program.n_steps}; make a frame with more"
            )
        rank_of = self._ranks_of(plan)
        unused = self.n_cells + _ROOM_CELLS
        shape = (self.mesh.n_live, self.n_steps, len(self.permutations))
        tables = StepTables(*(np.full(shape, value, np.int32) for value in (unused, unused, 0)))
        colour_of = {pair: k for k, pairs in enumerate(self.permutations) for pair in pairs}
        for k, pairs in enumerate(program.permutations):
            for source, target in pairs:
                pair = int(rank_of[source]), int(rank_of[target])
                if pair not in colour_of:
                    raise InputError(
                        f"SumFrame needs a plan between neighbours of {self.mesh}, but {plan!r} "
                        f"sends from rank {source} to rank {target}; use the algorithm 'trees'"
                    )
                own = slice(program.n_steps), colour_of[pair]
                is_idle = program.send[source, :, k] >= program.n_cells
                tables.send[pair[0], *own] = np.where(is_idle, unused, program.send[source, :, k])
                is_idle = program.take[target, :, k] == 0
                tables.place[pair[1], *own] = np.where(is_idle, unused, program.place[target, :, k])
                tables.take[pair[1], *own] = program.take[target, :, k]
        return FrameTables(tables, self)

    def allreduce(
        self,
        tree: Any,
        tables: FrameTables,
        axis_name: AxisName = "chips",
        *,
        accumulate: Any = None,
    ) -> Any:
        """Return the sum of every rank's tree, inside `shard_map`, by tables given as arguments.

        `tables` is the device's part, (1, steps, permutes). What a chip returns that is no rank of
        the plan means nothing. Types are added up as by `meshmend.jax.allreduce`.

        Raises:
            InputError: the axis is not that of this mesh, or the tables are those of another frame.
        """
        size, wanted = axis_size(axis_name, "SumFrame"), (self.n_steps, len(self.permutations))
        if not isinstance(tables, FrameTables) or tables.frame != self:
            got = tables.frame if isinstance(tables, FrameTables) else type(tables).__name__
            raise InputError(f"{self!r} needs tables that it has made, but got those of {got!r}")
        found = {table.shape for table in tables.tables}
        if size != self.mesh.n_live or found != {(1, *wanted)}:
            raise InputError(
                f"SumFrame of {self.mesh} needs {self.mesh.n_live} devices along the axis "
                f"{axis_name!r}, and on each its own row of tables(plan), of shape {(1, *wanted)}; "
                f"but got {size} devices and tables of shape {', '.join(map(str, found))}"
            )
        own = StepTables(*(table.reshape(table.shape[-2:]) for table in tables.tables))

        def summed(vector: jax.Array) -> jax.Array:
            unit = -(-vector.size // self.n_cells)
            buffer = filled_buffer(vector, (self.n_cells + _ROOM_CELLS + 1, unit), axis_name)
            ended = run_steps(buffer, own, axis_name, self.permutations, 1)
            return ended.reshape(-1)[: vector.size]

        return by_type(as_numbers(tree), accumulate, jnp.ravel, summed, jnp.shape)

    def _program(self, plan: Plan) -> LockstepProgram:
        if plan.schedule.collective is not Collective.ALLREDUCE:
            raise InputError(f"SumFrame needs the plan of an allreduce, but got {plan!r}")
        plan.schedule.refuse_colours("SumFrame")
        cells = in_pieces(with_equal_cells(plan.schedule), 1)
        slices = -(-self.n_cells // cells.schedule.n_chunks)
        program = lockstep_program(cells, slices)
        if program.n_cells > self.n_cells + _ROOM_CELLS:
            raise InputError(
                f"SumFrame has room for slices of {_ROOM_CELLS} cells, but {plan!r} has slices of "
                f"{program.cells_per_slice}; use the algorithm 'trees'"
            )
        return program

    def _ranks_of(self, plan: Plan) -> NDArray[np.int64]:
        """Return the rank in the whole mesh of each rank of a plan."""
        chips = plan.placement.mesh.live
        if plan.mesh.shape != self.mesh.shape or not set(chips) <= set(self.mesh.live):
            raise InputError(
                f"SumFrame of {self.mesh} needs plans for parts of that mesh, but got {plan!r}"
            )
        return np.array([self.mesh.rank_of[chip] for chip in chips], dtype=np.int64)
