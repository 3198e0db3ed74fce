"""How long a job took to get over each fault, from events."""

from typing import Any

from meshmend.launch.recoveries import Recoveries, Recovery

Event = dict[str, Any]


def generation(*chips: int, number: int = 1) -> Event:
    members = [[0, chip] for chip in chips]
    return {"event": "generation", "clock": 0.0, "chips": members, "number": number}


def done(chip: int, at: float, *, first: bool = True, generation: int = 1) -> Event:
    facts = {"chip": [0, chip], "at": at, "first": first, "generation": generation}
    return {"event": "done", "clock": at, **facts}


def seen(kind: str, clock: float) -> Event:
    return {"event": kind, "clock": clock}


def taken(recoveries: Recoveries, *events: Event) -> list[str]:
    """Return the faults that these events are the end of."""
    return [fault.fault for event in events for fault in recoveries.take(event)]


def test_a_fault_is_over_when_the_last_chip_has_done_its_first_step() -> None:
    recoveries = Recoveries()
    fault = Recovery("kill 0,3", 20, at=10.0)
    recoveries.happened(fault)

    over = taken(
        recoveries,
        seen("left", 10.1),
        seen("forming", 10.2),
        generation(0, 1, 2),
        done(1, 10.7),
        done(0, 10.5),
    )
    assert over == []
    assert recoveries.open() == [fault]
    over = taken(recoveries, done(0, 10.9, first=False), done(2, 10.6))

    assert over == ["kill 0,3"]
    assert recoveries.open() == []
    assert fault.as_json() == {
        "fault": "kill 0,3",
        "at_step": 20,
        "detected_s": 0.1,
        "recovered_s": 0.7,
    }


def test_a_chip_that_dies_on_the_way_is_not_waited_for() -> None:
    recoveries = Recoveries()
    recoveries.happened(Recovery("kill 0,3", 20, at=10.0))
    taken(recoveries, seen("left", 10.1), generation(0, 1, 2), done(0, 10.5))
    recoveries.happened(Recovery("kill 0,2", 20, at=10.6))

    over = taken(recoveries, seen("left", 10.7), generation(0, 1), done(0, 11.0), done(1, 11.1))

    assert over == ["kill 0,3", "kill 0,2"]
    assert [fault.recovered for fault in recoveries.faults] == [11.1, 11.1]


def test_what_was_seen_before_a_fault_does_not_detect_it() -> None:
    recoveries = Recoveries()
    recoveries.happened(Recovery("hang 0,1", 5, at=10.0))

    over = taken(recoveries, seen("forming", 9.9), generation(0, 1), done(0, 9.95), done(1, 9.97))

    assert over == []
    assert recoveries.faults[0].as_json()["detected_s"] is None


def test_a_quiet_fault_is_over_with_the_next_step_of_anyone() -> None:
    recoveries = Recoveries()
    recoveries.happened(Recovery("kill coordinator", 5, at=10.0, is_quiet=True))

    assert recoveries.open() == []
    assert taken(recoveries, done(0, 9.9, first=False)) == []
    assert taken(recoveries, done(0, 10.2, first=False)) == ["kill coordinator"]
    assert taken(recoveries, done(0, 10.4, first=False)) == []


def test_a_repair_is_over_when_its_chips_are_members_again() -> None:
    recoveries = Recoveries()
    recoveries.happened(Recovery("repair 0,1", 5, at=10.0, back=frozenset({(0, 1)})))

    assert taken(recoveries, seen("forming", 10.1), generation(0), done(0, 10.2)) == []
    over = taken(recoveries, seen("forming", 10.5), generation(0, 1), done(0, 10.8), done(1, 10.9))

    assert over == ["repair 0,1"]
    assert recoveries.faults[0].recovered == 10.9


def test_the_first_steps_of_the_first_generation_end_nothing() -> None:
    assert taken(Recoveries(), generation(0, 1), done(0, 1.0), done(1, 1.1)) == []


def test_steps_of_an_older_generation_do_not_end_a_fault_that_came_after_them() -> None:
    recoveries = Recoveries()
    taken(recoveries, generation(0, 1), done(0, 9.0))
    recoveries.happened(Recovery("kill 0,2", 5, at=9.5))
    taken(recoveries, seen("left", 9.6))

    assert taken(recoveries, done(1, 9.4)) == []
    assert recoveries.open() != []


def test_reports_that_a_coordinator_took_with_it_are_not_waited_for() -> None:
    """The second step of a generation says that all its chips have done their first."""
    recoveries = Recoveries()
    taken(recoveries, generation(0, 1, 2), done(0, 9.0), done(1, 9.0), done(2, 9.0))
    recoveries.happened(Recovery("kill 0,2", 5, at=10.0))
    taken(recoveries, seen("left", 10.1), generation(0, 1, number=2))

    assert taken(recoveries, done(0, 10.2, first=False)) == []  # of the generation before
    assert taken(recoveries, done(0, 10.6, first=False, generation=2)) == []
    assert taken(recoveries, done(0, 11.7, first=False, generation=2)) == ["kill 0,2"]
    assert recoveries.faults[0].recovered == 10.6


def test_the_death_of_who_was_no_member_is_quiet() -> None:
    recoveries = Recoveries()
    taken(recoveries, generation(0, 1), done(0, 9.0), done(1, 9.0))

    recoveries.happened(Recovery("kill 0,5", 5, at=10.0, victims=frozenset({(0, 5)})))

    assert taken(recoveries, done(0, 10.1, first=False)) == ["kill 0,5"]
