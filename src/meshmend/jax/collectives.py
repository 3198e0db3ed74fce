"""The collectives on pytrees: leaves become one vector per type, and a backend moves vectors.

A backend is a function of `(vector, plan, axis_name, slices)`: it takes this chip's vector inside
`shard_map` and returns the vector of the sums, of the same length and type. `permutes` runs the
plan as `ppermute`s, `pallas_kernel` as one kernel of remote copies. Knows nothing of steps and
tables.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshmend.errors import InputError
from meshmend.jax.devices import CHIPS, DATA, MODEL
from meshmend.jax.permutes import (
    AxisName,
    vector_all_gather,
    vector_all_to_all,
    vector_colour_sum,
    vector_reduce_scatter,
)
from meshmend.planning.plan import Plan
from meshmend.schedule.table import Collective
from meshmend.topology.tiles import Tiling

VectorSum = Callable[[jax.Array, Plan, AxisName, int | None], jax.Array]

PERMUTES = "permutes"
PALLAS = "pallas"
_AS_IT_IS = object()  # instead of a type to add up in
_MODULE_OF_BACKEND = {PERMUTES: "meshmend.jax.permutes", PALLAS: "meshmend.jax.pallas_kernel"}


def allreduce(
    tree: Any,
    plan: Plan,
    axis_name: AxisName = CHIPS,
    *,
    slices: int | None = None,
    accumulate: Any = None,
    backend: str = PERMUTES,
) -> Any:
    """Return the sum of every chip's tree over all chips of the plan; all end with the same bits.

    Call it inside `jax.shard_map` over an axis of as many devices as the plan has ranks, in rank
    order (`device_mesh`). Leaves of 16-bit floats are added up in float32, unless `accumulate`
    names another type; other leaves are added up in their own. `slices` is in how many pieces the
    payload is pipelined; by default the number that is fastest on the plan's fabric. The backend
    `pallas` is one TPU kernel instead of permutes.

    With a plan for tiles it is the sum over the axis `data` of `device_mesh(mesh, tile=...)`, for
    each place along `model` its own: chips are summed with those of their colour. Both axes must be
    those of the `shard_map`, because messages pass chips of other colours.

    Raises:
        InputError: the plan is of another collective, the axis has another size, `accumulate` is no
            type of floats, or there is no such backend.
    """
    if isinstance(plan, Plan) and plan.tiling is not None:
        _check_tiles(plan.tiling, axis_name, backend)
        axis_name = (DATA, MODEL)
    _check(plan, Collective.ALLREDUCE, axis_name)
    vector_sum = vector_colour_sum if plan.tiling is not None else _backend(backend)

    def summed(vector: jax.Array) -> jax.Array:
        return vector_sum(vector, plan, axis_name, slices)

    return by_type(as_numbers(tree), accumulate, jnp.ravel, summed, jnp.shape)


def pmean(tree: Any, plan: Plan, axis_name: AxisName = CHIPS, **options: Any) -> Any:
    """Return the mean of every chip's tree over all chips of the plan; options as `allreduce`."""
    total = allreduce(tree, plan, axis_name, **options)
    n_summed = plan.schedule.n_ranks if plan.tiling is None else plan.tiling.n_tiles
    return jax.tree.map(lambda leaf: leaf / n_summed, total)


def reduce_scatter(
    tree: Any,
    plan: Plan,
    axis_name: AxisName = CHIPS,
    *,
    slices: int | None = None,
    accumulate: Any = None,
) -> Any:
    """Return this chip's part of the sum of every chip's tree: rank i gets part i of each leaf.

    The first axis of each leaf is cut into as many equal parts as there are ranks, as by
    `lax.psum_scatter(..., tiled=True)`. The plan is one of a reduce-scatter in which every rank
    owns an equal part: `trees`, `ring-1d` or `rank-ring`. Otherwise as `allreduce`.

    Raises:
        InputError: as `allreduce`; or a leaf cannot be cut so; or ranks own unequal parts.
    """
    _check(plan, Collective.REDUCE_SCATTER, axis_name)
    n_ranks = plan.schedule.n_ranks

    def scattered(vectors: jax.Array) -> jax.Array:
        return vector_reduce_scatter(vectors, plan, axis_name, slices)

    def own(array: jax.Array) -> tuple[int, ...]:
        return (array.shape[0] // n_ranks, *array.shape[1:])

    return by_type(as_numbers(tree), accumulate, partial(_in_parts, plan), scattered, own)


def all_gather(
    tree: Any, plan: Plan, axis_name: AxisName = CHIPS, *, slices: int | None = None
) -> Any:
    """Return the parts of all chips, one after another along the first axis of each leaf.

    As `lax.all_gather(..., tiled=True)`; the inverse of what `reduce_scatter` does to shapes. The
    plan is one of an all-gather in which every rank owns an equal part.

    Raises:
        InputError: as `reduce_scatter`.
    """
    _check(plan, Collective.ALL_GATHER, axis_name)
    n_ranks = plan.schedule.n_ranks

    def vector(array: jax.Array) -> jax.Array:
        if array.ndim == 0:
            raise InputError("all_gather needs leaves with a first axis, but got a single number")
        return array.reshape(-1)

    def gathered(vector: jax.Array) -> jax.Array:
        return vector_all_gather(vector, plan, axis_name, slices)

    def all_parts(array: jax.Array) -> tuple[int, ...]:
        return (array.shape[0] * n_ranks, *array.shape[1:])

    # Nothing is added up, so 16-bit floats move as they are.
    return by_type(tree, _AS_IT_IS, vector, gathered, all_parts)


def all_to_all(tree: Any, plan: Plan, axis_name: AxisName = CHIPS) -> Any:
    """Return the blocks of all chips for this one: block i of each leaf comes from rank i.

    The first axis of each leaf is cut into as many equal blocks as there are ranks, of which block
    i goes to rank i, as by `lax.all_to_all(..., 0, 0, tiled=True)`. All of it goes between
    neighbours: blocks follow the routes of the plan.

    Raises:
        InputError: as `reduce_scatter`.
    """
    _check(plan, Collective.ALL_TO_ALL, axis_name)

    def exchanged(vectors: jax.Array) -> jax.Array:
        return vector_all_to_all(vectors, plan, axis_name)

    return by_type(tree, _AS_IT_IS, partial(_in_parts, plan), exchanged, jnp.shape)


def _in_parts(plan: Plan, array: jax.Array) -> jax.Array:
    """Return an array as one vector for each rank of a plan."""
    n_ranks = plan.schedule.n_ranks
    if array.ndim == 0 or array.shape[0] % n_ranks:
        raise InputError(
            f"{plan.schedule.collective} needs leaves whose first axis is a multiple of {n_ranks} "
            f"ranks, but got the shape {array.shape}"
        )
    return array.reshape(n_ranks, -1)


def by_type(
    tree: Any,
    accumulate: Any,
    prepared: Callable[[jax.Array], jax.Array],
    moved: Callable[[jax.Array], jax.Array],
    shape: Callable[[jax.Array], tuple[int, ...]],
) -> Any:
    """Return a tree whose leaves of one type went through a collective together.

    `prepared` makes a leaf a vector, or one vector for each rank, `moved` is the collective on
    leaves joined along their last axis, and `shape` is what a leaf becomes.
    """
    leaves, structure = jax.tree.flatten(tree)
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    groups: dict[Any, list[int]] = {}
    for at, array in enumerate(arrays):
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            raise InputError(
                "a collective moves numbers, but got random keys; pass jax.random.key_data(keys), "
                "and make keys of it with jax.random.wrap_key_data"
            )
        groups.setdefault(_accumulator(array.dtype, accumulate), []).append(at)
    results: list[Any] = [None] * len(arrays)
    for dtype, members in groups.items():
        joined = jnp.concatenate([prepared(arrays[at].astype(dtype)) for at in members], axis=-1)
        result = moved(joined) if joined.size else None
        start = 0
        for at in members:
            wanted = shape(arrays[at])
            size = prepared(arrays[at]).shape[-1]
            if result is None:
                part = jnp.zeros(wanted, dtype)
            else:
                part = result[..., start : start + size].reshape(wanted)
            results[at] = part.astype(arrays[at].dtype)
            start += size
    return jax.tree.unflatten(structure, results)


def _backend(name: str) -> VectorSum:
    if name not in _MODULE_OF_BACKEND:
        raise InputError(
            f"allreduce needs a backend among {', '.join(_MODULE_OF_BACKEND)}, but got {name!r}"
        )
    found: VectorSum = import_module(_MODULE_OF_BACKEND[name]).vector_sum
    return found


def _check(plan: Plan, collective: Collective, axis_name: AxisName) -> None:
    if not isinstance(plan, Plan):
        raise InputError(
            f"{collective} needs a plan, as of plan(mesh) or lockstep_plan(mesh, ...).plan, but "
            f"got a {type(plan).__name__}"
        )
    if plan.schedule.collective is not collective:
        raise InputError(
            f"{collective} needs a plan of that collective, but got {plan!r}; plan one with "
            f"plan(mesh, collective='{collective}')"
        )
    size = axis_size(axis_name, str(collective))
    if size != plan.schedule.n_ranks:
        raise InputError(
            f"a plan for {plan.schedule.n_ranks} ranks needs as many devices along the axis "
            f"{axis_name!r}, but it has {size}; make the mesh with device_mesh(plan.mesh, devices)"
        )


def axis_size(axis_name: AxisName, who: str) -> int:
    """Return the number of devices along an axis, inside a `shard_map`.

    Raises:
        InputError: there is no such axis.
    """
    try:
        return int(lax.axis_size(axis_name))
    except NameError:
        raise InputError(
            f"{who} needs to be called inside of jax.shard_map over the axis {axis_name!r}, which "
            "is unknown here; make its mesh with device_mesh"
        ) from None


def _check_tiles(tiling: Tiling, axis_name: AxisName, backend: str) -> None:
    if backend != PERMUTES:
        raise InputError(f"a plan for tiles runs as {PERMUTES}, but got the backend {backend!r}")
    if tiling.spares:
        raise InputError(
            f"a plan for tiles inside JAX needs all chips in tiles, but {len(tiling.spares)} "
            "are spares; fail them with mesh.without(...), and plan again"
        )
    if axis_name not in (CHIPS, DATA) and {*axis_name} != {DATA, MODEL}:
        raise InputError(f"a plan for tiles sums over the axis {DATA!r}, but got {axis_name!r}")
    sizes = tuple(axis_size(axis, "a plan for tiles") for axis in (DATA, MODEL))
    if sizes != (tiling.n_tiles, tiling.n_colours):
        raise InputError(
            f"a plan for {tiling.n_tiles} tiles of {tiling.n_colours} chips needs axes of these "
            f"sizes, {DATA!r} and {MODEL!r}, but they have {sizes[0]} and {sizes[1]}; make the "
            "mesh with device_mesh(mesh, devices, tile=...) and the same tile"
        )


def as_numbers(tree: Any) -> Any:
    """Return a tree in which truth values count as whole numbers, as in `lax.psum`."""
    arrays = jax.tree.map(jnp.asarray, tree)

    def counted(leaf: jax.Array) -> jax.Array:
        return leaf.astype(jnp.int32) if jnp.issubdtype(leaf.dtype, jnp.bool_) else leaf

    return jax.tree.map(counted, arrays)


def _accumulator(dtype: Any, accumulate: Any) -> Any:
    """Return the type to add up in."""
    if accumulate is _AS_IT_IS:
        return jnp.dtype(dtype)
    is_short = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    if not is_short:
        return jnp.dtype(dtype)
    if accumulate is None:
        return jnp.dtype(jnp.float32)
    try:
        found = jnp.dtype(accumulate)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise InputError(
            "accumulate needs to be a type of floats, such as jnp.bfloat16, but got "
            f"{accumulate!r:.60}"
        )
    return found
