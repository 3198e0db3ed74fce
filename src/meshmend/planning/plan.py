"""A plan: a schedule for a broken mesh, placed, analysed and proved.

`plan(mesh)` builds one; every plan it returns was proved right and free of deadlock.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError, PlanFileError, UnsupportedError, check_kind, hides_frames
from meshmend.planning.choose import choose, choose_trees, chosen_schedule
from meshmend.planning.colour_search import fastest_colours
from meshmend.planning.files import PlanFile, read_plan, write_plan
from meshmend.planning.packed_trees import with_equal_links
from meshmend.planning.pricing import supported_names
from meshmend.planning.progress import ProgressCallback, ProgressShares, no_progress
from meshmend.planning.proof import prove
from meshmend.planning.target import Payload, Question, Target, collective_named
from meshmend.planning.tree_formula import Pipeline
from meshmend.schedule.algorithms import algorithm
from meshmend.schedule.contributions import Proof
from meshmend.schedule.hazards import Hazards
from meshmend.schedule.placement import Placement, channel_loads, placed
from meshmend.schedule.priority import remaining_hops
from meshmend.schedule.table import Collective, Schedule
from meshmend.simulator.colour_limit import colour_limit
from meshmend.simulator.limit import Limit, limit
from meshmend.simulator.network_program import program_of
from meshmend.simulator.rules import Simulation, simulate
from meshmend.simulator.slices import best_slices
from meshmend.topology.fabric import Fabric
from meshmend.topology.failures import Chip, format_shape
from meshmend.topology.graph import largest_part, stranded
from meshmend.topology.mesh import Mesh
from meshmend.topology.routes import stretch_of
from meshmend.topology.tiles import Tiling
from meshmend.transport import reference

AUTO = "auto"
_FEW_MESSAGES = 1 << 17  # to simulate them and compute the limit takes about 20 ms
_N_STEPS = 5  # of a plan: build or read, hazards, route, verify, deadlock


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """A schedule that was proved right on the connected part of a mesh.

    `mesh` is the mesh that the caller gave; `stranded` names its live chips that are cut off and
    take no part; ranks are the chips of `placement.mesh`. `target` is the payload and the fabric
    that the plan was made for, `pipeline` how `auto` would run it there. A plan for tiles has its
    `tiling`: then the payload is that of a whole tile. `seconds` says how long each step took.
    """

    mesh: Mesh
    stranded: tuple[Chip, ...]
    schedule: Schedule
    placement: Placement
    hazards: Hazards
    proof: Proof
    target: Target
    pipeline: Pipeline | None = None
    tiling: Tiling | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        what = f"{self.schedule.algorithm} {self.schedule.collective}"
        return (
            f"<Plan for {self.mesh}: {what} over {self.schedule.n_ranks} ranks, proved "
            f"{self.proof.method}>"
        )

    def run(self, arrays: Sequence[NDArray[Any]], *, combine: np.ufunc = np.add) -> list[Any]:
        """Return what each rank holds after the collective, computed in this process.

        In a plan for tiles a rank's array is the part of its colour, the same length for all; a
        spare's is not read, and comes back as it was.
        """
        if self.tiling is None:
            return reference.run(self.schedule, arrays, combine=combine)
        return reference.run_colours(self.schedule, arrays, combine=combine)

    def save(self, path: str | Path) -> None:
        """Write the plan as a file that `load_plan` and `meshmend verify` read back."""
        file = PlanFile(self.mesh, self.schedule, self.pipeline, self.target, self.tiling)
        write_plan(Path(path), *file)

    def predicted(
        self, payload: Payload | None = None, fabric: Fabric | str | None = None
    ) -> Simulation:
        """Return what this plan costs by simulation: for its own payload and fabric, or for others.

        For a payload and fabric that `auto` chose the plan for, it runs in the pipeline of that
        choice, otherwise in the number of slices that is fastest.

            >>> plan(Mesh((4, 4)), "ring-1d").predicted("25MB", "tpu-v3").slices
            2

        Raises:
            InputError: the payload cannot be read, or the fabric is unknown.
        """
        target = self.target.with_(payload, fabric)
        return self._own_prediction if target == self.target else self._simulated(target, None)

    def limit(self, payload: Payload | None = None, fabric: Fabric | str | None = None) -> Limit:
        """Return the least time that any schedule of its collective takes on the plan's chips.

        Where ranks own parts of the payload, they own what they own in this plan.

            >>> mended = plan(Mesh((8, 8)).without("2x2@2,2"), payload="10MB")
            >>> print(f"{mended.predicted().time_s / mended.limit().time_s:.2f} times the limit")
            1.24 times the limit

        Raises:
            InputError: the payload cannot be read, or the fabric is unknown.
        """
        target, shares = self.target.with_(payload, fabric), self.schedule.shares
        if self.tiling is not None:
            return colour_limit(self.tiling, target.fabric, target.payload_bytes)
        return limit(
            self.placement.mesh,
            target.fabric,
            target.payload_bytes,
            self.schedule.collective,
            shares=None if np.allclose(shares, shares[0]) else shares,
        )

    @cached_property
    def _own_prediction(self) -> Simulation:
        return self._simulated(self.target, self.pipeline)

    def _simulated(self, target: Target, pipeline: Pipeline | None) -> Simulation:
        if pipeline is not None:
            return self.in_pipeline(pipeline, target)
        program = program_of(self.schedule, self.hazards, self.placement.routes)
        return best_slices(program, target.fabric, payload_bytes=target.payload_bytes)

    def in_pipeline(
        self, pipeline: Pipeline, target: Target | None = None, *, trace: bool = False
    ) -> Simulation:
        """Return the simulation of this plan in a pipeline, on its own target unless given."""
        target, routes = target or self.target, self.placement.routes
        return simulate(
            program_of(self.schedule, self.hazards, routes),
            target.fabric,
            payload_bytes=target.payload_bytes,
            slices=pipeline.slices,
            delay_slices=pipeline.delays(
                self.schedule, remaining_hops(self.schedule, self.hazards, routes)
            ),
            trace=trace,
        )

    @cached_property
    def channel_loads(self) -> NDArray[np.float64]:
        """What each directed link carries as a fraction of the payload."""
        return channel_loads(self.schedule, self.placement.routes)

    def summary(self) -> dict[str, Any]:
        """Return the figures of the plan as a JSON value.

        The predicted time is None if its simulation would take long.
        """
        routes = self.placement.routes
        stretch = stretch_of(self.placement.mesh, routes)
        return {
            "mesh": mesh_summary(self.mesh, self.stranded),
            **({} if self.tiling is None else {"tiling": tiling_summary(self.tiling)}),
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
            "payload_bytes": self.target.payload_bytes,
            "fabric": self.target.fabric.name,
            **self._predicted_figures(),
            "seconds": self.seconds,
        }

    def _predicted_figures(self) -> dict[str, float | None]:
        predicted_s = limit_s = bandwidth_limit_s = None
        if self.pipeline and self.pipeline.slices * self.schedule.n_rows <= _FEW_MESSAGES:
            predicted_s, bound = self.predicted().time_s, self.limit()
            limit_s, bandwidth_limit_s = bound.time_s, bound.bandwidth_s
        return {
            "predicted_s": predicted_s,
            "limit_s": limit_s,
            "bandwidth_limit_s": bandwidth_limit_s,
        }


def mesh_summary(mesh: Mesh, cut_off: Sequence[Chip]) -> dict[str, Any]:
    """Return a mesh's figures as a JSON value; `links` counts live links, each once."""
    return {
        "shape": [int(size) for size in mesh.shape],
        "wrap": list(mesh.wrap),
        "live": mesh.n_live,
        "failed": len(mesh.failed),
        "links": len(mesh.links),
        "stranded": [list(chip) for chip in cut_off],
    }


def tiling_summary(tiling: Tiling) -> dict[str, Any]:
    """Return a tiling's figures as a JSON value; `most` is whether no tiling has more tiles."""
    return {
        "tile": format_shape(tiling.shape),
        "tiles": tiling.n_tiles,
        "colours": tiling.n_colours,
        "spares": [list(chip) for chip in tiling.spares],
        "most": tiling.is_most,
    }


@hides_frames
def plan(
    mesh: Mesh,
    algorithm: str = AUTO,
    *,
    tile: str | Tiling | None = None,
    collective: str | Collective = Collective.ALLREDUCE,
    payload: Payload | None = None,
    fabric: Fabric | str | None = None,
    cache_dir: str | Path | None = None,
    progress: ProgressCallback = no_progress,
) -> Plan:
    """Return a proved plan for the largest connected part of a mesh.

    `auto` takes the algorithm that is fastest for the payload on the fabric. The payload is in
    bytes or a text such as "25MB"; by default 100 MB. The fabric is one of your own or the name of
    a preset; by default `reference`. The choice is kept in `cache_dir`, if given. `progress` is
    called when a step begins.

        >>> plan(Mesh((4, 4)).without("2x2@0,2"), payload="25MB", fabric="tpu-v3")
        <Plan for 4x4 less 2x2@0,2: trees allreduce over 12 ranks, proved exact>

    With a `tile` such as "2x2" each tile of the mesh holds the payload together, every chip the
    part of its colour, and chips sum with those of their colour, all colours at once. The tile may
    also be a tiling of the mesh (`Tiling.after`).

        >>> plan(Mesh((4, 4)).without("2x2@0,2"), tile="2x2")
        <Plan for 4x4 less 2x2@0,2: colours allreduce over 12 ranks, proved exact>

    Raises:
        InputError: the algorithm, collective or fabric is unknown, or the payload cannot be read.
        TopologyError: the tile cannot be read, or none fits.
        UnsupportedError: the algorithm does not support the mesh; the message names another.
    """
    check_kind("plan", "a Mesh such as Mesh((4, 4))", mesh, Mesh)
    collective = collective_named(collective)
    target = Target().with_(payload, fabric)
    tiling = None if tile is None else _tiling(mesh, tile)
    if tiling is not None and tiling.n_colours > 1:
        return _colour_plan(mesh, tiling, algorithm, collective, target, progress)
    halves = ProgressShares(progress, 2)
    steps = _Steps(halves.of(1) if algorithm == AUTO else progress)
    part = largest_part(mesh)
    pipeline = None
    if algorithm == AUTO:
        with steps.timed("choose"):
            question = Question(part, target.payload_bytes, target.fabric, collective)
            kept_in = None if cache_dir is None else Path(cache_dir)
            choice = choose(question, cache_dir=kept_in, progress=halves.of(0))
        with steps.timed("build"):
            schedule, pipeline = chosen_schedule(part, choice, collective), choice.pipeline
    else:
        with steps.timed("build"):
            schedule = _built(part, algorithm, collective)
    return _proved(PlanFile(mesh, schedule, pipeline, target), part, steps)


def _tiling(mesh: Mesh, tile: str | Tiling) -> Tiling:
    if isinstance(tile, str):
        return mesh.tiles(tile)
    check_kind("plan", "a tile such as '2x2', or a Tiling", tile, Tiling)
    if tile.mesh != largest_part(mesh):
        raise InputError(
            f"a plan for {mesh} needs a tiling of it, but got one of {tile.mesh}; use "
            "tiling.after(mesh)"
        )
    return tile


def _colour_plan(
    mesh: Mesh,
    tiling: Tiling,
    algorithm: str,
    collective: Collective,
    target: Target,
    progress: ProgressCallback,
) -> Plan:
    if algorithm != AUTO or collective is not Collective.ALLREDUCE:
        raise InputError(
            f"a plan for tiles is an allreduce by 'auto', but got {collective} by {algorithm!r}; "
            "leave out the tile, or the algorithm and the collective"
        )
    steps = _Steps(progress)
    with steps.timed("choose"):
        packed, pipeline = fastest_colours(tiling, target.fabric, target.payload_bytes)
    with steps.timed("build"):
        schedule = packed.schedule
    return _proved(PlanFile(mesh, schedule, pipeline, target, tiling), tiling.mesh, steps)


def fastest_trees(
    mesh: Mesh,
    *,
    payload: Payload | None = None,
    fabric: Fabric | str | None = None,
    progress: ProgressCallback = no_progress,
) -> Plan:
    """Return a proved plan of the trees that are fastest for a payload on a fabric.

    These are the trees that `simulate` prices; `plan` takes trees that suit long payloads, because
    it is called while a job waits.

    Raises:
        InputError: the fabric is unknown, or the payload cannot be read.
    """
    target, part = Target().with_(payload, fabric), largest_part(mesh)
    halves = ProgressShares(progress, 2)
    steps = _Steps(halves.of(1))
    with steps.timed("choose"):
        question = Question(part, target.payload_bytes, target.fabric)
        choice = choose_trees(question, progress=halves.of(0))
    with steps.timed("build"):
        schedule = chosen_schedule(part, choice, Collective.ALLREDUCE)
    return _proved(PlanFile(mesh, schedule, choice.pipeline, target), part, steps)


def equal_links_plan(mesh: Mesh, *, payload: Payload | None = None) -> Plan:
    """Return the plan that `auto` makes if it does not know how fast links are.

    It is for comparison: its predicted time is that on the links as they are.

        >>> slow = Mesh((4, 4)).slowed("link:0,0-0,1=0.25")
        >>> equal_links_plan(slow).predicted().time_s > 2 * plan(slow).predicted().time_s
        True

    Raises:
        InputError: the payload cannot be read.
    """
    made = plan(with_equal_links(mesh), payload=payload)
    return replace(made, mesh=mesh, placement=placed(largest_part(mesh), made.schedule))


def planned(mesh: Mesh, schedule: Schedule, target: Target) -> Plan:
    """Return a schedule of your own for the largest connected part of a mesh as a plan, proved.

    Raises:
        ProofError: the schedule is wrong.
    """
    file = PlanFile(mesh, schedule, None, target)
    return _proved(file, largest_part(mesh), _Steps(no_progress))


@hides_frames
def load_plan(
    path: str | Path, *, mesh: Mesh | None = None, progress: ProgressCallback = no_progress
) -> Plan:
    """Return the plan of a file, proved again; if `mesh` is given, it must be the plan's mesh.

        >>> plan(Mesh((2, 2)), "ring-1d").save("plan.json")
        >>> load_plan("plan.json").proof.method
        'exact'

    Raises:
        PlanFileError: the file cannot be read, or is for another mesh.
        ProofError: the plan is wrong.
    """
    check_kind("load_plan", "the path of a plan file", path, (str, os.PathLike))
    check_kind("load_plan", "a Mesh such as Mesh((4, 4))", mesh, (Mesh, NoneType))
    steps = _Steps(progress)
    with steps.timed("read"):
        file = read_plan(Path(path))
    if mesh is not None and mesh != file.mesh:
        raise PlanFileError(
            f"{path} is a plan for the mesh {file.mesh}, but got {mesh}; plan again"
        )
    part = largest_part(file.mesh)
    if part.n_live != file.schedule.n_ranks:
        raise PlanFileError(
            f"{path} is damaged: it has {file.schedule.n_ranks} ranks, but its mesh {file.mesh} "
            f"has {part.n_live} connected live chips"
        )
    return _proved(file, part, steps)


def _built(part: Mesh, name: str, collective: Collective) -> Schedule:
    try:
        return algorithm(name).build(part, collective)
    except UnsupportedError as error:
        other = next(supported_names(part, collective))
        raise UnsupportedError(f"{error}; use '{other}'") from None


def _proved(file: PlanFile, part: Mesh, steps: "_Steps") -> Plan:
    proved = prove(part, file.schedule, step=steps.timed)
    return Plan(
        mesh=file.mesh,
        stranded=stranded(file.mesh),
        schedule=file.schedule,
        placement=proved.placement,
        hazards=proved.hazards,
        proof=proved.proof,
        target=file.target,
        pipeline=file.pipeline,
        tiling=file.tiling,
        seconds=steps.seconds,
    )


class _Steps:
    """Reports each step when it begins, and records how long it took."""

    def __init__(self, progress: ProgressCallback) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        self._progress(step, len(self.seconds) / _N_STEPS)
        start = time.perf_counter()
        yield
        self.seconds[step] = time.perf_counter() - start
