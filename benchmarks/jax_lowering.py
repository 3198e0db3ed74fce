"""How many steps plans take in lockstep, against what bounds them, and how long XLA compiles them.

    python benchmarks/jax_lowering.py [--no-write] [--no-compile]

Prints a table and writes `results/jax_lowering-DATE.json` beside this file. `link` is what the
busiest link moves, `chain` the longest chain of rows, `order` what no order of these rows beats,
`any` what no schedule at all beats with as many cells: the last of n cells reaches a chip no
earlier than its farthest chip allows, and no faster than its links. Compile times are of a process
with as many virtual devices as there are live chips.
"""

import json
import os
import subprocess
import sys
import time
from functools import partial
from typing import Any

from meshmend import plan
from meshmend.planning.lowering import lockstep_plan, lowered
from meshmend.planning.plan import Plan
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from record import parser_of, record

MESHES = (
    ("4x4", "2x2@0,2"),
    ("8x8", "2x2@2,2"),
    ("16x16", "4x2@6,6"),
    ("16x16", "2x2@6,6"),
)
CHOSEN = "chosen"  # what `plan --lower jax` takes
CHILD = "LOWERING_CHILD"


def any_bound(mesh: Mesh, n_cells: int) -> int:
    """Return the least steps of any allreduce of so many cells."""
    links = (mesh.neighbor_ranks >= 0).sum(axis=1)
    return int((mesh_figures(mesh).eccentricities - 1 - (-n_cells // links)).max())


def planned(mesh: Mesh, algorithm: str, slices: int) -> Plan:
    """Return the plan of an algorithm, or the one that is chosen for so many slices."""
    return lockstep_plan(mesh, slices=slices).plan if algorithm == CHOSEN else plan(mesh, algorithm)


def measure(shape: str, fail: str, algorithm: str, slices: int) -> dict[str, Any]:
    """Return the steps of a lowered plan, what bounds them, and how long lowering took."""
    mesh = parse_mesh(shape, fail=[fail])
    made = planned(mesh, algorithm, slices)
    lowered(made, slices=slices, payload_bytes=1.0)  # compiles
    began = time.perf_counter()
    low = lowered(made, slices=slices)
    took_s = time.perf_counter() - began
    program = low.program
    return {
        "mesh": str(mesh),
        "algorithm": algorithm,
        "slices": slices,
        "chips": mesh.n_live,
        "steps": program.n_steps,
        "permutes": program.n_permutations,
        "link_bound": program.busiest,
        "depth_chain": program.depth,
        "order_bound": program.bound,
        "any_bound": any_bound(mesh, program.n_cells) if algorithm != "ft-two-d" else None,
        "predicted_s": low.time_s,
        "free_running_s": made.predicted().time_s,
        "limit_s": made.limit().time_s,
        "lower_s": took_s,
    }


def compile_time(shape: str, fail: str, algorithm: str, slices: int) -> dict[str, float]:
    """Return how long a process with enough devices traces and compiles the sum of 1 MB."""
    chips = parse_mesh(shape, fail=[fail]).n_live
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={chips}",
        "JAX_PLATFORMS": "cpu",
        CHILD: json.dumps([shape, fail, algorithm, slices]),
    }
    done = subprocess.run([sys.executable, __file__], env=environment, stdout=-1, check=True)
    times: dict[str, float] = json.loads(done.stdout)
    return times


def compile_here(shape: str, fail: str, algorithm: str, slices: int) -> dict[str, float]:
    """Trace and compile in this process."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    from meshmend.jax import allreduce, check_neighbours, device_mesh

    mesh = parse_mesh(shape, fail=[fail])
    made = planned(mesh, algorithm, slices)
    lowered(made, payload_bytes=1e6, slices=slices)
    spec = P("chips")
    summed = partial(allreduce, plan=made, slices=slices)
    mapped = jax.shard_map(summed, mesh=device_mesh(mesh), in_specs=spec, out_specs=spec)
    argument = jax.ShapeDtypeStruct((mesh.n_live, 250_000), jnp.float32)
    began = time.perf_counter()
    traced = jax.jit(mapped).lower(argument)
    lowered_at = time.perf_counter()
    compiled = traced.compile()
    ended = time.perf_counter()
    check_neighbours(compiled, mesh, allow_routed=algorithm == "ft-two-d")
    return {"trace_s": lowered_at - began, "compile_s": ended - lowered_at}


def main() -> None:
    """Measure every case, print, and write the result down unless told not to."""
    parser = parser_of(__doc__)
    parser.add_argument("--no-compile", action="store_true", help="steps only, without XLA")
    arguments = parser.parse_args()
    rows = []
    print("mesh                algorithm slices  steps  link chain order   any  of order", end="")
    print("   lower   trace compile")
    for shape, fail in MESHES:
        for algorithm in ("trees", CHOSEN, "ft-two-d"):
            for slices in (1, 8):
                row = measure(shape, fail, algorithm, slices)
                if not arguments.no_compile:
                    row |= compile_time(shape, fail, algorithm, slices)
                rows.append(row)
                print(
                    f"{row['mesh']:19} {algorithm:9} {slices:6} {row['steps']:6} "
                    f"{row['link_bound']:5} {row['depth_chain']:5} {row['order_bound']:5} "
                    f"{row['any_bound'] or '':>5} {row['steps'] / row['order_bound']:8.3f}x "
                    f"{row['lower_s']:6.2f}s {row.get('trace_s', 0):6.2f}s "
                    f"{row.get('compile_s', 0):6.2f}s",
                    flush=True,
                )
    if not arguments.no_write:
        path = record("jax_lowering", {"rows": rows})
        print(f"wrote {path.name}")


if __name__ == "__main__":
    if task := os.environ.get(CHILD):
        print(json.dumps(compile_here(*json.loads(task))))
    else:
        main()
