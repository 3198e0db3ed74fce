"""Planning ahead on each host: the host's first worker has a process that makes the plans.

Only for workers that were not started by meshmend's launcher, which plans ahead itself. This module
knows when the process is started, told of a new mesh, and killed, and which folder may be trusted.
If the process fails, training goes on.
"""

import hmac
import logging
import os
import shutil
import stat
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshmend.membership.generation import Generation
from meshmend.planning.ahead_process import AheadProcess
from meshmend.planning.plan_request import PlanRequest, PlanTask, SumSizes
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh

_END_TIMEOUT_S: Final = 5.0  # how long a killed process may take to end

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlanAheadSettings:
    """Where plans made ahead are stored, for which algorithm, and which chips fail together.

    If `is_scratch`, the folder lies in a directory that all users share, and is deleted after the
    job.
    """

    folder: Path
    algorithm: str
    board: tuple[int, ...]
    is_scratch: bool = False


def scratch_plan_folder(job: str, secret: bytes) -> Path:
    """Return the folder for a job's plans on this host; only its workers can know the name."""
    name = hmac.digest(secret, f"plans of {job}".encode(), "sha256").hex()[:24]
    return Path(tempfile.gettempdir()) / f"meshmend-plans-{os.geteuid()}-{name}"


def is_private_folder(folder: Path) -> bool:
    """Make a folder if it does not exist; return whether only this user has access to it."""
    try:
        folder.mkdir(mode=stat.S_IRWXU, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    is_open = found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not is_open


class HostPlanner:
    """One worker's part in planning ahead; `folder` holds the plans, None if it cannot be used.

    A failure of the planning process raises nothing: it is logged, once.
    """

    def __init__(self, chip: Chip, settings: PlanAheadSettings) -> None:
        self._chip = chip
        self._settings = settings
        self._process: AheadProcess | None = None
        self._waiter: threading.Thread | None = None
        self._has_warned = False
        self._is_first = False
        self.folder: Path | None = settings.folder
        if settings.is_scratch and not is_private_folder(settings.folder):
            self.folder = None
            self._warn_once(f"{settings.folder} belongs to someone else")

    def plan_ahead(self, generation: Generation, mesh: Mesh, sums: SumSizes) -> None:
        """Plan sums for the failures that may come next, if this chip is the first of its host.

        The process drops what it planned for the previous generation: that is out of date.
        """
        hosts = [seat.address[0] for seat in generation.seats]
        this_host = generation.seat_of[self._chip].address[0]
        self._is_first = generation.seats[hosts.index(this_host)].chip == self._chip
        if self.folder is None or not self._is_first or mesh.n_live == 1:
            self._kill()
            return
        distinct_hosts = list(dict.fromkeys(hosts))
        # Each host begins with other losses, so that hosts with a common folder share the work.
        self._give(mesh, sums, begin=distinct_hosts.index(this_host) / len(distinct_hosts))

    def plan_for(self, mesh: Mesh, sums: SumSizes) -> None:
        """Plan sums for a mesh now, and after that for the failures that may come next."""
        if self.folder is None:
            return
        self._is_first = True
        self._give(mesh, sums)

    def close(self) -> None:
        """Stop planning, because the job is over; delete a scratch folder."""
        self._kill()
        if self._waiter is not None:
            self._waiter.join(_END_TIMEOUT_S)
        if self._settings.is_scratch and self._is_first and self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _give(self, mesh: Mesh, sums: SumSizes, *, begin: float = 0.0) -> None:
        """Give a task to the process; if there is none, or it has ended, start one."""
        settings = self._settings
        request = PlanRequest(mesh, settings.board, settings.algorithm, tuple(sums))
        task = PlanTask(str(self.folder), request, begin=begin)
        if self._process is not None:
            with suppress(OSError):
                self._process.plan(task)
                return
            self._kill()
        try:
            self._process = AheadProcess()
            self._waiter = threading.Thread(target=self._wait, args=(self._process,), daemon=True)
            self._waiter.start()
            self._process.plan(task)
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            self._warn_once(str(error))

    def _wait(self, process: AheadProcess) -> None:
        """Wait for the end of a process, so that it does not stay a zombie."""
        if why := process.wait():
            self._warn_once(why)

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None

    def _warn_once(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("chip %s makes no plans ahead: %s", self._chip, why)
