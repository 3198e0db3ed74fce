"""Histories in which a job stood still, by hand: each had its cause in one decision."""

from meshmend.membership.decision import Decision
from meshmend.membership.generation import Generation, Seat
from meshmend.membership.history import BegunGeneration, CoordinatorRecord, History
from meshmend.membership.membership import Membership
from meshmend.membership.messages import FRESH, Status
from meshmend.membership.timing import Timing
from meshmend.net.listener import Address
from meshmend.topology.failures import Chip
from meshmend.topology.text import parse_mesh


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
