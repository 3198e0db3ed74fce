"""What a coordinator and a worker say of their job; no sockets, no clock."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from msgspec import structs

from meshmend.config import Timing
from meshmend.membership import events
from meshmend.membership.client import MembershipClient, WorkerIdentity
from meshmend.membership.coordinator import Coordinator
from meshmend.membership.generation import Generation, Seat
from meshmend.membership.job import JobFingerprint, JobSpec
from meshmend.membership.job_status import (
    ChangeCause,
    ChipsWait,
    FinishedChange,
    JobPhase,
    JobStatus,
    WorkerSummary,
    merged,
)
from meshmend.membership.job_view import JobView
from meshmend.membership.messages import (
    AskStatus,
    Failed,
    Go,
    Heartbeat,
    Hello,
    Message,
    NewGeneration,
    Over,
    Refused,
    Report,
    Status,
    StatusAnswer,
    StatusChanged,
    Traffic,
    TryLater,
    Wait,
)
from meshmend.membership.worker_status import WorkerStatusKeeper
from meshmend.topology.failures import Chip
from meshmend.topology.text import parse_mesh

MESH = parse_mesh("2x2x1")
TIMING = Timing(settle_s=0.1, doubt_s=0.1, gather_s=5.0, heartbeat_timeout_s=10.0)
PRINT = JobFingerprint("0.1", 100, 64, 0, "constant", "a model", "SGD(lr)", 500, "ab12")
A, B, C, D = MESH.live


@dataclass
class Sent:
    """What a coordinator sent, by connection, and on which connections it hung up."""

    messages: dict[int, list[Message]] = field(default_factory=dict)
    closed: list[int] = field(default_factory=list)

    def send(self, connection: int, message: Message) -> None:
        """Keep a message."""
        self.messages.setdefault(connection, []).append(message)

    def hang_up(self, connection: int) -> None:
        """Keep the number."""
        self.closed.append(connection)


class SmallJob:
    """A coordinator whose workers, by hand, do what they are told; connection n is chip n."""

    def __init__(self, *, straggler_timeout_s: float = 600.0, **timing_s: float) -> None:
        timing = structs.replace(TIMING, straggler_timeout_s=straggler_timeout_s, **timing_s)
        self.sent = Sent()
        self.coordinator = Coordinator(JobSpec("ours", MESH, (1, 1, 1), timing), self.sent)
        self.coordinator.tick(0.0)

    def arrive(self, *chips: Chip, now: float = 0.0) -> None:
        for chip in chips:
            number = MESH.live.index(chip)
            address = ("host", 1000 + number)
            said = Hello("ours", MESH.shape, chip, address, Status(), fingerprint=PRINT)
            self.coordinator.opened(number, "worker", now)
            self.coordinator.received(number, said, now)
        self.coordinator.tick(now)

    def say(self, chip: Chip, message: Message, now: float) -> None:
        self.coordinator.received(MESH.live.index(chip), message, now)
        self.coordinator.tick(now)

    def begin(self, now: float, chips: Iterable[Chip] = MESH.live) -> int:
        """Form a generation and take all its chips through their first step; return its number."""
        self.coordinator.tick(now)
        generation = self.coordinator.status(now).generation
        assert generation is not None
        number = generation.number
        for chip in chips:
            self.say(chip, StatusChanged(Status(number, ready=True)), now)
        for chip in chips:
            up = Status(number, ready=True, state_version=number)
            self.say(chip, StatusChanged(up), now)
        return number

    def step(self, chips: Iterable[Chip], step: int, number: int, now: float) -> None:
        """All chips finish a step, the first of them as the leader."""
        for place, chip in enumerate(chips):
            is_first = step == 1
            stepped = events.WorkerStepped(
                chip, step, number, now, leads=place == 0, first=is_first, loss=1.0, samples=64
            )
            if place == 0 or is_first:
                self.say(chip, Report(stepped), now)
            self.say(chip, Heartbeat(number, step + 1), now)


def test_a_job_that_gathers_says_whom_it_waits_for_and_since_when() -> None:
    job = SmallJob()
    job.arrive(A, now=1.0)
    job.arrive(B, now=3.0)

    status = job.coordinator.status(4.0)

    assert (status.phase, status.step, status.uptime_s) == (JobPhase.GATHERING, 0, 4.0)
    why = "the other workers have not connected yet"
    assert status.waits == (ChipsWait((A, B), (C, D), why, 3.0),)
    assert [each.connected_s for each in status.workers] == [3.0, 1.0]
    assert status.arguments[0].chips == (A, B)
    assert status.n_steps == 100


def test_a_job_that_prepares_says_who_is_not_ready() -> None:
    job = SmallJob()
    job.arrive(*MESH.live)
    job.coordinator.tick(1.0)
    generation = job.coordinator.status(1.0).generation
    assert generation is not None
    for chip in (A, B, C):
        job.say(chip, StatusChanged(Status(generation.number, ready=True)), 2.0)

    status = job.coordinator.status(3.5)

    assert status.phase is JobPhase.PREPARING
    why = f"they are still getting ready for generation {generation.number}"
    assert status.waits == (ChipsWait((A, B, C), (D,), why, 2.5),)


def test_a_job_whose_chips_have_all_left_does_not_train() -> None:
    job = SmallJob()
    job.arrive(*MESH.live)
    job.begin(1.0)
    for chip in MESH.live:
        job.coordinator.closed(MESH.live.index(chip), "gone", 2.0)

    for now in (2.0, 3.0, 600.0):
        job.coordinator.tick(now)
        assert job.coordinator.status(now).phase is JobPhase.STATE_LOST


def test_a_job_that_trains_has_a_step_a_rate_and_nobody_waits() -> None:
    job = SmallJob()
    job.arrive(*MESH.live)
    number = job.begin(1.0)
    for step in range(1, 9):
        job.step(MESH.live, step, number, 1.0 + step / 2)

    status = job.coordinator.status(5.5)

    assert (status.phase, status.step, status.waits) == (JobPhase.TRAINING, 8, ())
    assert status.step_ago_s == 0.5
    assert status.steps_per_s == pytest.approx(7 / 4)  # seven after the first, in four seconds
    assert status.samples_per_s == pytest.approx(64 * 7 / 4)
    assert (status.counts.steps, status.counts.samples) == (8, 8 * 64)
    assert {each.step for each in status.workers} == {8}
    assert status.changes[-1].change.cause is ChangeCause.CONNECTED


def test_reports_that_come_late_and_all_at_once_do_not_change_the_rate() -> None:
    """As after the restart of a coordinator: workers have kept their reports."""
    view = JobView()
    for step in range(1, 101):
        report = events.WorkerStepped(
            A, step, 1, 500.0 + step / 10, leads=True, first=False, loss=1.0, samples=64
        )
        view.take(3.0, report)

    assert view.steps_per_s(3.0) == pytest.approx(10.0)
    assert view.steps_per_s(3.0 + 9.9) == pytest.approx(5.0)  # and then nothing came


def test_who_is_behind_is_named_with_the_time() -> None:
    job = SmallJob()
    job.arrive(*MESH.live)
    number = job.begin(1.0)
    for chip in (A, B, C):
        job.say(chip, Heartbeat(number, 1), 2.0)
    job.say(D, Heartbeat(number, 0), 2.0)

    job.coordinator.tick(2.5)
    assert job.coordinator.status(2.5).waits == ()  # its heartbeat may just be late
    why = "the sum needs the gradients of all"
    assert job.coordinator.status(9.0).waits == (ChipsWait((A, B, C), (D,), why, 6.5),)


def test_nobody_is_behind_because_heartbeats_are_rare() -> None:
    """With a timeout of a minute they come every 7.5 s; a thousand chips that trained were red."""
    job = SmallJob(heartbeat_timeout_s=60.0, holder_timeout_s=60.0)
    job.arrive(*MESH.live)
    number = job.begin(1.0)
    for chip, begun in ((A, 9), (B, 7), (C, 5), (D, 3)):  # where each was at its last heartbeat
        job.say(chip, Heartbeat(number, begun), 2.0)

    job.coordinator.tick(2.5)
    for now in (4.0, 10.0):
        status = job.coordinator.status(now)
        assert (status.waits, {each.behind_s for each in status.workers}) == ((), {None})
    (wait,) = job.coordinator.status(20.0).waits
    assert (wait.chips, wait.awaited) == ((A,), (B, C, D))


def test_a_loss_is_a_recovery_with_a_time_and_a_return_is_none() -> None:
    job = SmallJob()
    job.arrive(*MESH.live)
    job.step(MESH.live, 1, job.begin(1.0), 2.0)
    job.coordinator.closed(3, "gone", 3.0)
    left = (A, B, C)
    job.step(left, 1, job.begin(3.2, left), 3.4)
    job.arrive(D, now=5.0)
    job.step(MESH.live, 1, job.begin(5.2), 5.6)

    status = job.coordinator.status(6.0)

    counts = status.counts
    assert (counts.departures, counts.arrivals, sum(counts.recoveries)) == (1, 5, 1)
    assert counts.recovery_s == pytest.approx(0.4)
    assert counts.recoveries[2] == 1  # up to half a second
    causes = [each.change.cause for each in status.changes]
    assert causes == [ChangeCause.CONNECTED, ChangeCause.LEFT, ChangeCause.CONNECTED]
    assert any(isinstance(each.event, events.WorkerLeft) for each in status.events)


def test_a_job_that_is_over_or_has_failed_says_so() -> None:
    job = SmallJob()
    job.arrive(*MESH.live)
    number = job.begin(1.0)
    for chip in MESH.live:
        done = Status(number, ready=True, state_version=number, step=100, finished=True)
        job.say(chip, StatusChanged(done), 2.0)

    assert job.coordinator.status(3.0).phase is JobPhase.OVER
    job.coordinator.failure = "no chip is left"
    assert job.coordinator.status(3.0).phase is JobPhase.FAILED


def test_an_asker_gets_one_answer_and_changes_nothing() -> None:
    job = SmallJob()
    job.arrive(*MESH.live)
    before = job.coordinator.status(1.0)

    for question in (AskStatus(), AskStatus("ours")):
        job.coordinator.opened(10, "asker", 1.0)
        job.coordinator.received(10, question, 1.0)
        assert job.sent.messages.pop(10) == [StatusAnswer(before)]
        job.coordinator.closed(10, "it hung up", 1.0)

    assert job.coordinator.status(1.0) == before


def test_an_asker_of_another_job_and_one_that_asks_twice_are_refused() -> None:
    job = SmallJob()
    for number, questions in enumerate(([AskStatus("theirs")], [AskStatus(), AskStatus()]), 10):
        job.coordinator.opened(number, "asker", 1.0)
        for question in questions:
            job.coordinator.received(number, question, 1.0)

    first, second = job.sent.messages[10][-1], job.sent.messages[11][-1]
    assert isinstance(first, Refused)
    assert first.why == "it belongs to job 'theirs', but this coordinator serves job 'ours'"
    assert isinstance(second, Refused)
    assert second.why == "an unexpected message 'ask status'"


def test_the_oldest_asker_makes_room_and_a_silent_one_is_dropped_without_a_word() -> None:
    job = SmallJob()
    job.arrive(*MESH.live)
    for number in range(10, 43):
        job.coordinator.opened(number, "asker", 1.0)
        job.coordinator.received(number, AskStatus(), 1.0)
    assert job.sent.closed == [10]

    for now in (4.0, 8.0, 12.0):
        for chip in MESH.live:
            job.say(chip, Heartbeat(0, 0), now)

    assert sorted(job.sent.closed) == list(range(10, 43))
    assert job.coordinator.status(12.0).counts.refusals == 0
    assert len(job.coordinator.status(12.0).workers) == 4


def test_questions_that_come_too_often_are_answered_later() -> None:
    job = SmallJob()
    job.coordinator = Coordinator(JobSpec("ours", parse_mesh("64x64"), (1, 1), TIMING), job.sent)
    for number in range(10, 14):
        job.coordinator.opened(number, "asker", 1.0 if number < 13 else 2.0)
        job.coordinator.received(number, AskStatus(), 1.0 if number < 13 else 2.0)

    kinds = [type(job.sent.messages[number][-1]) for number in range(10, 14)]
    assert kinds == [StatusAnswer, TryLater, TryLater, StatusAnswer]
    assert job.coordinator.status(2.0).counts.refusals == 0


def test_the_bytes_that_workers_count_are_kept_by_sender_and_receiver() -> None:
    job = SmallJob()
    job.arrive(A, B)
    job.say(A, Traffic(((B, 100), ((9, 9, 9), 5))), 1.0)
    job.say(A, Traffic(((B, 250),)), 2.0)

    assert job.coordinator.traffic == {A: {B: 250}}


def stepped(chip: Chip, *, step: int = 7) -> events.WorkerStepped:
    return events.WorkerStepped(chip, step, 1, 0.0, leads=False, first=True, loss=1.0, samples=64)


@pytest.mark.parametrize(
    ("before", "cause", "took_s"),
    [
        ([events.WorkerLeft(A), events.WorkerLeft(B)], ChangeCause.LEFT, 3.0),
        ([events.WorkerArrived(C), events.WorkerArrived(D)], ChangeCause.CONNECTED, 2.0),
        ([events.WorkerLeft(D), events.WorkerArrived(D)], ChangeCause.CONNECTED, 2.0),  # no member
        ([], ChangeCause.LINKS, 1.0),
    ],
)
def test_a_change_is_timed_from_what_began_it(
    before: list[events.Event], cause: ChangeCause, took_s: float
) -> None:
    view = JobView()
    for start in (events.GenerationBegan(1, (A, B), 0), stepped(A), stepped(B)):
        view.take(1.0, start)
    for clock, event in enumerate(before, 10):
        view.take(clock, event)
    view.take(12.0, events.GenerationForming(2, (A, B), "why"))
    view.take(12.5, events.GenerationBegan(2, (A, B), 6))

    assert view.take(12.7, stepped(A)).change is None
    assert view.take(13.0, stepped(B)).change == FinishedChange(cause, took_s, 2, 7, 1)


def test_a_worker_that_leaves_before_the_job_began_is_no_recovery() -> None:
    view = JobView()
    happened: list[events.Event] = [
        events.WorkerArrived(A),
        events.WorkerLeft(A),
        events.WorkerArrived(A),
        events.GenerationBegan(1, (A,), 0),
        stepped(A),
    ]
    for clock, event in enumerate(happened):
        view.take(float(clock), event)

    assert sum(view.counts().recoveries) == 0
    assert [each.change.cause for each in view.last_changes(9.0)] == [ChangeCause.CONNECTED]


IDENTITY = WorkerIdentity("ours", MESH.shape, A, 0, ("host", 7000), b"secret")
GENERATION = Generation(3, tuple(Seat(chip, ("host", 1), 3) for chip in MESH.live))


def worker_that_steps() -> tuple[MembershipClient, WorkerStatusKeeper]:
    client = MembershipClient(IDENTITY)
    keeper = WorkerStatusKeeper(IDENTITY, client, 0.0)
    client.fingerprint = PRINT
    client.join(("host", 1000), Status(), on_change=lambda: None, on_sever=lambda chip: None)
    client.received(NewGeneration(GENERATION))
    client.received(Go(3, 0, MESH.live))
    keeper.connected()
    for step in range(5):
        client.status = Status(3, ready=True, state_version=3, step=step)
        keeper.follow(client.status, 1.0 + step)
    return client, keeper


def test_a_worker_says_what_it_knows_and_that_its_coordinator_is_lost() -> None:
    _, keeper = worker_that_steps()
    keeper.disconnected(5.5)
    keeper.disconnected(6.0)

    status = keeper.status(7.0)

    assert (status.answered_by, status.phase, status.step) == (A, JobPhase.TRAINING, 4)
    assert (status.coordinator_lost_s, status.step_ago_s) == (1.5, 2.0)
    assert status.generation == GENERATION
    assert status.steps_per_s == pytest.approx(3 / 5)
    assert status.samples_per_s == pytest.approx(64 * 3 / 5)
    assert status.waits == ()
    assert keeper.status(7.0, is_brief=True) == structs.replace(status, generation=None)


def test_a_worker_that_lost_a_peer_and_its_coordinator_says_for_whom_it_waits() -> None:
    client, keeper = worker_that_steps()
    client.status = Status(3, ready=False, state_version=3, step=4, lost=(B,))
    keeper.disconnected(6.0)

    status = keeper.status(8.0)

    assert status.phase is JobPhase.PREPARING
    lost, none = status.waits
    assert (lost.awaited, none.since_s) == ((B,), 2.0)
    assert "only a coordinator" in none.why


@pytest.mark.parametrize(
    ("news", "phase"),
    [
        (Over(), JobPhase.OVER),
        (Failed("no state"), JobPhase.FAILED),
        (Wait("its board must be complete"), JobPhase.PREPARING),
    ],
)
def test_a_worker_knows_how_its_job_ended(news: Message, phase: JobPhase) -> None:
    client, keeper = worker_that_steps()
    client.received(news)

    assert keeper.status(7.0).phase is phase


def answer(chip: Chip, step: int, still_s: float) -> JobStatus:
    """Return what a worker says that has begun the sum of a step; all have finished step 5."""
    summary = WorkerSummary(chip, ("host", 1), 3, 5, begun=step, still_s=still_s)
    return JobStatus(
        "ours",
        "0.1",
        MESH.shape,
        JobPhase.TRAINING,
        9.0,
        5,
        answered_by=chip,
        step_ago_s=still_s,
        workers=(summary,),
    )


def test_several_workers_together_know_who_is_behind() -> None:
    status = merged(answer(A, 7, 5.0), [answer(C, 7, 4.0), answer(B, 6, 5.5)])

    assert [each.chip for each in status.workers] == [A, B, C]
    assert (status.step, status.step_ago_s) == (5, 4.0)
    (wait,) = status.waits
    assert (wait.chips, wait.awaited, wait.since_s) == ((A, C), (B,), 5.5)


def test_a_worker_that_has_lost_a_peer_means_that_the_job_does_not_step() -> None:
    lost = ChipsWait((A,), (D,), "it lost its connection to them")
    first = structs.replace(answer(A, 6, 5.0), phase=JobPhase.PREPARING, waits=(lost,))

    for answers in ([first, answer(B, 6, 5.0)], [answer(B, 6, 5.0), first]):
        status = merged(answers[0], answers[1:])
        assert (status.phase, status.waits) == (JobPhase.PREPARING, (lost,))


def test_workers_that_are_asked_one_after_the_other_while_all_step_wait_for_nobody() -> None:
    status = merged(answer(A, 7, 0.01), [answer(B, 6, 0.02)])

    assert status.waits == ()
