"""An all-to-all: every block arrives once, at its place, straight or over a third chip."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend import Mesh, plan
from meshmend.errors import InputError, UnsupportedError, VerificationError
from meshmend.planning.comparison import compared
from meshmend.planning.proof import prove
from meshmend.schedule.algorithms import ALGORITHMS, algorithm
from meshmend.schedule.all_to_all import straight_blocks
from meshmend.schedule.contributions import check_contributions
from meshmend.schedule.placement import channel_loads, placed
from meshmend.schedule.table import Collective, Schedule
from meshmend.topology.fabric import FABRICS
from meshmend.topology.pair_cut import pair_cut
from meshmend.transport import reference
from strategies import connected_meshes

ALL_TO_ALL = Collective.ALL_TO_ALL
NAMES = [name for name in ALGORITHMS if ALL_TO_ALL in algorithm(name).collectives]
HOLE = Mesh((4, 4)).without("2x2@0,0")


def transposed(schedule: Schedule, elements_each: int) -> bool:
    """Whether block b of rank a ends as block a of rank b, for all ranks."""
    n = schedule.n_ranks
    blocks = np.arange(n * n * elements_each).reshape(n, n, elements_each)
    made = reference.run(schedule, [payload.reshape(-1) for payload in blocks])
    return np.array_equal(np.stack(made).reshape(blocks.shape), blocks.transpose(1, 0, 2))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(mesh=connected_meshes())
def test_every_block_arrives_at_its_place_on_any_mesh(name: str, mesh: Mesh) -> None:
    schedule = algorithm(name).build(mesh, ALL_TO_ALL)

    prove(mesh, schedule)
    assert transposed(schedule, 4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("exact", [True, False])
def test_a_row_that_is_missing_or_misled_is_found(name: str, exact: bool) -> None:
    right = algorithm(name).build(Mesh((2, 3)), ALL_TO_ALL)
    columns = ("src", "dst", "lo", "hi", "op", "src_buffer", "dst_buffer")
    check_contributions(right, exact=exact)
    for row in range(0, right.n_rows, 7):
        keep = np.arange(right.n_rows) != row
        rest = {each: getattr(right, each)[keep] for each in columns}
        with pytest.raises(VerificationError):
            check_contributions(replace(right, **rest, phases=()), exact=exact)
    sends = np.flatnonzero(~right.is_local)
    for row in sends[::7]:
        dst = right.dst.copy()
        dst[row] = next(r for r in range(6) if r not in (right.src[row], right.dst[row]))
        with pytest.raises(VerificationError, match=r"misses the data of|do not belong there"):
            check_contributions(replace(right, dst=dst), exact=exact)


def test_blocks_of_different_sizes_are_no_schedule() -> None:
    """Counting whose data a place holds does not see where the payload is cut."""
    right = algorithm("relays").build(Mesh((2, 2)), ALL_TO_ALL)
    cuts = right.cuts.copy()
    cuts[right.n_chunks // 4] *= 0.9

    with pytest.raises(InputError, match="over 4 ranks needs equal blocks"):
        replace(right, cuts=cuts)


def test_two_chips_by_hand() -> None:
    """Each chip keeps its own block and gets the other's in its place."""
    a, b = plan(Mesh((1, 2)), "pairs", collective="all-to-all").run(
        [np.array([1, 2]), np.array([3, 4])]
    )

    assert (a.tolist(), b.tolist()) == ([1, 3], [2, 4])


@pytest.mark.parametrize(
    ("mesh", "most"),
    [
        (HOLE, 1.01),
        (Mesh((6, 6)).without("2x2@2,2"), 1.03),
        (Mesh((6, 6), wrap=(True, True)), 1.05),
        (Mesh((5, 5), wrap=(True, False)).without("1,1", "3,3"), 1.04),
        (Mesh((3, 3, 3)).without("1,1,1"), 1.07),
        (Mesh((4, 4)).slowed("link:0,0-0,1=0.25"), 1.07),
    ],
    ids=str,
)
def test_relays_even_out_the_links(mesh: Mesh, most: float) -> None:
    """The busiest link carries little more than the least that any all-to-all puts on it."""
    schedule = algorithm("relays").build(mesh, ALL_TO_ALL)
    blocks = channel_loads(schedule, placed(mesh, schedule).routes) * mesh.n_live

    times = blocks / mesh.port_speeds.reshape(-1)
    assert 1 - 1e-9 <= times.max() / pair_cut(mesh).blocks <= most


def test_auto_sends_straight_where_that_is_best_and_over_relays_around_a_hole() -> None:
    full = plan(Mesh((4, 4)), collective="all-to-all", payload="16MB")
    around = plan(HOLE, collective="all-to-all", payload="12MB")

    assert full.schedule.algorithm == "pairs"
    assert around.schedule.algorithm == "relays"
    for each in (full, around):
        assert 1 <= each.predicted().time_s / each.limit().time_s <= 1.06


@settings(max_examples=20, deadline=None)
@given(connected_meshes(), st.sampled_from([0.0, 1e2, 1e5, 1e8]))
def test_no_price_is_below_the_limit(mesh: Mesh, payload_bytes: float) -> None:
    made = plan(mesh, collective="all-to-all", payload=payload_bytes)

    assert made.predicted().time_s >= made.limit().time_s * (1 - 1e-9)


@pytest.mark.parametrize(
    ("name", "collective", "words"),
    [
        ("pairs", Collective.ALLREDUCE, "pairs is an all-to-all, but got the collective allreduce"),
        ("relays", Collective.ALL_GATHER, "relays is an all-to-all, but got the collective"),
        ("trees", ALL_TO_ALL, "trees is an allreduce, but got the collective all-to-all"),
        ("express", Collective.ALL_GATHER, "express is an allreduce, but got the collective"),
        ("two-roots", Collective.ALL_GATHER, "two-roots is an allreduce, but got the collective"),
        ("exchange", Collective.ALL_GATHER, "exchange is an allreduce, but got the collective"),
        ("direct", Collective.ALL_GATHER, "direct is an allreduce, but got the collective"),
    ],
)
def test_algorithms_refuse_collectives_that_they_do_not_have(
    name: str, collective: Collective, words: str
) -> None:
    with pytest.raises(UnsupportedError, match=words):
        algorithm(name).build(Mesh((4, 4)), collective)


@pytest.mark.parametrize("name", ["trees", "sub-mesh", "rings-nd"])
def test_no_price_of_a_sum_is_one_of_an_all_to_all(name: str) -> None:
    with pytest.raises(UnsupportedError, match="but got"):
        compared(HOLE, FABRICS["reference"], 1e6, [name], collective=ALL_TO_ALL)


def test_blocks_of_different_lengths_and_too_many_chips_are_refused() -> None:
    with pytest.raises(InputError, match=r"as many equal blocks, but got payloads of 3 el"):
        plan(Mesh((1, 2)), "pairs", collective="all-to-all").run([np.zeros(3), np.zeros(3)])
    with pytest.raises(UnsupportedError, match=r"relays needs at most 1024 chips, .* use 'pairs'"):
        algorithm("relays").build(Mesh((33, 32)), ALL_TO_ALL)


def test_more_pairs_than_a_table_holds_are_refused_before_memory_is_taken_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """128x128 took nine gigabytes, and more, and was refused afterwards."""
    monkeypatch.setattr("meshmend.schedule.all_to_all._all_pairs", lambda mesh: pytest.fail("made"))

    with pytest.raises(UnsupportedError, match=r"at most 134,217,728 rows, .* take a smaller mesh"):
        algorithm("pairs").build(Mesh((128, 128)), ALL_TO_ALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "most"),
    [(Mesh((24, 24)).without("2x2@8,8"), 1.05), (Mesh((32, 32)).without("2x2@14,14"), 1.05)],
    ids=str,
)
def test_many_chips_have_even_links_around_a_hole_too(mesh: Mesh, most: float) -> None:
    """Each block tries some relays only; straight ways put 2.8 times as much on some link."""
    made = plan(mesh, collective="all-to-all", payload=1e6 * mesh.n_live)
    blocks = channel_loads(made.schedule, made.placement.routes) * mesh.n_live

    assert made.schedule.algorithm == "relays"
    assert blocks.max() / pair_cut(mesh).blocks <= most
    assert straight_blocks(mesh) > 2 * pair_cut(mesh).blocks


def test_straight_ways_are_counted_as_the_schedule_puts_them_on_links() -> None:
    for mesh in (HOLE, Mesh((4, 4)).slowed("link:0,0-0,1=0.25"), Mesh((1, 1))):
        schedule = algorithm("pairs").build(mesh, ALL_TO_ALL)
        loads = channel_loads(schedule, placed(mesh, schedule).routes) * mesh.n_live
        busiest = (loads / mesh.port_speeds.reshape(-1)).max(initial=0.0)

        assert straight_blocks(mesh) == pytest.approx(busiest)
