"""A job in which nothing moves: when that has been too long, and where its workers stand."""

from meshmend.config import Timing
from meshmend.launch.elastic import Standstill
from meshmend.membership.events import (
    ChipsWaiting,
    Event,
    GenerationBegan,
    GenerationForming,
    StateLost,
    WorkerArrived,
    WorkerStepped,
)
from meshmend.membership.job_view import JobView

BOTH = ((0, 0), (0, 1))
TIMING = Timing(straggler_timeout_s=10.0, heartbeat_timeout_s=2.0)


def after(*events: Event, timing: Timing = TIMING) -> Standstill:
    """What is known after some events, all at time 5."""
    view = JobView(now=0.0)
    for event in events:
        view.take(5.0, event)
    return Standstill(view, timing)


def stepped(step: int) -> WorkerStepped:
    return WorkerStepped(
        (0, 0), step, generation=1, at=0.0, leads=True, first=False, loss=None, samples=1
    )


def test_a_job_without_any_sign_of_life_stands_still_from_its_start() -> None:
    standstill = after()

    assert not standstill.is_too_long(12.0)
    assert standstill.is_too_long(12.1)  # ten seconds, and two for the coordinator to act first
    assert "1x2@0,0 has not connected to the coordinator" in standstill.words(BOTH)


def test_a_step_or_a_chip_that_comes_is_a_move() -> None:
    for event in (stepped(1), WorkerArrived((0, 1)), GenerationForming(1, BOTH, "")):
        assert not after(event).is_too_long(17.0)
        assert after(event).is_too_long(17.1)


def test_to_wait_is_no_move() -> None:
    assert after(ChipsWaiting(BOTH, "cut off")).is_too_long(12.1)


def test_the_time_for_which_the_coordinator_waits_for_a_lost_state_does_not_count() -> None:
    assert not after(StateLost(7, 60.0)).is_too_long(77.0)
    assert after(StateLost(7, 60.0)).is_too_long(77.1)


def test_a_timeout_of_zero_is_for_ever() -> None:
    timing = Timing(straggler_timeout_s=0.0)

    assert not after(timing=timing).is_too_long(1e9)


def test_it_says_where_each_worker_stands() -> None:
    forming, began = GenerationForming(2, BOTH, ""), GenerationBegan(2, BOTH, 7)

    assert (
        after(WorkerArrived((0, 0))).words([(0, 0)]).endswith("0,0 is connected, in no generation")
    )
    assert after(forming).words(BOTH).endswith("1x2@0,0 prepares generation 2")
    assert after(began, stepped(9)).words(BOTH).endswith("1x2@0,0 is in generation 2 after step 9")
    assert after(began).words([(0, 2)]).endswith("0,2 is cut off")
    waiting = after(began, ChipsWaiting(((0, 2),), "too few"))
    assert waiting.words([(0, 0), (0, 2)]).endswith(
        "0,0 is in generation 2 after step 7; 0,2 waits: too few"
    )
    assert after(began).words([]).endswith("no worker is left")
