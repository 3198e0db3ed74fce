"""Histories in which a job stood still, by hand: each had its cause in one decision."""

from dataclasses import dataclass, field

from msgspec.structs import replace

from meshmend.config import Timing
from meshmend.membership.coordinator import Coordinator
from meshmend.membership.generation import Generation, Seat
from meshmend.membership.history import BegunGeneration, CoordinatorRecord, History
from meshmend.membership.job import JobSpec
from meshmend.membership.membership import Decision, Membership
from meshmend.membership.messages import (
    FRESH,
    Heartbeat,
    Hello,
    Message,
    NewGeneration,
    Status,
    TurnedAway,
)
from meshmend.topology.failures import Chip
from meshmend.topology.text import parse_mesh
from meshmend.transport.listener import Address


def address(chip: Chip) -> Address:
    return f"host-{chip[1]}", 1


def job(mesh: str, history: History | None = None) -> Membership:
    return Membership(parse_mesh(mesh), Timing(), board=(1, 1), history=history)


def arrive(
    membership: Membership, chip: Chip, status: Status, memory: Generation | None = None
) -> None:
    membership.arrive(chip, address(chip), status=status, memory=memory, now=0.0)


def decisions(membership: Membership, now: float) -> list[Decision]:
    """What is decided in the next minute."""
    return [membership.decide(now + second) for second in range(60)]


def generations(made: list[Decision]) -> list[Generation]:
    return [each.generation for each in made if each.generation is not None]


def be_ready(membership: Membership, generation: Generation, now: float) -> None:
    """Have all members of a generation say that they are ready for it."""
    for chip in generation.chips:
        status = membership.workers[chip].status
        ready = replace(status, generation=generation.number, ready=True)
        membership.update_status(chip, ready, now)


def begins(made: list[Decision]) -> list[tuple[int, bool]]:
    """With which steps generations begin, and whether these are read from a checkpoint."""
    return [(each.go.step, each.go.restores) for each in made if each.go is not None]


def test_chips_that_trained_before_the_record_was_lost_do_not_begin_anew_with_half_a_state() -> (
    None
):
    membership = job("1x2")
    half = Status(generation=13, ready=False, state_version=FRESH, step=4, checkpoint=4)
    for chip in ((0, 0), (0, 1)):
        arrive(membership, chip, half)

    made = decisions(membership, 0.0)

    assert made[[each.lost_step is not None for each in made].index(True)].generation is None
    assert all(each.go is None or each.go.restores for each in made)


def test_new_chips_begin_anew_though_a_first_generation_was_formed() -> None:
    membership = job("1x2")
    for chip in ((0, 0), (0, 1)):
        arrive(membership, chip, Status(generation=1, ready=False, state_version=FRESH, step=0))

    assert generations(decisions(membership, 0.0))


def test_a_chip_that_was_told_to_wait_gets_a_new_generation_from_a_new_coordinator() -> None:
    membership = job("1x2")
    first = Generation(1, tuple(Seat(chip, address(chip), 1) for chip in ((0, 0), (0, 1))))
    ready = Status(generation=1, ready=True, state_version=1, step=0)
    arrive(membership, (0, 0), Status(generation=1, ready=True, state_version=FRESH, step=0))
    membership.update_status((0, 0), ready, 0.0)
    arrive(membership, (0, 1), ready, first)

    assert generations(decisions(membership, 0.0))


def test_a_generation_without_the_state_makes_room_for_a_chip_that_waits_with_it() -> None:
    """The chip in the middle dies, and of the two ends the one without the state is taken."""
    everyone = tuple((chip, address(chip)) for chip in ((0, 0), (0, 1), (0, 2)))
    begun = (
        BegunGeneration(1, everyone, is_confirmed=True),
        BegunGeneration(3, everyone, base=1, step=4),
    )
    history = History(CoordinatorRecord("job", begun, step=4, highest=3))
    membership = job("1x3", history)
    membership.stop_awaiting((0, 1))
    arrive(membership, (0, 0), Status(generation=3, ready=True, state_version=FRESH, step=4))
    arrive(membership, (0, 2), Status(generation=3, ready=True, state_version=1, step=4))
    formed = generations(decisions(membership, 0.0))[-1]
    assert formed.chips == ((0, 0),)

    left = Status(generation=formed.number, ready=True, state_version=FRESH, step=4)
    membership.update_status((0, 0), left, 60.0)

    assert generations(decisions(membership, 60.0))[-1].chips == ((0, 2),)


def test_a_restored_state_counts_no_more_once_the_lost_one_was_back() -> None:
    """The restore takes no step, a holder comes back, and then its state is lost for good."""
    everyone = tuple((chip, address(chip)) for chip in ((0, 0), (0, 1), (0, 2)))
    begun = (
        BegunGeneration(1, everyone, is_confirmed=True),
        BegunGeneration(4, everyone, base=1, step=4, is_restored=True),
    )
    membership = job("1x3", History(CoordinatorRecord("job", begun, step=4, highest=4)))
    membership.stop_awaiting((0, 0))
    lacking = Status(generation=4, ready=False, state_version=FRESH, step=4, checkpoint=4)
    arrive(membership, (0, 1), lacking)
    arrive(membership, (0, 2), Status(generation=1, ready=False, state_version=1, step=6))
    (formed,) = generations(decisions(membership, 0.0))
    be_ready(membership, formed, 1.0)
    assert begins(decisions(membership, 1.0)) == [(6, False)]
    for chip in formed.chips:
        lost = replace(lacking, generation=formed.number, step=membership.workers[chip].status.step)
        membership.update_status(chip, lost, 61.0)

    arrive(membership, (0, 0), replace(lacking, state_version=4))
    made = decisions(membership, 61.0) + decisions(membership, 121.0)
    be_ready(membership, generations(made)[-1], 181.0)

    assert [each.lost_step for each in made if each.lost_step is not None] == [6]
    assert begins(decisions(membership, 181.0)) == [(4, True)]


def test_a_restored_state_counts_while_the_lost_one_is_not_back() -> None:
    """Also after a second restore that takes no step; the lost one then counts no more."""
    chips = ((0, 0), (0, 1))
    everyone = tuple((chip, address(chip)) for chip in chips)
    begun = (
        BegunGeneration(1, everyone, is_confirmed=True),
        BegunGeneration(4, everyone, base=1, step=4, is_restored=True),
    )
    history = History(CoordinatorRecord("job", begun, step=4, highest=4))
    lacking = Status(generation=4, ready=False, state_version=FRESH, step=4, checkpoint=4)
    restored = replace(lacking, state_version=4)
    lost = Status(generation=1, state_version=1, step=6)

    history.update(everyone[0], lacking)
    assert history.is_holder(restored)
    assert history.is_holder(lost)

    history.update(everyone[1], restored)
    seats = tuple(Seat(chip, address(chip), 1) for chip in chips)
    history.begin(Generation(5, seats), version=FRESH, step=2)
    history.update(everyone[0], replace(lacking, generation=5))
    assert history.is_holder(restored)
    assert not history.is_holder(lost)


def test_a_chip_of_a_generation_without_a_step_holds_what_that_one_began_with() -> None:
    """A second generation begins with a later step of the same state, and takes no step either."""
    everyone = tuple((chip, address(chip)) for chip in ((0, 0), (0, 1)))
    begun = (
        BegunGeneration(1, everyone, is_confirmed=True),
        BegunGeneration(4, everyone, base=1, step=6),
    )
    history = History(CoordinatorRecord("job", begun, step=6, highest=4))
    history.update(everyone[0], Status(generation=4, state_version=1, step=6))

    assert history.version_of(Status(generation=4, state_version=4, step=6)) == 1


def test_a_job_whose_first_state_lacks_a_part_fails_and_does_not_stand_still() -> None:
    """The first generation takes no step, but its members have shared their states out already."""
    everyone = tuple((chip, address(chip)) for chip in ((0, 0), (0, 1)))
    history = History(CoordinatorRecord("job", (BegunGeneration(1, everyone),), highest=1))
    membership = job("1x2", history)
    arrive(membership, (0, 1), Status(generation=1, ready=False, state_version=FRESH, step=0))
    arrive(membership, (0, 0), Status(generation=1, ready=False, state_version=1, step=0))
    membership.leave((0, 1), "chip (0, 1) is gone", 0.0)
    membership.stop_awaiting((0, 1))
    (formed,) = generations(decisions(membership, 0.0))
    be_ready(membership, formed, 60.0)
    assert begins(decisions(membership, 60.0)) == [(0, False)]

    lacking = Status(generation=formed.number, ready=False, state_version=FRESH, step=0)
    membership.update_status((0, 0), lacking, 120.0)
    made = decisions(membership, 120.0) + decisions(membership, 180.0)

    assert any(each.lost_step == 0 for each in made)
    assert any("no complete checkpoint" in each.failed for each in made)


def test_a_job_fails_if_the_state_to_go_back_to_turns_out_to_be_of_another_history() -> None:
    """A chip has finished a step in flight, which the others did again, and says so only now."""
    everyone = tuple((chip, address(chip)) for chip in ((0, 0), (0, 1)))
    begun = (
        BegunGeneration(1, everyone, is_confirmed=True),
        BegunGeneration(2, everyone[:1], base=1, step=0),
    )
    membership = job("1x2", History(CoordinatorRecord("job", begun, highest=2)))
    membership.stop_awaiting((0, 0))
    arrive(membership, (0, 1), Status(generation=1, ready=False, state_version=1, step=0))
    made = decisions(membership, 0.0) + decisions(membership, 60.0)
    (formed,) = generations(made)

    ready = Status(generation=formed.number, ready=True, state_version=1, step=1)
    membership.update_status((0, 1), ready, 120.0)
    made = decisions(membership, 120.0) + decisions(membership, 180.0)

    assert begins(made) == []
    assert any("no complete checkpoint" in each.failed for each in made)


def test_a_chip_that_can_read_the_checkpoint_is_waited_for_if_it_leaves() -> None:
    history = History(CoordinatorRecord("job", (BegunGeneration(2, ()),), step=6, highest=2))
    membership = job("1x2", history)
    reader = Status(generation=0, ready=False, state_version=FRESH, step=0, checkpoint=4)
    arrive(membership, (0, 0), reader)
    arrive(membership, (0, 1), replace(reader, checkpoint=None))
    made = decisions(membership, 0.0) + decisions(membership, 60.0)
    assert len(generations(made)) == 1

    membership.leave((0, 0), "chip (0, 0) is gone", 120.0)
    made = decisions(membership, 120.0)
    assert [each.lost_step for each in made if each.lost_step is not None] == [6], "said again"
    membership.arrive((0, 0), address((0, 0)), status=reader, memory=None, now=180.0)
    made += decisions(membership, 180.0)
    be_ready(membership, generations(made)[-1], 240.0)

    assert not any(each.failed for each in made)
    assert begins(decisions(membership, 240.0)) == [(4, True)]


@dataclass
class Workers:
    """Two workers that wait for what the coordinator says; one that is turned away comes back.

    Both were in generation 1. The one that missed generation 2 has the state from before it, the
    other was in generation 3 too and lacks a part of its state.
    """

    coordinator: Coordinator = field(init=False)
    formed: list[Generation] = field(default_factory=list)
    turned_away: list[Chip] = field(default_factory=list)
    _chip_of: dict[int, Chip] = field(default_factory=dict)
    _came_in: list[Chip] = field(default_factory=list)

    def __post_init__(self) -> None:
        begun = BegunGeneration(2, (((0, 0), address((0, 0))),), True, base=1, step=1)
        history = History(CoordinatorRecord("job", (begun,), step=2, highest=3))
        timing = Timing(heartbeat_timeout_s=10.0, straggler_timeout_s=60.0, holder_timeout_s=60.0)
        spec = JobSpec("job", parse_mesh("1x2"), (1, 1), timing)
        self.coordinator = Coordinator(spec, self, history=history)
        self._came_in = [(0, 0), (0, 1)]

    def send(self, connection: int, message: Message) -> None:
        """Take a message of the coordinator."""
        if isinstance(message, NewGeneration) and message.generation not in self.formed:
            self.formed.append(message.generation)
        if isinstance(message, TurnedAway):
            self.turned_away.append(self._chip_of[connection])

    def hang_up(self, connection: int) -> None:
        """Have the worker connect again."""
        self._came_in.append(self._chip_of.pop(connection))

    def wait(self, seconds: range, *, hung: Chip | None = None) -> None:
        """Send heartbeats; the loop of a chip that is hung does not take up a new generation."""
        for now in seconds:
            for chip in self._came_in:
                self._connect(chip, now)
            self._came_in = []
            for connection, chip in list(self._chip_of.items()):
                position = (1, 2) if chip == (0, 1) else (3, 0)
                if self.formed and chip != hung:
                    position = (self.formed[-1].number, 0)
                self.coordinator.received(connection, Heartbeat(*position), float(now))
            self.coordinator.tick(float(now))

    def _connect(self, chip: Chip, now: int) -> None:
        first = Generation(1, tuple(Seat(each, address(each), 1) for each in ((0, 0), (0, 1))))
        if chip == (0, 1):
            status, memory = Status(generation=1, state_version=1, step=1), first
        else:
            status, memory = Status(generation=3, state_version=FRESH, step=2), None
        connection = 2 * now + chip[1]
        self._chip_of[connection] = chip
        self.coordinator.opened(connection, "worker", float(now))
        hello = Hello("job", (1, 2), chip, address(chip), status, memory)
        self.coordinator.received(connection, hello, float(now))


def test_no_chip_is_turned_away_as_a_straggler_while_the_job_waits_for_the_state() -> None:
    """The one that had the state to go back to was turned away just before each next attempt."""
    workers = Workers()

    workers.wait(range(300))

    assert workers.turned_away == []
    assert [each.chips for each in workers.formed] == [((0, 0), (0, 1))]


def test_a_chip_that_hangs_when_the_job_goes_back_to_an_earlier_state_is_turned_away() -> None:
    """It is given its time from then on, however long the job has waited before."""
    workers = Workers()

    workers.wait(range(120), hung=(0, 0))
    assert (len(workers.formed), workers.turned_away) == (1, [])
    workers.wait(range(120, 130), hung=(0, 0))

    assert workers.turned_away == [(0, 0)]
