"""Which chip of which job this process is, read from its environment variables.

`planning/environment.py` reads the variables. This module turns them into what a worker needs: its
identity for the coordinator, its settings for the exchange, its faults, and its ledger. A file
says whether the worker trains, for the readiness probe of a scheduler.
"""

import hmac
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing import current_process
from pathlib import Path
from typing import Any
from uuid import uuid4

from msgspec import structs

from meshmend.config import CHIP, MESH, SECRET, RunConfig
from meshmend.errors import InputError
from meshmend.membership.client import WorkerIdentity
from meshmend.membership.coordinator_client import CoordinatorClient
from meshmend.membership.events import WriteFailed
from meshmend.membership.faults.fault import Fault, parse_fault
from meshmend.membership.messages import Status
from meshmend.membership.status_responder import StatusResponder
from meshmend.planning.catalogue import fabric_in
from meshmend.planning.environment import Environment
from meshmend.planning.settings import Settings
from meshmend.topology.failures import Chip, board_shape
from meshmend.topology.mesh import Mesh
from meshmend.train.core.exchange import Exchange
from meshmend.train.core.host_planner import PlanAheadSettings, scratch_plan_folder
from meshmend.train.data.ledger import Ledger
from meshmend.train.data.samples import Order, StreamOrder

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerEnvironment:
    """What a worker knows about its job; `identity` is None if it trains alone.

    `whole` is the mesh without failures; `n_live_at_start` chips of it were live at the start.
    """

    identity: WorkerIdentity | None = None
    whole: Mesh = field(default_factory=lambda: Mesh((1,)))
    n_live_at_start: int = 1
    chip: Chip = (0,)
    sums: Settings = field(default_factory=lambda: Settings(Mesh((1,))))
    plan_ahead: PlanAheadSettings | None = None
    run_dir: Path | None = None
    faults: tuple[Fault, ...] = ()
    board: tuple[int, ...] = (1,)
    settings: RunConfig = field(default_factory=RunConfig)

    @property
    def is_first(self) -> bool:
        """Whether this is the first chip of the job's mesh, which tells what all could tell."""
        return self.identity is None or self.chip == self.sums.mesh.live[0]

    def sums_in_words(self) -> dict[str, Any]:
        """Return what a job's fingerprint says of its sums: all chips must make the same plans."""
        algorithm = self.sums.planned_algorithm
        fabric = fabric_in(algorithm)
        return {
            "watch_links": self.sums.watch_links,
            "fabric": fabric.name if fabric else "",
            "algorithm": algorithm,
            "mesh": str(self.whole),
        }

    def run_id(self) -> str:
        """Return a name of this run, the same on all its workers; that of a lone one is random.

        A job that a scheduler starts again in the same folder is the same run.
        """
        if self.identity is None:
            return uuid4().hex
        place = str(self.run_dir) if self.run_dir else ""
        what = f"run {self.identity.job} in {place}".encode()
        return hmac.digest(self.identity.secret if not place else b"run", what, "sha256").hex()[:32]


@cache
def worker_environment() -> WorkerEnvironment:
    """Return what this process's environment variables say about its job.

    Raises:
        InputError: they cannot be read, or are those of the process that has started this one.
    """
    found = worker_environment_from(os.environ)
    # A loader worker that is spawned, not forked, imports the script before it does its own work.
    if found.identity is not None and getattr(current_process(), "_inheriting", False):
        raise InputError(
            "a process that multiprocessing has spawned runs the script once more, and must not "
            "join the job as another one of its chip: put the loop, and what makes the job, below "
            "if __name__ == '__main__'"
        )
    return found


# A worker that is forked from a process that has trained alone gets variables of its own.
os.register_at_fork(after_in_child=worker_environment.cache_clear)


def worker_environment_from(variables: Mapping[str, str]) -> WorkerEnvironment:
    """Return what environment variables say about a worker and its job.

    Raises:
        InputError: a variable is missing or cannot be read.
    """
    environment = Environment.from_environment(variables)
    if environment.coordinator is None:
        return WorkerEnvironment(run_dir=environment.run_dir)
    config, settings, chip = environment.config, environment.settings, environment.chip
    if settings is None:
        raise InputError(f"a worker needs to know the mesh, but {MESH.name} is not set")
    if not settings.secret:
        raise InputError(f"a worker needs the job's secret, but {SECRET.name} is not set")
    if chip is None:
        raise InputError(f"a worker needs to know its chip, but {CHIP.name} is not set")
    whole = replace(settings.mesh, failed=frozenset(), failed_links=frozenset())
    return WorkerEnvironment(
        identity=WorkerIdentity(
            job=config.job.name,
            shape=whole.shape,
            chip=chip,
            seat=whole.rank_of[chip],
            coordinator=environment.coordinator,
            secret=settings.secret.encode(),
            timing=config.timing,
        ),
        whole=whole,
        n_live_at_start=settings.mesh.n_live,
        chip=chip,
        sums=structs.replace(settings, link_timeout_s=config.timing.link_timeout_s),
        plan_ahead=_plan_ahead(environment, settings),
        run_dir=environment.run_dir,
        faults=tuple(parse_fault(text, whole) for text in environment.faults),
        board=environment.board or board_shape(len(whole.shape)),
        settings=config.job,
    )


def _plan_ahead(environment: Environment, settings: Settings) -> PlanAheadSettings | None:
    """Return where this process makes plans ahead; None if somebody else does."""
    if not environment.plans_ahead:
        return None
    plans, secret = _plans_in(environment.run_dir), settings.secret.encode()
    return PlanAheadSettings(
        plans or scratch_plan_folder(environment.config.job.name, secret),
        settings.planned_algorithm,
        environment.board or board_shape(len(settings.mesh.shape)),
        is_scratch=plans is None,
    )


def _plans_in(run_dir: Path | None) -> Path | None:
    return run_dir / "plans" if run_dir else None


@cache
def coordinator_client() -> CoordinatorClient:
    """Return the connection to the coordinator.

    Its thread stays in the network namespace in which this process is at the first call.
    """
    environment = worker_environment()
    identity = environment.identity
    assert identity is not None, "this process trains alone"
    folder = environment.settings.ready_dir
    ready = ReadyFile(Path(folder) if folder else None, environment.chip)
    return CoordinatorClient(identity, on_status=ready.update)


def exchange_of(environment: WorkerEnvironment) -> Exchange:
    """Return this chip's connections; those who ask over them get the status of the job."""
    client = coordinator_client()
    exchange = Exchange(
        environment.whole,
        environment.chip,
        environment.sums,
        plans=_plans_in(environment.run_dir),
        plan_ahead=environment.plan_ahead,
    )
    exchange.transport.answer_askers(StatusResponder(client.answer).take)
    client.set_traffic(exchange.sent_bytes)
    return exchange


def ledger_of(environment: WorkerEnvironment, order: Order | StreamOrder | None) -> Ledger:
    """Return the ledger of this chip, in the folder of the run if there is one."""
    failures = WriteFailures(environment)
    return Ledger(
        environment.run_dir / "ledger" if environment.run_dir else None,
        environment.chip,
        order,
        on_failure=lambda why: failures.report("its ledger", why),
    )


class WriteFailures:
    """Remembers what could not be written, so that it is reported once."""

    def __init__(self, environment: WorkerEnvironment) -> None:
        self._environment = environment
        self._reported: set[str] = set()

    def report(self, what: str, why: str, *, step: int | None = None) -> None:
        """Log and report that something cannot be written, unless that was done already.

        What is missing of a certain step is always reported, but logged once.
        """
        is_new, chip = what not in self._reported, self._environment.chip
        self._reported.add(what)
        if is_new:
            _log.warning("chip %s cannot write %s: %s", chip, what, why)
        if self._environment.identity is not None and (is_new or step is not None):
            coordinator_client().report(WriteFailed(chip, what, why, step))

    def clear(self, what: str) -> None:
        """Note that something can be written again; its next failure is reported again."""
        self._reported.discard(what)

    def has(self, what: str) -> bool:
        """Return whether something cannot be written now."""
        return what in self._reported


class ReadyFile:
    """A file that exists while one chip trains; without a folder there is none.

    A probe that looks for a file costs no Python process and needs no coordinator. A worker that is
    killed leaves its file behind. The next worker of the chip removes it when it starts.
    """

    def __init__(self, folder: Path | None, chip: Chip) -> None:
        self._file = folder / "-".join(map(str, chip)) if folder else None
        self._is_ready: bool | None = None

    def update(self, status: Status) -> None:
        """Make or remove the file: a worker is ready if it is up to date in its generation."""
        is_ready = status.ready and status.state_version == status.generation
        if self._file is None or is_ready == self._is_ready:
            return
        self._is_ready = is_ready
        try:
            if is_ready:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._file.touch()
            else:
                self._file.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("cannot change the ready file %s: %s", self._file, error.strerror)
