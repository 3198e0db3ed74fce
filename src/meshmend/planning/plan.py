"""A plan: a schedule for a broken mesh, placed, analysed and proved.

`plan(mesh)` builds one; nothing is returned that was not proved right and free of deadlock.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError, PlanFileError, UnsupportedError
from meshmend.execute import reference
from meshmend.planning.choose import choose, chosen_schedule
from meshmend.planning.files import read_plan, write_plan
from meshmend.planning.progress import ProgressCallback, ProgressShares, no_progress
from meshmend.planning.tree_formula import Pipeline
from meshmend.routing.deadlock import check_deadlock_free
from meshmend.routing.stretch import stretch_of
from meshmend.schedule.algorithms import ALGORITHMS, algorithm
from meshmend.schedule.hazards import Hazards, hazards_of
from meshmend.schedule.placement import Placement, channel_loads, placed
from meshmend.schedule.table import Collective, Schedule
from meshmend.topology.fabric import FABRICS, Fabric
from meshmend.topology.failures import Chip
from meshmend.topology.graph import largest_part, stranded
from meshmend.topology.mesh import Mesh
from meshmend.verify.contributions import Proof, check_contributions
from meshmend.verify.hops import check_hops

AUTO = "auto"
TYPICAL_PAYLOAD_BYTES = 100e6  # gradients of a ResNet-50 in 32 bits
_N_STEPS = 5  # of a plan: build or read, hazards, route, verify, deadlock


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """A schedule that was proved right on the connected part of a mesh.

    `mesh` is what was asked for; `stranded` names its live chips that are cut off and take no
    part; ranks are the chips of `placement.mesh`. `seconds` says how long each step took, and
    `pipeline` in how many slices `auto` would run it.
    """

    mesh: Mesh
    stranded: tuple[Chip, ...]
    schedule: Schedule
    placement: Placement
    hazards: Hazards
    proof: Proof
    seconds: dict[str, float] = field(default_factory=dict)
    pipeline: Pipeline | None = None

    def __repr__(self) -> str:
        return f"<Plan for {self.mesh}: {self.schedule!r}, proved {self.proof.method}>"

    def run(self, arrays: Sequence[NDArray[Any]], *, combine: np.ufunc = np.add) -> list[Any]:
        """Return what each rank holds after the collective, computed in this process."""
        return reference.run(self.schedule, arrays, combine=combine)

    def save(self, path: str | Path) -> None:
        """Write the plan as a file that `load_plan` and `meshmend verify` read back."""
        write_plan(Path(path), self.mesh, self.schedule, self.pipeline)

    @cached_property
    def channel_loads(self) -> NDArray[np.float64]:
        """What each directed link carries as a fraction of the payload."""
        return channel_loads(self.schedule, self.placement.routes)

    def summary(self) -> dict[str, Any]:
        """Return the figures of the plan as a JSON value."""
        routes = self.placement.routes
        stretch = stretch_of(self.placement.mesh, routes)
        return {
            "mesh": mesh_summary(self.mesh, self.stranded),
            "algorithm": self.schedule.algorithm,
            "collective": str(self.schedule.collective),
            "ranks": self.schedule.n_ranks,
            "rows": self.schedule.n_rows,
            "chunks": self.schedule.n_chunks,
            "verified": True,
            "proof": self.proof.method,
            "error_probability": self.proof.error_probability,
            "deadlock_free": True,
            "virtual_channels": routes.n_virtual_channels,
            "max_hops": routes.max_hops,
            "max_stretch": stretch.max,
            "max_link_load": float(self.channel_loads.max(initial=0.0)),
            "slices": self.pipeline and self.pipeline.slices,
            "skew": self.pipeline and self.pipeline.skew,
            "seconds": self.seconds,
        }


def mesh_summary(mesh: Mesh, cut_off: Sequence[Chip]) -> dict[str, Any]:
    """Return a mesh's figures as a JSON value; `links` counts live links, each once."""
    return {
        "shape": list(mesh.shape),
        "wrap": list(mesh.wrap),
        "live": mesh.n_live,
        "failed": len(mesh.failed),
        "links": len(mesh.links),
        "stranded": [list(chip) for chip in cut_off],
    }


def plan(
    mesh: Mesh,
    algorithm: str = AUTO,
    *,
    collective: str | Collective = Collective.ALLREDUCE,
    payload_bytes: float = TYPICAL_PAYLOAD_BYTES,
    fabric: Fabric = FABRICS["reference"],
    cache_dir: Path | None = None,
    progress: ProgressCallback = no_progress,
) -> Plan:
    """Return a proved plan for the largest connected part of a mesh.

    `auto` takes the algorithm that is fastest for this payload on this fabric; what it found is
    kept in `cache_dir`, if given. `progress` is told each step as it begins.

    Raises:
        InputError: an unknown algorithm or collective, or a mesh that the algorithm does not do;
            the message then names one that will.
    """
    wanted = _collective(collective)
    halves = ProgressShares(progress, 2)
    steps = _Steps(halves.of(1) if algorithm == AUTO else progress)
    part = largest_part(mesh)
    pipeline = None
    if algorithm == AUTO:
        with steps.timed("choose"):
            choice = choose(part, fabric, payload_bytes, cache_dir=cache_dir, progress=halves.of(0))
        with steps.timed("build"):
            schedule, pipeline = chosen_schedule(part, choice, wanted), choice.pipeline
    else:
        with steps.timed("build"):
            schedule = _built(part, algorithm, wanted)
    return replace(_proved(mesh, part, schedule, steps), pipeline=pipeline)


def load_plan(
    path: str | Path, *, mesh: Mesh | None = None, progress: ProgressCallback = no_progress
) -> Plan:
    """Return the plan of a file, proved anew; given a mesh, it must be the plan's own.

    Raises:
        PlanFileError: a file that cannot be read, or that is for another mesh.
        ProofError: the plan is wrong.
    """
    steps = _Steps(progress)
    with steps.timed("read"):
        own, schedule, pipeline = read_plan(Path(path))
    if mesh is not None and mesh != own:
        raise PlanFileError(f"{path} is a plan for the mesh {own}, but got {mesh}; plan again")
    part = largest_part(own)
    if part.n_live != schedule.n_ranks:
        raise PlanFileError(
            f"{path} is damaged: it has {schedule.n_ranks} ranks, but its mesh {own} has "
            f"{part.n_live} connected live chips"
        )
    return replace(_proved(own, part, schedule, steps), pipeline=pipeline)


def supported(mesh: Mesh) -> Iterator[str]:
    """Yield the names of the algorithms that do a connected mesh, in the order to prefer."""
    for candidate in ALGORITHMS.values():
        try:
            candidate.check(mesh)
        except UnsupportedError:
            continue
        yield candidate.name


def _built(part: Mesh, name: str, collective: Collective) -> Schedule:
    try:
        return algorithm(name).build(part, collective)
    except UnsupportedError as error:
        other = next(supported(part))
        raise UnsupportedError(f"{error}; '{other}' will do it") from None


def _proved(mesh: Mesh, part: Mesh, schedule: Schedule, steps: "_Steps") -> Plan:
    with steps.timed("hazards"):
        hazards = hazards_of(schedule)
    with steps.timed("route"):
        placement = placed(part, schedule)
    with steps.timed("verify"):
        proof = check_contributions(schedule)
        check_hops(schedule, placement)
    with steps.timed("deadlock"):
        check_deadlock_free(part, placement.routes)
    return Plan(mesh, stranded(mesh), schedule, placement, hazards, proof, steps.seconds)


def _collective(name: str | Collective) -> Collective:
    try:
        return Collective(name)
    except ValueError:
        raise InputError(
            f"there is no collective {name!r}; choose one of {', '.join(Collective)}"
        ) from None


class _Steps:
    """Names each step to whoever listens, and keeps how long it took."""

    def __init__(self, progress: ProgressCallback) -> None:
        self.seconds: dict[str, float] = {}
        self._tell = progress

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        self._tell(step, len(self.seconds) / _N_STEPS)
        start = time.perf_counter()
        yield
        self.seconds[step] = time.perf_counter() - start
