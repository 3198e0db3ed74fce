"""Plans inside a jitted JAX program: sums around failed chips as permutes between neighbours.

    allreduce         the sum over all chips of a plan, of any pytree
    pmean             the mean
    reduce_scatter    chip i gets part i of the sum
    all_gather        every chip gets every chip's part
    all_to_all        every chip gets the blocks that all chips have for it
    SumFrame          one executable for many plans: a failed link swaps tables, compiles nothing
    lockstep_plan     the plan that is fastest as a jitted program
    device_mesh       a `jax.sharding.Mesh` over the live chips, in rank order, or over tiles
    live_mesh         a mesh less the chips that have no device
    check_neighbours  proves of a compiled program that its permutes follow links of the mesh

The collectives are for use inside `jax.shard_map`, under `jit` and `grad`:

    mended = lockstep_plan(mesh, payload="100MB").plan
    devices = device_mesh(mesh, jax.devices())

    @jax.jit
    @partial(jax.shard_map, mesh=devices, in_specs=P("chips"), out_specs=P("chips"))
    def summed(gradients):
        return allreduce(gradients, mended)

Nothing below this package imports jax. Needs the extra `jax`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from meshmend.packages import need

need("meshmend.jax", "jax", extra="jax")

if TYPE_CHECKING:
    from meshmend.jax.collectives import (
        all_gather,
        all_to_all,
        allreduce,
        pmean,
        reduce_scatter,
    )
    from meshmend.jax.devices import device_mesh, live_mesh
    from meshmend.jax.neighbours import check_neighbours
    from meshmend.jax.swapping import SumFrame
    from meshmend.planning.lowering import lockstep_plan

__all__ = [
    "SumFrame",
    "all_gather",
    "all_to_all",
    "allreduce",
    "check_neighbours",
    "device_mesh",
    "live_mesh",
    "lockstep_plan",
    "pmean",
    "reduce_scatter",
]

_MODULE_OF = {
    "SumFrame": "meshmend.jax.swapping",
    "all_gather": "meshmend.jax.collectives",
    "all_to_all": "meshmend.jax.collectives",
    "allreduce": "meshmend.jax.collectives",
    "check_neighbours": "meshmend.jax.neighbours",
    "device_mesh": "meshmend.jax.devices",
    "live_mesh": "meshmend.jax.devices",
    "lockstep_plan": "meshmend.planning.lowering",
    "pmean": "meshmend.jax.collectives",
    "reduce_scatter": "meshmend.jax.collectives",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use (PEP 562)."""
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'meshmend.jax' has no attribute {name!r}")
