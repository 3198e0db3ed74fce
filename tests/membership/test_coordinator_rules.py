"""What the simulation of the protocol found, each as a case by hand; no sockets, no clock."""

from dataclasses import dataclass, field

import pytest
from msgspec import structs

from meshmend.config import Timing
from meshmend.membership.coordinator import Coordinator
from meshmend.membership.events import HistoryDropped
from meshmend.membership.generation import Generation, Seat
from meshmend.membership.history import BegunGeneration, CoordinatorRecord, History
from meshmend.membership.job import JobSpec
from meshmend.membership.job_status import JobPhase
from meshmend.membership.membership import Membership
from meshmend.membership.messages import (
    FRESH,
    Absent,
    AskMemory,
    CutLink,
    Failed,
    Finish,
    Go,
    Heartbeat,
    Hello,
    MendLink,
    Message,
    NewGeneration,
    Observe,
    Observed,
    Over,
    Refused,
    Repaired,
    Sever,
    Status,
    StatusChanged,
    TryLater,
    TurnedAway,
    Wait,
    Welcome,
    encode_message,
)
from meshmend.topology.failures import Chip, Link
from meshmend.topology.text import parse_mesh

MESH = parse_mesh("1x2")
TIMING = Timing(settle_s=0.1, doubt_s=0.1, gather_s=5.0, heartbeat_timeout_s=10.0)


@dataclass
class Sent:
    """What a coordinator sent, by connection."""

    messages: dict[int, list[Message]] = field(default_factory=dict)

    def send(self, connection: int, message: Message) -> None:
        """Keep a message."""
        self.messages.setdefault(connection, []).append(message)

    def hang_up(self, connection: int) -> None:
        """Nothing to close."""

    def kinds(self, connection: int) -> set[type[Message]]:
        """Return the kinds of messages that went to a connection."""
        return {type(message) for message in self.messages.get(connection, [])}


def hello(chip: Chip, status: Status | None = None) -> Hello:
    return Hello("ours", MESH.shape, chip, ("host", 1 + chip[1]), status or Status())


def membership_that_trains() -> tuple[Membership, Generation]:
    """Two workers that are up to date in their first generation."""
    membership = Membership(MESH, TIMING, board=(1, 1))
    for chip in MESH.live:
        address = ("host", 1 + chip[1])
        membership.arrive(chip, address, status=Status(), memory=None, now=0.0)
    generation = membership.decide(1.0).generation
    assert generation is not None
    for chip in MESH.live:
        membership.update_status(chip, Status(generation.number, ready=True), 1.0)
    assert membership.decide(1.0).go is not None
    number = generation.number
    for chip in MESH.live:
        membership.update_status(chip, Status(number, ready=True, state_version=number), 1.0)
    return membership, generation


def test_a_link_that_is_mended_as_soon_as_it_is_cut_gets_a_new_generation() -> None:
    """Both its ends have left the one before, and wait."""
    membership, before = membership_that_trains()
    one, other = MESH.live
    link = Link.between(one, other)
    lost = Status(before.number, state_version=before.number, lost=(other,))
    membership.update_status(one, lost, 2.0)
    membership.update_status(other, structs.replace(lost, lost=(one,)), 2.0)
    assert membership.decide(2.15).generation is None

    membership.mend(link, 2.16)
    after = membership.decide(3.0).generation

    assert after is not None
    assert after.epoch(one, other) > before.epoch(one, other)


def test_a_link_that_the_user_has_cut_while_no_worker_was_connected_is_severed() -> None:
    """As when a coordinator that was started again hears of the cut before its workers come."""
    one, other = MESH.live
    sent = Sent()
    coordinator = Coordinator(JobSpec("ours", MESH, (1, 1), TIMING), sent)
    coordinator.opened(9, "launcher", 0.0)
    coordinator.received(9, Observe("ours"), 0.0)
    coordinator.received(9, CutLink(Link.between(one, other)), 0.0)

    for number, chip in enumerate(MESH.live):
        coordinator.opened(number, "worker", 1.0)
        coordinator.received(number, hello(chip), 1.0)

    assert [sent.messages[number][-1] for number in (0, 1)] == [Sever(other), Sever(one)]


def test_a_link_that_the_user_has_cut_is_not_tried_by_the_next_coordinator_either() -> None:
    """The record tells it: the workers know that the link is cut, but not by whom."""
    one, other = MESH.live
    link = Link.between(one, other)
    sent, kept = Sent(), list[CoordinatorRecord]()
    coordinator = Coordinator(JobSpec("ours", MESH, (1, 1), TIMING), sent, keep=kept.append)
    coordinator.opened(9, "launcher", 0.0)
    coordinator.received(9, Observe("ours"), 0.0)
    for number, chip in enumerate(MESH.live):
        coordinator.opened(number, "worker", 0.0)
        coordinator.received(number, hello(chip), 0.0)
    coordinator.tick(1.0)
    begin_generation(coordinator, sent, {0: Status(), 1: Status()}, 1.0)
    coordinator.received(9, CutLink(link), 2.0)
    lost = {0: Status(1, state_version=1, lost=(other,)), 1: Status(1, state_version=1)}
    for number, status in lost.items():
        coordinator.received(number, StatusChanged(status), 2.0)
    coordinator.tick(3.0)
    coordinator.tick(4.0)
    memory = begin_generation(coordinator, sent, lost, 4.0)
    assert memory.chips == (one,)

    sent = Sent()
    coordinator = Coordinator(
        JobSpec("ours", MESH, (1, 1), TIMING), sent, history=History(kept[-1]), keep=kept.append
    )
    coordinator.opened(9, "launcher", 10.0)
    coordinator.received(9, Observe("ours"), 10.0)
    number = memory.number
    member = hello(one, Status(number, ready=True, state_version=number))
    coordinator.opened(0, "worker", 10.0)
    coordinator.received(0, structs.replace(member, memory=memory), 10.0)
    coordinator.opened(1, "worker", 10.0)
    waits = hello(other, Status(1, state_version=1))
    coordinator.received(1, structs.replace(waits, memory=memory), 10.0)

    def formed_until(now: int, then: int) -> list[Generation]:
        for second in range(now, then):
            for each in (0, 1):
                coordinator.received(each, Heartbeat(number, 0), float(second))
            coordinator.tick(float(second))
        return [each.generation for each in sent.messages[0] if isinstance(each, NewGeneration)]

    assert all(each.chips == (one,) for each in formed_until(10, 1000))
    coordinator.received(9, MendLink(link), 1000.0)
    assert formed_until(1000, 1010)[-1].chips == (one, other)


def test_a_chip_whose_steps_are_lost_is_refused_after_the_end_and_one_that_was_late_is_not() -> (
    None
):
    """Its exit code says so: those steps were led by a coordinator that this one knows not of."""
    sent = Sent()
    coordinator = Coordinator(JobSpec("ours", MESH, (1, 1), TIMING), sent)
    for number, chip in enumerate(MESH.live):
        coordinator.opened(number, "worker", 0.0)
        coordinator.received(number, hello(chip), 0.0)
    coordinator.tick(1.0)
    generation = begin_generation(coordinator, sent, {0: Status(), 1: Status()}, 1.0)
    coordinator.closed(1, "cut off", 2.0)
    coordinator.opened(9, "launcher", 3.0)
    coordinator.received(9, Observe("ours"), 3.0)
    coordinator.received(9, Finish(), 3.0)

    ours = Status(1, state_version=1, step=7, term=generation.term)
    for number, status in ((2, ours), (3, structs.replace(ours, term=generation.term - 1))):
        coordinator.opened(number, "worker", 4.0)
        known = structs.replace(hello((0, 1), status), memory=generation)
        coordinator.received(number, known, 4.0)

    assert sent.messages[2] == [Wait("the job was over before it came back"), Over()]
    assert sent.messages[3] == [
        Refused("the job is over, and chip (0, 1) has step 7 of another history, which is lost")
    ]
    dropped = [each.event for each in sent.messages[9] if isinstance(each, Observed)]
    assert HistoryDropped(generation.term - 1, 7, (0, 1)) in dropped


def begin_generation(
    coordinator: Coordinator, sent: Sent, statuses: dict[int, Status], now: float
) -> Generation:
    """Let the members of the generation that was formed last be up to date in it; return it."""
    made = [each for each in sent.messages[0] if isinstance(each, NewGeneration)][-1].generation
    for number, status in statuses.items():
        if MESH.live[number] in made.chips:
            ready = structs.replace(status, generation=made.number, ready=True, lost=())
            coordinator.received(number, StatusChanged(ready), now)
    coordinator.tick(now)
    assert any(isinstance(each, Go) and each.generation == made.number for each in sent.messages[0])
    for number in statuses:
        if MESH.live[number] in made.chips:
            begun = Status(made.number, ready=True, state_version=made.number)
            coordinator.received(number, StatusChanged(begun), now)
    return made


def test_the_number_of_a_generation_is_kept_before_anybody_hears_of_it() -> None:
    """Another coordinator would use it again for other workers."""
    sent, kept = Sent(), list[CoordinatorRecord]()
    coordinator = Coordinator(JobSpec("ours", MESH, (1, 1), TIMING), sent, keep=kept.append)
    for number, chip in enumerate(MESH.live):
        coordinator.opened(number, "worker", 0.0)
        coordinator.received(number, hello(chip), 0.0)
    coordinator.tick(1.0)

    (made,) = (each for each in sent.messages[0] if isinstance(each, NewGeneration))
    assert kept[-1].highest == made.generation.number


def test_a_worker_that_comes_back_is_told_again_why_it_waits() -> None:
    sent = Sent()
    coordinator = Coordinator(JobSpec("ours", MESH, (1, 1), TIMING), sent)
    for number in (1, 2):
        coordinator.opened(number, "worker", 0.0)
        coordinator.received(number, hello((0, 0)), 0.0)
        coordinator.tick(0.0)
        assert Wait in sent.kinds(number)
        coordinator.closed(number, "gone", 0.0)


def test_a_connection_that_stays_silent_is_not_refused_for_good() -> None:
    """The first message of a worker that holds the state may be held up on its way."""
    sent = Sent()
    coordinator = Coordinator(JobSpec("ours", MESH, (1, 1), TIMING), sent)
    coordinator.opened(1, "worker", 0.0)
    for tenth in range(111):
        coordinator.tick(0.1 * tenth)

    (answer,) = sent.messages[1]
    assert isinstance(answer, TryLater)
    assert not answer.is_chip_taken  # else it would end after a while


LATEST = 3  # a generation that began after step 10 and took steps; all its workers are gone


def coordinator_after_a_restart(*, of_all: bool = False) -> tuple[Coordinator, Sent]:
    """A coordinator that knows the latest generation from the record of the one before it.

    With `of_all`, the whole job was restarted.
    """
    gone = (((0, 0), ("gone", 1)), ((0, 1), ("gone", 2)))
    begun = (
        BegunGeneration(LATEST - 1, gone, is_confirmed=True),
        BegunGeneration(LATEST, gone, base=LATEST - 1, step=10),
    )
    record = CoordinatorRecord("ours", begun, step=12, highest=LATEST)
    sent = Sent()
    spec = JobSpec("ours", MESH, (1, 1), structs.replace(TIMING, holder_timeout_s=20.0))
    return Coordinator(spec, sent, history=History(record, is_restarted=of_all)), sent


def state_of(version: int, *, step: int, checkpoint: int | None = None) -> Status:
    return Status(version, state_version=version, step=step, checkpoint=checkpoint)


def says_hello(coordinator: Coordinator, connection: int, status: Status, now: float) -> None:
    """Let a worker of chip 0,0 connect; it remembers the generation that its state is of."""
    address = ("host", connection)
    memory = Generation(status.state_version, (Seat((0, 0), address, 1),), frozenset(), ())
    known = memory if status.state_version != FRESH else None
    first = structs.replace(hello((0, 0), status), address=address, memory=known)
    coordinator.opened(connection, "worker", now)
    coordinator.received(connection, first, now)


def answer_to_ready(
    coordinator: Coordinator, sent: Sent, status: Status, *, until_s: int = 60
) -> Go | Failed:
    """Return how a coordinator decides for its only worker, connection 1."""
    for second in range(1, until_s):
        coordinator.received(1, Heartbeat(0, 0), float(second))
        coordinator.tick(float(second))
        for message in sent.messages.pop(1, []):
            if isinstance(message, Go | Failed):
                return message
            if isinstance(message, NewGeneration):
                ready = structs.replace(status, generation=message.generation.number, ready=True)
                coordinator.received(1, StatusChanged(ready), float(second))
    raise AssertionError("it decided nothing")


def test_a_worker_that_the_others_went_on_without_gives_back_its_state_when_they_are_lost() -> None:
    coordinator, sent = coordinator_after_a_restart()
    status = state_of(LATEST - 1, step=9)
    says_hello(coordinator, 1, status, 0.0)

    go = answer_to_ready(coordinator, sent, status)

    assert isinstance(go, Go)
    assert (go.step, go.holders, go.restores, go.lost) == (9, ((0, 0),), False, 12)


def test_a_state_after_the_step_that_the_others_went_on_from_is_no_state_of_the_job() -> None:
    coordinator, sent = coordinator_after_a_restart()
    status = state_of(LATEST - 1, step=11)
    says_hello(coordinator, 1, status, 0.0)

    assert isinstance(answer_to_ready(coordinator, sent, status), Failed)


def test_such_a_worker_reads_its_checkpoint_instead() -> None:
    coordinator, sent = coordinator_after_a_restart()
    status = state_of(LATEST - 1, step=11, checkpoint=8)
    says_hello(coordinator, 1, status, 0.0)

    go = answer_to_ready(coordinator, sent, status)

    assert isinstance(go, Go)
    assert (go.step, go.restores) == (8, True)


def test_a_job_that_was_restarted_goes_on_from_its_checkpoint_without_waiting() -> None:
    coordinator, sent = coordinator_after_a_restart(of_all=True)
    status = Status(checkpoint=8)
    says_hello(coordinator, 1, status, 0.0)

    go = answer_to_ready(coordinator, sent, status, until_s=int(TIMING.gather_s) + 3)

    assert isinstance(go, Go)
    assert (go.step, go.restores, go.lost) == (8, True, 12)


def test_a_job_that_was_restarted_without_a_checkpoint_begins_again() -> None:
    coordinator, sent = coordinator_after_a_restart(of_all=True)
    says_hello(coordinator, 1, Status(), 0.0)

    go = answer_to_ready(coordinator, sent, Status(), until_s=int(TIMING.gather_s) + 3)

    assert isinstance(go, Go)
    assert (go.generation > LATEST, go.step, go.restores, go.lost) == (True, 0, True, 12)


def test_a_job_whose_workers_are_all_lost_later_waits_and_fails_as_any_other() -> None:
    """Only the first generation after the restart may begin again."""
    history = History(CoordinatorRecord("ours", (BegunGeneration(1, ()),)), is_restarted=True)
    history.begin(Generation(2, (), frozenset(), ()), version=FRESH, step=0)

    assert history.restorable(Status()) == ()
    assert history.wait_s(60.0) == 60.0


def test_a_state_of_a_generation_that_never_began_in_the_record_is_of_another_history() -> None:
    """A disk may lose the word that generation 1 began, but not that it was formed."""
    history = History(CoordinatorRecord("ours", highest=1, term=1_000_007))
    history.take_term(0, 5)
    history.begin(Generation(2, (), frozenset(), (), history.record.term), version=FRESH, step=0)

    assert not history.contains(Status(1, state_version=1, step=25, term=1_000_007))


def test_of_an_unknown_history_the_newest_state_counts_that_a_worker_has_brought() -> None:
    history = History(CoordinatorRecord("ours", is_unknown=True))
    older, newer = state_of(1, step=8), state_of(3, step=46)
    for number, status in enumerate((older, newer)):
        history.update(((0, number), ("host", number)), status)

    assert history.is_holder(newer)
    assert not history.is_holder(older)
    assert not history.is_holder(Status())


def test_the_state_of_a_generation_that_is_not_the_one_before_is_no_state_of_the_job() -> None:
    coordinator, sent = coordinator_after_a_restart()
    status = state_of(LATEST - 2, step=5)
    says_hello(coordinator, 1, status, 0.0)

    assert isinstance(answer_to_ready(coordinator, sent, status), Failed)


def test_a_worker_with_the_lost_state_takes_its_chip_back_from_a_new_one() -> None:
    coordinator, sent = coordinator_after_a_restart()
    says_hello(coordinator, 2, Status(), 0.0)
    coordinator.tick(6.0)  # nobody else comes: from now on it looks for the state
    says_hello(coordinator, 1, state_of(LATEST - 1, step=10), 6.0)

    assert TurnedAway in sent.kinds(2)
    assert Welcome in sent.kinds(1)


def test_a_worker_that_nobody_misses_waits_until_its_chip_is_free() -> None:
    coordinator, sent = coordinator_after_a_restart()
    says_hello(coordinator, 2, state_of(LATEST - 1, step=10), 0.0)
    coordinator.tick(6.0)
    says_hello(coordinator, 1, state_of(LATEST - 1, step=9), 6.0)

    assert TurnedAway not in sent.kinds(2)
    assert sent.kinds(1) == {TryLater}


def test_a_coordinator_that_is_started_again_does_not_wait_for_a_worker_that_is_known_dead() -> (
    None
):
    """The launcher, which saw it die, tells the new coordinator."""
    sent = Sent()
    coordinator = Coordinator(JobSpec("ours", MESH, (1, 1), TIMING), sent)
    coordinator.opened(9, "launcher", 0.0)
    coordinator.received(9, Observe("ours"), 0.0)
    coordinator.received(9, Absent((0, 1)), 0.0)
    seats = tuple(Seat(chip, ("host", 1), 1) for chip in MESH.live)
    status = Status(2, state_version=2, step=5)
    memory = Generation(2, seats, frozenset(), ())
    coordinator.opened(1, "worker", 0.0)
    coordinator.received(1, structs.replace(hello((0, 0), status), memory=memory), 0.0)
    coordinator.tick(2 * TIMING.settle_s)

    assert NewGeneration in sent.kinds(1)


def test_a_generation_that_may_have_begun_does_not_begin_again_with_other_holders() -> None:
    """One member took the go message of the coordinator before, the other missed it."""
    sent = Sent()
    coordinator = Coordinator(JobSpec("ours", MESH, (1, 1), TIMING), sent)
    seats = tuple(Seat(chip, ("host", 1 + chip[1]), 1) for chip in MESH.live)
    memory = Generation(2, seats, frozenset(), ())
    for number, (chip, version) in enumerate(zip(MESH.live, (2, 1), strict=True)):
        status = Status(2, ready=True, state_version=version, step=1)
        coordinator.opened(number, "worker", 0.0)
        coordinator.received(number, structs.replace(hello(chip, status), memory=memory), 0.0)
    coordinator.tick(0.0)
    assert Go not in sent.kinds(0)
    coordinator.tick(1.0)

    (made,) = (each for each in sent.messages[0] if isinstance(each, NewGeneration))
    assert made.generation.number > memory.number


def restarted(record: CoordinatorRecord, *, n_hellos: int = 2) -> tuple[Coordinator, Sent]:
    """A coordinator with this record, and workers that name the generation they remember."""
    sent = Sent()
    coordinator = Coordinator(JobSpec("ours", MESH, (1, 1), TIMING), sent, history=History(record))
    for number, chip in enumerate(MESH.live[:n_hellos]):
        named = structs.replace(hello(chip, Status(2, True, 2, 5)), recalls=FORMED.name)
        coordinator.opened(number, "worker", 0.0)
        coordinator.received(number, named, 0.0)
    return coordinator, sent


FORMED = Generation(2, tuple(Seat(chip, ("host", 1 + chip[1]), 1) for chip in MESH.live))
SAME = CoordinatorRecord("ours", highest=2, formed=FORMED)


def test_a_generation_that_the_record_holds_is_only_named_in_a_hello() -> None:
    coordinator, sent = restarted(SAME)
    coordinator.tick(0.0)

    assert [sent.kinds(number) & {Welcome, AskMemory} for number in (0, 1)] == [{Welcome}] * 2
    assert coordinator.status(0.0).generation == FORMED


def test_a_generation_that_the_record_does_not_hold_is_asked_for_once_more() -> None:
    """Its digest differs; what the worker says meanwhile does not end its connection."""
    other = structs.replace(FORMED, cut=frozenset([Link((0, 0), (0, 1))]))
    coordinator, sent = restarted(structs.replace(SAME, formed=other), n_hellos=1)
    assert sent.kinds(0) == {AskMemory}
    coordinator.received(0, StatusChanged(Status(2, True, 2, 6)), 0.0)
    assert sent.kinds(0) == {AskMemory}

    whole = structs.replace(hello((0, 0), Status(2, True, 2, 6)), memory=FORMED)
    coordinator.received(0, structs.replace(whole, recalls=FORMED.name), 0.0)
    coordinator.tick(0.0)

    assert Welcome in sent.kinds(0)
    assert coordinator.status(0.0).generation == FORMED


def test_a_hello_is_as_short_on_a_thousand_chips_as_on_two() -> None:
    seats = tuple(Seat((at // 32, at % 32), ("host", 1), 1) for at in range(1024))
    large = Generation(2, seats)

    assert large.name != FORMED.name
    named = structs.replace(hello((0, 0), Status(2, True, 2, 5)), recalls=large.name)
    assert len(encode_message(named)) < 400


def test_a_restarted_coordinator_waits_as_long_as_workers_of_its_generation_keep_coming() -> None:
    mesh = parse_mesh("4x4")
    seats = tuple(Seat(chip, ("host", 1), 1) for chip in mesh.live)
    formed = Generation(2, seats)
    history = History(CoordinatorRecord("ours", highest=2, formed=formed))
    sent = Sent()
    coordinator = Coordinator(JobSpec("ours", mesh, (1, 1), TIMING), sent, history=history)
    for number, chip in enumerate(mesh.live):
        now = 0.5 * number * TIMING.recall_s  # the last one comes after 7.5 times `recall_s`
        status = Status(2, True, 2, 5)
        named = Hello("ours", mesh.shape, chip, ("host", 1), status, recalls=formed.name)
        coordinator.opened(number, "worker", now)
        coordinator.received(number, named, now)
        coordinator.tick(now)

    coordinator.tick(now + TIMING.settle_s * 2)

    assert not any(NewGeneration in sent.kinds(number) for number in range(16))
    assert coordinator.status(now).phase is JobPhase.TRAINING


FIVE = parse_mesh("1x5")


def five_that_train() -> tuple[Coordinator, Sent, Status]:
    """Five workers, connections 1 to 5, and the status of each; number 9 observes."""
    sent = Sent()
    coordinator = Coordinator(JobSpec("ours", FIVE, (1, 1), TIMING), sent)
    coordinator.opened(9, "observer", 0.0)
    coordinator.received(9, Observe("ours"), 0.0)
    status = Status(1, ready=True)
    for chip in FIVE.live:
        coordinator.opened(1 + chip[1], "worker", 0.0)
        first = structs.replace(hello(chip), shape=FIVE.shape)
        coordinator.received(1 + chip[1], first, 0.0)
    coordinator.tick(1.0)
    for each in (status, structs.replace(status, state_version=1)):
        for chip in FIVE.live:
            coordinator.received(1 + chip[1], StatusChanged(each), 1.0)
        coordinator.tick(1.0)
    return coordinator, sent, structs.replace(status, state_version=1)


def test_a_chip_that_most_know_to_be_wrong_is_out_until_it_is_repaired() -> None:
    coordinator, sent, status = five_that_train()
    accusing = structs.replace(status, wrong=((0, 4),))

    for connection in (1, 2, 5):  # the accused one's own word does not count
        coordinator.received(connection, StatusChanged(accusing), 2.0)
        assert Refused not in sent.kinds(5)
    coordinator.received(3, StatusChanged(accusing), 2.0)
    assert Refused in sent.kinds(5)
    coordinator.tick(3.0)
    formed = [m for m in sent.messages[1] if isinstance(m, NewGeneration)][-1].generation
    assert (0, 4) not in formed.seat_of
    assert len(formed.chips) == 4

    again = structs.replace(hello((0, 4)), shape=FIVE.shape, address=("host", 99))
    for connection, is_repaired in ((6, False), (7, True)):
        if is_repaired:
            coordinator.received(9, Repaired((0, 4)), 4.0)
        coordinator.opened(connection, "worker", 4.0)
        coordinator.received(connection, again, 4.0)
        assert (Welcome in sent.kinds(connection)) is is_repaired


def test_few_chips_or_those_of_another_generation_turn_nobody_away() -> None:
    """One that is wrong may accuse anybody; so may one that has come from elsewhere."""
    coordinator, sent, status = five_that_train()

    for connection in (1, 2):
        everyone = structs.replace(status, wrong=FIVE.live)
        coordinator.received(connection, StatusChanged(everyone), 2.0)
    for connection in (3, 4, 5):
        late = structs.replace(status, generation=0, state_version=FRESH, wrong=FIVE.live)
        coordinator.received(connection, StatusChanged(late), 2.0)

    assert all(Refused not in sent.kinds(connection) for connection in range(1, 6))


def go_after(coordinator: Coordinator, sent: Sent, checkpoint: int | None, now: float) -> Go:
    """Return the go for the workers that are left, after they got ready."""
    coordinator.tick(now)
    formed = [m for m in sent.messages[1] if isinstance(m, NewGeneration)][-1].generation
    ready = Status(formed.number, ready=True, state_version=1, step=20, checkpoint=checkpoint)
    for chip in formed.chips:
        coordinator.received(1 + chip[1], StatusChanged(ready), now)
    coordinator.tick(now)
    return [m for m in sent.messages[1] if isinstance(m, Go)][-1]


@pytest.mark.parametrize(("checkpoint", "step"), [(10, 10), (15, 20), (None, 20)])
def test_the_others_go_back_to_a_checkpoint_from_before_the_wrong_numbers(
    checkpoint: int | None, step: int
) -> None:
    """If there is one: they have done 20 steps, and those up to 12 are known to be right."""
    coordinator, sent, status = five_that_train()
    accusing = structs.replace(
        status, step=20, wrong=((0, 4),), right_until=12, checkpoint=checkpoint
    )

    for connection in (1, 2, 3):
        coordinator.received(connection, StatusChanged(accusing), 2.0)
    go = go_after(coordinator, sent, checkpoint, 3.0)

    is_back = step < 20
    assert (go.step, go.restores, go.lost) == (step, is_back, 20 if is_back else None)
    assert len(go.holders) == (1 if is_back else 4)


def test_who_has_no_old_checkpoint_any_more_goes_on_with_what_all_hold() -> None:
    coordinator, sent, status = five_that_train()
    accusing = structs.replace(status, step=20, wrong=((0, 4),), right_until=12, checkpoint=10)
    for connection in (1, 2, 3):
        coordinator.received(connection, StatusChanged(accusing), 2.0)

    go = go_after(coordinator, sent, None, 3.0)

    assert (go.step, go.restores) == (20, False)
