"""`simulate` and `limit` as users call them, with a plan or a mesh.

They call `simulator/`, which times any schedule on any routes and proves what none can beat.
"""

from meshmend.errors import check_kind, hides_frames
from meshmend.planning.plan import Plan, plan
from meshmend.planning.target import Payload, Target, collective_named
from meshmend.schedule.table import Collective
from meshmend.simulator.limit import Limit
from meshmend.simulator.limit import limit as limit_of_mesh
from meshmend.simulator.rules import Simulation
from meshmend.topology.fabric import Fabric
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh


@hides_frames
def simulate(
    what: Plan | Mesh,
    payload: Payload | None = None,
    fabric: Fabric | str | None = None,
    *,
    collective: str | Collective = Collective.ALLREDUCE,
) -> Simulation:
    """Return what a plan costs, or the fastest plan of a mesh: its time and how busy the links are.

    The payload is a number of bytes or a text such as "25MB". The fabric is one of your own or the
    name of a preset. By default both are those of the plan: usually 100 MB on `reference`. A plan
    has its own collective; `collective` is for a mesh.

        >>> from meshmend import Mesh, plan, simulate
        >>> broken = Mesh((8, 8)).without("2x2@2,2")
        >>> rings = simulate(plan(broken, "ft-two-d"), "10MB")
        >>> trees = simulate(broken, "10MB")
        >>> f"{rings.time_s * 1e6:.0f} us by rings, {trees.time_s * 1e6:.0f} us by trees"
        '211 us by rings, 107 us by trees'

    Raises:
        InputError: the payload cannot be read, or the collective or the fabric is unknown.
    """
    check_kind("simulate", "a Plan or a Mesh", what, (Plan, Mesh))
    if isinstance(what, Mesh):
        what = plan(what, collective=collective, payload=payload, fabric=fabric)
    return what.predicted(payload, fabric)


@hides_frames
def limit(
    what: Plan | Mesh,
    payload: Payload | None = None,
    fabric: Fabric | str | None = None,
    *,
    collective: str | Collective = Collective.ALLREDUCE,
) -> Limit:
    """Return the least time that any schedule of a collective takes, on a mesh or for a plan.

    For a mesh that is not connected it is the limit of its largest part, as for `plan`. Payload,
    fabric and collective are as for `simulate`. On a mesh every rank owns an equal part.

        >>> from meshmend import Mesh, limit
        >>> print(limit(Mesh((8, 8)).without("2x2@2,2"), "10MB").describe()[:49])
        at least 86.3 us for 10 MB on reference, by bandw

    Raises:
        InputError: the payload cannot be read, or the collective or the fabric is unknown.
    """
    check_kind("limit", "a Plan or a Mesh", what, (Plan, Mesh))
    if isinstance(what, Plan):
        return what.limit(payload, fabric)
    target = Target().with_(payload, fabric)
    named = collective_named(collective)
    return limit_of_mesh(largest_part(what), target.fabric, target.payload_bytes, named)
