"""Describes a job as its coordinator knows it; changes nothing.

Knows neither sockets nor a clock. `worker_status` is what a worker knows.
"""

from collections.abc import Iterator

from meshmend.membership.admission import Admission
from meshmend.membership.events import ChipsWaiting
from meshmend.membership.generation import Generation
from meshmend.membership.job import JobSpec
from meshmend.membership.job_status import (
    ChipsWait,
    JobPhase,
    JobStatus,
    WorkerSummary,
    loop_waits,
    shared_arguments,
)
from meshmend.membership.job_view import JobView
from meshmend.membership.membership import ConnectedWorker, Membership
from meshmend.membership.messages import FRESH, Traffic
from meshmend.membership.stragglers import Stragglers
from meshmend.topology.failures import Chip


class StatusKeeper:
    """Keeps what a coordinator need not know to decide, only to answer how its job is."""

    def __init__(
        self, spec: JobSpec, membership: Membership, admission: Admission, stragglers: Stragglers
    ) -> None:
        self._spec = spec
        self._membership = membership
        self._admission = admission
        self._stragglers = stragglers
        self._began_at: float | None = None
        self.wait_reasons = WaitReasons(membership)
        self.view = JobView()
        self.traffic: dict[Chip, dict[Chip, int]] = {}  # bytes sent, by sender and receiver

    def begin(self, now: float) -> None:
        """Record that the coordinator runs; only the first call counts."""
        self._began_at = now if self._began_at is None else self._began_at

    def count_traffic(self, chip: Chip, sent: Traffic) -> None:
        """Record how many bytes a worker has sent; a new worker of its chip begins with 0."""
        mesh = self._spec.mesh
        self.traffic[chip] = {peer: n_bytes for peer, n_bytes in sent.sent if peer in mesh}

    def status(self, now: float, failure: str = "") -> JobStatus:
        """Return how the job is now; `failure` is why it could not go on."""
        membership, view = self._membership, self.view
        began_at = now if self._began_at is None else self._began_at
        stepped_at = view.stepped_at
        workers = tuple(self._summary(each, now) for _, each in sorted(membership.workers.items()))
        return JobStatus(
            job=self._spec.job,
            version=self._spec.version,
            shape=self._spec.mesh.shape,
            phase=JobPhase.FAILED if failure else self._phase(),
            uptime_s=max(0.0, now - began_at),
            step=membership.history.step,
            generation=membership.generation,
            step_ago_s=None if stepped_at is None else max(0.0, now - stepped_at),
            steps_per_s=view.steps_per_s(now),
            samples_per_s=view.samples_per_s(now),
            planned=view.planned,
            failure=failure,
            waits=(*self._waits(now), *loop_waits(self._members(workers))),
            workers=workers,
            arguments=shared_arguments(self._admission.fingerprints),
            events=view.last_events(now),
            changes=view.last_changes(now),
            counts=view.counts(),
            slow=view.slow(),
            fabric=view.fabric,
        )

    def _phase(self) -> JobPhase:
        membership = self._membership
        if membership.is_over:
            return JobPhase.OVER
        if membership.is_state_lost:
            return JobPhase.STATE_LOST
        if membership.awaited or membership.generation is None:
            return JobPhase.GATHERING
        if not membership.workers:
            return JobPhase.STATE_LOST
        return JobPhase.PREPARING if membership.go is None else JobPhase.TRAINING

    def _summary(self, worker: ConnectedWorker, now: float) -> WorkerSummary:
        status, position = worker.status, self._stragglers.position_of(worker.chip)
        version = status.state_version
        begun = position[1] if position and position[0] == version else 0
        return WorkerSummary(
            worker.chip,
            worker.address,
            generation=None if version == FRESH else version,
            step=max(status.step, begun - 1),
            begun=begun,
            connected_s=max(0.0, now - worker.connected_at),
            behind_s=self._behind_s(worker.chip, now),
            finished=status.finished,
        )

    def _behind_s(self, chip: Chip, now: float) -> float | None:
        """Return for how long a chip has been behind; None if its next heartbeat may deny it."""
        behind_s = self._stragglers.behind_s(chip, now)
        least_s = 2 * self._spec.timing.alive_every_s
        return None if behind_s is None or behind_s < least_s else behind_s

    def _members(self, workers: tuple[WorkerSummary, ...]) -> Iterator[WorkerSummary]:
        generation = self._membership.generation
        members = set(generation.chips) if generation and self._membership.go else set()
        return (worker for worker in workers if worker.chip in members)

    def _waits(self, now: float) -> Iterator[ChipsWait]:
        """Yield who waits outside the latest generation, and for whom that one waits."""
        for event in self.wait_reasons.events():
            waited_s = self.wait_reasons.waited_s(event.chips, now)
            yield ChipsWait(event.chips, self._membership.awaited, event.why, waited_s)
        generation, go = self._membership.generation, self._membership.go
        if generation is None or self._membership.is_over:
            return
        late = tuple(chip for chip in generation.chips if not self._is_done(chip, generation))
        if late:
            what = "getting up to date" if go else "getting ready"
            formed_at = self.view.formed_at
            yield ChipsWait(
                tuple(chip for chip in generation.chips if chip not in late),
                late,
                f"they are still {what} for generation {generation.number}",
                None if formed_at is None else max(0.0, now - formed_at),
            )

    def _is_done(self, chip: Chip, generation: Generation) -> bool:
        """Whether a member is ready for a generation and, if that has begun, up to date in it."""
        worker = self._membership.workers.get(chip)
        if worker is None or not worker.status.ready:
            return False
        status = worker.status
        reached = status.state_version if self._membership.go else status.generation
        return reached == generation.number


class WaitReasons:
    """Why connected workers do not train, and since when; each reason is sent once."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._reasons: dict[Chip, str] = {}
        self._since: dict[Chip, float] = {}

    def update(self, now: float) -> tuple[tuple[Chip, str], ...]:
        """Ask which workers wait now, and why; return those whose reason is new."""
        reasons = self._membership.reasons_to_wait()
        new = tuple((chip, why) for chip, why in reasons.items() if self._reasons.get(chip) != why)
        self._reasons = reasons
        self._since = {chip: self._since.get(chip, now) for chip in reasons}
        return new

    def forget(self, chip: Chip) -> None:
        """Record that a worker has left; its replacement gets the reason again."""
        self._reasons.pop(chip, None)
        self._since.pop(chip, None)

    def events(self) -> Iterator[ChipsWaiting]:
        """Yield one event per reason, for the observers."""
        for why in dict.fromkeys(self._reasons.values()):
            yield ChipsWaiting(
                tuple(chip for chip in self._reasons if self._reasons[chip] == why), why
            )

    def waited_s(self, chips: tuple[Chip, ...], now: float) -> float:
        """Return for how many seconds the first of these chips has waited."""
        return max(0.0, *(now - self._since[chip] for chip in chips))
