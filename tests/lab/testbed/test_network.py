"""The commands that make a testbed: pure text, no namespace needed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend.lab.testbed.names import address_of, interface_of, number_of
from meshmend.lab.testbed.network import (
    change_commands,
    chip_commands,
    link_commands,
    link_states,
    rate_commands,
)
from meshmend.topology.failures import Block, Link
from meshmend.topology.graph import components
from meshmend.topology.mesh import Mesh
from meshmend.topology.routes import routes_for
from meshmend.topology.text import parse_mesh

Kernel = dict[int, tuple[dict[str, bool], dict[str, tuple[str, str]]]]


@st.composite
def whole_meshes(draw: st.DrawFn) -> Mesh:
    """A small mesh or torus."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    return Mesh(shape, tuple(draw(st.booleans()) for _ in shape))


@st.composite
def broken(draw: st.DrawFn, full: Mesh) -> Mesh:
    """The mesh with some failed chips and links."""
    chips = draw(st.sets(st.sampled_from(full.live), max_size=full.n_chips - 1))
    links = [Link.between(full.live[a], full.live[b]) for a, b in full.links.tolist()]
    cuts = draw(st.sets(st.sampled_from(links), max_size=4)) if links else set()
    return full.without(*(Block((1,) * len(chip), chip) for chip in chips), *cuts)


def apply(kernel: Kernel, commands: dict[int, str]) -> None:
    """Do what the kernel would do with these commands, and refuse what it would refuse."""
    for chip, batch in commands.items():
        up, routes = kernel[chip]
        for line in batch.splitlines():
            words = line.split()
            match words[:2]:
                case ["route", "flush"]:
                    routes.clear()
                case ["link", "set"]:
                    up[words[3]] = words[4] == "up"
                    if not up[words[3]]:
                        for goal in [g for g, (_, device) in routes.items() if device == words[3]]:
                            del routes[goal]
                case ["route", "replace"]:
                    assert up[words[6]]
                    routes[words[2]] = (words[4], words[6])
                case ["route", "del"]:
                    del routes[words[2]]
                case _:
                    raise AssertionError(line)


def fresh(mesh: Mesh) -> Kernel:
    kernel: Kernel = {chip: ({}, {}) for chip in range(mesh.n_chips)}
    apply(kernel, dict(change_commands(None, mesh)))
    return kernel


@settings(max_examples=40, deadline=None)
@given(whole_meshes().flatmap(broken))
def test_routes_follow_the_paths_of_the_routing_layer_within_each_part(mesh: Mesh) -> None:
    ports = link_states(mesh).ports

    full = Mesh(mesh.shape, mesh.wrap)
    for chips in components(mesh):
        part = Mesh(mesh.shape, mesh.wrap, frozenset(full.live) - set(chips), mesh.failed_links)
        if part.n_live == 1:
            continue
        source, goal = part.live[0], part.live[-1]
        expected = routes_for(part, np.array([0]), np.array([part.n_live - 1]))
        path, here = [source], number_of(mesh, source)
        while here != number_of(mesh, goal):
            here = int(full.neighbor_ranks[here, ports[here, number_of(mesh, goal)]])
            path.append(full.live[here])
        assert tuple(path) == expected.path(part, 0, part.n_live - 1)


@settings(max_examples=40, deadline=None)
@given(whole_meshes().flatmap(lambda full: st.tuples(broken(full), broken(full))))
def test_a_change_leads_to_the_same_kernel_state_as_a_fresh_start(
    change: tuple[Mesh, Mesh],
) -> None:
    before, after = change
    kernel = fresh(before)

    apply(kernel, dict(change_commands(before, after)))

    assert kernel == fresh(after)


def test_no_change_needs_no_commands() -> None:
    mesh = parse_mesh("3x3", fail=["1,1"])

    assert change_commands(mesh, mesh) == {}


@pytest.mark.parametrize("fail", [[], ["0,1"], ["2x2@0,2"]])
def test_speeds_change_no_route_which_a_later_failure_relies_on(fail: list[str]) -> None:
    mesh = parse_mesh("4x4", fail=fail)

    assert np.array_equal(
        link_states(mesh.slowed("link:2,1-2,2=0.1")).ports, link_states(mesh).ports
    )


def test_the_smallest_mesh_is_two_chips_and_a_link() -> None:
    mesh = parse_mesh("1x2")

    assert link_commands(mesh, "/ns/{}".format).splitlines() == [
        "link add name up1 mtu 9000 netns /ns/0 type veth peer name down1 mtu 9000 netns /ns/1"
    ]
    assert rate_commands(mesh, 1.25e6)[0].splitlines() == [
        "qdisc replace dev up1 root tbf rate 10000000bit burst 10kb limit 1mb"
    ]
    slow = mesh.slowed("link:0,0-0,1=0.25")
    for chip, port in ((0, "up1"), (1, "down1")):
        assert rate_commands(slow, 1.25e6)[chip].splitlines() == [
            f"qdisc replace dev {port} root tbf rate 2500000bit burst 10kb limit 1mb"
        ]
    assert "address add 10.0.0.2/32 dev chip" in chip_commands(1)
    assert change_commands(None, mesh)[1].splitlines() == [
        "route flush table main",
        "link set dev down1 up",
        "route replace 10.0.0.1/32 via 10.0.0.1 dev down1 onlink src 10.0.0.2",
    ]


def test_figure_1_goes_along_the_row_first_and_figure_2_steps_aside() -> None:
    full, holed = parse_mesh("4x4"), parse_mesh("4x4", fail=["1,1"])
    here, goal = number_of(full, (1, 0)), number_of(full, (2, 3))

    assert interface_of(link_states(full).ports[here, goal]) == "up1"
    assert interface_of(link_states(holed).ports[here, goal]) == "up0"


def test_cut_off_chips_reach_each_other_and_nobody_else() -> None:
    mesh = parse_mesh("1x5", fail=["0,2"])

    ports = link_states(mesh).ports

    assert ports.tolist() == [
        [-1, 3, -1, -1, -1],
        [2, -1, -1, -1, -1],
        [-1, -1, -1, -1, -1],
        [-1, -1, -1, -1, 3],
        [-1, -1, -1, 2, -1],
    ]


@pytest.mark.parametrize(
    ("number", "address"), [(0, "10.0.0.1"), (15, "10.0.0.16"), (255, "10.0.1.0")]
)
def test_addresses_count_up_from_the_first_chip(number: int, address: str) -> None:
    assert address_of(number) == address
