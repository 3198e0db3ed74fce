"""The processes of an elastic job on this machine: a coordinator, workers, one that plans ahead.

All are forked. A worker of a chip is started again when the chip is repaired; `JobProcesses` keeps
the latest of each. `ProcessControl` does to them what faults say.
"""

import logging
import os
import signal
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

from meshmend.config import JobConfig
from meshmend.lab.testbed.bed import Testbed
from meshmend.launch.hosts import board_from
from meshmend.launch.job_page import PageRequest
from meshmend.launch.supervisor import (
    Child,
    KeptProcess,
    Supervisor,
)
from meshmend.launch.worker import Place, worker_variables
from meshmend.membership.coordinator_server import CoordinatorServer
from meshmend.membership.events import (
    GenerationBegan,
    TimedEvent,
)
from meshmend.membership.faults.fault import COORDINATOR, Fault, Process
from meshmend.membership.job import JobSpec
from meshmend.membership.job_view import JobView
from meshmend.membership.messages import CutLink, MendLink, Message, Repaired
from meshmend.planning.ahead_process import AheadProcess
from meshmend.planning.environment import Environment
from meshmend.planning.plan_request import PlanRequest, PlanTask, SumSizes
from meshmend.planning.settings import SMALL_WINDOW_BYTES, settings_of
from meshmend.topology.failures import Chip, Failure, Link
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import configured_mesh
from meshmend.train.core.worker_environment import coordinator_client
from meshmend.train.state.checkpoint import LAUNCHER_NOTICE, SAVE_NOTICE
from meshmend.transport.listener import Address
from meshmend.units import parse_bandwidth

_log = logging.getLogger(__name__)

_POLL_S: Final = 0.02
GAVE_UP: Final = 3  # the exit code of a coordinator whose job has failed
_IN_TESTBED: Final = {"GLOO_SOCKET_IFNAME": "chip"}  # the interface of a worker in a testbed

# Faults to inject now, from what goes on and the seconds since the start; None ends the job.
MoreFaults = Callable[[JobView, float], Iterable[Fault] | None]


@dataclass(frozen=True)
class ElasticJob:
    """What to run on every live chip of a mesh; `config` has the mesh, the folder, the faults.

    Each worker runs `body()`, which returns its exit code, and computes in `n_threads` threads.
    `sums` are the sizes of the sums of a step, if they are known before the first step: the
    launcher then plans ahead for the next failures. After `for_s` seconds the job is ended,
    whatever step it is at. `more_faults` is asked again and again for faults that depend on what
    the job does. `page` asks for a live page.
    """

    config: JobConfig
    body: Callable[[], int]
    on_event: Callable[[TimedEvent], None]
    sums: SumSizes = ()
    for_s: float | None = None
    more_faults: MoreFaults | None = None
    page: PageRequest | None = None
    n_threads: int = 1

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh at the start."""
        return configured_mesh(self.config.mesh)

    @property
    def board(self) -> tuple[int, ...]:
        """The chips that fail together."""
        return board_from(self.config.mesh.board, self.mesh)

    @property
    def run_dir(self) -> Path:
        """The folder of the run."""
        return Path(self.config.job.run_dir)

    @property
    def algorithm(self) -> str:
        """How the chips sum."""
        return settings_of(self.config.sums, self.mesh).planned_algorithm


@contextmanager
def testbed_of(config: JobConfig) -> Iterator[Testbed | None]:
    """Yield the testbed that the settings of a job ask for, or None."""
    if not config.local.testbed:
        yield None
        return
    bandwidth = parse_bandwidth(config.local.testbed)
    with Testbed.up(configured_mesh(config.mesh), link_bandwidth=bandwidth) as bed:
        yield bed


def in_testbed(config: JobConfig, address: str) -> JobConfig:
    """Return the settings of a worker that has this address in a testbed, whose links are slow."""
    window = config.sums.window_bytes or SMALL_WINDOW_BYTES
    return config.with_({"sums.bind": address, "sums.window": window})


def variables_here(
    environment: Environment, master: Address, bed: Testbed | None
) -> dict[str, str]:
    """Return the variables of a chip's worker on this machine, in a testbed if there is one."""
    if bed is None:
        return worker_variables(environment, master)
    assert environment.chip is not None
    config = in_testbed(environment.config, bed.address(environment.chip))
    return worker_variables(replace(environment, config=config), master) | _IN_TESTBED


class JobProcesses:
    """All processes of a job; `workers[chip]` is the latest worker of a chip.

    `common` is the environment that all workers have in common.
    """

    def __init__(
        self, job: ElasticJob, common: Environment, listener: socket.socket, bed: Testbed | None
    ) -> None:
        self._job = job
        self._common = common
        self._bed = bed
        self._listener = listener
        self.supervisor = Supervisor()
        self.workers: dict[Chip, Child] = {}
        self.coordinator: KeptProcess | None = None
        self._planners: dict[int, AheadProcess] = {}  # by pidfd; all but the latest have ended
        self._has_warned = False

    def start_coordinator(self) -> Child:
        """Start the coordinator, or restart it: the launcher keeps its listening socket open."""
        job, config = self._job, self._common.config
        spec = JobSpec(config.job.name, job.mesh, job.board, config.timing)
        secret = self._common.secret.encode()
        listener = self._listener

        def serve() -> int:
            record_file = job.run_dir / "coordinator.json"
            coordinator = CoordinatorServer(listener, secret, spec, record_file=record_file)
            coordinator.serve()
            coordinator.close()
            if coordinator.is_superseded:
                return 1  # the next one learns the later term from its workers
            return GAVE_UP if coordinator.failure else 0

        return self.supervisor.fork_worker(serve, Place(chip=()), "coordinator")

    def start_worker(self, chip: Chip, faults: Sequence[str] = ()) -> None:
        """Start the worker of a chip; it injects `faults` into itself."""
        job, bed = self._job, self._bed
        environment = replace(self._common, chip=chip, faults=tuple(faults))
        place = Place(
            chip=chip,
            first=_begin_worker,
            enter=bed.enter if bed else None,
            environment=variables_here(environment, self._listener.getsockname()[:2], bed),
            n_threads=job.n_threads,
        )
        self.workers[chip] = self.supervisor.fork_worker(job.body, place)

    def kill_workers(self, chips: Collection[Chip]) -> None:
        """Kill those workers of these chips that still run, and wait until they have ended."""
        killed = [self.workers[chip] for chip in chips if chip in self.workers]
        for child in killed:
            if child.code is None:
                child.is_end_expected = True
                child.signal(signal.SIGKILL)
        while any(child.code is None for child in killed):
            self.supervisor.serve(_POLL_S)

    def plan_ahead(self, formed: GenerationBegan, sums: SumSizes) -> None:
        """Have a process of lowest priority plan for the loss of each remaining board.

        It lives as long as the job, and drops what it planned for the generation before. A failure
        of this process does not stop the job: the first one is logged.
        """
        job = self._job
        whole = replace(job.mesh, failed=frozenset(), failed_links=frozenset())
        dead = set(whole.live) - set(formed.chips)
        mesh = replace(whole, failed=frozenset(dead)).without(*formed.cut)
        request = PlanRequest(mesh, job.board, job.algorithm, tuple(sums))
        task = PlanTask(str(job.run_dir / "plans"), request)
        for process in self._planners.values():
            with suppress(OSError):  # it has ended
                process.plan(task)
                return
        try:
            self._start_planner().plan(task)
        except OSError as error:
            self._warn_once(str(error))

    def _start_planner(self) -> AheadProcess:
        process = AheadProcess()
        pidfd = os.pidfd_open(process.pid)
        self._planners[pidfd] = process
        self.supervisor.watch(pidfd, lambda: self._reap_planner(pidfd))
        return process

    def close(self) -> None:
        """End all processes that still run."""
        for pidfd, process in list(self._planners.items()):
            process.kill()
            self._reap_planner(pidfd)
        self.supervisor.end_all()

    def _reap_planner(self, pidfd: int) -> None:
        """Wait for a planning process that has ended or was killed, and log why it failed."""
        self.supervisor.unwatch(pidfd)
        os.close(pidfd)
        if why := self._planners.pop(pidfd).wait():
            self._warn_once(why)

    def _warn_once(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("the launcher makes no plans ahead: %s", why)


class ProcessControl:
    """The `JobControl` of a job on this machine; `send` sends a message to its coordinator."""

    def __init__(
        self, processes: JobProcesses, send: Callable[[Message], None], bed: Testbed | None
    ) -> None:
        self._processes = processes
        self._send = send
        self._bed = bed

    def kill(self, process: Process) -> None:
        """Kill a process; its end does not count as a failure."""
        child = self._child(process)
        if child is not None and child.code is None:
            child.is_end_expected = True
            child.signal(signal.SIGKILL)

    def stop(self, process: Process) -> None:
        """Stop a process with SIGSTOP, which it cannot catch."""
        self._signal(process, signal.SIGSTOP)

    def resume(self, process: Process) -> None:
        """Resume a stopped process with SIGCONT."""
        self._signal(process, signal.SIGCONT)

    def restart(self, chips: Sequence[Chip], self_injected: Sequence[Fault]) -> None:
        """Kill the workers of these chips that still run, then start new ones."""
        self._processes.kill_workers(chips)
        for chip in chips:
            if chip in self._processes.workers:
                self._send(Repaired(chip))
            self._processes.start_worker(chip, [fault.words for fault in self_injected])

    def cut(self, failure: Failure) -> None:
        """Ask both ends of a link to break their connection; in a testbed, fail its network."""
        if isinstance(failure, Link):
            self._send(CutLink(failure))
        if self._bed is not None:
            self._bed.fail(failure)

    def mend(self, failure: Failure) -> None:
        """Tell the coordinator that a link is back; in a testbed, repair its network."""
        if isinstance(failure, Link):
            self._send(MendLink(failure))
        if self._bed is not None:
            self._bed.repair(failure)

    def expect_deaths(self, chips: Sequence[Chip]) -> None:
        """Count the next end of the workers of these chips as injected, not as a failure."""
        for chip in chips:
            child = self._child(chip)
            if child is not None:
                child.is_end_expected = True

    def _signal(self, process: Process, number: int) -> None:
        child = self._child(process)
        if child is not None:
            child.signal(number)

    def _child(self, process: Process) -> Child | None:
        if process == COORDINATOR:
            kept = self._processes.coordinator
            return kept.child if kept is not None else None
        return self._processes.workers.get(process)


def _begin_worker() -> None:
    SAVE_NOTICE.listen(LAUNCHER_NOTICE)
    coordinator_client()
