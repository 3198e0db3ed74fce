"""How long the simulator says that a schedule takes, routed as a plan would route it."""

from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.placement import placed
from meshmend.schedule.table import Schedule
from meshmend.simulator.network_program import Program, program_of
from meshmend.simulator.rules import simulate
from meshmend.topology.fabric import Fabric
from meshmend.topology.mesh import Mesh


def programmed(mesh: Mesh, schedule: Schedule) -> Program:
    """Return a schedule as the simulator runs it, on any machine and for any payload."""
    return program_of(schedule, hazards_of(schedule), placed(mesh, schedule).routes)


def program_s(program: Program, machine: Fabric, size: float, slices: int = 1) -> float:
    """Return how long a program takes for so many bytes."""
    return simulate(program, machine, payload_bytes=size, slices=slices).time_s


def time_s(mesh: Mesh, schedule: Schedule, machine: Fabric, size: float, slices: int = 1) -> float:
    """Return how long a schedule takes for so many bytes."""
    return program_s(programmed(mesh, schedule), machine, size, slices)
