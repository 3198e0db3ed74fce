"""What a coordinator is in charge of."""

from dataclasses import dataclass, field

from meshmend.membership.timing import Timing
from meshmend.topology.mesh import Mesh


@dataclass(frozen=True)
class JobSpec:
    """What a coordinator is in charge of: a job on a mesh."""

    job: str
    mesh: Mesh
    board: tuple[int, ...]
    timing: Timing = field(default_factory=Timing)
