"""Whom a coordinator lets in: the same arguments, and nothing that cannot be true."""

from typing import Any

import pytest
from msgspec.structs import replace

from meshmend.config import Timing
from meshmend.membership.admission import Admission
from meshmend.membership.generation import LARGEST_NUMBER, Generation, Seat
from meshmend.membership.history import CoordinatorRecord, History
from meshmend.membership.job import NOT_COMPARED, JobFingerprint, JobSpec
from meshmend.membership.membership import Membership
from meshmend.membership.messages import Hello, Status
from meshmend.membership.record_file import history_of, record_text
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh

MESH = Mesh((1, 4))
TIMING = Timing(gather_s=0.0)
OURS = JobFingerprint(
    "0.1.0", 60, 16, 0, "constant", "2 parameters", "SGD(lr)", 500, "0123456789abcdef"
)
HELD = Generation(5, tuple(Seat(chip, ("127.0.0.1", 1), 1) for chip in MESH.live))


def hello(chip: Chip, *, status: Status | None = None, **changes: Any) -> Hello:
    said = Hello("ours", MESH.shape, chip, ("127.0.0.1", 1), status or Status(), None, OURS)
    return replace(said, **changes)


def admission(history: History | None = None, *, version: str = "") -> Admission:
    history = history or History(CoordinatorRecord("ours"))
    membership = Membership(MESH, TIMING, board=(1, 1), history=history)
    spec = JobSpec("ours", MESH, (1, 1), TIMING, version)
    return Admission(spec, history, membership)


def test_the_next_workers_are_compared_with_the_first() -> None:
    rules = admission()
    assert rules.admit(hello((0, 0))) == ()

    other = hello((0, 1), fingerprint=replace(OURS, steps=30))
    assert rules.why_refused(other) == (
        "chip (0, 1) refused: steps is 30 on that chip, but 60 in this job, as on chip (0, 0)"
    )
    assert rules.why_refused(hello((0, 1))) == ""
    assert rules.why_refused(hello((0, 1), fingerprint=None)) == ""
    unread = replace(OURS, samples=NOT_COMPARED)
    assert rules.why_refused(hello((0, 1), fingerprint=unread)) == ""


def test_a_coordinator_that_is_started_again_compares_with_what_its_record_says() -> None:
    history = History(CoordinatorRecord("ours"))
    rules = admission(history)
    rules.admit(hello((0, 0)))
    rules.generation_began()
    rules.leave((0, 0))

    kept = history_of(record_text(history.record), history.record.job).record
    again = admission(History(kept))
    assert again.why_refused(hello((0, 1), fingerprint=replace(OURS, batch=8))) == (
        "chip (0, 1) refused: batch is 8 on that chip, but 16 in this job, as its coordinator says"
    )
    assert again.why_refused(hello((0, 1))) == ""


def test_a_first_worker_that_was_wrong_can_go_before_anything_has_begun() -> None:
    rules = admission()
    rules.admit(hello((0, 0), fingerprint=replace(OURS, steps=30)))
    assert rules.why_refused(hello((0, 1)))
    rules.leave((0, 0))

    assert rules.why_refused(hello((0, 1))) == ""


def test_a_first_worker_of_another_version_than_its_coordinator_is_refused_and_not_the_others() -> (
    None
):
    rules = admission(version="0.2.0")
    ours = replace(OURS, version="0.2.0")

    assert rules.why_refused(hello((0, 0))) == (
        "chip (0, 0) refused: meshmend's version is 0.1.0 on that chip, but 0.2.0 in this job, as "
        "its coordinator says"
    )
    assert rules.why_refused(hello((0, 1), fingerprint=ours)) == ""


def test_a_coordinator_of_another_version_goes_on_with_a_job_that_has_begun() -> None:
    rules = admission(version="0.2.0")

    holder = hello((0, 1), status=Status(5, True, 5, 40), memory=HELD)
    assert rules.why_refused(holder) == ""
    rules.admit(holder)
    assert rules.why_refused(hello((0, 0))) == ""


def test_a_worker_with_a_state_knows_better_than_a_new_one_that_came_first() -> None:
    rules = admission()
    rules.admit(hello((0, 0), fingerprint=replace(OURS, steps=30)))
    holder = hello((0, 1), status=Status(5, True, 5, 40), memory=HELD)

    assert rules.why_refused(holder) == ""
    assert rules.admit(holder) == (
        (
            (0, 0),
            "chip (0, 0) refused: steps is 30 on that chip, but 60 in this job, as on chip (0, 1)",
        ),
    )
    liar = replace(holder, chip=(0, 2), fingerprint=replace(OURS, steps=30))
    assert "steps is 30" in rules.why_refused(liar)


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (Status(generation=LARGEST_NUMBER), f"it reports generation {LARGEST_NUMBER}, but the"),
        (Status(state_version=3), "it holds a state, but names no generation"),
        (Status(lost=((9, 9),)), "lost (9, 9), which is not its peer"),
    ],
)
def test_what_a_new_worker_cannot_have_is_refused(status: Status, why: str) -> None:
    assert why in admission().why_refused(hello((0, 0), status=status))


def test_the_state_of_a_generation_is_held_by_its_members_only() -> None:
    history = History(CoordinatorRecord("ours"))
    rules = admission(history)
    member = hello((0, 0), status=Status(5, True, 5, 40), memory=HELD)
    rules.admit(member)
    history.begin(HELD, version=-1, step=0)

    assert rules.why_refused(member) == ""
    assert "holds the state of generation 5, but was not a member" in rules.why_refused(
        replace(member, address=("127.0.0.1", 2))
    )


@pytest.mark.parametrize(
    ("tile", "why"),
    [
        ("two", "a tile needs extents such as 2x2, but it names 'two'"),
        ("2x2", "a tile of 2x2 does not fit the mesh 1x4; take another"),
        ("1x2x1", "a tile of 1x2x1 does not fit the mesh 1x4; take another"),
    ],
)
def test_a_tile_that_the_mesh_cannot_have_is_refused(tile: str, why: str) -> None:
    assert why in admission().why_refused(hello((0, 0), fingerprint=replace(OURS, tile=tile)))
    assert admission().why_refused(hello((0, 0), fingerprint=replace(OURS, tile="1x2"))) == ""
