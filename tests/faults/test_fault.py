"""Faults as `--inject` writes them."""

import pytest

from meshmend.errors import InputError
from meshmend.faults.fault import COORDINATOR, Fault, FaultKind, Moment, parse_fault
from meshmend.topology.failures import Block, Link
from meshmend.topology.text import parse_mesh

MESH = parse_mesh("4x4")
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
        ("kill board:0,2 at 0", Fault(FaultKind.KILL, BOARD, at_step=0)),
        ("kill coordinator at 40", Fault(FaultKind.KILL, COORDINATOR, at_step=40)),
        ("kill coordinator at 1.5s", Fault(FaultKind.KILL, COORDINATOR, at_s=1.5)),
        ("hang 1,1 at 3.5s", Fault(FaultKind.HANG, CHIP, at_s=3.5)),
        ("hang 1,1 at 30 for 5s", Fault(FaultKind.HANG, CHIP, at_step=30, for_s=5.0)),
        ("slow 1,1 at 30 for 0.5s", Fault(FaultKind.SLOW, CHIP, at_step=30, for_s=0.5)),
        ("cut link:0,1-0,2 at 30", Fault(FaultKind.CUT, LINK, at_step=30)),
        ("repair link:0,2-0,1 at 30", Fault(FaultKind.REPAIR, LINK, at_step=30)),
        ("repair 2x2@0,2 at 60", Fault(FaultKind.REPAIR, BOARD, at_step=60)),
    ],
)
def test_a_fault_is_read(text: str, fault: Fault) -> None:
    assert parse_fault(text, MESH) == fault
    assert parse_fault(fault.words, MESH) == fault


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "cannot read ''; write"),
        ("kill 1,1", "cannot read 'kill 1,1'; write"),
        ("burn 1,1 at 3", "cannot read 'burn 1,1 at 3'"),
        ("kill 1,1 at 1.2.3", "cannot read"),
        ("kill 1,1 at 3 in sleep", "cannot read"),
        ("kill 1,1 at 2.5", "needs a whole step, or seconds such as 2.5s"),
        ("kill x at 3", "--inject 'kill x at 3': .*cannot read 'x'"),
        ("kill 9,9 at 3", "lie inside the mesh 4x4"),
        ("cut link:0,0-1,1 at 3", "has no link:0,0-1,1"),
        ("cut 1,1 at 3", "needs a link to cut, such as link:0,1-0,2"),
        ("cut coordinator at 3", "needs a link to cut"),
        ("kill link:0,1-0,2 at 3", "needs chips; a link is cut"),
        ("hang coordinator at 3", "the coordinator can be killed, nothing else"),
        ("repair coordinator at 3", "the coordinator can be killed, nothing else"),
        ("hang 1,1 at 3 in reduce", "only a kill of chips at a step has a moment"),
        ("kill 1,1 at 3s in reduce", "only a kill of chips at a step has a moment"),
        ("kill coordinator at 3 in reduce", "only a kill of chips at a step has a moment"),
    ],
)
def test_what_cannot_happen_is_refused(text: str, match: str) -> None:
    with pytest.raises(InputError, match=match):
        parse_fault(text, MESH)


def test_a_duration_that_is_no_number_is_refused() -> None:
    with pytest.raises(InputError, match="cannot read"):
        parse_fault("hang 1,1 at 3 for 1..2s", MESH)


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
