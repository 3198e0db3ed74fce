"""Testbeds for real: namespaces, links and routes of the kernel."""

import functools
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from meshmend.errors import TestbedError, TopologyError
from meshmend.lab.testbed import kernel, records, transfer
from meshmend.lab.testbed.bed import Testbed
from meshmend.lab.testbed.measure import link_rate
from meshmend.topology.failures import Chip, Link
from meshmend.topology.mesh import Mesh
from meshmend.topology.routes import routes_for
from meshmend.topology.text import parse_mesh
from testbeds import (
    BANDWIDTH,
    PORT,
    can_connect,
    cannot_connect,
    exit_code,
    interfaces,
    namespaces,
    next_hops,
    on_chip,
    processes_in,
    require_testbed,
    servers,
)
from waiting import HANG_S, until


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of records that no other test sees."""
    require_testbed()
    monkeypatch.setenv("MESHMEND_TESTBED_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


@pytest.fixture
def bed() -> Iterator[Testbed]:
    """A 3x3 mesh with a hole in its middle."""
    mesh = parse_mesh("3x3", fail=["1,1"])
    with Testbed.up(mesh, link_bandwidth=BANDWIDTH) as made:
        yield made


def kernel_paths(bed: Testbed) -> dict[tuple[Chip, Chip], tuple[Chip, ...]]:
    """Return the way that the kernels' routes take between all live pairs."""
    mesh = bed.mesh
    chip_at = {bed.address(chip): chip for chip in mesh.live}
    hops = {chip: next_hops(bed, chip) for chip in mesh.live}
    paths = {}
    for source, goal in itertools.permutations(mesh.live, 2):
        path = [source]
        while path[-1] != goal:
            path.append(chip_at[hops[path[-1]][bed.address(goal)]])
        paths[source, goal] = tuple(path)
    return paths


def expected_paths(mesh: Mesh) -> dict[tuple[Chip, Chip], tuple[Chip, ...]]:
    pairs = list(itertools.permutations(range(mesh.n_live), 2))
    src, dst = np.array(pairs).T
    # As many virtual channels as it takes for all routes to be shortest, as a kernel's are.
    routes = routes_for(mesh, src, dst, max_virtual_channels=8)
    return {(mesh.live[a], mesh.live[b]): routes.path(mesh, a, b) for a, b in pairs}


def test_all_live_pairs_connect_around_a_hole_over_kernel_routes(bed: Testbed) -> None:
    live = bed.mesh.live

    def connect(chip: Chip) -> None:
        for other in set(live) - {chip}:
            with socket.create_connection((bed.address(other), PORT), HANG_S) as connection:
                assert connection.getsockname()[0] == bed.address(chip)

    with servers(bed, live):
        children = [on_chip(bed, chip, functools.partial(connect, chip)) for chip in live]

        assert [exit_code(child) for child in children] == [0] * len(live)


@pytest.mark.parametrize(
    ("mesh", "wrap", "fail"),
    [("2x2", "none", []), ("3x3", "none", ["1,1"]), ("3x3", "all", ["link:0,0-0,1"])],
)
def test_kernel_routes_take_the_paths_of_the_routing_layer(
    mesh: str, wrap: str, fail: list[str]
) -> None:
    broken = parse_mesh(mesh, wrap=wrap, fail=fail)

    with Testbed.up(broken, link_bandwidth=BANDWIDTH) as bed:
        assert kernel_paths(bed) == expected_paths(broken)


def test_packets_cross_as_many_chips_as_the_path_has(bed: Testbed) -> None:
    source, goal = (1, 0), (1, 2)  # two steps apart, four around the hole
    hops = len(expected_paths(bed.mesh)[source, goal]) - 1

    assert hops == 4
    assert can_connect(bed, source, goal, ttl=hops)
    assert cannot_connect(bed, source, goal, ttl=hops - 1)


def test_a_chip_that_fails_live_is_routed_around_and_comes_back(bed: Testbed) -> None:
    broken = bed.fail("0,1")

    assert bed.mesh == broken == parse_mesh("3x3", fail=["1,1", "0,1"])
    assert kernel_paths(bed) == expected_paths(broken)
    assert can_connect(bed, (0, 0), (0, 2))
    assert cannot_connect(bed, (0, 0), (0, 1))

    whole = bed.repair("0,1", "1,1")

    assert whole == parse_mesh("3x3")
    assert kernel_paths(bed) == expected_paths(whole)
    assert can_connect(bed, (0, 0), (0, 1))


def test_a_link_that_fails_live_is_routed_around_and_comes_back(bed: Testbed) -> None:
    broken = bed.fail("link:0,0-0,1")

    assert kernel_paths(bed) == expected_paths(broken)
    assert can_connect(bed, (0, 0), (0, 1), ttl=7)
    assert cannot_connect(bed, (0, 0), (0, 1), ttl=6)

    bed.repair("link:0,0-0,1")

    assert can_connect(bed, (0, 0), (0, 1), ttl=1)


def test_a_link_that_drops_one_way_carries_no_connection_until_it_passes_again(
    bed: Testbed,
) -> None:
    bed.drop((0, 0), (0, 1))

    assert cannot_connect(bed, (0, 0), (0, 1))
    assert cannot_connect(bed, (0, 1), (0, 0))  # the answers are dropped
    assert can_connect(bed, (1, 0), (0, 0))
    assert bed.mesh == parse_mesh("3x3", fail=["1,1"])  # nobody is told

    bed.pass_again((0, 0), (0, 1))

    assert can_connect(bed, (0, 0), (0, 1))
    with pytest.raises(TopologyError, match=r"has no link from \(0, 0\) to \(2, 2\)"):
        bed.drop((0, 0), (2, 2))


_SEND = """
import socket, sys
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(400):
    try:
        sender.sendto(b"datagram", (sys.argv[1], 9))
    except ConnectionRefusedError:  # the answer to an earlier one
        pass
"""


def n_arrived(bed: Testbed, goal: Chip) -> int:
    """Return how many datagrams have come to a chip, on which nobody waits for them."""
    text = bed.run(goal, ["cat", "/proc/net/snmp"], capture_output=True, text=True).stdout
    names, numbers = (line.split() for line in text.splitlines() if line.startswith("Udp:"))
    return int(dict(zip(names, numbers, strict=True))["NoPorts"])


@pytest.mark.parametrize(("part", "least", "most"), [(0.0, 400, 400), (0.5, 100, 300)])
def test_a_link_loses_the_part_of_its_packets_that_was_asked_for(
    bed: Testbed, part: float, least: int, most: int
) -> None:
    for source, goal in (((0, 0), (0, 1)), ((0, 1), (0, 0))):
        assert can_connect(bed, source, goal)  # so each knows the other's Ethernet address
        before = n_arrived(bed, goal)
        bed.lose("link:0,0-0,1", 0.9)  # which the next one takes back
        bed.lose("link:0,0-0,1", part)
        bed.run(source, [sys.executable, "-c", _SEND, bed.address(goal)], check=True)
        bed.lose("link:0,0-0,1", 0.0)
        assert can_connect(bed, source, goal)  # so what was sent before has come or is lost

        assert least <= n_arrived(bed, goal) - before <= most


def test_a_flow_across_a_failed_chip_lives_on(bed: Testbed) -> None:
    size_bytes = 600_000  # about half a second
    script = [sys.executable, "-I", "-S", str(transfer.__file__)]
    address = bed.address((0, 2))
    with subprocess.Popen(
        bed.command((0, 2), [*script, "receive", address]), stdout=subprocess.PIPE, text=True
    ) as receiver:
        assert receiver.stdout is not None
        port = receiver.stdout.readline().strip()
        send = [*script, "send", address, port, str(size_bytes)]
        with subprocess.Popen(bed.command((0, 0), send)) as sender:
            until(lambda: received_bytes(bed, (0, 1)) > (1 << 17))
            bed.fail("0,1")
            assert sender.wait(HANG_S) == 0
        received, _ = receiver.communicate(timeout=HANG_S)[0].split()

    assert size_bytes - (1 << 16) <= int(received) < size_bytes  # the first piece is not counted


def received_bytes(bed: Testbed, chip: Chip) -> int:
    """Return the bytes that a chip has received over all its links."""
    shown = bed.run(chip, ["ip", "-json", "-stats", "link"], capture_output=True, check=True)
    return sum(link["stats64"]["rx"]["bytes"] for link in json.loads(shown.stdout))


def test_a_live_change_leaves_the_very_routes_of_a_fresh_start(bed: Testbed) -> None:
    bed.fail("link:0,1-0,2")
    bed.fail("2,0")
    with Testbed.up(bed.mesh, link_bandwidth=BANDWIDTH) as fresh:
        for chip in Mesh(bed.shape).live:
            assert routes_text(bed, chip) == routes_text(fresh, chip)


def routes_text(bed: Testbed, chip: Chip) -> list[str]:
    shown = bed.run(chip, ["ip", "-details", "route"], capture_output=True, text=True, check=True)
    return sorted(shown.stdout.splitlines())


def test_a_change_that_the_kernel_refuses_is_quoted(bed: Testbed) -> None:
    with pytest.raises(TestbedError, match=r"route del 10\.0\.0\.99/32: No such process"):
        kernel.run_change(bed.holder, {0: "route del 10.0.0.99/32\n"}, is_user=bed.is_user)


def test_a_change_that_died_half_way_is_made_good_by_the_next(bed: Testbed) -> None:
    before = bed.record
    kernel.run_batches(
        bed.holder,
        "ip",
        {0: "route flush table main\nlink set dev up1 down\n"},
        is_user=bed.is_user,
    )
    records.save(before.with_mesh(bed.mesh, settled=False))

    bed.repair("link:0,0-0,1")

    assert bed.record.settled
    assert kernel_paths(bed) == expected_paths(bed.mesh)


def test_a_link_carries_the_rate_that_was_asked_for(bed: Testbed) -> None:
    # A busy machine may hold up either end, but not every time.
    until(lambda: 0.8 < link_rate(bed, Link((0, 0), (0, 1))).ratio < 1.05)


def test_a_link_made_slow_carries_so_much_less_until_it_is_made_fast_again(bed: Testbed) -> None:
    slow, link = "link:0,0-0,1=0.25", Link((0, 0), (0, 1))

    assert str(bed.slow(slow)) == f"3x3 less 1,1 slow {slow}"
    until(lambda: 0.8 < link_rate(bed, link).ratio < 1.05)
    assert link_rate(bed, link).asked_bytes_per_s == BANDWIDTH / 4
    bed.fail("2,2")
    assert bed.mesh.speed_of(link) == 0.25  # a failure elsewhere changes no speed
    bed.slow("link:0,0-0,1=1")
    assert not bed.mesh.slow
    until(lambda: 0.8 < link_rate(bed, link).ratio < 1.05)


def test_down_leaves_no_process_no_record_and_no_interface(run_dir: Path) -> None:
    before = interfaces()
    with Testbed.up(Mesh((2, 2)), link_bandwidth=BANDWIDTH) as bed:
        inodes = namespaces(bed)
        sleeper = subprocess.Popen(bed.command((0, 0), ["sleep", "600"]))
        until(lambda: processes_in(inodes - namespaces_of_holder(bed)) == [sleeper.pid])
        assert interfaces() == before

    assert sleeper.wait(timeout=HANG_S) == -signal.SIGKILL
    assert processes_in(inodes) == []
    assert records.start_time(bed.holder) is None
    assert not run_dir.exists()
    assert interfaces() == before
    bed.down()  # once more does no harm
    with pytest.raises(TestbedError, match="there is no testbed 'bed1'"):
        _ = bed.mesh


def namespaces_of_holder(bed: Testbed) -> set[int]:
    """The holder sits in the namespace that it made last."""
    return {Path(f"/proc/{bed.holder}/ns/net").stat().st_ino}


OWNER = """
import subprocess, sys, time
from meshmend.lab.testbed.bed import Testbed
from meshmend.topology.mesh import Mesh
bed = Testbed.up(Mesh((1, 2)), link_bandwidth=1e6, name="orphan")
sleeper = subprocess.Popen(bed.command((0, 0), ["sleep", "600"]))
print(bed.holder, sleeper.pid, flush=True)
time.sleep(600)
"""


def test_killing_the_owner_leaves_nothing(run_dir: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        holder, sleeper = map(int, owner.stdout.readline().split())
        inodes = namespaces(Testbed.attach("orphan"))
        owner.kill()

    until(lambda: records.start_time(holder) is None)
    until(lambda: records.start_time(sleeper) is None)
    assert processes_in(inodes) == []
    assert not run_dir.exists()


def test_the_record_of_a_killed_holder_is_swept_by_the_next_testbed(run_dir: Path) -> None:
    first = Testbed.up(Mesh((1, 2)), link_bandwidth=BANDWIDTH, name="same", persistent=True)
    os.kill(first.holder, signal.SIGKILL)
    until(lambda: records.start_time(first.holder) is None)
    assert records.live_records() == ()
    assert (run_dir / "same.json").exists()

    with Testbed.up(Mesh((1, 2)), link_bandwidth=BANDWIDTH, name="same") as second:
        with pytest.raises(TestbedError, match="'same' was taken down; another has its name"):
            _ = first.mesh
        first.down()  # which must not touch the second
        assert second.mesh == Mesh((1, 2))
    assert not run_dir.exists()


def test_two_testbeds_with_the_same_addresses_do_not_meet() -> None:
    mesh = Mesh((1, 2))
    with (
        Testbed.up(mesh, link_bandwidth=BANDWIDTH) as one,
        Testbed.up(mesh, link_bandwidth=BANDWIDTH) as other,
    ):
        assert (one.name, other.name) == ("bed1", "bed2")
        assert one.address((0, 1)) == other.address((0, 1))
        one.fail("link:0,0-0,1")

        assert cannot_connect(one, (0, 0), (0, 1))
        assert can_connect(other, (0, 0), (0, 1))
        assert not namespaces(one) & namespaces(other)
        with pytest.raises(TestbedError, match="but there is bed1, bed2; name one of them"):
            Testbed.attach()
        with pytest.raises(TestbedError, match="'bed2' is up already; choose another"):
            Testbed.up(mesh, link_bandwidth=BANDWIDTH, name="bed2")


def test_a_forked_child_that_leaves_the_block_does_not_take_the_network_down() -> None:
    with Testbed.up(Mesh((1, 2)), link_bandwidth=BANDWIDTH) as bed:

        def leave() -> None:
            bed.__exit__(None, None, None)

        assert exit_code(on_chip(bed, (0, 0), leave)) == 0
        assert can_connect(bed, (0, 0), (0, 1))


@pytest.mark.parametrize(
    ("mesh", "bandwidth", "name", "message"),
    [
        ("17x16", BANDWIDTH, None, "at most 256 chips, but got 17x16"),
        ("1x2", 1.0, None, "links of 10 KB/s to 100 GB/s, but got 1 B/s"),
        ("1x2", BANDWIDTH, "../up", "1 to 64 letters, digits, dots, dashes, but got '../up'"),
    ],
)
def test_a_testbed_that_cannot_be_is_refused(
    mesh: str, bandwidth: float, name: str | None, message: str, run_dir: Path
) -> None:
    with pytest.raises(TestbedError, match=message):
        Testbed.up(parse_mesh(mesh), link_bandwidth=bandwidth, name=name)
    assert not run_dir.exists()


def test_what_is_not_there_is_refused(bed: Testbed) -> None:
    with pytest.raises(TopologyError, match=r"it has no chip \(3, 0\)"):
        bed.address((3, 0))
    with pytest.raises(TopologyError, match="needs to lie inside the mesh 3x3"):
        bed.fail("2x2@2,2")
    with pytest.raises(TopologyError, match="needs at least one live chip"):
        bed.fail("3x3@0,0")
    for link, part in (("link:0,0-0,1", 1.5), ("0,0", 0.5)):
        with pytest.raises(TopologyError, match=rf"a part from 0 to 1 .*, but got {part} of "):
            bed.lose(link, part)
    with pytest.raises(TopologyError, match=r"has no link from \(0, 0\) to \(2, 2\)"):
        bed.lose("link:0,0-2,2", 0.5)
    with pytest.raises(TestbedError, match=r"a link that is up .*, but got link:0,1-1,1"):
        link_rate(bed, Link((0, 1), (1, 1)))
    assert bed.mesh == parse_mesh("3x3", fail=["1,1"])


def test_a_missing_command_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_PATH", "/nowhere")

    with pytest.raises(TestbedError, match=r"command ip, .* apt-get install iproute2"):
        Testbed.up(Mesh((1, 2)), link_bandwidth=BANDWIDTH)


def test_a_kernel_that_refuses_a_command_is_quoted_and_nothing_is_left(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshmend.lab.testbed import network

    monkeypatch.setattr(network, "_SHAPER", "burst 10kb limit 1mb nonsense")

    with pytest.raises(
        TestbedError, match=r"veth, bridge and tbf, but 'tc qdisc replace .*nonsense"
    ):
        Testbed.up(Mesh((1, 2)), link_bandwidth=BANDWIDTH)
    assert not run_dir.exists()


def test_a_folder_that_others_may_write_is_refused(run_dir: Path) -> None:
    run_dir.mkdir()
    run_dir.chmod(0o777)

    with pytest.raises(TestbedError, match="to be writable by you alone"):
        Testbed.up(Mesh((1, 2)), link_bandwidth=BANDWIDTH)
