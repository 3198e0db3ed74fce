"""A first answer within a fraction of a second: trees without a search, proved, and about priced.

`plan` searches for what is fastest, which takes seconds on a thousand chips. Here the trees that
suit long payloads are proved as every plan is, and their time is estimated from their first slices.
The explorer shows them until the search has ended; after a failure a job trains with them.
"""

from dataclasses import dataclass, replace
from typing import Final

from meshmend.planning.packed_trees import Trees, TreeShape
from meshmend.planning.plan import Plan, planned
from meshmend.planning.target import Target
from meshmend.planning.tree_formula import TreeFormula
from meshmend.planning.tree_search import USUAL_DELAY_HOPS_PER_HOP
from meshmend.schedule.table import Schedule
from meshmend.schedule.trees import usual_tree_count
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh
from meshmend.trees.tree_packing import tree_packing

# On more chips there are few trees, which may be deeper: 32x32 less a board near a corner takes
# 0.01 s instead of 2.6 s to pack, and other holes up to 0.16 s; 16x16x16 less a chip near a corner
# takes 0.03 s instead of 22 s. Loads are up to 11 % higher.
_FEW_CHIPS: Final = 256
_MOST_TREES: Final = 12
_MANY_CHIPS: Final = 1500
_MOST_TREES_OF_MANY: Final = 5
_DEPTH_SLACK: Final = 6
_MOST_MESSAGES: Final = 160_000  # simulated; they take about a tenth of a second


@dataclass(frozen=True, eq=False)
class QuickPlan:
    """A proved plan and about how long it takes; `is_estimate` unless all slices were simulated."""

    plan: Plan
    trees: Trees
    time_s: float
    is_estimate: bool


def quick_plan(mesh: Mesh, target: Target) -> QuickPlan:
    """Return trees for the largest connected part of a mesh: proved, but not searched for.

    Their time is that of the first slices by simulation, and of the others by formula.
    """
    trees = _quick_trees(largest_part(mesh))
    proved = planned(mesh, trees.schedule, target)
    return retargeted(QuickPlan(proved, trees, 0.0, is_estimate=True), target)


def quick_schedule(mesh: Mesh) -> Schedule:
    """Return the sum over a connected mesh that `quick_plan` proves, without proof and price."""
    return _quick_trees(mesh).schedule


def _quick_trees(part: Mesh) -> Trees:
    """Return few trees for a connected mesh, found without a search; always the same ones."""
    shape = TreeShape(usual_tree_count(part))
    if part.n_live > _FEW_CHIPS:
        most = _MOST_TREES if part.n_live <= _MANY_CHIPS else _MOST_TREES_OF_MANY
        shape = TreeShape(min(shape.n_trees, most), _DEPTH_SLACK)
    packing = tree_packing(part, n_trees=shape.n_trees, depth_slack=shape.depth_slack)
    return Trees(part, shape, packing)


def retargeted(quick: QuickPlan, target: Target) -> QuickPlan:
    """Return the same trees with their pipeline and time for another payload or fabric."""
    figures, n_ranks = quick.trees.figures, quick.trees.mesh.n_live
    formula = TreeFormula(figures, target.fabric, target.payload_bytes, n_ranks)
    pipeline = formula.pipeline(formula.best_slices(), USUAL_DELAY_HOPS_PER_HOP)
    plan = replace(quick.plan, target=target, pipeline=pipeline)
    n_simulated = min(pipeline.slices, max(1, _MOST_MESSAGES // max(1, plan.schedule.n_rows)))
    first = Target(target.payload_bytes * n_simulated / pipeline.slices, target.fabric)
    first_s = plan.in_pipeline(replace(pipeline, slices=n_simulated), first).time_s
    later_s = (pipeline.slices - n_simulated) * formula.slice_interval_s(pipeline.slices)
    return QuickPlan(plan, quick.trees, first_s + later_s, n_simulated < pipeline.slices)
