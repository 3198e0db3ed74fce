"""The fault injector, on a job that only writes down what is done to it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generated_faults import MESH, faults
from meshmend.membership.faults.fault import COORDINATOR, Fault, FaultKind, Process, parse_fault
from meshmend.membership.faults.fault_injector import (
    DEFAULT_SLOW_S,
    SLOW_CYCLE_S,
    FaultInjector,
    InjectedFault,
)
from meshmend.topology.failures import Chip, Failure

TURN_S = 0.02
Call = tuple[float, str, Any]


@dataclass
class RecordedJob:
    """A job that writes down each call with its time; it refuses calls that make no sense."""

    now_s: float = 0.0
    calls: list[Call] = field(default_factory=list)
    stopped: set[Process] = field(default_factory=set)
    restarted_with: list[tuple[Fault, ...]] = field(default_factory=list)

    def kill(self, process: Process) -> None:
        self._note("kill", process)
        self.stopped.discard(process)

    def stop(self, process: Process) -> None:
        assert process not in self.stopped
        self._note("stop", process)
        self.stopped.add(process)

    def resume(self, process: Process) -> None:
        self._note("resume", process)
        self.stopped.remove(process)

    def restart(self, chips: Sequence[Chip], self_injected: Sequence[Fault]) -> None:
        self._note("restart", tuple(chips))
        self.restarted_with.append(tuple(self_injected))
        self.stopped.difference_update(chips)

    def cut(self, failure: Failure) -> None:
        self._note("cut", str(failure))

    def mend(self, failure: Failure) -> None:
        self._note("mend", str(failure))

    def _note(self, name: str, what: Any) -> None:
        self.calls.append((self.now_s, name, what))


@dataclass
class InjectedRun:
    """An injector on a recorded job, and what it noted."""

    faults: Sequence[Fault]
    job: RecordedJob = field(default_factory=RecordedJob)
    noted: list[InjectedFault] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.injector = FaultInjector(
            self.faults, self.job, heartbeat_timeout_s=2.0, note=self.noted.append
        )

    def turn(self, step: int, now_s: float) -> None:
        self.job.now_s = now_s
        self.injector.inject_due(step, now_s)

    def until(self, end_s: float, *, steps_per_s: float = 10.0) -> None:
        turns = range(round(self.job.now_s / TURN_S), round(end_s / TURN_S) + 1)
        for now_s in (turn * TURN_S for turn in turns):
            self.turn(int(now_s * steps_per_s), now_s)

    def named(self, *names: str) -> list[Call]:
        return [call for call in self.job.calls if call[1] in names]


def run_of(*texts: str) -> InjectedRun:
    return InjectedRun([parse_fault(text, MESH) for text in texts])


runs = st.lists(faults(max_step=50, max_s=5.0), max_size=6)
turns = st.lists(st.tuples(st.integers(0, 20), st.floats(0, 2.0)), max_size=12)


@given(runs, turns)
def test_each_fault_happens_once_at_or_after_its_step_or_time(
    injected: list[Fault], turns: list[tuple[int, float]]
) -> None:
    run = InjectedRun(injected)
    step, now_s = 0, 0.0

    for more_steps, more_s in turns:
        step, now_s = step + more_steps, now_s + more_s
        before = len(run.noted)
        run.turn(step, now_s)

        for noted in run.noted[before:]:
            assert noted.fault.is_due(step, now_s)
            assert noted.at_step == step
        assert not any(
            fault.is_due(step, now_s) for fault in run.injector.missed() if not fault.moment
        )

    happened = [noted.fault for noted in run.noted]
    assert sorted(map(str, (*happened, *run.injector.missed()))) == sorted(map(str, injected))
    assert not any(fault.moment for fault in happened)


@given(runs, turns)
def test_in_the_end_only_a_worker_that_hangs_for_good_is_stopped(
    injected: list[Fault], turns: list[tuple[int, float]]
) -> None:
    """Whatever faults overlap, and however late the injector is called."""
    run = InjectedRun(injected)
    now_s = 0.0
    for more_steps, more_s in turns:
        now_s += more_s
        run.turn(more_steps, now_s)

    run.turn(100, now_s + 10.0)
    run.turn(100, now_s + 1000.0)

    assert run.job.stopped == run.injector.hung()
    hang_for_good = [
        fault for fault in injected if fault.kind is FaultKind.HANG and fault.for_s is None
    ]
    assert run.job.stopped <= {chip for fault in hang_for_good for chip in fault.chips()}
    assert not run.injector.is_timed()


@given(runs)
def test_a_process_is_stopped_only_by_a_fault_that_stops_it(injected: list[Fault]) -> None:
    run = InjectedRun(injected)

    run.until(6.0)

    may_stop = {
        process
        for fault in injected
        if fault.kind in (FaultKind.HANG, FaultKind.SLOW, FaultKind.FREEZE)
        for process in fault.processes()
    }
    assert {what for _, _, what in run.named("stop")} <= may_stop


@given(runs)
def test_each_kill_cut_and_repair_is_carried_out_once_on_all_its_processes(
    injected: list[Fault],
) -> None:
    run = InjectedRun(injected)
    done = [fault for fault in injected if not fault.moment]

    run.until(6.0)

    kills = [fault for fault in done if fault.kind is FaultKind.KILL]
    repairs = [fault for fault in done if fault.kind is FaultKind.REPAIR]
    broken = [each for each in done if each.kind in (FaultKind.KILL, FaultKind.CUT)]
    expected: dict[str, list[Any]] = {
        "kill": [process for fault in kills for process in fault.processes()],
        "restart": [fault.chips() for fault in repairs if fault.chips()],
        "cut": [str(fault.target) for fault in broken if fault.target != COORDINATOR],
        "mend": [str(fault.target) for fault in repairs],
    }
    for name, targets in expected.items():
        assert Counter(what for _, _, what in run.named(name)) == Counter(targets)


def test_a_kill_ends_each_worker_and_breaks_their_network() -> None:
    run = run_of("kill 1x2@0,2 at 3")

    run.turn(2, 9.0)
    assert run.job.calls == []
    run.turn(3, 9.1)
    run.turn(4, 9.2)

    assert run.job.calls == [
        (9.1, "kill", (0, 2)),
        (9.1, "kill", (0, 3)),
        (9.1, "cut", "1x2@0,2"),
    ]
    (noted,) = run.noted
    assert (noted.kind, noted.chips) == (FaultKind.KILL, ((0, 2), (0, 3)))
    assert (noted.words, noted.at_step, noted.is_quiet) == ("kill 1x2@0,2", 3, False)
    assert noted.fault.lost() == {(0, 2), (0, 3)}
    assert not noted.fault.returned()


def test_a_repair_mends_the_network_and_restarts_the_workers() -> None:
    run = run_of("repair 1x2@0,2 at 1s", "kill 0,2 at 30 in reduce")
    assert run.injector.awaits_repair()

    run.turn(0, 1.0)

    assert run.job.calls == [(1.0, "mend", "1x2@0,2"), (1.0, "restart", ((0, 2), (0, 3)))]
    assert [fault.words for fault in run.job.restarted_with[0]] == ["kill 0,2 at 30 in reduce"]
    assert run.noted[0].fault.returned() == {(0, 2), (0, 3)}
    assert not run.injector.awaits_repair()


def test_a_link_is_cut_and_mended_and_no_process_is_touched() -> None:
    run = run_of("cut link:0,1-0,2 at 3", "repair link:0,1-0,2 at 5")

    run.turn(3, 0.3)
    run.turn(5, 0.5)

    assert run.job.calls == [(0.3, "cut", "link:0,1-0,2"), (0.5, "mend", "link:0,1-0,2")]


def test_the_coordinator_is_killed_alone() -> None:
    run = run_of("kill coordinator at 3")

    run.turn(3, 0.3)

    assert run.job.calls == [(0.3, "kill", "coordinator")]


@pytest.mark.parametrize(
    ("text", "process"),
    [("hang 1,1 at 1s for 3s", (1, 1)), ("freeze coordinator at 1s for 3s", "coordinator")],
)
def test_a_process_that_is_stopped_for_a_time_goes_on_after_it(text: str, process: Process) -> None:
    run = run_of(text)

    run.until(10.0)

    assert [(name, what) for _, name, what in run.job.calls] == [
        ("stop", process),
        ("resume", process),
    ]
    stop_s, resume_s = (at_s for at_s, _, _ in run.job.calls)
    assert 1.0 <= stop_s <= 1.0 + TURN_S
    assert 3.0 <= resume_s - stop_s <= 3.0 + TURN_S


def test_a_hang_without_end_has_none() -> None:
    run = run_of("hang 1,1 at 1s")

    run.until(10.0)

    assert [name for _, name, _ in run.job.calls] == ["stop"]
    assert run.injector.hung() == {(1, 1)}
    assert not run.injector.is_timed()


@pytest.mark.parametrize(
    ("text", "length_s"), [("slow 1,1 at 0 for 3s", 3.0), ("slow 1,1 at 0", DEFAULT_SLOW_S)]
)
def test_a_slow_worker_runs_a_third_of_the_time_and_then_always(text: str, length_s: float) -> None:
    run = run_of(text)

    run.until(10.0)

    stops, resumes = run.named("stop"), run.named("resume")
    stopped_s = sum(end[0] - begin[0] for begin, end in zip(stops, resumes, strict=True))
    assert stopped_s == pytest.approx(length_s * 2 / 3, rel=0.15)
    assert len(stops) == pytest.approx(length_s / SLOW_CYCLE_S, abs=1)
    assert resumes[-1][0] <= length_s + TURN_S
    assert run.injector.hung() == frozenset()


def test_a_slow_worker_that_hangs_does_not_run_until_the_hang_is_over() -> None:
    run = run_of("slow 1,1 at 0s for 5s", "hang 1,1 at 1s for 2s")

    run.until(10.0)

    assert not [call for call in run.named("resume") if 1.0 < call[0] < 3.0 - TURN_S]
    assert not run.job.stopped


def test_what_slowed_a_worker_does_not_stop_the_one_that_follows_it() -> None:
    run = run_of("slow 1,1 at 0s for 5s", "kill 1,1 at 1s", "repair 1,1 at 2s")

    run.until(10.0)

    assert all(at_s < 1.0 for at_s, _, _ in run.named("stop"))


@pytest.mark.parametrize(
    ("text", "is_quiet"),
    [
        ("kill 1,1 at 3", False),
        ("kill coordinator at 3", True),
        ("freeze coordinator at 3 for 50s", True),
        ("hang 1,1 at 3", False),
        ("hang 1,1 at 3 for 2.5s", False),
        ("hang 1,1 at 3 for 1.5s", True),
        ("slow 1,1 at 3", True),
        ("cut link:0,1-0,2 at 3", False),
        ("repair 1,1 at 3", False),
    ],
)
def test_a_fault_is_quiet_if_no_worker_is_lost_or_returns_by_it(text: str, is_quiet: bool) -> None:
    """The heartbeat timeout of these runs is 2 s."""
    run = run_of(text)

    run.turn(3, 1.0)

    assert run.noted[0].is_quiet is is_quiet


def test_a_dead_worker_has_injected_the_fault_of_the_nearest_step() -> None:
    run = run_of(
        "kill 1x2@1,0 at 10 in reduce", "kill 1,1 at 50 in update", "kill 0,0 at 9 in forward"
    )
    run.until(20.0)
    assert run.job.calls == []

    first = run.injector.pop_self_injected((1, 1), step=11)

    assert first is not None
    assert first.words == "kill 1x2@1,0 at 10 in reduce"
    assert (first.chips, first.at_step) == (((1, 0), (1, 1)), 11)
    assert run.injector.pop_self_injected((1, 0), step=11) is None
    second = run.injector.pop_self_injected((1, 1), step=49)
    assert second is not None
    assert second.words == "kill 1,1 at 50 in update"
    assert [fault.words for fault in run.injector.missed()] == ["kill 0,0 at 9 in forward"]


def test_the_injector_says_whether_it_needs_the_clock() -> None:
    run = run_of("kill 0,0 at 3", "hang 1,1 at 5 for 1s")
    assert not run.injector.is_timed()

    run.turn(5, 1.0)
    assert run.injector.is_timed()
    run.turn(5, 2.0)
    assert not run.injector.is_timed()
