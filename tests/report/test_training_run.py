"""A training run read back from its events: what is tolerated, what is refused, its figures."""

import math
import re
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.errors import InputError
from meshmend.report.moving_rate import MovingRate
from meshmend.report.training_events import event_words, rate_words, seconds
from meshmend.report.training_run import TrainingRun, samples_per_s, training_run
from meshmend.report.training_summary import train_summary
from training_events import chips_without, end, generation, lines, long_run, short_run, start, step

FULL = chips_without("4x4")
TEXT = "".join(lines(short_run()))


def run_of(*events: dict[str, Any]) -> TrainingRun:
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
    assert [f.kind for f in run.faults] == ["kill", "repair"]
    assert run.recoveries_s == (0.41,)
    assert run.median_recovery_s == run.worst_recovery_s == 0.41
    assert [str(g.mesh) for g in run.generations] == ["4x4", "4x4 less 2x2@0,2", "4x4"]


@given(st.integers(0, len(TEXT)))
def test_a_file_cut_at_any_byte_is_a_run_as_soon_as_its_start_is_whole(cut: int) -> None:
    kept = TEXT[:cut].splitlines()
    whole = [line for line in kept if line.endswith("}") and line in TEXT.splitlines()]
    if not whole:
        with pytest.raises(InputError):
            training_run(kept)
        return

    run = training_run(kept)

    n_steps = sum('"event": "step"' in line for line in whole)
    assert len(run.steps) == run.n_done == n_steps
    assert run.samples.used == 64 * n_steps
    assert (run.end is None) == ('"event": "end"' not in whole[-1])


@given(st.lists(st.tuples(st.integers(1, 20), st.floats(0, 5)), max_size=60))
def test_a_step_told_twice_counts_as_told_last(told: list[tuple[int, float]]) -> None:
    events = [step(float(t), number, loss) for t, (number, loss) in enumerate(told)]

    run = run_of(start(20), generation(0, 1, FULL), *events)

    assert list(run.steps.step) == sorted({number for number, _ in told})
    assert dict(zip(run.steps.step.tolist(), run.steps.loss, strict=True)) == dict(told)


@given(st.lists(st.floats(0.01, 2.0), min_size=1, max_size=40))
def test_samples_per_s_lies_between_the_slowest_and_the_fastest_step(times: list[float]) -> None:
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
    kill = {"fault": "kill 0,0", "at_step": 3}
    times = {"detected_s": 0.1, "recovered_s": 0.5}

    run = run_of(
        start(),
        {"event": "fault", "t": 1.0, **kill},
        {"event": "fault", "t": 2.0, **kill},
        {"event": "recovered", "t": 2.5, **kill, **times},
        {"event": "recovered", "t": 4.0, "fault": "chip (1, 1) died", "at_step": None} | times,
    )

    assert [(f.at_s, f.is_recovered) for f in run.faults] == [
        (1.0, True),
        (2.0, False),
        (3.5, True),
    ]
    assert run.faults[2].kind == "not injected"


def test_a_run_resumed_into_the_same_file_goes_on_in_time() -> None:
    again = [start(), generation(0.5, 1, FULL), step(1.0, 2, 0.9), end(1.5, 2, 1.0, 0.9)]

    run = run_of(start(), generation(0.5, 1, FULL), step(1.0, 1, 1.0), *again)

    assert run.steps.at_s.tolist() == [1.0, 2.0]
    assert run.duration_s == 2.5
    assert run.end is not None


def test_what_comes_after_the_end_does_not_undo_it() -> None:
    late = {"event": "coordinator", "t": 3.0, "state": "lost"}

    assert run_of(start(), end(2, 0, 1.0, 1.0), late).end is not None
    assert run_of(start(), end(2, 0, 1.0, 1.0), late, start()).end is None


def test_an_event_of_an_unknown_kind_is_kept() -> None:
    run = run_of(start(), {"event": "eclipse", "t": 1.0, "of": "the sun"})

    assert event_words(run.others[-1]) == 'eclipse {"of": "the sun"}'


@pytest.mark.parametrize(
    ("events", "words"),
    [
        (["[1]"], "objects with a text under"),
        (["nonsense", "{}"], "one JSON object a line, but line 1 is 'nonsense'"),
        ([], "begin with a start event, but got no event at all"),
        (lines([step(0, 1, 1.0)]), "begin with a start event, but got 'step'"),
        (lines([start() | {"t": -1}]), "t of zero or more, but got -1"),
        (lines([start() | {"t": None}]), "a start event needs a number under 't', but got None"),
        (lines([start() | {"t": math.inf}]), "a start event needs a finite number under 't'"),
        (lines([start() | {"steps": "many"}]), "needs a whole number under 'steps'"),
        (lines([start() | {"steps": -3}]), "steps of zero or more, but got -3"),
        (lines([start() | {"mesh": 4}]), "needs a text under 'mesh', but got 4"),
        (lines([start() | {"mesh": "4y4"}]), "--mesh needs positive extents"),
        (lines([start() | {"fail": "2x2@0,0"}]), "needs a list of texts under 'fail'"),
        (lines([start(), generation(1, 1, [[9, 9]])]), r"inside the mesh 4x4, .* \[\(9, 9\)\]"),
        (lines([start(), generation(1, 1, [])]), "needs chips inside the mesh 4x4, but got none"),
        (lines([start(), {**generation(1, 1, FULL), "chips": [0]}]), "needs a list of chips such"),
        (lines([start(), step(1, 1, 1.0, samples=True)]), "needs a whole number under 'samples'"),
    ],
)  # fmt: skip
def test_nonsense_is_refused(events: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        training_run(events)


@pytest.mark.parametrize(
    ("time_s", "words"),
    [(0.004, "4 ms"), (0.41, "0.41 s"), (0.0, "0.00 s"), (38.249, "38.25 s"), (99.96, "1 min 40 s"),
     (725, "12 min 5 s"), (7384, "2 h 3 min"), (math.nan, "-")],
)  # fmt: skip
def test_times_are_written_as_people_say_them(time_s: float, words: str) -> None:
    assert seconds(time_s) == words


@pytest.mark.parametrize(
    ("per_s", "words"), [(1204.4, "1,204"), (10.0, "10"), (3.52, "3.5"), (0.0791, "0.079")]
)
def test_a_rate_is_said_in_two_digits_at_least(per_s: float, words: str) -> None:
    assert rate_words(per_s) == words
    assert rate_words(float("nan")) == "-"


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        (start(), "training tiny ResNet (19,466 parameters) on mesh 4x4: 100 steps of 64 samples"),
        (start(1, wrap="all", fail=["0,0"], parameters=0, size=""),
         "training ResNet on mesh 4x4 wrap all less 0,0: 1 step of 64 samples"),
        (generation(1, 3, FULL[:12], waiting=FULL[12:], cut=["link:2,0-3,0"], step=9, why=""),
         "generation 3: 12 chips from step 9 on; 1x4@3,0 cut off, waiting; without link:2,0-3,0"),
        (step(1, 7, 1.25), "step 7: loss 1.25, 64 samples on 16 chips"),
        ({"event": "fault", "fault": "chip (1, 1) died"}, "chip (1, 1) died"),
        ({"event": "recovered", "fault": "hang 0,0", "at_step": 4, "recovered_s": 2.5},
         "recovered from hang 0,0 at step 4 in 2.50 s (detected after -)"),
        ({"event": "recovered", "fault": "repair 0,0", "at_step": 4, "recovered_s": 2.5},
         "repair 0,0 at step 4 done in 2.50 s"),
        ({"event": "checkpoint", "step": 50, "path": "a/b"}, "checkpoint of step 50 in a/b"),
        ({"event": "coordinator", "state": "lost"},
         "coordinator lost; training goes on without it"),
        ({"event": "coordinator", "state": "back"}, "coordinator back, knows the job again"),
        ({"event": "refused", "who": "127.0.0.1:4242", "why": "wrong secret"},
         "refused 127.0.0.1:4242: wrong secret"),
        ({"event": "missed", "fault": "kill 0,0 at 99"},
         "kill 0,0 at 99 did not come: the job was over before"),
        ({"event": "turned away", "chip": [0, 2], "why": "of an older generation"},
         "chip (0, 2) turned away: of an older generation"),
        (end(9, 100, 2.3, 0.2), "done: 100 steps, loss 2.3 to 0.2, replicas equal"),
        (end(9, 1, 2.3, 0.2, replicas_equal=False),
         "done: 1 step, loss 2.3 to 0.2, REPLICAS DIFFER"),
        ({"event": "eclipse"}, "eclipse"),
    ],
)  # fmt: skip
def test_every_kind_of_event_has_its_sentence(event: dict[str, Any], sentence: str) -> None:
    assert event_words(event) == sentence


def test_summary_of_a_whole_run_reads_as_a_table() -> None:
    assert train_summary(short()).splitlines() == [
        "trained   tiny ResNet (19,466 parameters) on 4x4",
        "steps     100 of 100 in 10.13 s, 694 samples/s",
        "loss      2.264 to 0.2361; on samples held back: accuracy 0.93",
        "samples   6400 used, 0 lost, 0 repeated",
        "chips     16, 12, 16",
        "replicas  equal bit for bit",
        "recovery  median 0.41 s, worst 0.41 s, of 1 fault",
        "",
        "  fault           at step  detected  recovered",
        "  kill 2x2@0,2         30    0.02 s     0.41 s",
        "  repair 2x2@0,2       60      4 ms     1.70 s",
    ]


def test_summary_of_many_faults_shows_the_slowest_in_order_and_counts_the_rest() -> None:
    run = run_of(*long_run(1200))

    table = train_summary(run).split("\n\n")[1].splitlines()

    assert len(table) == 22
    assert table[-1].strip() == "and 40 more that took less; the report has them all"
    at_steps = [int(re.split(r"\s{2,}", line.strip())[1]) for line in table[1:-1]]
    assert all(one < other for one, other in pairwise(at_steps))
    assert f"{run.worst_recovery_s:.2f} s" in "\n".join(table)


def test_summary_of_a_run_cut_short_says_so() -> None:
    summary = train_summary(run_of(start()))

    assert "steps     0 of 100" in summary
    assert "loss      -" in summary
    assert "recovery  none was needed" in summary
    assert summary.endswith("end       none: the run was cut short, or still goes on")
