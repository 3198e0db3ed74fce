"""Compiles the kernels of the tests before they begin: two processes would compile most of them.

    python tests/helpers/compile_kernels.py

What an installation compiles comes first. The others are kernels that a job needs late or never.
A kernel that is missing here costs time and nothing else: the first test that needs it compiles it.
"""

from meshmend import plan
from meshmend.forecast.compile_engine import compile_engine
from meshmend.planning.compile_once import compile_once
from meshmend.planning.lowering import lockstep_plan
from meshmend.schedule.contributions import check_contributions
from meshmend.schedule.table import SUMS
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh
from meshmend.topology.packing_number import exact_packing_number
from meshmend.train.state.digest import load_hash
from meshmend.transport.dma_program import pack
from meshmend.trees.spread_trees import spread_trees
from meshmend.trees.tree_disjoint import disjoint_forest

_HOLE = Mesh((4, 4)).without("2x2@0,2")
_SLIT = Mesh((5, 5)).without("1x3@2,1")
_TORUS = Mesh((4, 4), wrap=(True, True))


def compile_schedules() -> None:
    """Plan what `auto` seldom takes, and price each collective next to its limit."""
    plan(_SLIT, "two-roots")
    check_contributions(plan(_TORUS, "exchange").schedule, exact=False)
    disjoint_forest(mesh_figures(_HOLE), 4, 0)
    spread_trees(_TORUS, n_trees=1, n_roots=2)
    for collective in SUMS:
        trees = plan(_HOLE, "trees", collective=collective)
        trees.predicted()
        trees.limit()
    plan(_HOLE, collective="all-to-all").limit()


def compile_lowering() -> None:
    """Lower a plan to steps, and a schedule to remote copies."""
    lockstep_plan(_HOLE)
    schedule = plan(_HOLE, "trees").schedule
    pack(schedule, schedule.n_chunks)


if __name__ == "__main__":
    compile_once()
    compile_engine()
    compile_schedules()
    compile_lowering()
    exact_packing_number(_HOLE)
    load_hash()
