"""Proves schedules: every schedule is proved here before it is measured or run.

Knows schedules and meshes, not where a schedule comes from or what it is used for.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from meshmend.schedule.contributions import Proof, check_contributions
from meshmend.schedule.hazards import Hazards, hazards_of
from meshmend.schedule.placement import Placement, placed
from meshmend.schedule.proofs import check_hops, check_scratch, check_updates
from meshmend.schedule.table import Schedule
from meshmend.topology.deadlock import check_deadlock_free
from meshmend.topology.mesh import Mesh

Step = Callable[[str], AbstractContextManager[object]]  # is entered for each named step


@dataclass(frozen=True, eq=False)
class ProvedSchedule:
    """A schedule that was proved right on a connected mesh, and what was derived on the way."""

    schedule: Schedule
    placement: Placement
    hazards: Hazards
    proof: Proof

    @property
    def mesh(self) -> Mesh:
        """The mesh whose live chips are the ranks."""
        return self.placement.mesh


def prove(
    mesh: Mesh, schedule: Schedule, *, replicas: Sequence[int] = (), step: Step = nullcontext
) -> ProvedSchedule:
    """Return a schedule with its proof: contributions, hops, and freedom from deadlock.

    In an all-gather, `replicas` are ranks that hold at the start what the chunks' owners hold.
    Each of the steps `hazards`, `route`, `verify` and `deadlock` runs inside `step(name)`.

    Raises:
        InputError: the mesh has more or fewer live chips than the schedule has ranks.
        VerificationError: a rank ends with the wrong data, uses scratch before it is written or a
            weight before it is updated, or a hop is dead.
        DeadlockError: routes can wait for each other in a circle.
    """
    with step("hazards"):
        hazards = hazards_of(schedule)
    with step("route"):
        placement = placed(mesh, schedule)
    with step("verify"):
        proof = check_contributions(schedule, replicas=replicas)
        check_scratch(schedule)
        check_updates(schedule)
        check_hops(schedule, placement)
    with step("deadlock"):
        check_deadlock_free(mesh, placement.routes)
    return ProvedSchedule(schedule, placement, hazards, proof)


def check_probe(mesh: Mesh, schedule: Schedule) -> None:
    """Prove that the messages of a schedule cross live links and cannot deadlock.

    This is for schedules that only measure links. They deliver no sums, so there are no
    contributions to count.

    Raises:
        InputError, VerificationError, DeadlockError: as `prove` does.
    """
    placement = placed(mesh, schedule)
    check_hops(schedule, placement)
    check_deadlock_free(mesh, placement.routes)
