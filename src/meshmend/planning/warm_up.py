"""Compiles inner loops before they are used, in parts that may run at the same time.

    python -m meshmend.planning.warm_up [simulation] [proofs] [exchange] [plans]

`simulation` and `proofs` are what most commands need, and the default. Run at the same time as a
first command, they halve the wait on two cores: each process stores the loops that it compiled for
the other. They leave out the loops that a command needs first, packing trees and deriving hazards,
because both processes would compile them at the same time. `plans` compiles the packing of trees.
`exchange` compiles hazards, what workers need to sum, and trees for larger meshes.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from meshmend.planning.plan import plan
from meshmend.schedule.algorithms import algorithm
from meshmend.schedule.contributions import check_contributions
from meshmend.schedule.hazards import NONE, Hazards, hazards_of
from meshmend.schedule.placement import Placement, channel_loads, placed
from meshmend.schedule.priority import delay_slices, remaining_hops
from meshmend.schedule.proofs import check_hops
from meshmend.schedule.table import Collective, Schedule
from meshmend.simulator.network_program import program_of
from meshmend.simulator.rules import simulate
from meshmend.topology.deadlock import check_deadlock_free
from meshmend.topology.fabric import FABRICS
from meshmend.topology.mesh import Mesh
from meshmend.topology.routes import stretch_of
from meshmend.transport.event_loop import load_event_loop
from meshmend.trees.rooted_trees import rooted_packing
from meshmend.trees.spread_trees import spread_trees
from meshmend.trees.tree_packing import gap_packing

_MESH: Final = Mesh((4, 4)).without("2x2@0,2")


def simulation() -> None:
    """Simulate a small schedule, as a plan does."""
    schedule, placement = _placed_schedule()
    hazards = _one_after_another(schedule.n_rows)
    program = program_of(schedule, hazards, placement.routes)
    delays = delay_slices(remaining_hops(schedule, hazards, placement.routes), 0.5)
    assert len(program.channel_loads) == 2, "also compiles what the search for slices uses"
    simulate(program, FABRICS["reference"], payload_bytes=1000, slices=2, delay_slices=delays)


def proofs() -> None:
    """Verify a small schedule, as a plan does."""
    schedule, placement = _placed_schedule()
    check_contributions(schedule)
    check_hops(schedule, placement)
    check_deadlock_free(_MESH, placement.routes)
    stretch_of(_MESH, placement.routes)
    channel_loads(schedule, placement.routes)


def _placed_schedule() -> tuple[Schedule, Placement]:
    schedule = algorithm("ft-two-d").build(_MESH, Collective.ALLREDUCE)
    return schedule, placed(_MESH, schedule)


def _one_after_another(n_rows: int) -> Hazards:
    """Return hazards by which each row waits for the one before it, made without compiling."""
    send = np.arange(n_rows, dtype=np.uint32) - np.uint32(1)  # the first wraps round to NONE
    write, more = np.full(n_rows, NONE), np.empty(0, dtype=np.uint32)
    for array in (send, write, more):
        array.flags.writeable = (
            False  # as in `hazards_of`; writable arrays would compile other loops
        )
    return Hazards(send, write, more)


def exchange() -> None:
    """Derive hazards, load the loop that sends and receives, fill gaps, root and spread trees."""
    hazards_of(algorithm("ft-two-d").build(Mesh((4, 4)), Collective.ALLREDUCE))
    load_event_loop()
    gap_packing(_MESH, n_trees=2, depth_slack=1, gap=0.5)
    rooted_packing(_MESH, n_trees=_MESH.n_live, both_ways=True)
    spread_trees(Mesh((4, 4), wrap=(True, True)), n_trees=2, n_roots=2)


def plans() -> None:
    """Plan for a mesh that lost a board, also short payloads, a slow link, and tiles."""
    plan(_MESH)
    plan(_MESH, payload="10KB")
    plan(_MESH.slowed("link:0,0-0,1=0.5"), payload="1KB")
    plan(_MESH, tile="2x2")


PARTS: Final[Mapping[str, Callable[[], None]]] = {
    "simulation": simulation,
    "proofs": proofs,
    "exchange": exchange,
    "plans": plans,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or ["simulation", "proofs"]:
        PARTS[name]()
