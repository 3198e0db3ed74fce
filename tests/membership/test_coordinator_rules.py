"""What the simulation of the protocol found, each as a case by hand; no sockets, no clock."""

from dataclasses import dataclass, field, replace

from meshmend.membership.coordinator import Coordinator
from meshmend.membership.generation import Generation
from meshmend.membership.history import CoordinatorRecord
from meshmend.membership.job_spec import JobSpec
from meshmend.membership.membership import Membership
from meshmend.membership.messages import (
    Hello,
    Message,
    NewGeneration,
    Refused,
    Status,
    TryLater,
    Wait,
)
from meshmend.membership.timing import Timing
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
    membership.update_status(other, replace(lost, lost=(one,)), 2.0)
    assert membership.decide(2.15).generation is None

    membership.mend(link, 2.16)
    after = membership.decide(3.0).generation

    assert after is not None
    assert after.epoch(one, other) > before.epoch(one, other)


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
        assert Wait in sent.kinds(number)
        coordinator.closed(number, "gone", 0.0)


def test_a_connection_that_stays_silent_is_not_refused_for_good() -> None:
    """The first message of a worker that holds the state may be held up on its way."""
    sent = Sent()
    coordinator = Coordinator(JobSpec("ours", MESH, (1, 1), TIMING), sent)
    coordinator.opened(1, "worker", 0.0)
    for tenth in range(111):
        coordinator.tick(0.1 * tenth)

    assert TryLater in sent.kinds(1)
    assert Refused not in sent.kinds(1)
