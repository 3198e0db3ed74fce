"""Makes plans before they are needed, for the loss of each single board; keeps them in a folder.

After a failure the job waits for the new plan, so the plan is made while nothing is wrong. A worker
that needs a plan looks into the folder first, and makes the plan itself if there is none.
"""

import hashlib
import itertools
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from meshmend import __version__
from meshmend.errors import MeshmendError, UnsupportedError
from meshmend.execute.event_loop import load_event_loop
from meshmend.execute.transport import ITEMSIZES
from meshmend.locks import folder_lock
from meshmend.planning.catalogue import (
    CollectiveCall,
    is_remembered,
    payload_class,
    proved_schedule,
    remember,
)
from meshmend.planning.files import read_plan, write_plan
from meshmend.planning.plan_request import PlanRequest, SumSizes
from meshmend.schedule.table import Collective, Schedule
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh

_ALLREDUCE: Final = CollectiveCall("allreduce")
_LOCK_TIMEOUT_S: Final = 2.0


def board_losses(mesh: Mesh, board: tuple[int, ...]) -> Iterator[Mesh]:
    """Yield what is left of a mesh when one board fails, for each board.

    Chips that are cut off by the loss count as failed.
    """
    corners = itertools.product(
        *(range(0, extent, size) for extent, size in zip(mesh.shape, board, strict=True))
    )
    for corner in corners:
        spans = zip(corner, board, mesh.shape, strict=True)
        inside = set(
            itertools.product(*(range(at, min(at + size, end)) for at, size, end in spans))
        )
        lost = inside & set(mesh.live)
        if lost and len(lost) < mesh.n_live:
            yield largest_part(replace(mesh, failed=mesh.failed | lost))


def plan_losses(request: PlanRequest, *, for_s: float) -> int:
    """Plan for a mesh, then for the loss of each of its boards while there is time.

    It returns how many meshes have plans now, in the memory of this process.
    """
    load_event_loop()
    deadline = time.monotonic() + for_s
    n_planned = 0
    for mesh in (request.mesh, *board_losses(request.mesh, request.board)):
        if n_planned and time.monotonic() > deadline:
            break
        for class_bytes in payload_classes(request.sums):
            if mesh.n_live > 1:
                proved_schedule(mesh, request.algorithm, _ALLREDUCE, class_bytes)
        n_planned += 1
    return n_planned


def plan_ahead(folder: Path, request: PlanRequest, *, begin: float = 0.0) -> None:
    """Put plans into a folder for the loss of each board, then for the mesh as it is now.

    The last plan is for a chip that joins again, which has planned nothing yet. Several processes
    may fill one folder. Each begins at another place `begin` in the list of losses, from 0 to 1,
    and skips plans that exist. A loss that the algorithm does not support is skipped.
    """
    losses = list(board_losses(request.mesh, request.board))
    first = int(begin * len(losses))
    for mesh in (*losses[first:], *losses[:first], request.mesh):
        with suppress(UnsupportedError):
            store_plans(folder, mesh, request.algorithm, request.sums)


def store_plans(folder: Path, mesh: Mesh, algorithm: str, sums: SumSizes) -> None:
    """Plan sums for a mesh and put the plans into the folder, unless they exist."""
    for class_bytes in payload_classes(sums):
        path = _path(folder, mesh, algorithm, class_bytes)
        if mesh.n_live > 1 and not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_plan(path, mesh, proved_schedule(mesh, algorithm, _ALLREDUCE, class_bytes)[0])


def load_or_make_plans(folder: Path, mesh: Mesh, algorithm: str, sums: SumSizes) -> None:
    """Load the plans for a mesh into memory; make those that are not in the folder.

    One of the processes that need a plan makes it; the others wait and read it. If all made the
    same plan at once, they would compete for the cores. That process may hang, so the others wait
    two seconds at most.
    """
    load_plans(folder, mesh, algorithm, sums)
    if all(is_remembered(mesh, algorithm, _ALLREDUCE, size) for size in payload_classes(sums)):
        return
    with folder_lock(folder, timeout_s=_LOCK_TIMEOUT_S):
        load_plans(folder, mesh, algorithm, sums)
        with suppress(MeshmendError, OSError):  # the sum that needs the plan raises it again
            store_plans(folder, mesh, algorithm, sums)


def load_plans(folder: Path, mesh: Mesh, algorithm: str, sums: SumSizes) -> None:
    """Load the plans for a mesh from the folder: those that can be read and are proved right."""
    for class_bytes in payload_classes(sums):
        if is_remembered(mesh, algorithm, _ALLREDUCE, class_bytes):
            continue
        try:
            found = read_plan(_path(folder, mesh, algorithm, class_bytes))
            if found.mesh == mesh and _is_allreduce(found.schedule, mesh):
                remember(mesh, algorithm, _ALLREDUCE, class_bytes, found.schedule)
        except MeshmendError:
            continue


def payload_classes(sums: SumSizes) -> list[int]:
    """Return the sizes in bytes that sums are planned for, each once."""
    sizes = (n_elements * ITEMSIZES.get(dtype, 2) for n_elements, dtype in sums)
    return list(dict.fromkeys(payload_class(_ALLREDUCE, n_bytes) for n_bytes in sizes))


def _is_allreduce(schedule: Schedule, mesh: Mesh) -> bool:
    return schedule.collective is Collective.ALLREDUCE and schedule.n_ranks == mesh.n_live


def _path(folder: Path, mesh: Mesh, algorithm: str, class_bytes: int) -> Path:
    # All chips must run the same plan, so a plan that another version made is not read.
    key = f"{mesh} {algorithm} {class_bytes} {__version__}"
    name = hashlib.blake2b(key.encode(), digest_size=12)
    return folder / f"{name.hexdigest()}.json"
