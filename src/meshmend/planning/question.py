"""A question to `auto` and to every price: which mesh, payload, fabric and collective."""

from dataclasses import asdict, dataclass
from typing import Final

from meshmend.planning.cache import Key
from meshmend.schedule.table import Collective
from meshmend.topology.fabric import Fabric
from meshmend.topology.mesh import Mesh

SEARCH_VERSION: Final = 14  # answers that another version of the search found are not read
_FOR_THE_READER: Final = ("name", "source", "usual_mesh")  # of a fabric


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

    @property
    def key(self) -> Key:
        """What a cache knows the question by: the same for equal meshes, figures and payloads."""
        figures = {
            name: value
            for name, value in asdict(self.fabric).items()
            if name not in _FOR_THE_READER
        }
        return (SEARCH_VERSION, str(self.mesh), figures, self.payload_bytes, self.collective)
