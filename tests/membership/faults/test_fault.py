"""Faults as `--inject` writes them."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from generated_faults import MESH, faults
from meshmend.errors import InputError
from meshmend.membership.faults.fault import (
    COORDINATOR,
    Fault,
    FaultKind,
    Moment,
    Part,
    parse_fault,
)
from meshmend.topology.failures import Block, Link

BOARD = Block((2, 2), (0, 2))
CHIP = Block((1, 1), (1, 1))
LINK = Link((0, 1), (0, 2))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill 2x2@0,2 at 20", Fault(FaultKind.KILL, BOARD, at_step=20)),
        (" kill  2x2@0,2  at  20 ", Fault(FaultKind.KILL, BOARD, at_step=20)),
        (
            "kill 2x2@0,2 at 20 in reduce",
            Fault(FaultKind.KILL, BOARD, at_step=20, moment=Moment.REDUCE),
        ),
        (
            "kill 2x2@0,2 at 20 in bucket 3",
            Fault(FaultKind.KILL, BOARD, at_step=20, moment=Moment.BUCKET, bucket=3),
        ),
        ("kill board:0,2 at 0", Fault(FaultKind.KILL, BOARD, at_step=0)),
        ("kill coordinator at 40", Fault(FaultKind.KILL, COORDINATOR, at_step=40)),
        ("kill coordinator at 1.5s", Fault(FaultKind.KILL, COORDINATOR, at_s=1.5)),
        ("hang 1,1 at 3.5s", Fault(FaultKind.HANG, CHIP, at_s=3.5)),
        ("hang 1,1 at 30 for 5s", Fault(FaultKind.HANG, CHIP, at_step=30, for_s=5.0)),
        ("slow 1,1 at 30 for 0.5s", Fault(FaultKind.SLOW, CHIP, at_step=30, for_s=0.5)),
        (
            "freeze coordinator at 20 for 5s",
            Fault(FaultKind.FREEZE, COORDINATOR, at_step=20, for_s=5.0),
        ),
        ("cut link:0,1-0,2 at 30", Fault(FaultKind.CUT, LINK, at_step=30)),
        ("repair link:0,2-0,1 at 30", Fault(FaultKind.REPAIR, LINK, at_step=30)),
        ("repair 2x2@0,2 at 60", Fault(FaultKind.REPAIR, BOARD, at_step=60)),
        ("flip gradient 1,1 at 40", Fault(FaultKind.FLIP, CHIP, 40, part=Part.GRADIENT)),
        ("flip  state  2x2@0,2 at 40", Fault(FaultKind.FLIP, BOARD, 40, part=Part.STATE)),
        ("wrong 1,1 from 40", Fault(FaultKind.WRONG, CHIP, 40)),
        ("throttle 1,1 from 40", Fault(FaultKind.THROTTLE, CHIP, 40)),
        ("throttle 1,1 from 40 for 2.5s", Fault(FaultKind.THROTTLE, CHIP, 40, for_s=2.5)),
    ],
)
def test_a_fault_is_read(text: str, fault: Fault) -> None:
    assert parse_fault(text, MESH) == fault
    assert parse_fault(fault.words, MESH) == fault


@given(faults())
def test_the_words_of_a_fault_name_that_fault(fault: Fault) -> None:
    assert parse_fault(fault.words, MESH) == fault


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "cannot read ''; write"),
        ("   ", "cannot read '   '; write"),
        ("kill 1,1", "cannot read 'kill 1,1'; write"),
        ("burn 1,1 at 3", "cannot read 'burn 1,1 at 3'; write"),
        ("Kill 1,1 at 3", "cannot read"),
        ("kill kill 1,1 at 3", "cannot read"),
        ("kill 1,1 at 3 at 4", "cannot read"),
        ("kill 1,1 at 3; kill 0,0 at 4", "cannot read"),
        ("kill 1,1 at 1.2.3", "cannot read"),
        ("kill 1,1 at .5s", "cannot read"),
        ("kill 1,1 at nan", "cannot read"),
        ("kill 1,1 at nans", "cannot read"),
        ("kill 1,1 at inf", "cannot read"),
        ("kill 1,1 at infs", "cannot read"),
        ("kill 1,1 at -1", "cannot read"),
        ("kill 1,1 at 1e3", "cannot read"),
        ("kill 1,1 at 1_000", "cannot read"),
        ("kill 1,1 at \u0663", "cannot read 'kill 1,1 at \u0663'"),  # an Arabic three
        ("kill \u0661,1 at 3", "cannot read 'kill \u0661,1 at 3'"),
        ("hang 1,1 at 3 for 5", "cannot read"),
        ("hang 1,1 at 3 for 1..2s", "cannot read"),
        ("hang 1,1 at 3 for infs", "cannot read"),
        ("hang 1,1 at 3 for -5s", "cannot read"),
        ("hang 1,1 at 3 for 5s for 5s", "cannot read"),
        (
            "kill 1,1 at 3 in sleep",
            "write one of forward, bucket, reduce, gather, update, recovery",
        ),
        ("kill 1,1 at 3 in bucket", "needs a bucket's number in the moment bucket, and only there"),
        ("kill 1,1 at 3 in reduce 2", "needs a bucket's number in the moment bucket, and only"),
        ("kill 1,1 at 3 in bucket -1", "cannot read"),
        ("kill 1,1 at 2.5", "needs an integer step, or seconds such as 2.5s"),
        ("kill 1,1 at " + "9" * 100, "needs a step from 0 to 9007199254740991"),
        ("kill 1,1 at " + "9" * 100 + "s", "needs a time of 0 s, or from 1e-09 to 1e\\+09 s"),
        ("kill 1,1 at 0." + "0" * 100 + "1s", "needs a time of 0 s, or from 1e-09"),
        ("kill 1,1 at " + "9" * 400, "at most 200 characters, but got 412: 'kill 1,1 at 999"),
        ("kill 1,1 at " + "9" * 400 + "s", "at most 200 characters, but got 413"),
        ("kill 1,1 at 3" + " " * 300, "at most 200 characters, but got 313"),
        ("kill " + "9" * 150 + ",1 at 3", "lie inside the mesh 4x4"),
        ("kill 99999x99999@0,0 at 3", "lie inside the mesh 4x4"),
        ("kill 4x4@0,0 at 3", "needs at least one live chip"),
        ("hang 1,1 at 3 for 0s", "hang 1,1 needs a duration from 1e-09 to 1e\\+09 s"),
        ("hang 1,1 at 3 for " + "9" * 100 + "s", "hang 1,1 needs a duration from"),
        ("kill x at 3", "--inject 'kill x at 3': .*cannot read 'x'"),
        ("kill 9,9 at 3", "lie inside the mesh 4x4"),
        ("kill 1 at 3", "mesh 4x4"),
        ("cut link:0,0-1,1 at 3", "has no link:0,0-1,1"),
        ("cut link:0,0-0,0 at 3", "two different chips"),
        ("cut 1,1 at 3", "cut needs a link, such as link:0,1-0,2, but got 1,1"),
        ("cut coordinator at 3", "cut needs a link"),
        ("kill link:0,1-0,2 at 3", "kill needs chips or the coordinator, but got link:0,1-0,2"),
        ("hang coordinator at 3", "hang needs chips, such as 1,1 or 2x2@0,2, but got coordinator"),
        ("slow link:0,1-0,2 at 3", "slow needs chips"),
        ("repair coordinator at 3", "repair needs chips or a link, but got coordinator"),
        ("freeze 1,1 at 3 for 5s", "freeze needs the coordinator; to stop a chip, hang it"),
        ("freeze coordinator at 3", 'freeze coordinator needs a duration, such as "for 5s"'),
        ("kill 1,1 at 3 for 5s", "kill 1,1 needs no duration"),
        ("repair 1,1 at 3 for 5s", "repair 1,1 needs no duration"),
        ("hang 1,1 at 3 in reduce", "only a kill of chips at a step can"),
        ("kill 1,1 at 3s in reduce", "only a kill of chips at a step can"),
        ("kill coordinator at 3 in reduce", "only a kill of chips at a step can"),
        ("flip 1,1 at 3", "needs one of gradient, weights, sum, state after flip"),
        ("flip head 1,1 at 3", "cannot read"),
        ("kill gradient 1,1 at 3", "needs one of gradient, weights, sum, state after flip, and"),
        ("flip sum 1,1 at 3s", "flip sum 1,1 needs a step, and no duration"),
        ("flip sum 1,1 at 3 for 5s", "needs a step, and no duration"),
        ("flip sum 1,1 from 3", "only wrong and throttle begin at a step and go on"),
        ("flip sum coordinator at 3", "flip needs chips, such as 1,1"),
        ("wrong link:0,1-0,2 from 3", "wrong needs chips, such as 1,1"),
        ("wrong 1,1 at 3", "only wrong and throttle begin at a step and go on"),
        ("kill 1,1 from 3", "only wrong and throttle begin at a step and go on"),
    ],
)
def test_what_cannot_happen_is_refused_in_one_line(text: str, match: str) -> None:
    with pytest.raises(InputError, match=match) as caught:
        parse_fault(text, MESH)

    assert str(caught.value).startswith("--inject ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("at_step", "at_s"), [(None, None), (3, 3.0), (-1, None), (None, -1.0), (None, float("nan"))]
)
def test_a_fault_has_one_time_that_can_come(at_step: int | None, at_s: float | None) -> None:
    with pytest.raises(InputError, match="kill 1,1 needs"):
        Fault(FaultKind.KILL, CHIP, at_step, at_s)


_TARGETS = ["0,0", "2x2@0,2", "link:0,1-0,2", "board:0,0", "coordinator"]
_NUMBERS = ["3", "3s", "1e9", "-1", "nan", "9" * 20]
_WORDS = st.sampled_from([*FaultKind, *Moment, "at", "for", "in", *_TARGETS, *_NUMBERS])


@given(st.text() | st.lists(_WORDS | st.text(max_size=4), max_size=8).map(" ".join))
@example("kill 1,1 at \ud800")
def test_any_text_is_read_or_refused(text: str) -> None:
    """No text raises anything but InputError, and what is read has words that are read."""
    try:
        fault = parse_fault(text, MESH)
    except InputError:
        return

    assert parse_fault(fault.words, MESH) == fault


@pytest.mark.parametrize(
    ("text", "step", "elapsed_s", "is_due"),
    [
        ("kill 1,1 at 20", 19, 99.0, False),
        ("kill 1,1 at 20", 20, 0.0, True),
        ("kill 1,1 at 3.5s", 99, 3.4, False),
        ("kill 1,1 at 3.5s", 0, 3.5, True),
    ],
)
def test_a_fault_is_due_by_its_step_or_by_its_time(
    text: str, step: int, elapsed_s: float, is_due: bool
) -> None:
    assert parse_fault(text, MESH).is_due(step, elapsed_s) is is_due


def test_a_fault_says_what_it_does_to_which_chips() -> None:
    fault = parse_fault("kill 2x2@0,2 at 20", MESH)

    assert str(fault) == "kill 2x2@0,2"
    assert fault.chips() == ((0, 2), (0, 3), (1, 2), (1, 3))
    assert parse_fault("cut link:0,1-0,2 at 3", MESH).chips() == ()
