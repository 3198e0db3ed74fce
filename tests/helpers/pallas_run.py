"""Runs a plan with the backend `pallas` in Pallas' TPU interpreter, and looks for races.

The interpreter blocks a thread of XLA's pool for each chip that waits. The pool has as many threads
as the machine has cores, unless `NPROC` says otherwise. So this runs in a process of its own, with
an environment of its own: see `interpreted`.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dma_mutants import ARRIVAL_WAIT_DROPPED, MUTANTS
from meshmend.schedule.table import Schedule
from meshmend.transport.dma_program import DmaProgram, dma_program
from waiting import HANG_S


@dataclass(frozen=True)
class Case:
    """What is summed on which mesh, and what is wrong with the program; nothing by default."""

    mesh: str
    fail: str
    algorithm: str = "trees"
    slices: int = 1
    n_elements: int = 1 << 13
    dtype: str = "float32"
    mutant: str = "none"


@dataclass(frozen=True)
class Outcome:
    """What came out: whether all sums are right, and what the interpreter reports."""

    is_right: bool
    n_races: int
    n_unbalanced: int  # chips that end with a semaphore that is not at zero
    n_blocks: int

    @property
    def is_faultless(self) -> bool:
        return self.is_right and not self.n_races and not self.n_unbalanced


def interpreted(case: Case) -> Outcome:
    """Return what comes out of a case, run in a process of its own."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "NPROC": "64",
    }
    ran = subprocess.run(
        [sys.executable, Path(__file__), json.dumps(asdict(case))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    return Outcome(
        **found,
        n_races=ran.stdout.count("RACE DETECTED"),
        n_unbalanced=ran.stdout.count("non-zero count"),
    )


def _run(case: Case) -> dict[str, Any]:
    """Run a case in this process; what the interpreter reports goes to standard output."""
    import jax
    from jax.experimental.pallas import tpu as pltpu
    from jax.sharding import PartitionSpec

    from meshmend.jax import allreduce, device_mesh, pallas_kernel
    from meshmend.planning.plan import plan
    from meshmend.topology.text import parse_mesh

    n_blocks = []

    def mutated(schedule: Schedule, blocks: int) -> DmaProgram:
        n_blocks.append(blocks)
        return MUTANTS[case.mutant](dma_program(schedule, blocks))

    kernel: Any = pallas_kernel  # whose parts are replaced
    kernel.dma_program = mutated
    if case.mutant == ARRIVAL_WAIT_DROPPED:
        kernel._wait_arrived = lambda *of: None
    mesh = parse_mesh(case.mesh, fail=[case.fail])
    jax.config.update("jax_num_cpu_devices", mesh.n_live)
    mended = plan(mesh, case.algorithm)

    def summed(numbers: jax.Array) -> jax.Array:
        total: jax.Array = allreduce(numbers, mended, slices=case.slices, backend="pallas")
        return total

    spec = PartitionSpec("chips")
    run = jax.jit(jax.shard_map(summed, mesh=device_mesh(mesh), in_specs=spec, out_specs=spec))
    shape = (mesh.n_live, case.n_elements)
    numbers = np.random.default_rng(0).integers(-8, 8, shape).astype(case.dtype)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        sums = np.asarray(run(numbers))
    is_right = np.array_equal(sums, np.broadcast_to(numbers.sum(axis=0), shape))
    return {"is_right": is_right, "n_blocks": n_blocks[0]}


if __name__ == "__main__":
    print(json.dumps(_run(Case(**json.loads(sys.argv[1])))))
