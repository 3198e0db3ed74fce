"""Compiles a sum by the backend `pallas` for TPUs, on a machine that has none.

`lowered_for_tpu` needs JAX alone: Pallas checks the kernel and writes it down in the language of
the TPU compiler. `compiled_for_tpu` needs the package `libtpu`, which holds that compiler; it
compiles for a topology that is only described. Both run in a process of their own: a process that
has imported JAX must not fork.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from waiting import HANG_S


def lowered_for_tpu(mesh: str, fail: str, n_elements: int, dtype: str) -> int:
    """Return how many kernels the lowered program has."""
    return _in_process("lower", mesh, fail, n_elements, dtype)


def compiled_for_tpu(mesh: str, fail: str, n_elements: int, dtype: str, topology: str) -> int:
    """Return how many kernels the compiled program has, on the chips of a topology less a hole."""
    return _in_process("compile", mesh, fail, n_elements, dtype, topology)


def _in_process(*arguments: Any) -> int:
    ran = subprocess.run(
        [sys.executable, Path(__file__), json.dumps(arguments)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return int(ran.stdout.splitlines()[-1])


def _kernels(
    what: str, mesh_text: str, fail: str, n_elements: int, dtype: str, *topology: str
) -> int:
    import jax
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

    from meshmend.jax import allreduce, device_mesh
    from meshmend.planning.plan import plan
    from meshmend.topology.text import parse_mesh

    mesh = parse_mesh(mesh_text, fail=[fail])
    mended = plan(mesh, "trees")
    kind = AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    devices: Any = AbstractMesh((mesh.n_live,), ("chips",), abstract_device=kind)
    if what == "compile":
        described = topologies.get_topology_desc(platform="tpu", topology_name=topology[0])
        devices = device_mesh(mesh, described.devices)
    spec = PartitionSpec("chips")

    def summed(numbers: jax.Array) -> Any:
        return allreduce(numbers, mended, slices=4, backend="pallas")

    run = jax.jit(jax.shard_map(summed, mesh=devices, in_specs=spec, out_specs=spec))
    of = jax.ShapeDtypeStruct(
        (mesh.n_live, n_elements), dtype, sharding=NamedSharding(devices, spec)
    )
    if what == "lower":
        text = run.trace(of).lower(lowering_platforms=("tpu",)).as_text()
    else:
        text = run.lower(of).compile().as_text() or ""
    return len(re.findall(r"custom_call_target *= *.tpu_custom_call|@tpu_custom_call", text))


if __name__ == "__main__":
    print(_kernels(*json.loads(sys.argv[1])))
