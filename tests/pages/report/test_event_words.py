"""Every event has its sentence; times and rates are written as people say them."""

import math
from typing import get_args

import pytest

from meshmend.membership import events
from meshmend.membership.events import CoordinatorState, Event
from meshmend.membership.faults.fault import FaultKind
from meshmend.pages.report.event_words import event_words, rate_words, seconds
from training_events import chips_without, end, fault, generation, recovered, start, step

FULL = chips_without("4x4")


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


SENTENCES = [
    (
        events.StateLost(177, 60.0),
        "no chip has the state after step 177 any more; waiting 60.00 s for a chip that has it",
    ),
    (
        events.StateRestored(150, 177),
        "the state after step 177 is lost: going back to step 150, 27 steps to do again",
    ),
    (
        events.StateRestored(50, 0),  # the coordinator's record does not say how far the job was
        "no chip has the latest state any more: going back to step 50",
    ),
    (
        events.HistoryDropped(1000007, 433, (0, 2)),
        "chip (0, 2) holds steps up to 433 that a coordinator of term 1000007 led, and this job "
        "went on without: they are lost",
    ),
    (
        events.CoordinatorSuperseded(1000007, 2000009),
        "a coordinator of term 2000009 serves this job now; this one, of term 1000007, ends",
    ),
    (events.JobFinished(), "the job has finished"),
    (events.JobFailed("nobody is left"), "the job has failed: nobody is left"),
    (start().event,
     "training tiny ResNet (19,466 parameters) on mesh 4x4: 100 steps of 64 samples"),
    (start(1, wrap="all", fail=("0,0",), parameters=0, size="").event,
     "training ResNet on mesh 4x4 wrap all less 0,0: 1 step of 64 samples"),
    (events.WorkerArrived((0, 2)), "chip (0, 2) is ready"),
    (events.WorkerLeft((0, 2)), "chip (0, 2) is gone"),
    (events.WorkerLeft((0, 2), "chip (0, 2) hung up"), "chip (0, 2) hung up"),
    (events.WorkerTurnedAway((0, 2), "of an older generation"),
     "chip (0, 2) turned away: of an older generation"),
    (events.ConnectionRefused("127.0.0.1:4242", "wrong secret"),
     "refused 127.0.0.1:4242: wrong secret"),
    (events.ChipsWaiting(FULL[:2], "their board is not whole"),
     "1x2@0,0 waiting: their board is not whole"),
    (events.GenerationForming(2, FULL[:12], "chip (3, 3) hung up"),
     "generation 2 forms with 12 chips: chip (3, 3) hung up"),
    (generation(1, 3, FULL[:12], waiting=FULL[12:], cut=("link:2,0-3,0",), step=9, why="").event,
     "generation 3: 12 chips from step 9 on; 1x4@3,0 waiting; without link:2,0-3,0"),
    (events.WorkerStepped((0, 2), 7, 1, 2.5, leads=False, first=True, loss=1.0, samples=64),
     "chip (0, 2) finished step 7"),
    (events.WorkerSaved((0, 0), 50, 2.5, "a/b"), "checkpoint of step 50 in a/b"),
    (step(1, 7, 1.25).event, "step 7: loss 1.25, 64 samples on 16 chips"),
    (step(1, 7, None).event, "step 7: loss -, 64 samples on 16 chips"),
    (events.WriteFailed((0, 2), "its ledger", "No space left on device"),
     "chip (0, 2) cannot write its ledger: No space left on device; training goes on"),
    (events.NonFiniteSum((0, 2), 7, ("a.weight", "b.weight"), 5),
     "chip (0, 2) has gradients in step 7 that are not finite: a.weight, b.weight and 3 more"),
    (events.StatesDiffer((0, 0), 40, ((0, 1),), ("model.0.weight",), 3, 20),
     "the chips differ after step 40, equal after step 20: chip (0, 1) in model.0.weight "
     "and 2 more"),
    (events.LinkSlow("link:0,0-0,1", 0.25, 41, (0, 0)),
     "link:0,0-0,1 has 0.25 of the bandwidth; the job plans anew"),
    (events.LinkRestored("link:0,0-0,1", 1.0, 41, (0, 0)),
     "link:0,0-0,1 is as fast as the others again; the job plans anew"),
    (events.FabricMeasured(6.15e6, 44e-6, 12e-6, 0, (0, 0)),
     "the chips have measured their fabric: 6.15MB/s,44us,12us"),
    (events.ChipSlow((0, 1), 0.33, 41, (0, 0)),
     "chip (0, 1) computes at 0.33 of the others' speed; it gets a smaller share"),
    (events.ChipRestored((0, 1), 1.0, 41, (0, 0)),
     "chip (0, 1) computes as fast as the others again"),
    (events.WrongResult((0, 1), 41, (640, 656), 32, (0, 0)),
     "chip (0, 1) computed samples 640 to 655 of step 41 wrong; steps 33 to 40 may "
     "be wrong too"),
    (events.WrongResult((0, 1), 41, (640, 656), 40, (0, 0), ("0.weight", "0.bias"), 3),
     "chip (0, 1) computed samples 640 to 655 of step 41 wrong (0.weight, 0.bias and 1 more); all "
     "steps before it are known to be right"),
    (events.WrongResult((0, 1), 41, None, None, (0, 0)),
     "chip (0, 1) has a wrong state in step 41; no step before it is known to be right"),
    (events.WrongSum((0, 0), 41, ((0, 1),)),
     "the sum of step 41 is wrong on 0,1; the step is done again"),
    (events.StateMended((0, 1), 40, ("model.0.weight",), 3, 20, (0, 0)),
     "chip (0, 1) differed from the others after step 40, equal after step 20: it took their "
     "state, for model.0.weight and 2 more"),
    (events.NonFiniteSum((0, 0), 7),
     "the gradients of step 7 are finite, but their sum is not"),
    (events.RunEnded(steps=9, redone=27, history_faults=("two histories",), unchecked=("a",)),
     "done: 9 steps, loss - to -, 27 steps done again, HISTORY WRONG, not all steps checked"),
    (events.CheckpointSaved(50, "a/b"), "checkpoint of step 50 in a/b"),
    (events.FaultHappened("chip (1, 1) died"), "chip (1, 1) died"),
    (fault(1, "kill 0,0", 3).event, "kill 0,0 at step 3"),
    (events.FaultRecovered("hang 0,0", 4, None, 2.5, FaultKind.HANG),
     "recovered from hang 0,0 at step 4 in 2.50 s (detected after -)"),
    (recovered(9, "repair 0,0", 4, detected=0.1, took=2.5).event,
     "repair 0,0 at step 4 done in 2.50 s"),
    (events.FaultMissed("kill 0,0 at 99"),
     "kill 0,0 at 99 was not injected: the job ended before it"),
    (events.CoordinatorChanged(CoordinatorState.LOST),
     "coordinator is lost; training goes on without it"),
    (events.CoordinatorChanged(CoordinatorState.BACK),
     "coordinator is back and knows the job again"),
    (end(9, 100, 2.3, 0.2).event, "done: 100 steps, loss 2.3 to 0.2, replicas equal"),
    (end(9, 1, 2.3, 0.2, replicas_equal=False).event,
     "done: 1 step, loss 2.3 to 0.2, REPLICAS DIFFER"),
    (events.RunEnded(steps=0), "done: 0 steps, loss - to -"),
]  # fmt: skip


@pytest.mark.parametrize(("event", "sentence"), SENTENCES)
def test_an_event_has_its_sentence(event: Event, sentence: str) -> None:
    assert event_words(event) == sentence


def test_every_kind_of_event_is_among_them() -> None:
    assert {type(event) for event, _ in SENTENCES} == set(get_args(Event))
