"""A training run read back from its events: what is tolerated, what is refused, its figures."""

import math
import re
from functools import lru_cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.errors import InputError
from meshmend.membership.events import (
    CoordinatorChanged,
    CoordinatorState,
    FabricMeasured,
    FaultRecovered,
    SampleCounts,
    StateRestored,
    TimedEvent,
)
from meshmend.membership.faults.fault import FaultKind
from meshmend.membership.moving_rate import MovingRate
from meshmend.pages.report.training_page import training_page
from meshmend.pages.report.training_run import RunFault, TrainingRun, samples_per_s, training_run
from meshmend.pages.report.training_summary import train_summary
from training_events import (
    at,
    chips_without,
    end,
    fault,
    generation,
    lines,
    long_run,
    recovered,
    short_run,
    start,
    step,
)

FULL = chips_without("4x4")
TEXT = "".join(lines(short_run()))


def run_of(*events: TimedEvent) -> TrainingRun:
    return training_run(lines(events))


@lru_cache
def short() -> TrainingRun:
    return run_of(*short_run())


def test_figures_of_a_run_with_a_kill_and_a_repair() -> None:
    run = short()

    assert (run.n_steps, run.n_done, run.chips) == (100, 100, (16, 12, 16))
    assert (run.samples.used, run.samples.lost, run.samples.repeated) == (6400, 0, 0)
    assert run.replicas_equal is True
    assert run.evaluation == {"accuracy": 0.93}
    assert [f.kind for f in run.faults] == [FaultKind.KILL, FaultKind.REPAIR]
    assert run.recoveries_s == (0.41,)
    assert run.median_recovery_s == run.worst_recovery_s == 0.41
    assert [str(g.mesh) for g in run.generations] == ["4x4", "4x4 less 2x2@0,2", "4x4"]


def test_a_last_step_that_came_to_count_when_a_chip_died_is_done() -> None:
    """No chip knows its loss; the generation after it begins with it."""
    left = generation(3.0, 2, FULL[:12], step=12)
    run = run_of(start(12), generation(1.0, 1, FULL, step=0), step(2.0, 11, 3.26), left)

    assert (run.n_done, run.final_loss) == (12, 3.26)


@given(st.integers(0, len(TEXT)))
def test_a_file_cut_at_any_byte_is_a_run_as_soon_as_its_start_is_whole(cut: int) -> None:
    kept = TEXT[:cut].splitlines()
    whole = [line for line in kept if line.endswith("}") and line in TEXT.splitlines()]
    if not whole:
        with pytest.raises(InputError):
            training_run(kept)
        return

    run = training_run(kept)

    n_steps = sum('"event":"step"' in line for line in whole)
    assert len(run.steps) == run.n_done == n_steps
    assert run.samples.used == 64 * n_steps
    assert (run.end is None) == ('"event":"end"' not in whole[-1])


@given(st.lists(st.tuples(st.integers(1, 20), st.floats(0, 5)), max_size=60))
def test_a_step_told_twice_counts_as_told_last(told: list[tuple[int, float]]) -> None:
    events = [step(float(t), number, loss) for t, (number, loss) in enumerate(told)]

    run = run_of(start(20), generation(0, 1, FULL), *events)

    assert list(run.steps.step) == sorted({number for number, _ in told})
    assert dict(zip(run.steps.step.tolist(), run.steps.loss, strict=True)) == dict(told)


@given(st.lists(st.integers(10, 2000), min_size=1, max_size=40))
def test_samples_per_s_lies_between_the_slowest_and_the_fastest_step(times_ms: list[int]) -> None:
    times = [time_ms / 1000 for time_ms in times_ms]  # a line of events.jsonl has 0.1 ms
    ends = np.cumsum(times) + 1.0
    events = [step(float(t), number, 1.0) for number, t in enumerate(ends, 1)]

    at_s, rate = samples_per_s(run_of(start(), generation(1.0, 1, FULL), *events))

    assert len(at_s) == len(rate) == 400
    assert (rate >= 64 / max(times) * (1 - 1e-6)).all()
    assert (rate <= 64 / min(times) * (1 + 1e-6)).all()


def test_samples_per_s_of_a_run_without_steps_is_empty() -> None:
    assert [len(part) for part in samples_per_s(run_of(start()))] == [0, 0]
    assert math.isnan(run_of(start()).mean_samples_per_s)


@given(st.floats(0.01, 3), st.integers(1, 512), st.integers(1, 50))
def test_moving_rate_of_even_steps_is_their_rate(dt: float, samples: int, n_steps: int) -> None:
    rate = MovingRate(2.0)
    rate.begin(5.0)

    for number in range(1, n_steps + 1):
        now = rate.add(5.0 + number * dt, samples)

        assert now == pytest.approx(samples / dt, rel=1e-6)


def test_moving_rate_has_none_before_a_second_moment() -> None:
    assert math.isnan(MovingRate(2.0).add(1.0, 64))


def test_a_recovery_belongs_to_the_first_open_fault_of_its_name() -> None:
    kill = "kill 0,0"

    run = run_of(
        start(),
        fault(1.0, kill, 3),
        fault(2.0, kill, 3),
        recovered(2.5, kill, 3, detected=0.1, took=0.5),
        at(4.0, FaultRecovered("chip (1, 1) died", None, 0.1, 0.5, chips=((1, 1),))),
    )

    assert [(f.at_s, f.is_recovered) for f in run.faults] == [
        (1.0, True),
        (2.0, False),
        (3.5, True),
    ]
    assert [f.kind_words for f in run.faults] == ["kill", "kill", "not injected"]


@pytest.mark.parametrize("kind", [FaultKind.KILL, FaultKind.FREEZE])
def test_a_fault_without_chips_is_the_coordinators(kind: FaultKind) -> None:
    own = RunFault(f"{kind.value} coordinator", 1.0, 5, kind)

    assert own.is_of_coordinator
    assert own.kind_words == f"{kind.value} coordinator"


def test_a_run_resumed_into_the_same_file_goes_on_in_time() -> None:
    again = [start(), generation(0.5, 1, FULL), step(1.0, 2, 0.9), end(1.5, 2, 1.0, 0.9)]

    run = run_of(start(), generation(0.5, 1, FULL), step(1.0, 1, 1.0), *again)

    assert run.steps.at_s.tolist() == [1.0, 2.0]
    assert run.duration_s == 2.5
    assert run.end is not None


@pytest.mark.parametrize("before", ["2x2", "4x8"])
def test_a_run_resumed_on_another_mesh_is_told_from_there(before: str) -> None:
    elsewhere = generation(0.5, 1, chips_without(before))
    again = [start(), generation(0.5, 1, FULL), step(1.0, 2, 0.9), end(1.5, 2, 1, 0.9)]

    run = run_of(start(mesh=before), elsewhere, step(1.0, 1, 1.0), *again)

    assert str(run.mesh) == "4x4"
    assert (run.resumed_after, run.n_done, run.duration_s) == (1, 2, 1.5)


def test_what_comes_after_the_end_does_not_undo_it() -> None:
    late = at(3.0, CoordinatorChanged(CoordinatorState.LOST))

    assert run_of(start(), end(2, 0, 1.0, 1.0), late).end is not None
    assert run_of(start(), end(2, 0, 1.0, 1.0), late, start()).end is None


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ((), "begin with a start event, but got no event at all"),
        ((start(mesh="4y4"),), "--mesh needs positive extents"),
        ((start(wrap="some"),), "--wrap needs none, all, or axes"),
        ((start(fail=("9,9",)),), "needs to lie inside the mesh 4x4, but 9,9"),
        ((start(), generation(1, 1, [(9, 9)])), r"inside the mesh 4x4, .* \[\(9, 9\)\]"),
        ((start(), generation(1, 1, [])), "needs chips inside the mesh 4x4, but got no chips"),
        ((start(), generation(1, 1, FULL, cut=("0,0",))), "a link is written link:0,1-0,2"),
        ((start(), generation(1, 1, FULL, cut=("link:0,0-3,3",))), "Mesh 4x4 has no link:0,0-3,3"),
    ],
)  # fmt: skip
def test_events_that_make_no_run_are_refused(events: tuple[TimedEvent, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        run_of(*events)


def test_summary_of_a_whole_run_reads_as_a_table() -> None:
    assert train_summary(short()).splitlines() == [
        "trained   tiny ResNet (19,466 parameters) on 4x4",
        "steps     100 of 100 in 10.13 s, 694 samples/s",
        "loss      2.264 to 0.2361; on held-out samples: accuracy 0.93",
        "samples   6400 used, 0 lost, 0 repeated",
        "chips     16, 12, 16",
        "replicas  equal bit for bit",
        "recovery  median 0.41 s, worst 0.41 s, of 1 fault; 1 repair, back after at most 1.70 s",
        "",
        "  fault           at step  detected  recovered",
        "  kill 2x2@0,2         30    0.02 s     0.41 s",
        "  repair 2x2@0,2       60      4 ms     1.70 s",
    ]


def test_summary_of_many_faults_shows_the_slowest_in_order_and_counts_the_rest() -> None:
    run = run_of(*long_run(1200))

    table = train_summary(run).split("\n\n")[1].splitlines()

    assert len(table) == 22
    assert table[-1].strip() == "and 40 more that recovered faster; the report has them all"
    at_steps = [int(re.split(r"\s{2,}", line.strip())[1]) for line in table[1:-1]]
    assert all(one < other for one, other in pairwise(at_steps))
    assert f"{run.worst_recovery_s:.2f} s" in "\n".join(table)


def test_summary_of_a_script_of_ones_own_does_not_guess_its_number_of_steps() -> None:
    run = run_of(start(steps=0), generation(1, 1, FULL), step(2, 1, 0.5), step(3, 2, 0.4))

    assert "steps     2 in 3.00 s" in train_summary(run)


def test_summary_and_page_of_a_resumed_run_say_so() -> None:
    run = run_of(start(), generation(1, 1, FULL, step=60), step(2, 61, 0.5), step(3, 62, 0.4))

    assert "steps     62 of 100, resumed after step 60, in 3.00 s" in train_summary(run)
    assert "of 100, resumed after step 60" in training_page(run)
    assert "resumed" not in train_summary(short()) + training_page(short())


def test_summary_and_page_show_the_fabric_that_was_measured() -> None:
    fabric = TimedEvent(2.5, FabricMeasured(6.15e6, 44e-6, 12e-6, 1))
    run = run_of(start(), generation(1, 1, FULL), step(2, 1, 0.5), fabric, step(3, 2, 0.4))

    assert "fabric    6.15MB/s,44us,12us, as measured" in train_summary(run)
    assert "6.15MB/s,44us,12us" in training_page(run)


def test_summary_of_a_run_cut_short_says_so() -> None:
    summary = train_summary(run_of(start()))

    assert "steps     0 of 100" in summary
    assert "loss      -" in summary
    assert "recovery  none: no faults" in summary
    assert summary.endswith("end       none: the run was stopped or still runs")


def restored_run() -> TrainingRun:
    return run_of(
        start(steps=30),
        *(step(number / 10, number, 1.0) for number in range(1, 18)),
        at(2.0, StateRestored(step=15, lost=17)),
        step(2.1, 16, 0.5),
        end(3.0, 16, 1.0, 0.5, redone=2, restores=(StateRestored(step=15, lost=17),)),
    )


def test_steps_that_were_lost_do_not_count_and_those_done_again_count_once() -> None:
    run = restored_run()

    assert run.n_done == 16
    assert run.steps.loss[-1] == 0.5
    assert "redone    the state after step 17 was lost; 2 steps were done again after step 15" in (
        train_summary(run).splitlines()
    )


def test_a_run_that_was_cut_short_tells_of_its_restores_too() -> None:
    run = run_of(start(), step(1, 1, 1.0), at(2.0, StateRestored(step=0, lost=1)))

    assert run.restores == (StateRestored(step=0, lost=1),)
    assert run.n_done == 0


def test_what_is_wrong_or_could_not_be_checked_is_in_the_summary() -> None:
    run = run_of(
        start(),
        step(1, 1, 1.0),
        end(
            *(2, 1, 1.0, 1.0),
            replicas_equal=None,
            samples=SampleCounts(64),
            history_faults=("two histories",),
            unchecked=("the ledger of chip (0, 1) ends at step 1: disk full",),
        ),
    )

    shown = train_summary(run).splitlines()

    assert "replicas  not checked" in shown
    assert "samples   64 used in the finished steps" in shown
    assert "WRONG     two histories" in shown
    assert "unchecked the ledger of chip (0, 1) ends at step 1: disk full" in shown
