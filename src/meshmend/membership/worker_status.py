"""Describes a job as one of its workers knows it: for those who ask while the coordinator is dead.

A worker knows its generation, its own step, and whether it has a coordinator. It does not know how
far the others are. Knows neither sockets nor a clock; `coordinator_status` is the coordinator's.
"""

from collections.abc import Iterator
from typing import Final

from meshmend.membership.client import MembershipClient, WorkerIdentity
from meshmend.membership.job_status import (
    ChipsWait,
    JobPhase,
    JobStatus,
    WorkerSummary,
    shared_arguments,
)
from meshmend.membership.messages import FRESH, Status
from meshmend.membership.moving_rate import MovingRate

_WINDOW_S: Final = 10.0  # of the rate


class WorkerStatusKeeper:
    """Keeps when a worker stepped, and since when it has had no coordinator.

    The worker's threads write, and the thread that answers reads. Each field is replaced as a
    whole, so nobody waits for a lock.
    """

    def __init__(self, identity: WorkerIdentity, client: MembershipClient, now: float) -> None:
        self._identity = identity
        self._client = client
        self._began_at = now
        self._lost_at: float | None = now  # since when it has had no coordinator
        self._step = 0
        self._stepped_at: float | None = None
        self._begun, self._moved_at = 0, now
        self._rate = MovingRate(_WINDOW_S)

    def move(self, step: int, now: float) -> None:
        """Record that the worker's loop has begun the sum of a step."""
        self._begun, self._moved_at = step, now

    def follow(self, status: Status, now: float) -> None:
        """Record the worker's new status. With `move`, this is all that a step pays."""
        if status.step == self._step + 1:
            self._rate.add(now, 1)
        if status.step != self._step:
            self._step, self._stepped_at = status.step, now

    def connected(self) -> None:
        """Record that the coordinator has admitted this worker."""
        self._lost_at = None

    def disconnected(self, now: float) -> None:
        """Record that the connection to the coordinator was lost; only the first call counts."""
        self._lost_at = now if self._lost_at is None else self._lost_at

    def status(self, now: float, *, is_brief: bool = False) -> JobStatus:
        """Return how the job is, as far as this worker knows."""
        client, identity = self._client, self._identity
        fingerprint, steps_per_s = client.fingerprint, self._rate.at(now)
        is_constant = fingerprint is not None and fingerprint.policy == "constant"
        samples = fingerprint.batch if fingerprint and is_constant else None
        return JobStatus(
            job=identity.job,
            version=fingerprint.version if fingerprint else "",
            shape=identity.shape,
            phase=self._phase(),
            uptime_s=max(0.0, now - self._began_at),
            step=client.status.step,
            answered_by=identity.chip,
            generation=None if is_brief else client.memory,
            step_ago_s=None if self._stepped_at is None else max(0.0, now - self._stepped_at),
            steps_per_s=steps_per_s,
            samples_per_s=samples * steps_per_s if samples and steps_per_s is not None else None,
            coordinator_lost_s=None if self._lost_at is None else max(0.0, now - self._lost_at),
            failure=client.news.failure,
            waits=tuple(self._waits(now)),
            workers=(self._summary(max(0.0, now - self._moved_at)),),
            arguments=shared_arguments({identity.chip: fingerprint}),
        )

    def _phase(self) -> JobPhase:
        news, status, generation = self._client.news, self._client.status, self._client.memory
        if news.failure:
            return JobPhase.FAILED
        if news.is_over:
            return JobPhase.OVER
        if generation is None:
            return JobPhase.GATHERING
        is_stepping = status.ready and status.state_version == generation.number and not news.wait
        return JobPhase.TRAINING if is_stepping else JobPhase.PREPARING

    def _summary(self, still_s: float) -> WorkerSummary:
        client, status = self._client, self._client.status
        return WorkerSummary(
            self._identity.chip,
            client.address or ("", 0),
            generation=None if status.state_version == FRESH else status.state_version,
            step=status.step,
            begun=self._begun,
            still_s=still_s,
            finished=status.finished,
        )

    def _waits(self, now: float) -> Iterator[ChipsWait]:
        """Yield what this worker waits for, if it does not step."""
        chips, news, status = (self._identity.chip,), self._client.news, self._client.status
        if self._phase() in (JobPhase.TRAINING, JobPhase.OVER, JobPhase.FAILED):
            return
        if news.wait:
            yield ChipsWait(chips, (), news.wait)
        if status.lost:
            yield ChipsWait(chips, status.lost, "it lost its connection to them")
        if self._lost_at is not None:
            why = "only a coordinator can form the next generation, and none answers"
            yield ChipsWait(chips, (), why, max(0.0, now - self._lost_at))
