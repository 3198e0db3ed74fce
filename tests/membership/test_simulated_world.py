"""The simulated world itself: what it does to processes is what would befall real ones."""

from functools import partial

import pytest

from meshmend.membership.coordinator import Coordinator
from simulation.event_loop import EventLoop, Process
from simulation.runs import simulate


def test_a_second_shorter_freeze_does_not_wake_half_of_a_process() -> None:
    """What a frozen process is to do waits for the end of the freeze: all of it, or nothing."""
    events = EventLoop(0)
    process = Process(events, 1, "worker")
    done: list[str] = []

    process.freeze(1e9)
    process.soon(lambda: done.append("before the second freeze"))
    events.run(0.1, lambda: False)
    process.freeze(0.1)
    process.soon(lambda: done.append("after it"))
    events.run(5.0, lambda: False)

    assert done == []


def test_a_process_that_wakes_does_first_what_it_has_held_back() -> None:
    events = EventLoop(0)
    process = Process(events, 1, "worker")
    done: list[int] = []

    process.freeze(3.0)
    for number in range(5):
        process.soon(partial(done.append, number), 0.1 * number)
    events.at(1.0, process.thaw)
    process.soon(partial(done.append, 5), 1.1)
    events.run(2.0, lambda: False)

    assert done == [0, 1, 2, 3, 4, 5]


def test_a_process_that_is_stopped_while_it_wakes_holds_back_the_rest() -> None:
    events = EventLoop(0)
    process = Process(events, 1, "worker")
    done: list[float] = []

    process.freeze(1.0)
    process.soon(lambda: process.freeze(1.0), 0.1)
    process.soon(lambda: done.append(events.now), 0.2)
    events.run(5.0, lambda: False)

    assert done == [2.0]


def test_a_trace_of_a_job_that_stands_still_ends_with_where_each_worker_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Coordinator, "tick", lambda coordinator, now: None)

    run = simulate(0, traces=True)

    assert "stands still" in run.problem
    assert "waits in" in run.trace[-1]
    assert "await_news" in run.trace[-1]
