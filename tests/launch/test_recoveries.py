"""How long a job took to get over each fault, from events."""

from meshmend.launch.recoveries import Recoveries, Recovery
from meshmend.membership.events import (
    Event,
    FaultRecovered,
    GenerationBegan,
    GenerationForming,
    WorkerLeft,
    WorkerSaved,
    WorkerStepped,
)
from meshmend.membership.faults.fault import FaultKind

Observed = tuple[float, Event]


def generation(*chips: int, number: int = 1) -> Observed:
    members = tuple((0, chip) for chip in chips)
    return 0.0, GenerationBegan(number=number, chips=members, step=0)


def stepped(chip: int, at: float, *, first: bool = True, generation: int = 1) -> Observed:
    event = WorkerStepped(
        (0, chip), 1, generation, at, leads=chip == 0, first=first, loss=None, samples=64
    )
    return at, event


def left(clock: float) -> Observed:
    return clock, WorkerLeft((0, 3))


def forming(clock: float) -> Observed:
    return clock, GenerationForming(number=2, chips=(), why="")


def taken(recoveries: Recoveries, *events: Observed) -> list[str]:
    """Return the faults that these events are the end of."""
    return [fault.fault for clock, event in events for fault in recoveries.handle(clock, event)]


def test_a_fault_is_over_when_the_last_chip_has_done_its_first_step() -> None:
    recoveries = Recoveries()
    fault = Recovery("kill 0,3", 20, at=10.0, kind=FaultKind.KILL, chips=((0, 3),))
    recoveries.add(fault)

    over = taken(
        recoveries,
        left(10.1),
        forming(10.2),
        generation(0, 1, 2),
        stepped(1, 10.7),
        stepped(0, 10.5),
    )
    assert over == []
    assert recoveries.open() == [fault]
    over = taken(recoveries, stepped(0, 10.9, first=False), stepped(2, 10.6))

    assert over == ["kill 0,3"]
    assert recoveries.open() == []
    assert fault.event() == FaultRecovered(
        fault="kill 0,3",
        at_step=20,
        detected_s=0.1,
        recovered_s=0.7,
        kind=FaultKind.KILL,
        chips=((0, 3),),
    )


def test_a_chip_that_dies_on_the_way_is_not_waited_for() -> None:
    recoveries = Recoveries()
    recoveries.add(Recovery("kill 0,3", 20, at=10.0))
    taken(recoveries, left(10.1), generation(0, 1, 2), stepped(0, 10.5))
    recoveries.add(Recovery("kill 0,2", 20, at=10.6))

    over = taken(recoveries, left(10.7), generation(0, 1), stepped(0, 11.0), stepped(1, 11.1))

    assert over == ["kill 0,3", "kill 0,2"]
    assert [fault.recovered for fault in recoveries.faults] == [11.1, 11.1]


def test_what_was_seen_before_a_fault_does_not_detect_it() -> None:
    recoveries = Recoveries()
    recoveries.add(Recovery("hang 0,1", 5, at=10.0))

    over = taken(recoveries, forming(9.9), generation(0, 1), stepped(0, 9.95), stepped(1, 9.97))

    assert over == []
    assert recoveries.faults[0].event().detected_s is None


def test_a_quiet_fault_is_over_with_the_next_step_of_anyone() -> None:
    recoveries = Recoveries()
    recoveries.add(Recovery("kill coordinator", 5, at=10.0, is_quiet=True))

    assert recoveries.open() == []
    assert taken(recoveries, stepped(0, 9.9, first=False)) == []
    assert taken(recoveries, stepped(0, 10.2, first=False)) == ["kill coordinator"]
    assert taken(recoveries, stepped(0, 10.4, first=False)) == []


def test_a_checkpoint_ends_a_quiet_fault_too() -> None:
    recoveries = Recoveries()
    recoveries.add(Recovery("kill coordinator", 5, at=10.0, is_quiet=True))

    saved = 10.2, WorkerSaved((0, 0), 5, 10.2, "checkpoints")

    assert taken(recoveries, saved) == ["kill coordinator"]


def test_a_repair_is_over_when_its_chips_are_members_again() -> None:
    recoveries = Recoveries()
    recoveries.add(Recovery("repair 0,1", 5, at=10.0, repaired=frozenset({(0, 1)})))

    assert taken(recoveries, forming(10.1), generation(0), stepped(0, 10.2)) == []
    over = taken(recoveries, forming(10.5), generation(0, 1), stepped(0, 10.8), stepped(1, 10.9))

    assert over == ["repair 0,1"]
    assert recoveries.faults[0].recovered == 10.9


def test_the_first_steps_of_the_first_generation_end_nothing() -> None:
    assert taken(Recoveries(), generation(0, 1), stepped(0, 1.0), stepped(1, 1.1)) == []


def test_steps_of_an_older_generation_do_not_end_a_fault_that_came_after_them() -> None:
    recoveries = Recoveries()
    taken(recoveries, generation(0, 1), stepped(0, 9.0))
    recoveries.add(Recovery("kill 0,2", 5, at=9.5))
    taken(recoveries, left(9.6))

    assert taken(recoveries, stepped(1, 9.4)) == []
    assert recoveries.open() != []


def test_reports_that_a_coordinator_took_with_it_are_not_waited_for() -> None:
    """The second step of a generation says that all its chips have done their first."""
    recoveries = Recoveries()
    taken(recoveries, generation(0, 1, 2), stepped(0, 9.0), stepped(1, 9.0), stepped(2, 9.0))
    recoveries.add(Recovery("kill 0,2", 5, at=10.0))
    taken(recoveries, left(10.1), generation(0, 1, number=2))

    assert taken(recoveries, stepped(0, 10.2, first=False)) == []  # of the generation before
    assert taken(recoveries, stepped(0, 10.6, first=False, generation=2)) == []
    assert taken(recoveries, stepped(0, 11.7, first=False, generation=2)) == ["kill 0,2"]
    assert recoveries.faults[0].recovered == 10.6


def test_the_death_of_who_was_no_member_is_quiet() -> None:
    recoveries = Recoveries()
    taken(recoveries, generation(0, 1), stepped(0, 9.0), stepped(1, 9.0))

    recoveries.add(Recovery("kill 0,5", 5, at=10.0, victims=frozenset({(0, 5)})))

    assert taken(recoveries, stepped(0, 10.1, first=False)) == ["kill 0,5"]
