"""The backend `permutes`: a plan as one `lax.scan` whose steps are permutes between ranks.

Knows lockstep programs and vectors. What a rank sends in which step stands in tables of which each
device reads its own row, so the program's size does not grow with the steps or the ranks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshmend.planning.lowering import lowered
from meshmend.planning.plan import Plan
from meshmend.schedule.block_steps import block_program
from meshmend.schedule.lockstep_program import LockstepProgram, Pairs

AxisName = str | tuple[str, ...]
Sum = Callable[[jax.Array, Any, AxisName], jax.Array]  # what a chip has, the program, the axis


def with_own_transpose(run: Sum) -> Sum:
    """Return a collective that is its own transpose, with the gradient by the same program.

    JAX's own gradient is right too, but the transpose of each slice is a sum over the whole buffer.
    """

    @partial(jax.custom_vjp, nondiff_argnums=(1, 2))
    def summed(array: jax.Array, program: Any, axis_name: AxisName) -> jax.Array:
        return run(array, program, axis_name)

    def forward(array: jax.Array, program: Any, axis_name: AxisName) -> tuple[jax.Array, None]:
        return summed(array, program, axis_name), None

    def backward(
        program: Any, axis_name: AxisName, _: None, gradient: jax.Array
    ) -> tuple[jax.Array]:
        return (summed(gradient, program, axis_name),)

    summed.defvjp(forward, backward)
    return summed


class StepTables(NamedTuple):
    """One rank's tables, each an array (steps, permutations), or all ranks' with one axis more.

    `LockstepProgram` says what they hold.
    """

    send: Any  # arrays of NumPy or of JAX
    place: Any
    take: Any


def vector_sum(vector: jax.Array, plan: Plan, axis_name: AxisName, slices: int | None) -> jax.Array:
    """Return the sum of every chip's vector, by the steps of the plan.

    Every cell of the sum is added up along one tree or ring, and its owner's value is copied to all
    other chips: so all end with the same bits. The gradient is the sum of the gradients, by the
    same program.
    """
    program = lowered(plan, payload_bytes=vector.nbytes, slices=slices).program
    unit = -(-vector.size // program.n_cells)
    buffer = filled_buffer(vector, (program.n_cells + program.width, unit), axis_name)
    ended = _summed(buffer, program, axis_name)
    return ended[: program.n_cells].reshape(-1)[: vector.size]


def vector_colour_sum(
    vector: jax.Array, plan: Plan, axis_name: AxisName, slices: int | None
) -> jax.Array:
    """Return the sum of the vectors of all chips of this chip's colour, by the steps of the plan.

    The axes are those of `device_mesh(mesh, tile=...)`: tiles, and the colours of a tile. A chip's
    vector is the part of its colour in a payload of all colours; the rest of the payload is room
    for what passes the chip.
    """
    tiling = plan.tiling
    assert tiling is not None, "the plan is for tiles"
    n_colours = tiling.n_colours
    found = lowered(plan, payload_bytes=n_colours * vector.nbytes, slices=slices).program
    program = _in_order_of_tiles(found, plan)
    cells_each = program.cells_per_slice // n_colours
    shares = program.slices * cells_each
    unit = -(-vector.size // shares)
    own = jnp.pad(vector, (0, shares * unit - vector.size)).reshape(program.slices, -1, unit)
    first = (lax.axis_index(axis_name) % n_colours) * cells_each
    whole = jnp.zeros((program.slices, program.cells_per_slice, unit), vector.dtype)
    whole = lax.dynamic_update_slice_in_dim(_varying(whole, axis_name), own, first, axis=1)
    buffer = filled_buffer(whole, (program.n_cells + program.width, unit), axis_name)
    ended = _summed(buffer, program, axis_name)[: program.n_cells]
    cells = ended.reshape(program.slices, -1, unit)
    mine = lax.dynamic_slice_in_dim(cells, first, cells_each, axis=1)
    return mine.reshape(-1)[: vector.size]


# One program for each: a program is a static argument of what JAX traces, and compared by identity.
@lru_cache(maxsize=64)
def _in_order_of_tiles(program: LockstepProgram, plan: Plan) -> LockstepProgram:
    """Return a program whose ranks are numbered tile by tile, and by colour within a tile."""
    tiling = plan.tiling
    assert tiling is not None, "the plan is for tiles"
    ranks = [tiling.mesh.rank_of[chip] for tile in tiling.tiles for chip in tile]
    number = {rank: at for at, rank in enumerate(ranks)}
    return replace(
        program,
        permutations=tuple(
            tuple((number[src], number[dst]) for src, dst in pairs)
            for pairs in program.permutations
        ),
        send=program.send[ranks],
        place=program.place[ranks],
        take=program.take[ranks],
    )


def _varying(array: jax.Array, axis_name: AxisName) -> jax.Array:
    """Return a constant as an array that `shard_map` takes for different on each device."""
    return array + (0 * lax.axis_index(axis_name)).astype(array.dtype)


def vector_reduce_scatter(
    vectors: jax.Array, plan: Plan, axis_name: AxisName, slices: int | None
) -> jax.Array:
    """Return this rank's row of the sum of every chip's vectors, an array (ranks, elements)."""
    program = lowered(plan, payload_bytes=vectors.nbytes, slices=slices).program
    cells_of_ranks = program.cells_of_ranks()
    n_ranks, n_elements = vectors.shape
    shares = program.slices * cells_of_ranks.shape[1]
    unit = -(-n_elements // shares)
    padded = jnp.pad(vectors, ((0, 0), (0, shares * unit - n_elements)))
    parts = padded.reshape(n_ranks, program.slices, -1, unit).swapaxes(0, 1)
    in_order = jnp.zeros((program.slices, program.cells_per_slice, unit), vectors.dtype)
    in_order = in_order.at[:, cells_of_ranks].set(parts)
    buffer = filled_buffer(in_order, (program.n_cells + program.width, unit), axis_name)
    ended = run_program(buffer, program, axis_name)[: program.n_cells]
    own = jnp.asarray(cells_of_ranks)[lax.axis_index(axis_name)]
    return ended.reshape(program.slices, -1, unit)[:, own].reshape(-1)[:n_elements]


def vector_all_gather(
    vector: jax.Array, plan: Plan, axis_name: AxisName, slices: int | None
) -> jax.Array:
    """Return every chip's vector, an array (ranks, elements)."""
    n_ranks = plan.schedule.n_ranks
    program = lowered(plan, payload_bytes=n_ranks * vector.nbytes, slices=slices).program
    cells_of_ranks = program.cells_of_ranks()
    shares = program.slices * cells_of_ranks.shape[1]
    unit = -(-vector.size // shares)
    parts = jnp.pad(vector, (0, shares * unit - vector.size)).reshape(program.slices, -1, unit)
    own = jnp.asarray(cells_of_ranks)[lax.axis_index(axis_name)]
    cells = jnp.zeros((program.slices, program.cells_per_slice, unit), vector.dtype)
    cells = cells.at[:, own].set(parts)
    buffer = filled_buffer(cells, (program.n_cells + program.width, unit), axis_name)
    ended = run_program(buffer, program, axis_name)[: program.n_cells]
    gathered = ended.reshape(program.slices, -1, unit)[:, cells_of_ranks]
    return gathered.swapaxes(0, 1).reshape(n_ranks, -1)[:, : vector.size]


def vector_all_to_all(vectors: jax.Array, plan: Plan, axis_name: AxisName) -> jax.Array:
    """Return the vectors of all ranks for this one, in their order, from (ranks, elements) for all.

    The gradient is the all-to-all of the gradients, by the same program: a block and the one that
    comes back for it change places.
    """
    return _exchanged(vectors, plan, axis_name)


def _run_exchange(vectors: jax.Array, plan: Plan, axis_name: AxisName) -> jax.Array:
    program, n_blocks = _block_program(plan), plan.schedule.n_chunks
    n_ranks, n_elements = vectors.shape
    n_parts = n_blocks // n_ranks
    unit = -(-n_elements // n_parts)
    padded = jnp.pad(vectors, ((0, 0), (0, n_parts * unit - n_elements)))
    buffer = filled_buffer(padded, (program.n_cells + program.width, unit), axis_name)
    arrived = run_program(buffer, program, axis_name)[n_blocks : 2 * n_blocks]
    arrived = arrived.reshape(n_ranks, -1)[:, :n_elements]
    is_own = jnp.arange(n_ranks)[:, None] == lax.axis_index(axis_name)
    return jnp.where(is_own, vectors, arrived)


_exchanged = with_own_transpose(_run_exchange)


@lru_cache(maxsize=64)
def _block_program(plan: Plan) -> LockstepProgram:
    return block_program(plan.schedule, plan.placement)


def filled_buffer(array: jax.Array, shape: tuple[int, ...], axis_name: AxisName) -> jax.Array:
    """Return a buffer of this shape that begins with an array's elements, and ends with zeros."""
    n_more = math.prod(shape) - array.size
    # The zeros differ from device to device as far as the type checker of `shard_map` knows, and so
    # does the buffer: a loop over permutes, and a kernel, must begin with what they end with.
    zeros = jnp.zeros(n_more, array.dtype) + (0 * lax.axis_index(axis_name)).astype(array.dtype)
    return jnp.concatenate([array.reshape(-1), zeros]).reshape(shape)


def run_program(buffer: jax.Array, program: LockstepProgram, axis_name: AxisName) -> jax.Array:
    """Return a rank's buffer after all steps of a program."""
    tables = own_tables(program, axis_name)
    return run_steps(buffer, tables, axis_name, program.permutations, program.width)


_summed = with_own_transpose(run_program)


def run_steps(
    buffer: jax.Array,
    tables: StepTables,
    axis_name: AxisName,
    permutations: Sequence[Pairs],
    width: int,
) -> jax.Array:
    """Return a rank's buffer after all steps of its tables; every permute moves `width` cells."""

    def step(buffer: jax.Array, table: StepTables) -> tuple[jax.Array, None]:
        # Everything is read before anything is written: what a step overwrites may be sent in it.
        arriving = [
            lax.ppermute(_span(buffer, table.send[k], width), axis_name, pairs)
            for k, pairs in enumerate(permutations)
        ]
        for k, cells in enumerate(arriving):
            buffer = _put(buffer, cells, table.place[k], table.take[k])
        return buffer, None

    return lax.scan(step, buffer, tables)[0] if permutations else buffer


def own_tables(program: LockstepProgram, axis_name: AxisName) -> StepTables:
    """Return the tables of the rank that asks."""
    rank = lax.axis_index(axis_name)
    # The tables of all ranks are constants of the program; in 16 bits they compile much faster.
    dtype = np.int16 if program.n_cells <= np.iinfo(np.int16).max else np.int32
    tables = np.stack([program.send, program.place, program.take], axis=1).astype(dtype)
    own = lax.dynamic_index_in_dim(jnp.asarray(tables), rank, keepdims=False)
    return StepTables(*own.astype(jnp.int32))


def _span(buffer: jax.Array, start: jax.Array, width: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(buffer, start, width)


def _put(buffer: jax.Array, cells: jax.Array, start: jax.Array, take: jax.Array) -> jax.Array:
    """Return the buffer with cells added or overwritten; `take` says which and how many."""
    width = len(cells)
    old = _span(buffer, start, width)
    new = jnp.where(take < 0, cells, old + cells)
    counts = jnp.arange(width)[:, None] < jnp.abs(take)
    return lax.dynamic_update_slice_in_dim(buffer, jnp.where(counts, new, old), start, axis=0)
