"""What is going on in a job, from events: who trains, what is over, how long each fault took."""

from meshmend.membership.events import (
    ChipRestored,
    ChipSlow,
    ChipsWaiting,
    Event,
    FabricMeasured,
    FaultHappened,
    FaultRecovered,
    GenerationBegan,
    GenerationForming,
    LinkRestored,
    LinkSlow,
    WorkerArrived,
    WorkerLeft,
    WorkerSaved,
    WorkerStepped,
)
from meshmend.membership.faults.fault import FaultKind
from meshmend.membership.job_status import ChangeCause, SlowPart
from meshmend.membership.job_view import ChipState, Ends, JobView, Recovery

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


def taken(view: JobView, *events: Observed) -> list[str]:
    """Return the faults that these events are the end of."""
    return [fault.fault for clock, event in events for fault in view.take(clock, event).recoveries]


def test_a_fault_is_over_when_the_last_chip_has_done_its_first_step() -> None:
    view = JobView()
    fault = Recovery("kill 0,3", 20, at=10.0, kind=FaultKind.KILL, chips=((0, 3),))
    view.measure(fault)

    over = taken(
        view,
        left(10.1),
        forming(10.2),
        generation(0, 1, 2),
        stepped(1, 10.7),
        stepped(0, 10.5),
    )
    assert over == []
    assert view.open_faults() == [fault]
    over = taken(view, stepped(0, 10.9, first=False), stepped(2, 10.6))

    assert over == ["kill 0,3"]
    assert view.open_faults() == []
    assert fault.event() == FaultRecovered(
        fault="kill 0,3",
        at_step=20,
        detected_s=0.1,
        recovered_s=0.7,
        kind=FaultKind.KILL,
        chips=((0, 3),),
    )


def test_a_chip_that_dies_on_the_way_is_not_waited_for() -> None:
    view = JobView()
    view.measure(Recovery("kill 0,3", 20, at=10.0))
    taken(view, left(10.1), generation(0, 1, 2), stepped(0, 10.5))
    view.measure(Recovery("kill 0,2", 20, at=10.6))

    over = taken(view, left(10.7), generation(0, 1), stepped(0, 11.0), stepped(1, 11.1))

    assert over == ["kill 0,3", "kill 0,2"]
    assert [fault.recovered for fault in view.faults] == [11.1, 11.1]


def test_what_was_seen_before_a_fault_does_not_detect_it() -> None:
    view = JobView()
    view.measure(Recovery("hang 0,1", 5, at=10.0))

    over = taken(view, forming(9.9), generation(0, 1), stepped(0, 9.95), stepped(1, 9.97))

    assert over == []
    assert view.faults[0].event().detected_s is None


def test_a_quiet_fault_is_over_with_the_next_step_of_anyone() -> None:
    view = JobView()
    view.measure(Recovery("kill coordinator", 5, at=10.0, is_quiet=True))

    assert view.open_faults() == []
    assert taken(view, stepped(0, 9.9, first=False)) == []
    assert taken(view, stepped(0, 10.2, first=False)) == ["kill coordinator"]
    assert taken(view, stepped(0, 10.4, first=False)) == []


def test_a_checkpoint_ends_a_quiet_fault_too() -> None:
    view = JobView()
    view.measure(Recovery("kill coordinator", 5, at=10.0, is_quiet=True))

    saved = 10.2, WorkerSaved((0, 0), 5, 10.2, "checkpoints")

    assert taken(view, saved) == ["kill coordinator"]


def test_a_repair_is_over_when_its_chips_are_members_again() -> None:
    view = JobView()
    view.measure(Recovery("repair 0,1", 5, at=10.0, repaired=frozenset({(0, 1)})))

    assert taken(view, forming(10.1), generation(0), stepped(0, 10.2)) == []
    over = taken(view, forming(10.5), generation(0, 1), stepped(0, 10.8), stepped(1, 10.9))

    assert over == ["repair 0,1"]
    assert view.faults[0].recovered == 10.9


def test_the_first_steps_of_the_first_generation_end_nothing() -> None:
    assert taken(JobView(), generation(0, 1), stepped(0, 1.0), stepped(1, 1.1)) == []


def test_steps_of_an_older_generation_do_not_end_a_fault_that_came_after_them() -> None:
    view = JobView()
    taken(view, generation(0, 1), stepped(0, 9.0))
    view.measure(Recovery("kill 0,2", 5, at=9.5))
    taken(view, left(9.6))

    assert taken(view, stepped(1, 9.4)) == []
    assert view.open_faults() != []


def test_reports_that_a_coordinator_took_with_it_are_not_waited_for() -> None:
    """The second step of a generation says that all its chips have done their first."""
    view = JobView()
    taken(view, generation(0, 1, 2), stepped(0, 9.0), stepped(1, 9.0), stepped(2, 9.0))
    view.measure(Recovery("kill 0,2", 5, at=10.0))
    taken(view, left(10.1), generation(0, 1, number=2))

    assert taken(view, stepped(0, 10.2, first=False)) == []  # of the generation before
    assert taken(view, stepped(0, 10.6, first=False, generation=2)) == []
    assert taken(view, stepped(0, 11.7, first=False, generation=2)) == ["kill 0,2"]
    assert view.faults[0].recovered == 10.6


def test_the_death_of_who_was_no_member_is_quiet() -> None:
    view = JobView()
    taken(view, generation(0, 1), stepped(0, 9.0), stepped(1, 9.0))

    view.measure(Recovery("kill 0,5", 5, at=10.0, victims=frozenset({(0, 5)})))

    assert taken(view, stepped(0, 10.1, first=False)) == ["kill 0,5"]


def test_faults_that_others_measured_get_the_recovery_that_fits() -> None:
    """As in a run's file: two alike, of which one is over, and a recovery without its fault."""
    view = JobView()
    killed = FaultHappened("kill 0,3", 20, FaultKind.KILL, ((0, 3),))
    over = FaultRecovered("kill 0,3", 20, 0.1, 0.7, FaultKind.KILL, ((0, 3),))
    repaired = FaultRecovered("repair 0,3", 30, None, 2.0, FaultKind.REPAIR, ((0, 3),))
    for clock, event in ((10.0, killed), (11.0, killed), (11.5, over), (15.0, repaired)):
        assert view.take(clock, event) == Ends()

    assert [(each.at, each.recovered_s) for each in view.faults] == [
        (10.0, 0.7),
        (11.0, None),
        (13.0, 2.0),
    ]
    assert view.recoveries_s == [0.7]  # a repair is none


def test_one_view_tells_who_trains_what_was_counted_and_what_is_over() -> None:
    view = JobView((1, 4))
    members = ((0, 0), (0, 1))
    for clock, event in (
        (1.0, WorkerArrived((0, 0))),
        (1.1, WorkerArrived((0, 1))),
        (1.2, WorkerArrived((0, 2))),
        (1.3, GenerationForming(1, members, "began")),
        (1.4, ChipsWaiting(((0, 2),), "too few")),
        (2.0, GenerationBegan(1, members, 4, waiting=((0, 2),))),
    ):
        view.take(clock, event)
    assert view.take(*stepped(0, 3.0)).change is None
    ends = view.take(*stepped(1, 3.5))

    assert ends.change is not None
    assert (ends.change.cause, ends.change.took_s) == (ChangeCause.CONNECTED, 3.5 - 1.2)
    assert view.connected == {(0, 0), (0, 1), (0, 2)}
    assert (view.generation, view.step) == (GenerationBegan(1, members, 4, ((0, 2),)), 4)
    assert (view.counts().arrivals, view.counts().steps) == (3, 1)
    assert view.moved_at == 3.5
    states = [view.chips[0, chip] for chip in range(4)]
    assert states == [
        ChipState.JOINING,
        ChipState.JOINING,
        ChipState.WAITING,
        ChipState.JOINING,
    ]


def test_the_fabric_is_the_one_that_was_measured_last() -> None:
    view, fabric = JobView(), FabricMeasured(6.15e6, 44e-6, 12e-6, 0)
    assert view.fabric is None
    view.take(0.0, FabricMeasured(1e6, 0.0, 0.0, 0))
    view.take(1.0, fabric)

    assert view.fabric == fabric


def test_chips_and_links_are_slow_until_they_are_restored_or_gone() -> None:
    view, slow = JobView(), SlowPart("link:0,0-0,1", 0.25)
    view.take(0.0, LinkSlow("link:0,0-0,1", 0.25, 1))
    for chip in range(3):
        view.take(0.0, ChipSlow((0, chip), 0.5, 1))
    view.take(1.0, ChipRestored((0, 0), 1.0, 2))
    view.take(1.0, WorkerLeft((0, 1)))

    assert view.slow() == (SlowPart("chip 0,2", 0.5), slow)
    view.take(2.0, LinkRestored("link:0,0-0,1", 1.0, 3))
    assert view.slow() == (SlowPart("chip 0,2", 0.5),)


def test_a_fault_that_is_over_costs_nothing_with_each_step_that_follows() -> None:
    """A job of a thousand chips tells of a thousand first steps after each of its faults."""
    n_looks = 0

    class Watched(Recovery):
        def __getattribute__(self, name: str) -> object:
            nonlocal n_looks
            n_looks += 1
            return super().__getattribute__(name)

    view = JobView()
    view.measure(Watched("kill 0,3", 20, at=10.0, is_quiet=True))
    assert taken(view, stepped(0, 10.1), stepped(1, 10.2)) == ["kill 0,3"]
    n_looks = 0

    assert taken(view, *(stepped(0, 11.0 + number) for number in range(100))) == []
    assert n_looks == 0
