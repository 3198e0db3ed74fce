"""Makes what torch.distributed asks for: a group of ours, a backend, or a plain Gloo group.

`init_process_group("meshmend")` gets a process group of ours; with `enable_reconfigure` one that
can be made again on other chips; and where other devices have a backend of their own
(`cpu:meshmend,cuda:nccl`), a backend for CPUs. `versions.py` knows which torch has what.

A group of some of the ranks runs on our schedules if its chips are connected: a box of the mesh, a
row, or any other connected set. Groups share nothing but the process: each has its own listener,
its own connections and its own threads. So collectives of two groups never wait for each other.
"""

import logging
import os
from datetime import timedelta
from typing import Any

import torch
from msgspec.structs import replace

from meshmend.config import CHIP, COORDINATOR, FAIL, MESH
from meshmend.errors import InputError
from meshmend.planning.compile_once import compile_once
from meshmend.planning.environment import settings_from
from meshmend.planning.settings import Settings
from meshmend.topology.failures import Chip
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh
from meshmend.topology.submesh import box_around
from meshmend.torch.call_arguments import dist
from meshmend.torch.device_backend import MeshmendBackend, our_group
from meshmend.torch.group import MeshmendGroup
from meshmend.torch.late_gloo import LateGloo
from meshmend.torch.reconfigurable_group import ReconfigurableGroup
from meshmend.torch.tile_groups import ColourSums, TwinGroup
from meshmend.torch.transports import NO_DEVICE, NoTransport, transport_of
from meshmend.torch.versions import HAS_PYTHON_BACKENDS, asks_for_reconfigure, is_one_of_several

_log = logging.getLogger("meshmend.torch")

_CONNECT_S, _CONNECT_S_PER_RANK = 8.0, 0.1  # on a busy machine too
_LATEST_S = 2.0  # the first step after a failure is done by then


def create_group(options: Any, given: Any = None) -> Any:
    """Return the backend that `init_process_group("meshmend")` or `new_group` asks for.

    Raises:
        InputError: the mesh is not known, or has more or fewer live chips than there are ranks.
    """
    if isinstance(given, ColourSums):
        return TwinGroup(options, _gloo(options), given)
    if not isinstance(given, Settings | None):
        raise InputError(
            "pg_options of the backend meshmend needs meshmend.torch.Settings(mesh), but got a "
            f"{type(given).__name__}"
        )
    settings = given or _settings_of_world() or settings_from(os.environ)
    if not dist.is_initialized() and not CHIP.value_in(os.environ):  # our launchers have done it
        compile_once()  # else every rank would, in its first collective, and peers wait for it
    if asks_for_reconfigure(options) and not is_one_of_several():
        return ReconfigurableGroup(options, settings)
    if options.group_size == 1 and not dist.is_initialized() and COORDINATOR.value_in(os.environ):
        settings = replace(settings, mesh=Mesh((1,)))  # a worker that has not joined its job yet
    mesh, n_ranks = settings.mesh, options.group_size
    is_of_all = given is not None and mesh.n_live == n_ranks
    n_world = dist.get_world_size() if dist.is_initialized() and not is_of_all else n_ranks
    check_world(mesh, n_world)
    ranks = list(range(n_ranks) if is_of_all else options.global_ranks_in_group or range(n_ranks))
    chips = tuple(mesh.live[rank] for rank in ranks)
    if n_ranks == n_world:
        return _group_or_backend(options, settings, chips)
    if reason := why_gloo(mesh, chips):
        if options.group_rank == 0:
            _log.warning("the group of ranks %s runs on Gloo: %s", ranks, reason)
        inner = _gloo(options)
        is_late = isinstance(inner, LateGloo)
        return MeshmendGroup(options, settings, inner, NoTransport()) if is_late else inner
    settings = replace(settings, mesh=box_around(mesh, chips))
    return _group_or_backend(options, settings, chips)


def _gloo(options: Any) -> Any:
    """Return Gloo; in an elastic job one that connects later, and all ranks are here already.

    There a rank may leave for the next generation at any time. A thread that waits for its call is
    left behind, and ends when its time to connect is over.
    """
    store, rank, n_ranks = (
        dist.PrefixStore("gloo", options.store),
        options.group_rank,
        options.group_size,
    )
    is_detailed = dist.get_debug_level() == dist.DebugLevel.DETAIL  # its checks run on Gloo
    if is_detailed or not COORDINATOR.value_in(os.environ):
        return dist.ProcessGroupGloo(store, rank, n_ranks, options.timeout)
    connect = timedelta(seconds=_CONNECT_S + n_ranks * _CONNECT_S_PER_RANK)
    return LateGloo(
        store,
        rank,
        n_ranks,
        options.timeout,
        connect=min(connect, options.timeout),
        latest_s=_LATEST_S,
    )


def _group_or_backend(
    options: Any, settings: Settings, chips: tuple[Chip, ...]
) -> MeshmendGroup | MeshmendBackend:
    """Return a group whose rank i is `chips[i]`; the plan's ranks are in row-major order."""
    is_backend = is_one_of_several()
    if is_backend and not HAS_PYTHON_BACKENDS:
        raise InputError(
            "the backend meshmend beside another one (cpu:meshmend,cuda:nccl) needs torch 2.14 or "
            f"newer, but this is torch {torch.__version__}; use the backend meshmend alone"
        )
    in_order = tuple(sorted(chips))
    place_of = {chip: place for place, chip in enumerate(in_order)}
    place = place_of[chips[options.group_rank]]
    transport = transport_of(settings, in_order, options.store, place, options.timeout)
    places = None if chips == in_order else [place_of[chip] for chip in chips]
    group = MeshmendGroup(options, settings, _gloo(options), transport, places=places)
    return MeshmendBackend(group) if is_backend else group


def why_gloo(mesh: Mesh, chips: tuple[Chip, ...]) -> str:
    """Return why a group of these chips cannot run on our schedules, or an empty text."""
    if not mesh_figures(box_around(mesh, chips)).is_connected:
        return f"its chips are not connected in the mesh {mesh}"
    return ""


def runs_on(group: Any = None) -> str:
    """Return what the collectives of a group run on: `meshmend` or `gloo`.

    `torch.distributed.get_backend` returns the name that the group was made with instead.
    """
    ours = our_group(group or dist.group.WORLD)
    return "meshmend" if ours is not None and ours.device_type != NO_DEVICE else "gloo"


def check_world(mesh: Mesh, world_size: int) -> None:
    """Raise InputError unless there is one worker for each live chip."""
    if mesh.n_live != world_size:
        raise InputError(
            f"the backend meshmend needs one worker for each of the {mesh.n_live} live chips of "
            f"{mesh}, but the world size is {world_size}; start {mesh.n_live} workers or describe "
            f"another mesh in {MESH.name} and {FAIL.name}"
        )


def _settings_of_world() -> Settings | None:
    """Return the settings of the default group, which may have come from its `pg_options`."""
    world = our_group(dist.group.WORLD) if dist.is_initialized() else None
    return world.settings if world is not None else None
