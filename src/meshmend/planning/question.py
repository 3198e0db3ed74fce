"""A question to `auto` and to every price: which mesh, payload, fabric and collective."""

from dataclasses import dataclass

from meshmend.schedule.table import Collective
from meshmend.topology.fabric import Fabric
from meshmend.topology.mesh import Mesh


@dataclass(frozen=True)
class Question:
    """What does a collective of this payload cost on this connected mesh and fabric?"""

    mesh: Mesh
    payload_bytes: float
    fabric: Fabric
    collective: Collective = Collective.ALLREDUCE

    @property
    def n_halves(self) -> int:
        """How many halves of an allreduce the collective consists of: 1 or 2."""
        halves = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
        return 1 if self.collective in halves else 2
