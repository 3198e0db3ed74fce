"""The job that a coordinator serves."""

from dataclasses import dataclass, field

from meshmend.config import Timing
from meshmend.topology.mesh import Mesh


@dataclass(frozen=True)
class JobSpec:
    """The job that a coordinator serves: its name, mesh, board shape and timing.

    `version` is meshmend's on the coordinator's host, for those who ask.
    """

    job: str
    mesh: Mesh
    board: tuple[int, ...]
    timing: Timing = field(default_factory=Timing)
    version: str = ""
