"""Who trains together: by hand, and through any order of deaths, hangs, cuts and repairs."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend.config import Timing
from meshmend.membership.generation import Generation
from meshmend.membership.history import CoordinatorRecord, History
from meshmend.membership.job import JobFingerprint
from meshmend.membership.membership import Decision, Membership, PendingChanges
from meshmend.membership.messages import FRESH, Status
from meshmend.topology.failures import Chip, Link, parse_link
from meshmend.topology.graph import components
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from simulated_job import Job, training

SQUARE = parse_mesh("4x4")
BOARD = (2, 2)
CHIPS = SQUARE.live
LINKS = [Link.between(SQUARE.live[one], SQUARE.live[two]) for one, two in SQUARE.links]

Event = tuple[str, int]

EVENTS = (
    *("turn", "turn", "turn", "turns", "turns", "connect", "deliver", "listen", "act", "decide"),
    *("pass", "kill", "kill board", "start board", "start", "hang", "wake", "drop silent"),
    *("cut", "mend", "kill coordinator", "lose coordinator", "start coordinator"),
)


def started(mesh: Mesh = SQUARE, board: tuple[int, ...] = BOARD) -> Job:
    """A job whose workers are all there and train."""
    job = Job(mesh, board)
    for chip in mesh.live:
        job.start_worker(chip)
    settle(job)
    return job


def membership_of(job: Job) -> Membership:
    assert job.membership is not None
    return job.membership


def generation_of(job: Job) -> Generation:
    generation = membership_of(job).generation
    assert generation is not None
    return generation


def board_at(number: int) -> list[Chip]:
    row, col = divmod(number % 4, 2)
    return [(2 * row + i, 2 * col + j) for i in (0, 1) for j in (0, 1)]


def happen(job: Job, event: Event) -> None:
    """Let one thing happen; what cannot happen now does not."""
    kind, number = event
    chip, link = CHIPS[number % 16], LINKS[number % len(LINKS)]
    for each in board_at(number):
        if kind == "kill board":
            job.kill(each)
        elif kind == "start board":
            job.start_worker(each)
    if kind in ("connect", "deliver", "listen", "act", "kill", "hang", "wake"):
        getattr(job, kind)(chip)
    elif kind == "start":
        job.start_worker(chip)
    elif kind in ("cut", "mend"):
        getattr(job, kind)(link)
    elif kind in ("kill coordinator", "lose coordinator"):
        job.kill_coordinator(loses=kind == "lose coordinator")
    elif kind == "start coordinator":
        job.start_coordinator()
    elif kind == "pass":
        job.now += 0.01 * number
    elif kind == "turn":
        job.turn(number)
    elif kind == "turns":
        for _ in range(number):
            job.turn(number)
    elif kind == "decide":
        job.decide()
    elif kind == "drop silent":
        job.drop_silent()


def settle(job: Job, n_turns: int = 150) -> None:
    """Let nothing more happen, and everything that is under way come to its end."""
    job.start_coordinator()
    job.drop_silent()
    for chip in list(job.workers):
        job.wake(chip)
    for _ in range(n_turns):
        job.turn()
        if job.is_calm() and not job.broken_inside():
            return
        assert job.membership is not None
        soon = job.membership.settled_at()
        job.now = max(job.now, min(job.now + 0.1, soon or 0.0))


def check_settled(job: Job) -> None:
    """Everybody able trains, all with the same bits, and the next step is done by all."""
    assert job.membership is not None
    generation = job.membership.generation
    if job.failure:
        states = {worker.state_version for worker in job.workers.values()}
        assert states <= {FRESH}, "a state was there to go on from"
        return
    if not job.workers:
        return
    assert generation is not None
    members = list(training(job))
    assert {worker.chip for worker in members} == set(generation.chips)
    steps = {worker.chip: worker.step for worker in members}
    for _ in range(6):
        job.turn()
    assert job.membership.generation is generation
    assert all(worker.step > steps[worker.chip] for worker in members)
    check_waiting(job)


def check_waiting(job: Job) -> None:
    """Who waits is cut off, or not all of its board is there; and was told so."""
    assert job.membership is not None
    generation = job.membership.generation
    assert generation is not None
    there, members = set(job.workers), set(generation.chips)
    whole = {chip for k in range(4) if there >= set(board_at(k)) for chip in board_at(k)}
    able = members | whole
    mesh = replace(
        SQUARE, failed=frozenset(SQUARE.live) - able, failed_links=frozenset(generation.cut)
    )
    (mine,) = (part for part in components(mesh) if members & set(part))
    assert set(mine) == members
    for chip in there - members:
        why = job.workers[chip].wait
        assert ("cut off" if chip in whole else "missing") in why


@settings(max_examples=60)
@given(st.booleans(), st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 23)), max_size=60))
def test_whatever_happens_nothing_diverges_is_lost_or_waits_for_ever(
    is_started: bool, events: list[Event]
) -> None:
    """Checked on the way: one number a generation, connected, sums and holders of equal bits."""
    job = started() if is_started else Job(SQUARE, BOARD)

    for event in events:
        happen(job, event)
    settle(job)

    check_settled(job)


def test_survivors_keep_their_connections_and_who_comes_back_gets_new_ones() -> None:
    job = started()
    whole = generation_of(job)
    for chip in board_at(3):
        job.kill(chip)
    settle(job)
    less = generation_of(job)
    for chip in board_at(3):
        job.start_worker(chip)
    settle(job)
    again = generation_of(job)

    assert [len(each.chips) for each in (whole, less, again)] == [16, 12, 16]
    assert {each.epoch((0, 0), (0, 1)) for each in (whole, less, again)} == {whole.number}
    assert again.epoch((1, 2), (2, 2)) == again.epoch((2, 2), (2, 3)) == again.number


def test_a_link_that_was_mended_gets_a_new_connection_and_no_other_does() -> None:
    job = started()
    before = generation_of(job).number
    job.cut(LINKS[0])
    settle(job)
    assert generation_of(job).cut == {LINKS[0]}
    assert len(generation_of(job).chips) == 16
    job.mend(LINKS[0])
    settle(job)
    after = generation_of(job)

    assert after.cut == frozenset()
    epochs = {link: after.epoch(link.first, link.second) for link in LINKS}
    assert epochs.pop(LINKS[0]) > before
    assert set(epochs.values()) == {before}


def test_a_board_that_failed_before_the_start_joins_whole() -> None:
    job = started(SQUARE.without("2x2@0,2"))
    assert len(generation_of(job).chips) == 12
    first, *others = board_at(1)

    job.start_worker(first)
    settle(job)
    assert len(generation_of(job).chips) == 12
    assert "(0, 3), (1, 2), (1, 3) are missing" in job.workers[first].wait
    for chip in others:
        job.start_worker(chip)
    settle(job)

    assert len(generation_of(job).chips) == 16


def test_the_part_with_the_latest_state_goes_on_although_another_is_larger() -> None:
    job = started()
    for chip in (*board_at(1), *board_at(2)):
        job.kill(chip)
    settle(job)
    ahead = next(training(job)).chip
    assert len(generation_of(job).chips) == 4
    for _ in range(20):
        job.turn()
    steps = job.workers[ahead].step

    mate = next(chip for chip in generation_of(job).chips if chip != ahead)
    job.kill(mate)
    settle(job)

    assert ahead in generation_of(job).chips
    assert len(generation_of(job).chips) == 3
    assert job.workers[ahead].step >= steps


def test_half_a_board_goes_on_if_nobody_else_knows_what_was_learned() -> None:
    job = started()
    job.kill((3, 3))
    for chip in (*board_at(1), *board_at(2)):
        job.kill(chip)
    settle(job)
    assert set(job.workers) - set(generation_of(job).chips) == {(2, 2), (2, 3), (3, 2)}
    for chip in board_at(0):
        job.kill(chip)
    for chip in board_at(1):
        job.start_worker(chip)
    settle(job)

    assert set(generation_of(job).chips) >= {(2, 2), (2, 3), (3, 2)}
    assert {worker.step for worker in training(job)} != {0}
    assert job.lost_steps, "the steps that board 0 took alone are told as lost"


def test_new_workers_do_not_begin_anew_while_all_who_trained_hang() -> None:
    """The holders are counted as dead; when they wake, the job goes on from what they hold."""
    job = started(parse_mesh("1x2"), (1, 1))
    job.kill((0, 1))
    settle(job)
    before = job.workers[0, 0].step
    job.hang((0, 0))
    job.drop_silent()
    job.start_worker((0, 1))
    for _ in range(50):
        job.turn()
    assert job.workers[0, 1].step == 0
    assert "holds the state after step" in job.workers[0, 1].wait
    job.wake((0, 0))
    settle(job)

    assert all(worker.step >= before for worker in training(job))
    assert len(list(training(job))) == 2
    assert not job.failure


def test_a_job_whose_state_is_gone_for_good_fails_and_says_which_step_is_lost() -> None:
    job = started(parse_mesh("1x2"), (1, 1))
    step = job.workers[0, 0].step
    for chip in ((0, 0), (0, 1)):
        job.kill(chip)
        job.start_worker(chip)
    settle(job)

    assert job.lost_steps[0] >= step - 1
    assert "no chip that is left holds the state after step" in job.failure
    assert all(worker.step == 0 for worker in job.workers.values())


def test_a_coordinator_that_was_started_again_knows_that_there_was_a_state() -> None:
    job = started(parse_mesh("1x2"), (1, 1))
    job.kill_coordinator(loses=True)
    for chip in ((0, 0), (0, 1)):
        job.kill(chip)
        job.start_worker(chip)
    settle(job)

    assert job.failure


def test_a_first_generation_that_took_no_step_is_not_waited_for() -> None:
    """The chip that gives its first state to the others dies before they have it."""
    job = Job(parse_mesh("1x2"), (1, 1))
    for chip in ((0, 0), (0, 1)):
        job.start_worker(chip)
    while not (job.membership and job.membership.go):
        job.turn()
    job.kill((0, 0))
    settle(job)

    assert not job.failure
    assert not job.lost_steps
    assert [worker.chip for worker in training(job)] == [(0, 1)]


def test_a_complaint_is_not_forgotten_with_the_coordinator_that_heard_it() -> None:
    job = started()
    before = generation_of(job).number
    job.cut(LINKS[0])
    for _ in range(4):
        job.turn()
    assert any(worker.status.lost for worker in job.workers.values())
    job.kill_coordinator(loses=False)
    settle(job)

    assert generation_of(job).number > before
    check_settled(job)


def test_who_took_the_place_of_another_meanwhile_is_not_taken_for_it() -> None:
    job = started()
    before = generation_of(job).number
    job.kill_coordinator(loses=False)
    job.kill((1, 1))
    job.start_worker((1, 1))
    settle(job)

    assert generation_of(job).seat_of[1, 1].since > before
    check_settled(job)


def test_chips_that_lose_each_other_although_their_link_is_cut_get_a_new_connection() -> None:
    """Some plans have far chips talk: they can lose each other too."""
    job = started()
    job.cut(LINKS[0])
    settle(job)
    before, membership = generation_of(job), membership_of(job)
    worker = job.workers[LINKS[0].first]

    worker.doing = "waiting"
    worker.tell(is_ready=False, lost=[LINKS[0].second])
    settle(job)

    after = generation_of(job)
    assert membership_of(job) is membership
    assert after.number > before.number
    assert after.epoch(LINKS[0].first, LINKS[0].second) > before.number


def two_chips() -> tuple[Membership, Link]:
    """A job of two chips that train, and the link between them."""
    membership = Membership(parse_mesh("1x2"), Timing(), board=(1, 1))
    for chip in ((0, 0), (0, 1)):
        membership.arrive(chip, ("host", 1), status=Status(), memory=None, now=0.0)
    next_generation(membership, 0.0)
    return membership, Link.between((0, 0), (0, 1))


def next_generation(membership: Membership, now: float) -> tuple[float, int]:
    """Wait until a generation is formed, and let it go; return when, and how many chips it has."""
    while (formed := membership.decide(now).generation) is None:
        now += 0.5
        assert now < 100_000, "no generation is formed"
    for chip in formed.chips:
        ready = Status(generation=formed.number, ready=True, state_version=formed.number)
        membership.update_status(chip, ready, now)
    assert membership.decide(now).go is not None
    return now, len(formed.chips)


@pytest.mark.parametrize("returns", [False, True])
def test_a_job_whose_workers_have_all_left_fails_unless_one_comes_back(*, returns: bool) -> None:
    membership, _ = two_chips()
    for at, chip in enumerate(((0, 0), (0, 1)), start=1):
        membership.leave(chip, "it is gone", float(at))
    before = [membership.decide(at).failed for at in (2.0, 100.0, 1801.9)]
    if returns:
        membership.arrive((0, 0), ("host", 2), status=Status(), memory=None, now=1801.9)

    failed = membership.decide(1802.0).failed

    assert before == ["", "", ""]
    assert failed == (
        "" if returns else "the last worker has left, and none came back within 1800 s"
    )


def test_links_that_cut_live_chips_off_are_tried_again_less_and_less_often() -> None:
    membership, link = two_chips()
    waits, now = [], 10.0
    for _ in range(9):
        membership.cut(link, now)
        cut_at, n_alone = next_generation(membership, now)
        now, n_together = next_generation(membership, cut_at)
        assert (n_alone, n_together) == (1, 2)
        waits.append(round(now - cut_at, -1))

    assert waits == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]


def test_a_link_that_was_sound_for_long_after_it_was_tried_again_is_tried_soon() -> None:
    membership, link = two_chips()
    now = 10.0
    for _ in range(3):
        membership.cut(link, now)
        cut_at, _ = next_generation(membership, now)
        back_at, _ = next_generation(membership, cut_at)
        now = back_at + 3600

    assert back_at - cut_at < 70


def test_a_link_that_the_user_has_cut_is_not_tried_again_before_it_is_mended() -> None:
    membership, link = two_chips()
    membership.cut_on_purpose(link)
    membership.cut(link, 10.0)
    assert next_generation(membership, 10.0)[1] == 1

    assert all(membership.decide(float(now)) == Decision() for now in range(20, 9000))
    membership.mend(link, 9000.0)
    assert next_generation(membership, 9000.0)[1] == 2


@pytest.mark.parametrize("is_told_late", [True, False])
def test_links_of_a_chip_that_died_are_sound_however_soon_a_new_worker_comes(
    is_told_late: bool,
) -> None:
    """Late, as after the loss of the coordinator too; or before the new worker comes."""
    membership, link = two_chips()
    assert membership.generation is not None
    number = membership.generation.number
    lost = Status(generation=number, state_version=number, lost=(link.first,))

    if not is_told_late:
        membership.update_status(link.second, lost, 10.0)
    membership.leave(link.first, "gone", 10.0)
    membership.arrive(link.first, ("host", 2), status=Status(), memory=None, now=10.0)
    if is_told_late:
        membership.update_status(link.second, lost, 10.0)
    membership.note_contact(link.first, 10.1)
    membership.note_contact(link.second, 10.1)

    assert next_generation(membership, 10.3)[1] == 2
    assert not membership.generation.cut


OF_TILES = JobFingerprint("1", 0, 0, 0, "", "", "", 0, "", tile="1x2")


def tiles_in_a_row(*gone: Chip) -> Membership:
    """A job of four chips in a row, in tiles of two, that train; without those that are gone."""
    record = CoordinatorRecord("ours", fingerprint=OF_TILES)
    mesh = replace(parse_mesh("1x4"), failed=frozenset(gone))
    membership = Membership(mesh, Timing(), board=(1, 1), history=History(record))
    for chip in mesh.live:
        membership.arrive(chip, ("host", 1), status=Status(), memory=None, now=0.0)
    next_generation(membership, 0.0)
    return membership


@pytest.mark.parametrize(
    "link", ["link:0,1-0,2", "link:0,2-0,3"], ids=["between tiles", "inside a tile"]
)
def test_a_link_that_keeps_a_tile_apart_is_tried_again(link: str) -> None:
    membership = tiles_in_a_row()
    membership.cut(parse_link(link), 10.0)
    cut_at, n_alone = next_generation(membership, 10.0)
    now, n_together = next_generation(membership, cut_at)

    assert (n_alone, n_together) == (2, 4)
    assert now - cut_at == pytest.approx(60.0, abs=2.0)


def test_a_link_to_chips_that_have_no_whole_tile_is_not_tried_before_they_have() -> None:
    """A try would stop the others in vain."""
    membership = tiles_in_a_row((0, 3))
    membership.cut(parse_link("link:0,1-0,2"), 10.0)
    assert next_generation(membership, 10.0)[1] == 2

    assert all(membership.decide(float(now)) == Decision() for now in range(11, 9000))
    membership.arrive((0, 3), ("host", 1), status=Status(), memory=None, now=9000.0)
    now, n_together = next_generation(membership, 9000.0)
    assert now <= 9070.0
    assert n_together == 4


def test_nothing_is_decided_any_more_when_all_is_over() -> None:
    membership = Membership(parse_mesh("1x2"), Timing(), board=(1, 1))
    for chip in ((0, 0), (0, 1)):
        membership.arrive(chip, ("host", 1), status=Status(), memory=None, now=0.0)
    generation = membership.decide(1.0).generation
    assert generation is not None
    done = Status(
        generation=generation.number, ready=True, state_version=generation.number, finished=True
    )
    for member in generation.chips:
        membership.update_status(member, done, 1.0)

    assert membership.decide(1.0).go is not None
    assert membership.decide(1.0).is_over
    membership.leave((0, 1), "gone", 1.1)
    assert membership.decide(2.0) == Decision()
    assert membership.decide(9.0) == Decision()


def test_nobody_is_asked_again_before_the_first_have_gathered() -> None:
    membership = Membership(SQUARE, Timing(gather_s=9.0), board=BOARD)
    membership.arrive((0, 0), ("host", 1), status=Status(), memory=None, now=1.0)

    assert membership.decide(5.0) == Decision()
    assert membership.settled_at() == 10.0
    assert membership.reason_to_wait((0, 0)) == "the other workers have not connected yet"


def test_a_generation_is_made_although_things_keep_happening() -> None:
    timing = Timing(settle_s=1.0)
    membership = Membership(parse_mesh("1x2"), timing, board=(1, 1))
    for chip in ((0, 0), (0, 1)):
        membership.arrive(chip, ("host", 1), status=Status(), memory=None, now=0.0)
    made = []
    for turn in range(1, 30):
        membership.leave((0, 1), "gone", 0.5 * turn)
        membership.arrive((0, 1), ("host", turn), status=Status(), memory=None, now=0.5 * turn)
        made.append(membership.decide(0.5 * turn).generation)

    assert any(made)


def test_a_link_in_doubt_is_cut_only_once_both_its_ends_were_heard_after_the_complaint() -> None:
    link = Link.between((0, 0), (0, 1))
    changes = PendingChanges(settle_s=0.02, doubt_s=0.15)
    changes.heard |= {(0, 0): 1.0, (0, 1): 0.9}
    changes.doubt_link(link, 1.0)

    assert changes.cut_links(CHIPS, 1.1) == []
    assert changes.cut_links(CHIPS, 2.0) == []  # its other end may be gone, and not the link
    changes.heard[0, 1] = 2.1
    assert changes.cut_links(CHIPS, 2.2) == [link]
    assert changes.cut_links(CHIPS, 3.0) == []


def test_a_link_is_not_to_blame_for_an_end_that_has_left() -> None:
    changes = PendingChanges(settle_s=0.02, doubt_s=0.15)
    changes.heard |= {(0, 0): 1.0, (0, 1): 0.9}
    changes.doubt_link(Link.between((0, 0), (0, 1)), 1.0)

    assert changes.cut_links([(0, 0)], 2.0) == []
    assert not changes.doubts
