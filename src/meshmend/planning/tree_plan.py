"""Tree plans that follow failures: proved schedules over a packing that is carried along.

After a failure the new plan is on the critical path of the recovery. Nearly every link of
nearly every tree is still right, so the packing is repaired and not searched for anew.
"""

from dataclasses import dataclass

from meshmend.overlay.tree_packing import TreePacking, tree_packing
from meshmend.overlay.tree_repair import repacked
from meshmend.routing.deadlock import check_deadlock_free
from meshmend.schedule.hazards import Hazards, hazards_of
from meshmend.schedule.placement import Placement, placed
from meshmend.schedule.table import Collective, Schedule
from meshmend.schedule.trees import spread_tree_schedule, tree_schedule, usual_tree_count
from meshmend.topology.mesh import Mesh
from meshmend.verify.contributions import Proof, check_contributions
from meshmend.verify.hops import check_hops


@dataclass(frozen=True, eq=False)
class TreePlan:
    """A packing of a connected mesh and a proved schedule over it."""

    packing: TreePacking
    schedule: Schedule
    placement: Placement
    hazards: Hazards
    proof: Proof

    @property
    def mesh(self) -> Mesh:
        return self.placement.mesh


def tree_plan(
    mesh: Mesh,
    *,
    n_trees: int | None = None,
    depth_slack: int | None = None,
    collective: Collective = Collective.ALLREDUCE,
) -> TreePlan:
    """Return a proved plan for a connected mesh; without `n_trees` with what suits long payloads.

    Raises:
        TopologyError: the mesh is not connected, or a count is out of range.
    """
    packing = tree_packing(mesh, n_trees=n_trees or usual_tree_count(mesh), depth_slack=depth_slack)
    return proved_tree_plan(mesh, packing, collective)


def replanned(plan: TreePlan, mesh: Mesh) -> TreePlan:
    """Return a proved plan for a mesh that lost or regained chips or links since this plan.

    Raises:
        TopologyError: another shape, or a mesh that is not connected.
    """
    packing = repacked(plan.packing, plan.mesh, mesh)
    return proved_tree_plan(mesh, packing, plan.schedule.collective)


def proved_tree_plan(mesh: Mesh, packing: TreePacking, collective: Collective) -> TreePlan:
    """Return the plan over a packing: in a half every rank owns an equal chunk.

    Raises:
        ProofError: the packing is not one of this mesh.
    """
    build = tree_schedule if collective is Collective.ALLREDUCE else spread_tree_schedule
    schedule = build(packing, collective)
    placement = placed(mesh, schedule)
    proof = check_contributions(schedule)
    check_hops(schedule, placement)
    check_deadlock_free(mesh, placement.routes)
    return TreePlan(packing, schedule, placement, hazards_of(schedule), proof)
