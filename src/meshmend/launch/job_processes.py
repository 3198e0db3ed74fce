"""Starts and ends the processes of a job: coordinator, workers, and one that plans ahead.

Coordinator and workers are forked from this process, which has imported all that they need. The
process that plans ahead needs no torch, so it is a new Python process. This module does not react
to what happens in a process.
"""

import logging
import os
import signal
import socket
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from meshmend.launch.children import Child, Children
from meshmend.launch.elastic_job import ElasticJob
from meshmend.launch.forked_worker import Place, elastic_rank, torchrun_variables, work
from meshmend.membership.coordinator_server import CoordinatorServer
from meshmend.membership.events import GenerationBegan
from meshmend.membership.job import JobSpec
from meshmend.planning.ahead_process import AheadProcess
from meshmend.planning.environment import Environment
from meshmend.planning.plan_request import PlanRequest, PlanTask, SumSizes
from meshmend.topology.failures import Chip
from meshmend.train.core.worker_environment import coordinator_client

_POLL_S: Final = 0.02
GAVE_UP: Final = 3  # the exit code of a coordinator whose job has failed

_log = logging.getLogger(__name__)


class JobProcesses:
    """All processes of a job; `workers[chip]` is the latest worker of a chip."""

    def __init__(self, job: ElasticJob, name: str, listener: socket.socket) -> None:
        self._job = job
        self._name = name
        self._listener = listener
        self.children = Children()
        self.workers: dict[Chip, Child] = {}
        self.coordinator: Child | None = None
        self._planners: dict[int, AheadProcess] = {}  # by pidfd; all but the latest are killed
        self._has_warned = False

    def start_coordinator(self) -> None:
        """Start the coordinator, or restart it: the launcher keeps its listening socket open."""
        job = self._job
        spec = JobSpec(self._name, job.settings.mesh, job.board, job.timing)
        secret = job.settings.secret.encode()
        listener = self._listener

        def serve() -> int:
            record_file = job.run_dir / "coordinator.json"
            coordinator = CoordinatorServer(listener, secret, spec, record_file=record_file)
            coordinator.serve()
            coordinator.close()
            if coordinator.is_superseded:
                return 1  # the next one learns the later term from its workers
            return GAVE_UP if coordinator.failure else 0

        place = Place(chip=())
        self.coordinator = self.children.start(
            "[coordinator] ", lambda pipes, parent: work(serve, place, pipes, parent)
        )

    def start_worker(self, chip: Chip, faults: Sequence[str] = ()) -> None:
        """Start the worker of a chip; it injects `faults` into itself."""
        job = self._job
        settings = job.settings
        if job.address_of is not None:
            settings = replace(settings, bind=job.address_of(chip))
        at_start, coordinator = settings.mesh, self._listener.getsockname()[:2]
        rank = elastic_rank(chip, at_start)
        environment = Environment(
            settings,
            chip=chip,
            coordinator=coordinator,
            job=self._name,
            job_dir=job.run_dir,
            board=job.board,
            faults=tuple(faults),
            checks=job.checks,
            timing=job.timing,
        )
        variables = {
            **torchrun_variables(
                rank,
                at_start.n_live,
                local_rank=rank,
                local_world_size=at_start.n_live,
                master=coordinator,
            ),
            **environment.to_environment(),
            **job.environment,
        }
        place = Place(
            chip=chip,
            first=coordinator_client,
            enter=job.enter,
            environment=variables,
            n_threads=job.n_threads,
        )
        self.workers[chip] = self.children.start(
            f"[{','.join(map(str, chip))}] ",
            lambda pipes, parent: work(job.body, place, pipes, parent),
        )

    def kill_workers(self, chips: Collection[Chip]) -> None:
        """Kill those workers of these chips that still run, and wait until they have ended."""
        killed = [self.workers[chip] for chip in chips if chip in self.workers]
        for child in killed:
            if child.code is None:
                child.is_end_expected = True
                child.signal(signal.SIGKILL)
        while any(child.code is None for child in killed):
            self.children.handle(_POLL_S)

    def plan_ahead(self, formed: GenerationBegan, sums: SumSizes) -> None:
        """Start a process of lowest priority that plans for the loss of each remaining board.

        The process of the generation before is killed. A failure of this process does not stop the
        job: the first one is logged.
        """
        for process in self._planners.values():
            process.kill()
        job = self._job
        whole = replace(job.settings.mesh, failed=frozenset(), failed_links=frozenset())
        dead = set(whole.live) - set(formed.chips)
        mesh = replace(whole, failed=frozenset(dead)).without(*formed.cut)
        request = PlanRequest(mesh, job.board, job.settings.planned_algorithm, tuple(sums))
        try:
            process = AheadProcess(PlanTask(str(job.run_dir / "plans"), request))
        except OSError as error:
            self._warn_once(str(error))
            return
        pidfd = os.pidfd_open(process.pid)
        self._planners[pidfd] = process
        self.children.watch(pidfd, lambda: self._reap_planner(pidfd))

    def close(self) -> None:
        """End all processes that still run."""
        for pidfd, process in list(self._planners.items()):
            process.kill()
            self._reap_planner(pidfd)
        for child in self.children.alive():
            child.signal(signal.SIGCONT)
        self.children.end_all()

    def _reap_planner(self, pidfd: int) -> None:
        """Wait for a planning process that has ended or was killed, and log why it failed."""
        self.children.unwatch(pidfd)
        os.close(pidfd)
        if why := self._planners.pop(pidfd).wait():
            self._warn_once(why)

    def _warn_once(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("the launcher makes no plans ahead: %s", why)
