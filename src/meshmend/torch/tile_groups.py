"""Replicas of several chips: `tiles("2x2")` is a DeviceMesh whose sums between tiles share a plan.

    dist.init_process_group("meshmend")
    mesh = meshmend.torch.tiles("2x2")  # axes: "replicate", "shard"
    fully_shard(model, mesh=mesh)

Inside a tile, along "shard", a group is one of connected chips like any other. Along "replicate"
are the twins, one chip of each tile, which hold the same part of the model. They are not
neighbours: between them are chips of other colours. So one table holds the sums of all colours, and
each rank's call runs all that the table asks of this rank: its own sum, and what it forwards for
others. It ends when both are done, so a rank may leave after its last call.

That asks more than c10d does: **every rank of the mesh calls the sum over "replicate", in the same
order, with tensors of one size and type**, as FSDP does. Ranks that differ are told so by the
transport. Short tensors, such as a loss, go to Gloo, which asks for a call of the twins alone.
"""

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from meshmend.config import COORDINATOR
from meshmend.errors import InputError, MeshmendError, MismatchError, StalledError, StoppedError
from meshmend.planning.catalogue import (
    QUICK,
    Catalogue,
    CollectiveCall,
    fabric_in,
    is_remembered,
    payload_class,
    proved_schedule,
)
from meshmend.planning.files import PlanFile, decode_plan, encode_plan
from meshmend.planning.plan import plan
from meshmend.planning.plan_cache import load_plans, planned_calls
from meshmend.planning.plan_request import SumSizes, tile_sum
from meshmend.planning.proof import prove
from meshmend.planning.settings import Settings
from meshmend.planning.target import Target
from meshmend.schedule.hazards import Hazards
from meshmend.schedule.table import Schedule
from meshmend.topology.failures import format_chip, format_shape
from meshmend.topology.figures import mesh_figures
from meshmend.topology.text import parse_tile
from meshmend.topology.tiles import Tiling, box_tiling
from meshmend.torch.call_arguments import c10d, dist, dtype_name, op_name, options_of
from meshmend.torch.group import MeshmendGroup, Tensors, untraced
from meshmend.torch.progress_thread import Rest
from meshmend.torch.transports import TensorTransport, transport_of
from meshmend.torch.versions import forget_meshes
from meshmend.transport.tasks import RankProgram, rank_program
from meshmend.units import counted, some

_log = logging.getLogger("meshmend.torch")

REPLICATE: Final = "replicate"
SHORT_BYTES: Final = 4096  # up to here a sum between tiles is Gloo's
_LONG_S: Final = 20.0  # that a sum waits before a line says what it may wait for
_TELL_AFTER_S: Final = 0.5
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1  # between two looks for a plan
_WHAT_IT_NEEDS: Final = (
    "every rank of the mesh must call it, in the same order, with tensors of one size and type"
)


def tiles(
    tile: str, axes: Sequence[str] = (REPLICATE, "shard"), *, spares: bool = False
) -> DeviceMesh:
    """Return the tiles of the job's mesh as a DeviceMesh; every rank calls this.

    The first axis goes from tile to tile, the others lie inside a tile: one for all of its chips,
    or one for each axis of the tile, such as ("replicate", "shard", "tensor") for "2x2".

    Chips in no tile are refused, unless `spares` is true. Then their ranks get a mesh in which they
    have no coordinate (`mesh.get_coordinate() is None`), and take no part.

    In a job of `meshmend run --elastic`, `reconfigure(build=..., tile="2x2")` lays the tiles anew
    when chips die or come back, and `build` calls this for those of the present generation.

    Raises:
        InputError: there is no process group of ours, the axes do not fit, or a chip is in no tile.
        TopologyError: the tile cannot be read, or none fits.
    """
    world = _world(tile)
    tiling = _tiling(world, tile, may_have_spares=spares)
    names, shape = tuple(axes), _shape_inside(tiling, axes)
    rank_of = world.settings.mesh.rank_of
    ranks = np.array([[rank_of[chip] for chip in chips] for chips in tiling.tiles])
    ranks = ranks.reshape(tiling.n_tiles, *shape)
    number, device_type = len(world.meshes), world.device_type
    here = np.argwhere(ranks == dist.get_rank())
    if not len(here):
        world.meshes.append(
            DeviceMesh(device_type, torch.tensor(ranks), mesh_dim_names=names, _init_backend=False)
        )
        return world.meshes[-1]
    sums = None
    if tiling.n_tiles > 1 and tiling.n_colours > 1:
        sums = ColourSums.of(tiling, world, f"meshmend-tiles-{number}")
    groups = []
    for axis, name in enumerate(names):
        line = ranks[tuple(slice(None) if at == axis else i for at, i in enumerate(here[0]))]
        groups.append(
            dist.new_group(
                line.tolist(),
                pg_options=sums if axis == 0 else None,
                use_local_synchronization=True,
                group_desc=f"tiles-{number}-{name}",
                sort_ranks=False,
            )
        )
    _note_place(names, ranks)
    world.meshes.append(
        DeviceMesh.from_group(groups, device_type, mesh=torch.tensor(ranks), mesh_dim_names=names)
    )
    return world.meshes[-1]


_place_in: dict[tuple[object, ...], int] = {}  # this chip's, in each mesh of tiles that it was in


def _note_place(names: tuple[str, ...], ranks: NDArray[np.int64]) -> None:
    """Let `DTensor` forget its meshes if this chip comes into a known one at another place.

    Two generations may have meshes of the same ranks, which are one to PyTorch, though a chip has
    another rank. `DTensor` would go on with the mesh that it has kept, and that chip would take
    itself for the chip that it was.
    """
    mesh = (names, ranks.shape, ranks.tobytes())
    if _place_in.setdefault(mesh, dist.get_rank()) != dist.get_rank():
        forget_meshes()
        _place_in.clear()
        _place_in[mesh] = dist.get_rank()


def _tiling(world: MeshmendGroup, tile: str, *, may_have_spares: bool) -> Tiling:
    if world.tile is not None:  # the coordinator knows them as boxes, and spares wait there
        return box_tiling(world.settings.mesh, world.tile)
    return _without_spares(world.settings.mesh.tiles(tile), may_be=may_have_spares)


def _world(tile: str) -> MeshmendGroup:
    world = dist.group.WORLD if dist.is_initialized() else None
    if not isinstance(world, MeshmendGroup):
        what = "there is none" if world is None else f"it is {dist.get_backend()}"
        raise InputError(
            f"tiles needs a default process group of the backend meshmend, but {what}; call "
            'dist.init_process_group("meshmend") first'
        )
    if world.supports_reconfigure:
        raise InputError(
            "tiles needs a process group that stays as it is, but this one can be made again on "
            "other chips; leave out enable_reconfigure"
        )
    if COORDINATOR.value_in(os.environ) and world.tile != parse_tile(tile):
        raise InputError(
            f"tiles of {tile} in a job of meshmend run --elastic need a generation with such "
            f"tiles; call tiles in build, with reconfigure(build=build, tile={tile!r})"
        )
    return world


def _shape_inside(tiling: Tiling, axes: Sequence[str]) -> tuple[int, ...]:
    """Return how the chips of a tile are laid out along the axes that lie inside it."""
    if len(axes) == 2:
        return (tiling.n_colours,)
    if len(axes) == 1 + len(tiling.shape):
        return tiling.shape
    raise InputError(
        f"tiles of {format_shape(tiling.shape)} need 2 axes, or {1 + len(tiling.shape)}: one from "
        f"tile to tile and one for each axis of the tile, but got {list(axes)}"
    )


def _without_spares(tiling: Tiling, *, may_be: bool) -> Tiling:
    """Return a tiling of the chips in tiles alone: a spare that makes no call forwards nothing."""
    left = tiling.spares
    if not left:
        return tiling
    name = format_shape(tiling.shape)
    if not may_be:
        spares = [format_chip(chip) for chip in left]
        raise InputError(
            f"tiles of {name} leave {counted(len(left), 'chip')} of {tiling.mesh} in no tile: "
            f"{some(spares, between='; ')}; take another tile, or pass spares=True and end the "
            "ranks whose mesh.get_coordinate() is None"
        )
    mesh = dataclasses.replace(tiling.mesh, failed=tiling.mesh.failed | set(left))
    if not mesh_figures(mesh).is_connected:
        raise InputError(
            f"tiles of {name} on {tiling.mesh} are connected by spares alone, which take no part; "
            "take another tile"
        )
    return Tiling(mesh, tiling.shape, tiling.tiles, tiling.is_most)


@dataclasses.dataclass(frozen=True, eq=False)
class ColourSums:
    """What a rank needs to take part in the sums of all colours: its place, plans and messages.

    It is the `pg_options` with which `new_group` makes the group of this rank's twins.
    """

    colour: int
    settings: Settings
    tiling: Tiling
    transport: TensorTransport
    catalogue: "_ColourCatalogue"
    short_bytes: int = SHORT_BYTES

    @classmethod
    def of(cls, tiling: Tiling, world: MeshmendGroup, name: str) -> "ColourSums":
        """Return those of this rank; all ranks in tiles call this at the same time."""
        mesh = tiling.mesh
        rank = mesh.rank_of[world.settings.mesh.live[dist.get_rank()]]
        settings = replace(world.settings, mesh=mesh)
        store = dist.PrefixStore(name, c10d._get_default_store())
        return cls(
            colour=int(tiling.colour_of[rank]),
            settings=settings,
            tiling=tiling,
            transport=transport_of(settings, mesh.live, store, rank, world.options._timeout),
            catalogue=_ColourCatalogue(tiling, settings, store, rank, world),
            # Who waits in Gloo cannot be told that the mesh has changed.
            short_bytes=SHORT_BYTES if world.tile is None else 0,
        )


class _ColourCatalogue(Catalogue):
    """The tasks of one rank in the sums of all colours; the first rank plans for all."""

    def __init__(
        self, tiling: Tiling, settings: Settings, store: Any, rank: int, world: MeshmendGroup
    ) -> None:
        super().__init__(tiling.mesh, settings.planned_algorithm, settings.slices, rank)
        self._tiling, self._store, self._timeout = tiling, store, world.options._timeout
        self._is_elastic, self._plans = world.tile is not None, world.plans
        self.is_interrupted = False

    @property
    def sum_sizes(self) -> SumSizes:
        """The sums between tiles that have had a plan."""
        return tuple(tile_sum(n_bytes, self._tiling.shape) for _, n_bytes in self._programs)

    def algorithm(self, kind: CollectiveCall, n_bytes: int) -> str:
        """Return the name without a plan: a rank that is profiled must not ask for one alone."""
        return "colours"

    def _program(self, kind: CollectiveCall, n_bytes: int) -> RankProgram:
        class_bytes = payload_class(kind, n_bytes)
        key = (kind, class_bytes)
        if key not in self._programs:
            self._programs[key] = self._planned(class_bytes)
        return self._programs[key]

    def _planned(self, class_bytes: int) -> RankProgram:
        """Return this rank's part of a plan that was proved here, whoever made it.

        Ranks that make the same calls need the same plans in the same order, so plans have numbers.
        """
        name = f"plan-{len(self._programs)}"
        if self._rank == 0:
            schedule, hazards = self._made(class_bytes)
            file = PlanFile(self._mesh, schedule, None, Target(class_bytes), self._tiling)
            self._store.set(name, encode_plan(file))
            return rank_program(schedule, hazards, self._rank)
        file = decode_plan(self._awaited(name), name)
        if file.target.payload_bytes != class_bytes:
            raise MismatchError(
                f"ranks disagree: the first chip sums up to {file.target.payload_bytes:g} bytes "
                f"of a tile, but rank {dist.get_rank()} up to {class_bytes}; {_WHAT_IT_NEEDS}"
            )
        return rank_program(file.schedule, prove(self._mesh, file.schedule).hazards, self._rank)

    def _made(self, class_bytes: int) -> tuple[Schedule, Hazards]:
        """Return the fastest plan; in an elastic job, where all wait for it, one without a search.

        Plans for the meshes that a job may have next are made ahead, into a folder.
        """
        if not self._is_elastic:
            fabric = fabric_in(self._algorithm)
            made = plan(self._mesh, tile=self._tiling, payload=class_bytes, fabric=fabric)
            return made.schedule, made.hazards
        size = tile_sum(class_bytes, self._tiling.shape)
        if self._plans is not None:
            load_plans(self._plans, self._mesh, self._algorithm, [size])
        [(call, _)] = planned_calls([size])
        is_ready = is_remembered(self._mesh, self._algorithm, call, class_bytes)
        algorithm = self._algorithm if is_ready else QUICK
        return proved_schedule(self._mesh, algorithm, call, class_bytes)

    def _awaited(self, name: str) -> bytes:
        """Return what the first chip writes to the store.

        A get that waits would keep the other threads of this process from the store meanwhile, also
        one for which the first chip may wait.
        """
        deadline, pause_s = time.monotonic() + self._timeout.total_seconds(), _SHORTEST_PAUSE_S
        while not self._store.check([name]):
            if self.is_interrupted:
                raise StoppedError("the mesh changed while a plan was awaited")
            if time.monotonic() > deadline:
                raise StalledError(
                    f"the sum over the tiles on rank {dist.get_rank()} waited for a plan, but the "
                    f"first chip asked for none; {_WHAT_IT_NEEDS}"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return bytes(self._store.get(name))


class TwinGroup(MeshmendGroup):
    """One rank of the group of a colour: long sums run on the plan of all, the rest on Gloo.

    The payload of that plan has a part for each colour. This rank's own goes into its part; the
    others hold nothing, and are written before they are read.
    """

    def __init__(self, options: Any, inner: Any, sums: ColourSums) -> None:
        self._sums = sums
        self._has_warned = False
        super().__init__(options, sums.settings, inner, sums.transport)

    def world_rank(self, place: int) -> int:
        """Return the rank itself: messages of all colours go over all chips in tiles."""
        return place

    def interrupt(self) -> None:
        """Make every collective under way on this rank fail; the other ranks are not told."""
        self._sums.catalogue.is_interrupted = True
        super().interrupt()

    def _use(self, settings: Settings, transport: TensorTransport, rank: int) -> None:
        super()._use(settings, transport, rank)
        self._catalogue = self._sums.catalogue

    @untraced
    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Return a handle that is done when every twin has called this."""
        return self._fallback.barrier(options_of(dist.BarrierOptions, opts, timeout))

    def _supports(self, tensors: Tensors, op: Any = None) -> bool:
        return False

    def _can_sum(self, tensors: Tensors, op: Any) -> bool:
        is_long = all(tensor.nbytes > self._sums.short_bytes for tensor in tensors)
        return is_long and super()._supports(tensors, op)

    def _start_sum(self, kind: CollectiveCall, flat: torch.Tensor, opts: Any) -> Rest:
        n_colours, colour = self._sums.tiling.n_colours, self._sums.colour
        whole = flat.new_empty((n_colours, flat.numel()))
        whole[colour].copy_(flat)
        n_elements, op = whole.numel(), op_name(opts.reduceOp)
        try:
            task = self._catalogue.task(kind, n_elements, dtype_name(flat), op)
        except MeshmendError:
            # Others wait for this rank. They are told, but not before this one has said why.
            later = threading.Timer(_TELL_AFTER_S, self.abort)
            later.daemon = True
            later.start()
            raise
        wait = self._start(task, whole.view(-1), opts.timeout)

        def rest() -> None:
            watch = threading.Timer(_LONG_S, self._warn_of_long_wait)
            watch.daemon = True
            watch.start()
            try:
                wait()
            finally:
                watch.cancel()
            flat.detach().copy_(whole[colour])

        return rest

    def _warn_of_long_wait(self) -> None:
        """Say once what such a sum needs: who left it out in some colours waits without a word."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "the sum over the tiles on rank %d has waited for %g s; %s",
                dist.get_rank(),
                _LONG_S,
                _WHAT_IT_NEEDS,
            )
