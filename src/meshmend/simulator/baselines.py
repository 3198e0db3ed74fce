"""Baselines for a broken mesh: an algorithm for intact meshes, run on an intact part.

The chips of the part hold the payload; other live chips may forward. The result is a schedule of
the broken mesh like any other, so its cost can be compared.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from meshmend.schedule.algorithms import algorithm
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.placement import placed
from meshmend.schedule.table import Collective, Schedule, index_dtype
from meshmend.simulator.network_program import Program, program_of
from meshmend.topology.mesh import Mesh
from meshmend.topology.submesh import IntactPart


def on_ranks(schedule: Schedule, ranks: NDArray[np.int32], n_ranks: int) -> Schedule:
    """Return a schedule whose rank i is rank `ranks[i]` of n_ranks; the others take no part."""
    dtype = index_dtype(n_ranks * schedule.n_buffers, schedule.n_chunks)
    return replace(
        schedule,
        n_ranks=n_ranks,
        owners=ranks[schedule.owners],
        src=ranks[schedule.src].astype(dtype),
        dst=ranks[schedule.dst].astype(dtype),
        lo=schedule.lo.astype(dtype),
        hi=schedule.hi.astype(dtype),
    )


def program_on_part(part: IntactPart, mesh: Mesh, name: str, collective: Collective) -> Program:
    """Return an algorithm for a part's chips, on routes over the live chips of the whole mesh.

    Raises:
        UnsupportedError: the algorithm does not support the part's shape.
    """
    schedule = on_ranks(algorithm(name).build(part.mesh, collective), part.ranks, mesh.n_live)
    return program_of(schedule, hazards_of(schedule), placed(mesh, schedule).routes)
