"""The collectives on pytrees: leaves become one vector per type, and a backend moves vectors.

A backend is a function of `(vector, plan, axis_name, slices)`: it takes this chip's vector inside
`shard_map` and returns the vector of the sums, of the same length and type. `permutes` runs the
plan as `ppermute`s. Knows nothing of steps and tables.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshmend.errors import InputError
from meshmend.planning.plan import Plan
from meshmend.schedule.table import Collective

AxisName = str | tuple[str, ...]
VectorSum = Callable[[jax.Array, Plan, AxisName, int | None], jax.Array]

PERMUTES = "permutes"
_MODULE_OF_BACKEND = {PERMUTES: "meshmend.jax.permutes"}


def allreduce(
    tree: Any,
    plan: Plan,
    axis_name: AxisName = "chips",
    *,
    slices: int | None = None,
    accumulate: Any = None,
    backend: str = PERMUTES,
) -> Any:
    """Return the sum of every chip's tree over all chips of the plan; all end with the same bits.

    Call it inside `jax.shard_map` over an axis of as many devices as the plan has ranks, in rank
    order (`device_mesh`). Leaves of 16-bit floats are added up in float32, unless `accumulate`
    names another type; other leaves are added up in their own. `slices` is in how many pieces the
    payload is pipelined; by default the number that is fastest on the plan's fabric.

    Raises:
        InputError: the plan is of another collective, the axis has another size, or there is no
            such backend.
    """
    _check(plan, Collective.ALLREDUCE, axis_name)
    vector_sum = _backend(backend)
    leaves, structure = jax.tree.flatten(tree)
    arrays = [_as_number(leaf) for leaf in leaves]
    groups: dict[Any, list[int]] = {}
    for at, array in enumerate(arrays):
        groups.setdefault(_accumulator(array.dtype, accumulate), []).append(at)
    sums: list[Any] = list(arrays)
    for dtype, members in groups.items():
        vector = jnp.concatenate([arrays[at].astype(dtype).reshape(-1) for at in members])
        total = vector_sum(vector, plan, axis_name, slices) if vector.size else vector
        start = 0
        for at in members:
            array = arrays[at]
            part = total[start : start + array.size]
            sums[at] = part.reshape(array.shape).astype(array.dtype)
            start += array.size
    return jax.tree.unflatten(structure, sums)


def pmean(tree: Any, plan: Plan, axis_name: AxisName = "chips", **options: Any) -> Any:
    """Return the mean of every chip's tree over all chips of the plan; options as `allreduce`."""
    total = allreduce(tree, plan, axis_name, **options)
    return jax.tree.map(lambda leaf: leaf / plan.schedule.n_ranks, total)


def _backend(name: str) -> VectorSum:
    if name not in _MODULE_OF_BACKEND:
        raise InputError(
            f"allreduce needs a backend among {', '.join(_MODULE_OF_BACKEND)}, but got {name!r}"
        )
    found: VectorSum = import_module(_MODULE_OF_BACKEND[name]).vector_sum
    return found


def _check(plan: Plan, collective: Collective, axis_name: AxisName) -> None:
    if plan.schedule.collective is not collective:
        raise InputError(
            f"{collective} needs a plan of that collective, but got {plan!r}; plan one with "
            f"plan(mesh, collective='{collective}')"
        )
    size = lax.axis_size(axis_name)
    if size != plan.schedule.n_ranks:
        raise InputError(
            f"a plan for {plan.schedule.n_ranks} ranks needs as many devices along the axis "
            f"{axis_name!r}, but it has {size}; make the mesh with device_mesh(plan.mesh, devices)"
        )


def _as_number(leaf: Any) -> jax.Array:
    """Return a leaf as an array; truth values count as whole numbers, as in `lax.psum`."""
    array = jnp.asarray(leaf)
    return array.astype(jnp.int32) if array.dtype == jnp.bool_ else array


def _accumulator(dtype: Any, accumulate: Any) -> Any:
    """Return the type to add up in."""
    is_short = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    if not is_short:
        return jnp.dtype(dtype)
    return jnp.dtype(jnp.float32 if accumulate is None else accumulate)
