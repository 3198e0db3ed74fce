"""What the explorer tells its page: flows, frames, next hops, prices, and refusals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from browsing import QUESTION
from meshmend.errors import InputError, TopologyError
from meshmend.pages.explore.explorer_answers import (
    first_answers,
    first_plan,
    flows_of,
    heat_answers,
    hole_words,
    searched_answers,
    usual_rows,
    whole_channels,
)
from meshmend.pages.explore.explorer_question import (
    ExplorerQuestion,
    document_of,
    page_start,
    question_of,
)
from meshmend.pages.explore.page_server import Access
from meshmend.pages.explore.planner_tasks import N_FRAMES, next_hops, timeline_of
from meshmend.planning.plan import plan
from meshmend.planning.progress import no_progress
from meshmend.planning.quick_plan import quick_plan
from meshmend.planning.target import Target
from meshmend.topology.mesh import Mesh
from strategies import connected_meshes

BROKEN = Mesh((6, 6)).without("2x2@2,2")


def test_the_page_offers_a_fabric_of_the_users_own_figures() -> None:
    own = "6.15MB/s,44us,12us"
    question = ExplorerQuestion(BROKEN, Target().with_("1MB", own), "auto")

    start = page_start(question)

    assert start["question"]["fabric"] in start["fabrics"]
    assert question_of(start["question"]).target.fabric.hop_latency_s == 44e-6


@given(connected_meshes())
@settings(max_examples=20)
def test_a_quick_plan_is_proved_and_takes_no_less_than_the_limit(mesh: Mesh) -> None:
    quick = quick_plan(mesh, Target(payload_bytes=1e6))

    assert quick.plan.proof is not None
    assert quick.time_s >= quick.plan.limit().time_s * (1 - 1e-9)


def test_a_quick_plan_of_a_small_mesh_is_as_fast_as_its_estimate() -> None:
    quick = quick_plan(BROKEN, Target(payload_bytes=1e6))

    assert not quick.is_estimate
    assert quick.time_s == pytest.approx(quick.plan.predicted().time_s)


@pytest.mark.parametrize("name", ["trees", "ring-1d", "ft-two-d", "rings-nd", "rank-ring"])
def test_flows_use_exactly_the_channels_that_reduce(name: str) -> None:
    made = plan(BROKEN, name)
    n_ports = 4

    flows = flows_of(made)

    drawn = {channel for flow in flows for part in flow.parts for channel in part}
    busy = set(whole_channels(BROKEN)[made.channel_loads > 0].tolist())
    assert drawn <= busy
    assert {channel // n_ports for channel in drawn} == set(
        np.ravel_multi_index(tuple(BROKEN.coordinates.T), BROKEN.shape).tolist()
    )


def test_the_flows_of_trees_are_spanning_trees_and_a_ring_is_one_ring() -> None:
    trees, ring = flows_of(plan(BROKEN, "trees")), flows_of(plan(BROKEN, "rank-ring"))

    assert all(len(part) == BROKEN.n_live - 1 for flow in trees for part in flow.parts)
    assert [len(flow.parts) for flow in ring] == [1]


@pytest.mark.parametrize("name", ["trees", "ft-two-d", "rank-ring"])
def test_the_frames_of_all_slices_add_up_to_the_work_of_the_links(name: str) -> None:
    made = plan(BROKEN, name, payload="1GB")  # overhead does not count
    whole = timeline_of(made)

    slices = [timeline_of(made, slice_number=each) for each in range(whole.n_shown)]

    together = sum(each.busy.astype(np.int64) for each in slices)
    assert np.abs(together - whole.busy).max() <= len(slices)  # of 255: each slice is rounded
    busy_s = whole.busy.sum() / 255 * whole.time_s / N_FRAMES
    assert busy_s == pytest.approx(made.channel_loads.sum() * 1e9 / 70e9, rel=0.01)


def test_a_slice_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InputError, match="a slice needs a number from 0 to"):
        timeline_of(plan(BROKEN, "trees"), slice_number=10_000)


@given(connected_meshes(), st.data())
@settings(max_examples=20)
def test_next_hops_lead_to_live_neighbours_and_reach_every_chip(
    mesh: Mesh, data: st.DataObject
) -> None:
    chip = data.draw(st.sampled_from(mesh.live))

    table = next_hops(mesh, chip)

    for goal in mesh.live:
        index = int(np.ravel_multi_index(goal, mesh.shape))
        port = table["ports"][index]
        if goal == chip:
            assert port == -1
            continue
        assert mesh.neighbor_ranks[mesh.rank_of[chip], port] >= 0
        assert table["hops"][index] >= 1


def test_next_hops_of_a_dead_chip_are_refused() -> None:
    with pytest.raises(InputError, match="needs a live chip"):
        next_hops(BROKEN, (2, 2))


def test_answers_come_in_the_order_of_the_page_and_agree_with_the_limit() -> None:
    question = question_of({**QUESTION, "fail": ["board:0,0"]})

    first = list(first_answers(question))
    later = list(searched_answers(question, None, no_progress))

    assert [answer["kind"] for answer in first] == ["plan", "hole"]
    kinds = [answer["kind"] for answer in later]
    assert kinds[:2] == ["plan", "hole"]
    assert kinds == sorted(kinds, key=["plan", "hole", "row", "curve"].index)
    priced = [row for row in later if row["kind"] == "row" and "time_s" in row]
    assert min(row["time_s"] for row in priced) >= later[0]["limit_s"]
    assert later[0]["time_s"] <= first[0]["time_s"] * 1.02


@pytest.mark.parametrize(
    "changes",
    [
        {"mesh": "1x1"},
        {"mesh": "5"},
        {"mesh": "2x2x2"},
        {"mesh": "3x3", "fail": ["0,1", "1,0"]},
        {"mesh": "3x3", "slow": ["link:0,0-0,1=0.25"], "fail": ["2,2"]},
        {"mesh": "2x4", "tile": "2x2", "fail": ["1,1"]},
        {"tile": "2x2", "mesh": "2x2"},
        {"mesh": "2x2", "tile": "1x1"},
        {"mesh": "2x3", "collective": "all-to-all", "fail": ["1,1"]},
        {"collective": "all-to-all", "algorithm": "pairs", "mesh": "1x1"},
    ],
)
def test_odd_meshes_are_answered(changes: dict[str, object]) -> None:
    question = question_of({**QUESTION, **changes})

    answers = [*first_answers(question), *searched_answers(question, None, no_progress)]

    assert {"plan", "row", "curve"} <= {answer["kind"] for answer in answers}


def test_an_algorithm_that_does_not_support_the_mesh_is_refused_and_the_rest_goes_on() -> None:
    question = question_of({**QUESTION, "algorithm": "two-d", "fail": ["0,0"]})

    answers = list(searched_answers(question, None, no_progress))

    assert answers[0]["kind"] == "refused"
    assert "two-d needs a full mesh" in answers[0]["why"]
    assert sum(answer["kind"] == "row" for answer in answers) > 4


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"mesh": None}, "needs the text `mesh`"),
        ({"mesh": "65x65"}, "draws at most 4096 chips"),
        ({"fail": "0,0"}, "`fail` as a list"),
        ({"algorithm": "magic"}, "there is no algorithm 'magic'"),
        ({"payload": "1 apple"}, "apple"),
        ({"slow": "link"}, "`slow` as a list"),
        ({"tile": "two"}, "--tile needs positive extents"),
        ({"tile": "2x2", "algorithm": "trees"}, "tiles have a plan of their own"),
        ({"collective": "all-gather"}, "shows allreduce and all-to-all"),
        ({"collective": "all-to-all", "algorithm": "trees"}, "there is no algorithm 'trees'"),
    ],
)
def test_questions_that_cannot_be_read_are_refused(changes: dict[str, object], why: str) -> None:
    with pytest.raises((InputError, TopologyError), match=why):
        question_of({**QUESTION, **changes})


def test_a_question_is_written_and_read_back() -> None:
    words = {"fail": ["board:0,0", "link:2,2-2,3"], "slow": ["link:3,2-3,3=0.5"], "tile": "1x2"}
    question = question_of({**QUESTION, **words})

    assert question_of(document_of(question)) == question


def test_the_flows_of_tiles_are_those_of_each_colour_and_reach_its_chips() -> None:
    made = plan(BROKEN, tile="2x2", payload="1MB")
    assert made.tiling is not None

    flows = flows_of(made)

    chips = np.ravel_multi_index(tuple(BROKEN.coordinates.T), BROKEN.shape)
    assert [flow.name for flow in flows] == [f"colour {each}" for each in range(4)]
    for colour, flow in enumerate(flows):
        its = set(chips[made.tiling.colour_of == colour].tolist())
        for part in flow.parts:
            senders = {channel // 4 for channel in part}
            assert len(its - senders) <= 1  # the root sends to nobody


def test_without_knowing_the_speeds_a_slow_link_costs_more() -> None:
    question = question_of({**QUESTION, "slow": ["link:0,0-0,1=0.25"]})

    (row,) = usual_rows(question)

    assert row["instead"] == "Without knowing the speeds"
    assert row["time_s"] > 1.5 * first_plan(question).time_s


def test_the_map_of_an_all_to_all_has_every_chip_and_every_link() -> None:
    question = question_of({**QUESTION, "mesh": "3x3", "collective": "all-to-all"})

    answers = list(heat_answers(question, no_progress))

    assert len(answers) == 9 + 12
    assert all(each["time_s"] >= 0.5 * each["full_s"] for each in answers)


def test_a_hole_that_leaves_no_tile_is_not_on_the_map() -> None:
    question = question_of({**QUESTION, "mesh": "2x2", "tile": "2x2"})

    assert {each["unit"] for each in heat_answers(question, no_progress)} == {"link"}


@pytest.mark.parametrize(
    ("path", "host", "origin", "is_refused"),
    [
        ("/right/", "127.0.0.1:80", None, False),
        ("/right/start", "localhost:80", "http://localhost:80", False),
        ("/wrong/", "127.0.0.1:80", None, True),
        ("/", "127.0.0.1:80", None, True),
        ("/rightly/", "127.0.0.1:80", None, True),
        ("/right/", "evil.example:80", None, True),
        ("/right/", "127.0.0.1:81", None, True),
        ("/right/", "127.0.0.1:80", "http://evil.example", True),
        ("/right/", "127.0.0.1:80", "null", True),
    ],
)
def test_only_the_own_page_with_the_token_is_let_in(
    path: str, host: str, origin: str | None, is_refused: bool
) -> None:
    assert bool(Access(80, "right").why_refused(path, host, origin)) == is_refused


@pytest.mark.parametrize(
    ("full_s", "time_s", "words", "reason"),
    [
        (1.0, 1.063, "+6.3 %", ""),
        (1.0, 0.937, "nothing", "fewer chips sum, which takes 6.3 % less here"),
        (1.0, 1.0, "nothing", "fewer chips sum, which takes as long here"),
        (1.0, 0.99999, "nothing", "fewer chips sum, which takes as long here"),
        (0.0, 0.0, "nothing", "fewer chips sum, which takes as long here"),
    ],
)
def test_a_hole_never_costs_less_than_nothing(
    full_s: float, time_s: float, words: str, reason: str
) -> None:
    assert hole_words(full_s, time_s) == (words, reason)
