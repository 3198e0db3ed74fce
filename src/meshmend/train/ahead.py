"""A process of low priority that makes plans before they are needed, one on each host of a job.

For workers that no launcher of ours has started: each host's first worker starts it, and it dies
with that worker. It is a process of its own, not a fork: a worker has threads. Whatever becomes of
it, training goes on: a plan that is not there is made on the spot.
"""

import hmac
import json
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from meshmend.processes import die_with_parent
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import mesh_words, parse_mesh

if TYPE_CHECKING:  # the process is to be light and of low priority before it imports these
    from meshmend.membership.generation import Generation
    from meshmend.planning.plan_cache import Sums

_LOW: Final = 19
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
_PATIENCE_S: Final = 5.0  # for a process that was killed to be gone

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ahead:
    """Plans that are made ahead: in which folder, for which algorithm and the loss of which boards.

    `is_scratch`: the folder is in a place that all users share, and goes when the job is over.
    """

    folder: Path
    algorithm: str
    board: tuple[int, ...]
    is_scratch: bool = False


def scratch_plans(job: str, secret: bytes) -> Path:
    """Return the folder that all workers of a job on this host find, and nobody else."""
    name = hmac.digest(secret, f"plans of {job}".encode(), "sha256").hex()[:24]
    return Path(tempfile.gettempdir()) / f"meshmend-plans-{os.geteuid()}-{name}"


def is_ours(folder: Path) -> bool:
    """Make a folder unless it is there; return whether this user alone can get at what is in it."""
    try:
        folder.mkdir(mode=stat.S_IRWXU, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    is_open = found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not is_open


class Planner:
    """What one worker does so that there are plans; `folder` is where, None if it cannot be used.

    Nothing here raises because of the process that plans: what is wrong is logged, once.
    """

    def __init__(self, chip: Chip, ahead: Ahead) -> None:
        self._chip = chip
        self._ahead = ahead
        self._process: subprocess.Popen[bytes] | None = None
        self._attendant: threading.Thread | None = None
        self._has_complained = False
        self._is_first = False
        self.folder: Path | None = ahead.folder
        if ahead.is_scratch and not is_ours(ahead.folder):
            self.folder = None
            self._complain(f"{ahead.folder} belongs to someone else")

    def look_ahead(self, generation: "Generation", mesh: Mesh, sums: "Sums") -> None:
        """Plan sums for what may fail next, if this chip is the first of its host.

        What was planned for the generation before is given up, whoever is first now.
        """
        self._end()
        hosts = [seat.address[0] for seat in generation.seats]
        mine = generation.seat_of[self._chip].address[0]
        self._is_first = generation.seats[hosts.index(mine)].chip == self._chip
        if self.folder is None or not self._is_first or mesh.n_live == 1:
            return
        each = list(dict.fromkeys(hosts))
        task = {
            "folder": str(self.folder),
            "mesh": mesh_words(mesh),
            "board": self._ahead.board,
            "algorithm": self._ahead.algorithm,
            "sums": list(sums),
            "turn": each.index(mine) / len(each),
        }
        try:
            self._start(json.dumps(task).encode())
        except (OSError, RuntimeError) as error:
            self._complain(str(error))

    def close(self) -> None:
        """Plan no more; the job is over."""
        self._end()
        if self._attendant is not None:
            self._attendant.join(_PATIENCE_S)
        if self._ahead.is_scratch and self._is_first and self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, task: bytes) -> None:
        # A group of its own: Ctrl-C is for the worker. -P: nothing is imported from where it runs.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **_ONE_THREAD},
            process_group=0,
        )
        self._attendant = threading.Thread(
            target=self._attend, args=(self._process, task), daemon=True
        )
        self._attendant.start()

    def _attend(self, process: "subprocess.Popen[bytes]", task: bytes) -> None:
        """Tell a process what to plan, and wait for its end so that it does not stay a zombie."""
        _, said = process.communicate(task)
        if process.returncode > 0:  # it was not killed
            last = said.decode(errors="replace").strip().splitlines()[-1:]
            self._complain("".join(last) or f"exit code {process.returncode}")

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None

    def _complain(self, why: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            _log.warning("chip %s makes no plans ahead: %s", self._chip, why)


def main() -> None:
    """Plan what standard input says, until that is done or the worker with this number is gone."""
    os.nice(_LOW)
    die_with_parent(int(sys.argv[1]))
    from meshmend.planning.plan_cache import PlanRequest, plan_ahead

    task: dict[str, Any] = json.load(sys.stdin)
    words = task["mesh"]
    outlook = PlanRequest(
        mesh=parse_mesh(words["shape"], wrap=words["wrap"], fail=words["fail"]),
        board=tuple(task["board"]),
        algorithm=task["algorithm"],
        sums=[(n_elements, dtype) for n_elements, dtype in task["sums"]],
    )
    plan_ahead(Path(task["folder"]), outlook, turn=task["turn"])


if __name__ == "__main__":
    main()
