"""Laws that `auto` keeps on random meshes, payloads and fabrics."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend.planning.choose import choose
from meshmend.planning.comparison import compared
from meshmend.planning.least_times import REGIONS, least_regions_s, least_time
from meshmend.planning.plan import plan
from meshmend.planning.pricing import names_to_try, price, supported_names
from meshmend.planning.target import Question
from meshmend.schedule.table import Collective
from meshmend.simulator.limit import limit
from meshmend.topology.fabric import Fabric, fabric
from meshmend.topology.failures import Chip, Link, SlowLink
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from strategies import connected_meshes

REFERENCE = fabric("reference")
FABRICS = (
    REFERENCE,
    fabric("tpu-v5e"),
    REFERENCE.with_(message_overhead_s=0.0),
    REFERENCE.with_(hop_latency_s=0.0),
    Fabric("slow start", 1e9, 1e-4, 1e-5),
    Fabric("slow chips", 1e11, 1e-6, 1e-7, 5e10),
)
PAYLOADS = st.floats(0, 7.5).map(lambda exponent: round(10**exponent))
CASES = (connected_meshes(), PAYLOADS, st.sampled_from(FABRICS), st.sampled_from(list(Collective)))
MOST_BEHIND = 1.01


@settings(max_examples=12, deadline=None)
@given(*CASES)
def test_auto_is_never_slower_than_any_name_and_the_same_whatever_else_is_listed(
    mesh: Mesh, payload_bytes: int, machine: Fabric, collective: Collective
) -> None:
    """Of the names that it tries: it leaves out those that were nowhere faster, by their kind."""
    question = mesh, machine, payload_bytes
    (alone,) = compared(*question, ["auto"], collective=collective).prices
    names = [*names_to_try(mesh, collective), "auto"]
    beside = compared(*question, names, collective=collective).prices

    assert [each.time_s for each in beside if each.name == "auto"] == [alone.time_s]
    assert alone.time_s <= MOST_BEHIND * beside[0].time_s, beside[0].name


def test_direct_sends_are_tried_on_any_number_of_chips_that_no_bound_rules_out() -> None:
    """Of 75 chips, where a hop takes as long as twenty messages: 4 % sooner than the exchange."""
    found = compared(Mesh((3, 5, 5)), fabric("tpu-v5e"), 1, ["auto", "exchange", "direct"])

    assert choose(Question(Mesh((3, 5, 5)), 1, fabric("tpu-v5e"))).algorithm == "direct"
    assert {each.name for each in found.prices[:2]} == {"auto", "direct"}


def test_a_payload_gets_its_own_slices() -> None:
    """It does not take those of its class, which are made for another payload."""
    mesh, machine = Mesh((5, 5), (True, True)), REFERENCE.with_(message_overhead_s=0.0)

    prices = compared(mesh, machine, 1e6, ["rings-nd", "auto"]).prices

    assert [each.time_s for each in prices] == pytest.approx([8.238e-6, 8.238e-6], rel=1e-3)
    assert choose(Question(mesh, 1e6, machine)).slices == prices[0].figures.slices


@settings(max_examples=30, deadline=None)
@given(
    connected_meshes(), PAYLOADS, st.sampled_from(FABRICS[:2]), st.sampled_from(list(Collective))
)
def test_a_plan_takes_as_long_as_the_simulation_of_auto_says(
    mesh: Mesh, payload_bytes: int, machine: Fabric, collective: Collective
) -> None:
    (auto,) = compared(mesh, machine, payload_bytes, ["auto"], collective=collective).prices

    planned = plan(mesh, payload=payload_bytes, fabric=machine, collective=collective)

    assert planned.predicted().time_s == pytest.approx(auto.time_s, rel=1e-9)


def images(mesh: Mesh) -> list[Mesh]:
    """Return the mirror image of a mesh along each axis, and the mesh with its axes reversed."""

    def moved(to: Callable[[Chip], Chip], image: Mesh) -> Mesh:
        def link(each: Link) -> Link:
            return Link.between(to(each.first), to(each.second))

        return replace(
            image,
            failed=frozenset(map(to, mesh.failed)),
            failed_links=frozenset(map(link, mesh.failed_links)),
            slow=frozenset(SlowLink(link(each.link), each.speed) for each in mesh.slow),
        )

    def mirrored(axis: int) -> Callable[[Chip], Chip]:
        last = mesh.shape[axis] - 1
        return lambda chip: (*chip[:axis], last - chip[axis], *chip[axis + 1 :])

    whole = Mesh(mesh.shape, mesh.wrap)
    turned = Mesh(mesh.shape[::-1], mesh.wrap[::-1])
    mirrors = [moved(mirrored(axis), whole) for axis in range(len(mesh.shape))]
    return [*mirrors, moved(lambda chip: chip[::-1], turned)]


@settings(max_examples=40, deadline=None)
@given(connected_meshes(), PAYLOADS, st.sampled_from(FABRICS), st.sampled_from(list(Collective)))
def test_images_of_a_mesh_have_one_limit(
    mesh: Mesh, payload_bytes: int, machine: Fabric, collective: Collective
) -> None:
    least_s = limit(mesh, machine, payload_bytes, collective).time_s

    for image in images(mesh):
        assert limit(image, machine, payload_bytes, collective).time_s == pytest.approx(least_s)


def check_images_take_equally_long(
    mesh: Mesh, payload_bytes: float, machine: Fabric, collective: Collective
) -> None:
    (one,) = compared(mesh, machine, payload_bytes, ["auto"], collective=collective).prices

    for image in images(mesh):
        (other,) = compared(image, machine, payload_bytes, ["auto"], collective=collective).prices
        made = plan(image, payload=payload_bytes, fabric=machine, collective=collective)
        assert other.time_s == pytest.approx(one.time_s, rel=1e-9)
        assert made.predicted().time_s == pytest.approx(one.time_s, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(*CASES)
def test_images_of_a_mesh_take_equally_long(
    mesh: Mesh, payload_bytes: int, machine: Fabric, collective: Collective
) -> None:
    check_images_take_equally_long(mesh, payload_bytes, machine, collective)


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(*CASES)
def test_images_of_a_mesh_take_equally_long_in_many_cases(
    mesh: Mesh, payload_bytes: int, machine: Fabric, collective: Collective
) -> None:
    check_images_take_equally_long(mesh, payload_bytes, machine, collective)


@pytest.mark.parametrize(
    ("mesh", "payload_bytes"),
    [
        (parse_mesh("8x8", fail=["4x2@2,4"]), 1e6),
        (parse_mesh("9x6", wrap="1", fail=["1,4", "link:3,2-3,3"]), 1e5),
        (parse_mesh("6x5", slow=["link:0,0-0,1=0.25"]), 1e7),
    ],
    ids=str,
)
def test_images_of_a_larger_mesh_take_equally_long(mesh: Mesh, payload_bytes: float) -> None:
    check_images_take_equally_long(mesh, payload_bytes, REFERENCE, Collective.ALLREDUCE)


BETTER = {
    "link_bandwidth_bytes_per_s": 1.3,
    "hop_latency_s": 0.7,
    "message_overhead_s": 0.7,
}


@settings(max_examples=40, deadline=None)
@given(
    connected_meshes(),
    PAYLOADS,
    st.sampled_from(FABRICS),
    st.sampled_from(list(Collective)),
    st.sampled_from(sorted(BETTER)),
)
def test_neither_a_better_fabric_nor_fewer_bytes_raise_the_limit(
    mesh: Mesh, payload_bytes: int, machine: Fabric, collective: Collective, figure: str
) -> None:
    better = machine.with_(**{figure: BETTER[figure] * getattr(machine, figure)})
    most_s = (1 + 1e-9) * limit(mesh, machine, payload_bytes, collective).time_s

    assert limit(mesh, better, payload_bytes, collective).time_s <= most_s
    assert limit(mesh, machine, 0.9 * payload_bytes, collective).time_s <= most_s


def test_the_limit_of_a_machine_without_latency_is_no_single_overhead() -> None:
    """With messages of one overhead, what a chip of four links knows grows fivefold at most."""
    machine = Fabric("no latency", 1e12, 0.0, 1e-6)

    bound = limit(Mesh((16, 16), (True, True)), machine, 1)

    assert bound.kind == "messages"
    assert bound.time_s == pytest.approx(4e-6)


@settings(max_examples=60, deadline=None)
@given(connected_meshes(), PAYLOADS, st.sampled_from(FABRICS), st.sampled_from(list(Collective)))
def test_no_algorithm_beats_the_time_that_rules_it_out(
    mesh: Mesh, payload_bytes: int, machine: Fabric, collective: Collective
) -> None:
    question = Question(mesh, payload_bytes, machine, collective)

    for name in supported_names(mesh, collective):
        if name not in {"trees", "two-roots"}:  # their times are hopes, not bounds
            least_s = least_time(question, name)
            if name in REGIONS:
                least_s = least_regions_s(question, name)
            priced = price(question, name)
            assert priced.time_s >= (1 - 1e-9) * least_s, name


def check_a_faster_fabric_is_not_slower(
    mesh: Mesh, payload_bytes: float, machine: Fabric, figure: str
) -> None:
    better = machine.with_(**{figure: BETTER[figure] * getattr(machine, figure)})
    (before,) = compared(mesh, machine, payload_bytes, ["auto"]).prices
    (after,) = compared(mesh, better, payload_bytes, ["auto"]).prices

    assert after.time_s <= 1.01 * before.time_s


FASTER_CASES = (
    connected_meshes(),
    PAYLOADS,
    st.sampled_from(FABRICS),
    st.sampled_from(["link_bandwidth_bytes_per_s", "hop_latency_s"]),
)


@settings(max_examples=15, deadline=None)
@given(*FASTER_CASES)
def test_neither_faster_links_nor_shorter_hops_make_auto_slower(
    mesh: Mesh, payload_bytes: int, machine: Fabric, figure: str
) -> None:
    check_a_faster_fabric_is_not_slower(mesh, payload_bytes, machine, figure)


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(*FASTER_CASES)
def test_neither_faster_links_nor_shorter_hops_make_auto_slower_in_many_cases(
    mesh: Mesh, payload_bytes: int, machine: Fabric, figure: str
) -> None:
    check_a_faster_fabric_is_not_slower(mesh, payload_bytes, machine, figure)
