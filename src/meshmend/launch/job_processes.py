"""The processes of a job: its coordinator, a worker per live chip, and one that plans ahead.

All are forked from this process, which has imported what they need. Knows how to start them; what
they are told and what happens to them is not its business.
"""

import os
import signal
import socket
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from meshmend.launch.children import Child, Children
from meshmend.launch.elastic_job import ElasticJob
from meshmend.launch.forked_worker import Place, work
from meshmend.membership.coordinator_server import CoordinatorServer
from meshmend.membership.events import GenerationBegan
from meshmend.membership.job_spec import JobSpec
from meshmend.planning.plan_cache import PlanRequest, Sums, plan_ahead
from meshmend.topology.failures import Chip
from meshmend.train.worker_environment import coordinator_client

_LOW: Final = 19
_TURN_S: Final = 0.02


class JobProcesses:
    """Everyone who works on a job; `workers` holds the latest of each chip."""

    def __init__(self, job: ElasticJob, name: str, listener: socket.socket) -> None:
        self._job = job
        self._name = name
        self._listener = listener
        self.children = Children()
        self.workers: dict[Chip, Child] = {}
        self.coordinator: Child | None = None
        self._planner: Child | None = None

    def start_coordinator(self) -> None:
        """Start the coordinator, again if it has died: what it listens on has stayed."""
        job = self._job
        spec = JobSpec(self._name, job.settings.mesh, job.board, job.timing)
        secret = job.settings.secret.encode()
        listener = self._listener

        def serve() -> int:
            coordinator = CoordinatorServer(listener, secret, spec)
            coordinator.serve()
            coordinator.close()
            return 0

        place = Place(chip=())
        self.coordinator = self.children.start(
            "[coordinator] ", lambda pipes, parent: work(serve, place, pipes, parent)
        )

    def start_worker(self, chip: Chip, harms: Sequence[str] = ()) -> None:
        """Start the worker of a chip; `harms` is what it is to do to itself."""
        job = self._job
        settings = job.settings
        if job.address_of is not None:
            settings = replace(settings, bind=job.address_of(chip))
        host, port = self._listener.getsockname()[:2]
        environment = {
            **settings.environment(),
            "MESHMEND_COORDINATOR": f"{host}:{port}",
            "MESHMEND_JOB": self._name,
            "MESHMEND_CHIP": ",".join(map(str, chip)),
            "MESHMEND_JOB_DIR": str(job.run_dir),
            "MESHMEND_INJECT": "\n".join(harms),
            "MESHMEND_CHECK": "1" if job.checks else "",
            **job.environment,
        }
        place = Place(chip=chip, first=coordinator_client, enter=job.enter, environment=environment)
        self.workers[chip] = self.children.start(
            f"[{','.join(map(str, chip))}] ",
            lambda pipes, parent: work(job.body, place, pipes, parent),
        )

    def bury(self, chips: Collection[Chip]) -> None:
        """Kill what is left of some workers, and wait until they are gone."""
        left = [self.workers[chip] for chip in chips if chip in self.workers]
        for child in left:
            if child.code is None:
                child.was_ended = True
                child.signal(signal.SIGKILL)
        while any(child.code is None for child in left):
            self.children.handle(_TURN_S)

    def look_ahead(self, formed: GenerationBegan, sums: Sums) -> None:
        """Have a process of low priority plan for the loss of each board that is left."""
        job = self._job
        if self._planner is not None:
            self._planner.was_ended = True
            self._planner.signal(signal.SIGKILL)
        whole = replace(job.settings.mesh, failed=frozenset(), failed_links=frozenset())
        dead = set(whole.live) - set(formed.chips)
        mesh = replace(whole, failed=frozenset(dead)).without(*formed.cut)
        outlook = PlanRequest(mesh, job.board, job.settings.algorithm, sums)

        def plan() -> int:
            os.nice(_LOW)
            plan_ahead(job.run_dir / "plans", outlook)
            return 0

        place = Place(chip=())
        self._planner = self.children.start(
            "[planner] ", lambda pipes, parent: work(plan, place, pipes, parent)
        )

    def close(self) -> None:
        """End everyone who still runs."""
        for child in self.children.alive():
            child.signal(signal.SIGCONT)
        self.children.end_all()
