"""Plans made before they are needed: for the loss of each single board, kept in a folder.

After a failure the new plan is on the critical path, so it is made while nothing is wrong. Whoever
needs one looks into the folder first; a plan that is not there is made on the spot.
"""

import fcntl
import hashlib
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from meshmend import __version__
from meshmend.errors import MeshmendError, UnsupportedError
from meshmend.execute.event_loop import load_event_loop
from meshmend.execute.transport import ITEMSIZES
from meshmend.planning.catalogue import (
    Kind,
    is_remembered,
    payload_class,
    proved_schedule,
    remember,
)
from meshmend.planning.files import read_plan, write_plan
from meshmend.schedule.table import Collective, Schedule
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh

Sums = Sequence[tuple[int, str]]  # how many elements of which type

_SUM = Kind("allreduce")
_TURN_S = 2.0
_GLANCE_S = 0.005


@dataclass(frozen=True)
class PlanRequest:
    """What may be needed next: sums, by an algorithm, on what is left of a mesh of boards."""

    mesh: Mesh
    board: tuple[int, ...]
    algorithm: str
    sums: Sums


def losses(mesh: Mesh, board: tuple[int, ...]) -> Iterator[Mesh]:
    """Yield what is left of a mesh when one board dies, for each board; cut-off chips count out."""
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


def plan_losses(
    mesh: Mesh, algorithm: str, sums: Sums, *, board: tuple[int, ...], for_s: float
) -> int:
    """Plan sums for a mesh, then for the loss of each of its boards while there is time.

    Returns for how many meshes there are plans now, in the memory of this process.
    """
    load_event_loop()
    deadline = time.monotonic() + for_s
    n_planned = 0
    for one in (mesh, *losses(mesh, board)):
        if n_planned and time.monotonic() > deadline:
            break
        for class_bytes in classes(sums):
            if one.n_live > 1:
                proved_schedule(one, algorithm, _SUM, class_bytes)
        n_planned += 1
    return n_planned


def plan_ahead(folder: Path, outlook: PlanRequest, *, turn: float = 0.0) -> None:
    """Put plans into a folder for the loss of each board, then for the mesh as it is now.

    The last is for a chip that comes back: it has planned nothing yet. Several who fill one folder
    begin at different turns of the round, from 0 to 1, and leave out what another has done. A loss
    that the algorithm does not do is passed over.
    """
    left = list(losses(outlook.mesh, outlook.board))
    first = int(turn * len(left))
    for mesh in (*left[first:], *left[:first], outlook.mesh):
        with suppress(UnsupportedError):
            store_plans(folder, mesh, outlook.algorithm, outlook.sums)


def store_plans(folder: Path, mesh: Mesh, algorithm: str, sums: Sums) -> None:
    """Plan sums for a mesh and put the plans into the folder, unless they are there."""
    for class_bytes in classes(sums):
        path = _path(folder, mesh, algorithm, class_bytes)
        if mesh.n_live > 1 and not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_plan(path, mesh, proved_schedule(mesh, algorithm, _SUM, class_bytes)[0])


def plan_together(folder: Path, mesh: Mesh, algorithm: str, sums: Sums) -> None:
    """Have plans for a mesh, from the folder or made now, by one of all who need them at once.

    The others wait for it and read: many who made the same plan at once would share the cores. Who
    makes it may stop half-way, so nobody waits for long.
    """
    load_plans(folder, mesh, algorithm, sums)
    if all(is_remembered(mesh, algorithm, _SUM, class_bytes) for class_bytes in classes(sums)):
        return
    with _turn(folder):
        load_plans(folder, mesh, algorithm, sums)
        with suppress(MeshmendError, OSError):  # who needs the plan will make it, or say why not
            store_plans(folder, mesh, algorithm, sums)


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Be alone with a folder; if that cannot be had soon, go ahead all the same.

    The kernel gives the turn of a process that dies to another.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".turn").open("wb")
    except OSError:
        yield
        return
    with lock:
        deadline = time.monotonic() + _TURN_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_GLANCE_S)
            except OSError:  # a file system without locks
                break
            else:
                break
        yield


def load_plans(folder: Path, mesh: Mesh, algorithm: str, sums: Sums) -> None:
    """Take the plans for a mesh from the folder, if they are there, whole, and proved right."""
    for class_bytes in classes(sums):
        if is_remembered(mesh, algorithm, _SUM, class_bytes):
            continue
        try:
            found = read_plan(_path(folder, mesh, algorithm, class_bytes))
            if found.mesh == mesh and _is_sum(found.schedule, mesh):
                remember(mesh, algorithm, _SUM, class_bytes, found.schedule)
        except MeshmendError:
            continue


def classes(sums: Sums) -> list[int]:
    """Return the sizes that sums are planned for, each once."""
    sizes = (n_elements * ITEMSIZES.get(dtype, 2) for n_elements, dtype in sums)
    return list(dict.fromkeys(payload_class(_SUM, n_bytes) for n_bytes in sizes))


def _is_sum(schedule: Schedule, mesh: Mesh) -> bool:
    return schedule.collective is Collective.ALLREDUCE and schedule.n_ranks == mesh.n_live


def _path(folder: Path, mesh: Mesh, algorithm: str, class_bytes: int) -> Path:
    # All chips must run the same plan, so one that another version made is not looked at.
    what = f"{mesh} {algorithm} {class_bytes} {__version__}"
    name = hashlib.blake2b(what.encode(), digest_size=12)
    return folder / f"{name.hexdigest()}.json"
