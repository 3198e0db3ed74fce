"""A schedule on a mesh, of which searches ask how long it takes in one pipeline and another."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshmend.planning.tree_formula import Pipeline
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.placement import placed
from meshmend.schedule.priority import remaining_hops
from meshmend.schedule.table import Schedule
from meshmend.simulator.network_program import Program, program_of
from meshmend.simulator.rules import Progress, Simulation, simulate
from meshmend.topology.fabric import Fabric
from meshmend.topology.mesh import Mesh


@dataclass(frozen=True, eq=False)
class Pipelined(ABC):
    """What all pipelines have in common is computed once."""

    mesh: Mesh

    @property
    @abstractmethod
    def schedule(self) -> Schedule:
        """The moves that are pipelined."""

    @cached_property
    def _program_and_remaining_hops(self) -> tuple[Program, NDArray[np.int32]]:
        schedule = self.schedule
        hazards, routes = hazards_of(schedule), placed(self.mesh, schedule).routes
        return program_of(schedule, hazards, routes), remaining_hops(schedule, hazards, routes)

    def simulated(
        self,
        fabric: Fabric,
        payload_bytes: float,
        pipeline: Pipeline,
        progress: Progress | None = None,
    ) -> Simulation:
        """Return the simulation of the schedule in a pipeline."""
        program, remaining = self._program_and_remaining_hops
        return simulate(
            program,
            fabric,
            payload_bytes=payload_bytes,
            slices=pipeline.slices,
            delay_slices=pipeline.delays(program.schedule, remaining),
            progress=progress,
        )
