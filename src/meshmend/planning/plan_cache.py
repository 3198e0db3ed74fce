"""Makes plans before they are needed, for the loss of each single board; keeps them in a folder.

After a failure the job waits for the new plan, so the plan is made while nothing is wrong. A worker
that needs a plan looks into the folder first, and makes the plan itself if there is none.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from meshmend import __version__
from meshmend.errors import (
    MeshmendError,
    PlanFileError,
    ProofError,
    TopologyError,
    UnsupportedError,
)
from meshmend.files import write_whole
from meshmend.locks import folder_lock
from meshmend.planning.cache import Cache, Key
from meshmend.planning.catalogue import (
    CollectiveCall,
    is_remembered,
    is_searched,
    payload_class,
    planned_pipeline,
    proved_schedule,
    proved_short_sum,
    proved_spread,
    remember,
)
from meshmend.planning.files import PlanFile, decode_plan, encode_plan
from meshmend.planning.plan_request import GATHER, PlanRequest, SumSizes, tile_of
from meshmend.schedule.table import Collective, Schedule, in_rank_order
from meshmend.topology.failures import Chip, blocks_over, format_shape
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh
from meshmend.topology.symmetry import stand_in
from meshmend.topology.tiles import box_tiling
from meshmend.transport.tasks import ITEMSIZES

PlannedCall = tuple[CollectiveCall, int]  # and the bytes that it is planned for

_ALLREDUCE: Final = CollectiveCall("allreduce")
_ALL_GATHER: Final = CollectiveCall(GATHER)
_LOCK_TIMEOUT_S: Final = 60.0
_COVERAGE: Final = "coverage"  # a file that says how many of which mesh's losses have plans
_MOST_BYTES: Final = 4 << 30  # of one folder: plans for the loss of each board of 4096 chips


def board_losses(mesh: Mesh, board: tuple[int, ...]) -> Iterator[Mesh]:
    """Yield what is left of a mesh when one board fails, for each board.

    Chips that are cut off by the loss count as failed.
    """
    for block in blocks_over(mesh.shape, board):
        lost = {chip for chip in block.chips() if chip in mesh.rank_of}
        if lost and len(lost) < mesh.n_live:
            yield largest_part(replace(mesh, failed=mesh.failed | lost))


def tile_losses(mesh: Mesh, tile: tuple[int, ...]) -> Iterator[Mesh]:
    """Yield the chips in tiles when one chip of a mesh fails, for each chip.

    The mesh is one that tiles cover: chips that wait outside may make more tiles than foreseen.
    """
    seen = set()
    for chip in mesh.live:
        left = replace(mesh, failed=mesh.failed | {chip})
        with suppress(TopologyError):  # no tile is left
            spares = box_tiling(left, tile).spares
            rest = largest_part(replace(left, failed=left.failed | set(spares)))
            if rest not in seen:
                seen.add(rest)
                yield rest


def _losses(request: PlanRequest) -> Iterator[Mesh]:
    """Yield what may be left of a request's mesh after the next failure."""
    tiles = [tile for _, dtype in request.sums if (tile := tile_of(dtype))]
    if tiles:
        return tile_losses(request.mesh, tiles[0])
    return board_losses(request.mesh, request.board)


def plan_losses(request: PlanRequest, *, for_s: float) -> int:
    """Plan for a mesh, then for the loss and return of each of its boards while there is time.

    It returns how many meshes have plans now, in the memory of this process.
    """
    deadline = time.monotonic() + for_s
    n_planned = 0
    for mesh in itertools.chain([request.mesh], _losses(request)):
        if n_planned and time.monotonic() > deadline:
            break
        if mesh.n_live > 1:
            proved_short_sum(mesh)
            for call, class_bytes in planned_calls(request.sums):
                proved_schedule(mesh, request.algorithm, call, class_bytes)
        if mesh != request.mesh:
            holders = tuple(request.mesh.rank_of[chip] for chip in mesh.live)
            for in_parts in (False, True):
                proved_spread(request.mesh, holders, in_parts=in_parts)
        n_planned += 1
    return n_planned


def plan_ahead(folder: Path, request: PlanRequest, *, begin: float = 0.0) -> None:
    """Put plans into a folder for the loss of each board, and for the mesh as it is now.

    Several processes may fill one folder. Each begins at another place `begin` in the list of
    losses, from 0 to 1, and skips plans that exist. The one that begins at 0 makes those for the
    mesh itself before all others: the job may run quick plans until they are there. Boards beside
    chips that have failed come before other boards. After a loss come its mirror images and shifts:
    their plans are the same, with other ranks. A loss that the algorithm does not support is left
    out.
    """
    losses = list(_losses(request))

    def wanted() -> Iterator[Mesh]:
        if not begin:
            yield request.mesh  # before the losses of thousands of chips are put in order
        yield from _in_order(request.mesh, losses, begin)
        if begin:
            yield request.mesh

    folder.mkdir(parents=True, exist_ok=True)
    n_planned = 0
    for mesh in wanted():
        with suppress(UnsupportedError):
            store_plans(folder, mesh, request.algorithm, request.sums)
            n_planned += mesh != request.mesh
        coverage = _Coverage(str(request.mesh), n_planned, len(losses))
        write_whole(folder / _COVERAGE, msgspec.json.encode(coverage), is_durable=False)


def planned_losses(folder: Path, mesh: Mesh) -> tuple[int, int] | None:
    """Return how many losses of a board of a mesh have plans, and of how many; None: not known."""
    try:
        found = msgspec.json.decode((folder / _COVERAGE).read_bytes(), type=_Coverage)
    except (OSError, msgspec.MsgspecError):
        return None
    return (found.n_planned, found.n_losses) if found.mesh == str(mesh) else None


class _Coverage(msgspec.Struct, frozen=True):
    mesh: str
    n_planned: int
    n_losses: int


def _in_order(mesh: Mesh, losses: list[Mesh], begin: float) -> list[Mesh]:
    """Return the losses from `begin` on: beside failed chips first, and those alike together."""
    first = int(begin * len(losses))
    rotated = [*losses[first:], *losses[:first]]
    first_of: dict[Mesh, int] = {}  # of those with the same stand-in, where the first is
    places = [first_of.setdefault(stand_in(left).mesh, at) for at, left in enumerate(rotated)]
    # What neighbours share, such as power and cooling, fails for both.
    near = _beside_failed(mesh)
    is_later = [near.isdisjoint(left.failed - mesh.failed) for left in rotated]
    return [rotated[at] for at in np.lexsort((places, is_later))]


def _beside_failed(mesh: Mesh) -> set[Chip]:
    """Return the chips that had a link to a chip that has failed."""
    whole = replace(mesh, failed=frozenset(), failed_links=frozenset())
    return {beside for chip in mesh.failed for beside in whole.neighbors(chip)}


def store_plans(folder: Path, mesh: Mesh, algorithm: str, sums: SumSizes) -> None:
    """Plan sums for a mesh and put the plans into the folder, unless they exist."""
    plans = _plans_in(folder)
    for call, class_bytes in planned_calls(sums):
        key = _key(mesh, algorithm, call, class_bytes)
        if mesh.n_live == 1 or plans.has_file(key):
            continue
        if is_searched(mesh, algorithm, call, class_bytes) and not call.tile:
            like = stand_in(mesh).mesh
            if like != mesh:  # another process may have searched for it
                store_plans(folder, like, algorithm, sums)
                load_plans(folder, like, algorithm, sums)
        plans.put(key, _file(mesh, algorithm, call, class_bytes))


def load_or_make_plans(
    folder: Path,
    mesh: Mesh,
    algorithm: str,
    sums: SumSizes,
    *,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Load the plans for a mesh into memory; make those that are not in the folder.

    One of the processes that need a plan makes it; the others wait and read it. If all made the
    same plan at once, they would compete for the cores. If that process dies, another one makes
    the plan. If it hangs, the coordinator forms a generation without it: `check` is called while
    this process waits, and raises what ends the wait.
    """
    load_plans(folder, mesh, algorithm, sums)
    if all(is_remembered(mesh, algorithm, *call) for call in planned_calls(sums)):
        return
    with folder_lock(folder, timeout_s=_LOCK_TIMEOUT_S, check=check):
        load_plans(folder, mesh, algorithm, sums)
        with suppress(MeshmendError, OSError):  # the sum that needs the plan raises it again
            store_plans(folder, mesh, algorithm, sums)


def load_plans(folder: Path, mesh: Mesh, algorithm: str, sums: SumSizes) -> None:
    """Load the plans for a mesh from the folder: those that can be read and are proved right."""
    for call, class_bytes in planned_calls(sums):
        if is_remembered(mesh, algorithm, call, class_bytes):
            continue
        found = _plans_in(folder).get(_key(mesh, algorithm, call, class_bytes))
        if found is not None:
            with suppress(ProofError, PlanFileError):
                _remember_file(found, mesh, algorithm, call, class_bytes)


def has_plan(
    folder: Path, mesh: Mesh, algorithm: str, call: CollectiveCall, class_bytes: int
) -> bool:
    """Whether there is a plan in the folder, which may be damaged."""
    return _plans_in(folder).has_file(_key(mesh, algorithm, call, class_bytes))


def packed_plan(mesh: Mesh, algorithm: str, call: CollectiveCall, class_bytes: int) -> bytes:
    """Return a plan as bytes that `remember_packed` reads back on another chip."""
    return encode_plan(_file(mesh, algorithm, call, class_bytes))


def _file(mesh: Mesh, algorithm: str, call: CollectiveCall, class_bytes: int) -> PlanFile:
    schedule, _ = proved_schedule(mesh, algorithm, call, class_bytes)
    pipeline = planned_pipeline(mesh, algorithm, call, class_bytes)
    tiling = box_tiling(mesh, call.tile) if call.tile else None
    return PlanFile(mesh, schedule, pipeline, tiling=tiling)


def remember_packed(
    mesh: Mesh, algorithm: str, call: CollectiveCall, class_bytes: int, packed: bytes
) -> None:
    """Prove a plan that another chip has sent; `proved_schedule` then returns it.

    Raises:
        PlanFileError: it cannot be read, or is a plan for something else.
        ProofError: it is wrong.
    """
    found = decode_plan(packed, "a plan that was sent")
    if is_remembered(mesh, algorithm, call, class_bytes):
        known = proved_schedule(mesh, algorithm, call, class_bytes)[0]
        if known.digest == found.schedule.digest:
            return
    _remember_file(found, mesh, algorithm, call, class_bytes)


def _remember_file(
    found: PlanFile, mesh: Mesh, algorithm: str, call: CollectiveCall, class_bytes: int
) -> None:
    if found.mesh != mesh or not _is_for(found.schedule, call, mesh):
        raise PlanFileError(f"a plan for {found.mesh} is no {call.name} on {mesh}; plan again")
    remember(mesh, algorithm, call, class_bytes, found.schedule, found.pipeline)


def planned_calls(sums: SumSizes) -> list[PlannedCall]:
    """Return what is planned for these sums and gathers, each once."""
    found = []
    for n_elements, dtype in sums:
        if tile := tile_of(dtype):
            call = CollectiveCall("allreduce", tile=tile)
        else:
            call = _ALL_GATHER if dtype == GATHER else _ALLREDUCE
        n_bytes = n_elements * (1 if tile or dtype == GATHER else ITEMSIZES.get(dtype, 2))
        found.append((call, payload_class(call, n_bytes)))
    return list(dict.fromkeys(found))


def _is_for(schedule: Schedule, call: CollectiveCall, mesh: Mesh) -> bool:
    """Whether a schedule does what a call asks of a mesh; gathered parts are in rank order."""
    if schedule.collective is not Collective(call.name) or schedule.n_ranks != mesh.n_live:
        return False
    if call.tile:
        colours = schedule.colours
        return colours is not None and np.array_equal(
            colours.of_rank, box_tiling(mesh, call.tile).colour_of
        )
    if schedule.colours is not None:
        return False
    return call == _ALLREDUCE or in_rank_order(schedule) is schedule


def _plans_in(folder: Path) -> Cache[PlanFile]:
    """Return the plans in a folder; each is a plan file, which `meshmend verify` reads."""
    # All chips must run the same plan, so a plan that another version made is not read.
    decode = partial(decode_plan, path="a plan made ahead")
    return Cache(folder, __version__, encode_plan, decode, _MOST_BYTES)


def _key(mesh: Mesh, algorithm: str, call: CollectiveCall, class_bytes: int) -> Key:
    name = f"{call.name} in tiles of {format_shape(call.tile)}" if call.tile else call.name
    return (str(mesh), algorithm, name, class_bytes)
