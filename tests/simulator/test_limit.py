"""The limit: each bound by hand, the largest wins, and simple algorithms never beat it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.errors import InputError, TopologyError
from meshmend.simulator.limit import limit
from meshmend.topology.fabric import Fabric, fabric
from meshmend.topology.text import parse_mesh

UNIT = Fabric("unit", link_bandwidth_bytes_per_s=1.0, hop_latency_s=1.0, message_overhead_s=0.0)


def test_a_large_payload_is_bound_by_bandwidth() -> None:
    bound = limit(parse_mesh("4x4"), fabric("reference"), 112e6)

    assert bound.kind == "bandwidth"
    assert bound.bandwidth_s == pytest.approx(1e-3)  # 112 MB / (1.6 x 70 GB/s)
    assert bound.time_s == pytest.approx(1e-3 + 550e-9)  # a message's overhead, and one hop
    assert bound.bandwidth_or_latency_s == bound.bandwidth_s
    assert bound.latency_s == pytest.approx(3e-6)  # 6 hops
    assert bound.chip_s is None
    assert bound.describe() == (
        "at least 1 ms for 112 MB on reference, by bandwidth: packing number 1.6, bound by "
        "all 24 links over 16 chips"
    )


def test_a_small_payload_is_bound_by_the_way_to_the_farthest_chip() -> None:
    bound = limit(parse_mesh("4x4"), fabric("reference"), 1400)

    assert bound.kind == "exit"
    # 1400 bytes over 2 links of 70 GB/s, one overhead, 6 hops.
    assert bound.time_s == pytest.approx(10e-9 + 50e-9 + 3e-6)
    assert bound.bandwidth_or_latency_s == pytest.approx(3e-6)
    assert bound.describe() == (
        "at least 3.06 us for 1.4 KB on reference, by exit: the payload leaves chip (0, 0) over 2 "
        "links, and some of it takes 6 hops"
    )


def test_what_must_reach_several_far_chips_leaves_earlier() -> None:
    """On a 3x3 torus each chip has four others two hops away, and four links."""
    bound = limit(parse_mesh("3x3", wrap="all"), UNIT.with_(message_overhead_s=0.5), 4)

    assert bound.kind == "exit"
    # Two hops, an overhead, and four payloads to four chips. What leaves in the last overhead, or
    # 0.5 of these 4, reaches one chip, and what leaves before it all four.
    assert bound.time_s == pytest.approx(2 + 0.5 + 0.5 + (4 - 0.5) / 4)
    assert bound.describe().endswith("and some of it takes 2 hops to each of 4 chips")


def test_without_bytes_so_many_messages_leave_that_all_can_hear() -> None:
    """On a 5x5 torus four chips are four hops away: a chip's four links may reach them at once.

    Twelve are three hops away, which takes two messages, one after another.
    """
    torus, slow = parse_mesh("5x5", wrap="all"), UNIT.with_(message_overhead_s=1.5)

    assert limit(torus, slow, 0).time_s == 3 + 2 * 1.5
    assert limit(torus, UNIT.with_(message_overhead_s=0.5), 0).time_s == 4 + 0.5


def test_a_narrow_way_between_two_halves_binds_with_the_hops_on_both_sides() -> None:
    """Two 2x2 blocks joined by one link: all of the payload crosses it, from corner to corner."""
    mesh = parse_mesh("2x4", fail=["link:0,1-0,2"])
    bound = limit(mesh, UNIT, 100)

    assert bound.kind == "exit"
    assert bound.time_s == 100 + 2 + 1 + 2
    assert "leaves the 4 chips around" in bound.describe()
    assert "over 1 link, and some of it takes 5 hops" in bound.describe()
    assert limit(mesh.slowed("link:1,1-1,2=0.5"), UNIT, 100).time_s == 2 * 100 + 2 + 1 + 2


def test_slow_chips_bind_by_their_additions() -> None:
    slow = UNIT.with_(chip_bandwidth_bytes_per_s=0.1)

    bound = limit(parse_mesh("2x2"), slow, 100)

    assert bound.kind == "chip"
    assert bound.chip_s == pytest.approx(100 * 3 / 4 / 0.1)
    assert bound.time_s == pytest.approx(750 + 1)  # the first message arrives after a hop
    assert "on unit*, by chip: the additions" in bound.describe()


def test_one_chip_needs_no_time() -> None:
    bound = limit(parse_mesh("1x1"), UNIT.with_(chip_bandwidth_bytes_per_s=1.0), 1e9)

    assert bound.time_s == 0
    assert "there is one chip" in bound.describe()


def test_two_chips_swap_their_payloads() -> None:
    assert limit(parse_mesh("2"), UNIT, 10).time_s == 10 + 1


def test_the_limit_of_the_design_page() -> None:
    bound = limit(parse_mesh("32x32", fail=["4x2@14,14"]), fabric("reference"), 100e6)

    assert bound.bandwidth_s == pytest.approx(739e-6, rel=1e-3)
    assert bound.time_s == pytest.approx(100e6 / (2 * 70e9) + 50e-9 + 62 * 0.5e-6)
    assert bound.latency_s == pytest.approx(31e-6)


@given(n_chips=st.integers(3, 30), payload=st.integers(0, 10**6))
def test_a_ring_algorithm_on_a_ring_is_never_below_the_limit(n_chips: int, payload: int) -> None:
    """The two-way ring takes (n - 1) / n of the payload, exactly the bandwidth bound."""
    bound = limit(parse_mesh(str(n_chips), wrap="all"), UNIT, payload)
    ring_s = 2 * (n_chips - 1) * (payload / 2 / n_chips)

    assert bound.bandwidth_s == pytest.approx(ring_s)
    assert bound.bandwidth_or_latency_s == max(bound.bandwidth_s, n_chips // 2)
    assert bound.time_s == max(bound.bandwidth_s + 1, payload / 2 + n_chips // 2)


@given(st.lists(st.integers(0, 10**9), min_size=2, max_size=2).map(sorted))
def test_more_bytes_never_have_a_lower_limit(payloads: list[int]) -> None:
    mesh = parse_mesh("4x4", fail=["2x2@0,2"])
    less, more = (limit(mesh, fabric("tpu-v3"), payload).time_s for payload in payloads)

    assert less <= more


@pytest.mark.parametrize("payload", [-1, float("nan"), float("inf")])
def test_an_impossible_payload_is_refused(payload: float) -> None:
    with pytest.raises(InputError, match="limit needs a payload of zero bytes or more, but got"):
        limit(parse_mesh("2x2"), UNIT, payload)


def test_a_mesh_in_pieces_has_no_limit() -> None:
    with pytest.raises(TopologyError, match="needs connected chips"):
        limit(parse_mesh("3x1", fail=["1,0"]), UNIT, 1)
