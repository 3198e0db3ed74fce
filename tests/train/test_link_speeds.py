"""Slow links are found from how long links are busy: soon, the same on all chips, and no others."""

from pathlib import Path

import numpy as np
import pytest

from elastic_job import elastic, of_kind
from meshmend.topology.failures import Link, SlowLink
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from meshmend.train.core.link_speeds import LOOKS, LinkSpeeds, Work

LINK = Link((0, 0), (0, 1))
STEP_US = 100_000
STEP_BYTES = 100_000  # over each link, each way
FULL = 2.5  # bytes in a microsecond


class Traffic:
    """What the kernels of all chips count, while links have some speeds and hosts are busy."""

    def __init__(self, mesh: Mesh, *, noise: float = 0.0, seed: int = 0) -> None:
        self._mesh, self.speeds, self._noise = mesh, mesh.port_speeds, noise
        self._work = np.zeros((*self.speeds.shape, 2))
        self._random = np.random.default_rng(seed)
        self.now_us = 0

    def probe(self, ways: list[tuple[int, int]], n_bytes: int, mesh: Mesh) -> None:
        for one, other in ways:
            (port,) = np.flatnonzero(mesh.neighbor_ranks[one] == other)
            self._work[one, port] += n_bytes, n_bytes / (FULL * mesh.port_speeds[one, port])

    def step(self, speeds: Mesh | None = None, unused: Link | None = None) -> None:
        part = (self.speeds if speeds is None else speeds.port_speeds) * FULL
        slower = 1 + self._noise * self._random.random(part.shape)
        used = np.ones(part.shape)
        if unused is not None:
            used[self._mesh.slowed(SlowLink(unused, 0.5)).port_speeds < 1] = 0
        self._work[..., 0] += STEP_BYTES * used
        self._work[..., 1] += STEP_BYTES / part * slower * used
        self.now_us += STEP_US

    def of(self, rank: int) -> list[Work]:
        return [(int(n), int(us)) for n, us in self._work[rank].tolist()]


def looked(
    chips: list[LinkSpeeds], traffic: Traffic, steps: int, speeds: Mesh | None = None
) -> list[tuple[int, tuple[SlowLink, ...]]]:
    """Train so many steps; return what all chips found, and when."""
    found = []
    for step in range(steps):
        traffic.step(speeds)
        due = [chip.is_due() for chip in chips]
        assert len(set(due)) == 1
        if due[0]:
            told = [chip.mine(traffic.of(rank), traffic.now_us) for rank, chip in enumerate(chips)]
            each = [chip.conclude(told) for chip in chips]
            assert len(set(each)) == 1
            if each[0]:
                found.append((step, each[0]))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_link_is_found_within_three_seconds_and_again_when_it_is_mended(seed: int) -> None:
    mesh = parse_mesh("3x3", wrap="all", fail=["2,2"])
    chips = [LinkSpeeds(mesh) for _ in mesh.live]
    traffic = Traffic(mesh, noise=0.3, seed=seed)

    assert looked(chips, traffic, 100) == []
    ((step, found),) = looked(chips, traffic, 60, mesh.slowed(SlowLink(LINK, 0.25)))
    assert [each.link for each in found] == [LINK]
    assert found[0].speed == pytest.approx(0.25, abs=0.1)
    assert step * STEP_US < 3e6
    assert chips[0].mesh.speed_of(LINK) == found[0].speed
    ((_, mended),) = looked(chips, traffic, 60)
    assert mended == (SlowLink(LINK, 1.0),)
    assert chips[0].mesh == mesh


def test_noise_on_all_links_and_short_pauses_of_one_raise_no_alarm() -> None:
    mesh = Mesh((4, 4))
    chips, traffic = [LinkSpeeds(mesh) for _ in mesh.live], Traffic(mesh, noise=0.5)
    everywhere = mesh.slowed(
        *(SlowLink(Link(mesh.live[a], mesh.live[b]), 0.3) for a, b in mesh.links.tolist())
    )

    assert looked(chips, traffic, 300) == []
    assert looked(chips, traffic, 100, everywhere) == []
    for _ in range(10):
        assert looked(chips, traffic, 2, mesh.slowed(SlowLink(LINK, 0.25))) == []
        assert looked(chips, traffic, 40) == []


def test_links_that_carry_little_or_are_mostly_idle_say_nothing() -> None:
    mesh = parse_mesh("2x2", slow=["link:0,0-0,1=0.5"])
    chip = LinkSpeeds(mesh)
    idle, few = (10**9, 1000), (100, 10**6)

    chip.mine([(0, 0)] * 4, 0)
    for _ in range(2 * LOOKS):
        assert chip.conclude([[10**6, *idle, *few, *idle, *few]] * 4) == ()


def test_looks_are_about_a_second_apart_whatever_a_step_takes() -> None:
    for step_us, apart in ((1_000, 500), (100_000, 5), (5_000_000, 1)):
        chip, due = LinkSpeeds(Mesh((2, 2))), []
        for step in range(3000):
            if chip.is_due():
                due.append(step)
                chip.conclude([chip.mine([(0, 0)] * 4, step * step_us)])
        assert due[-1] - due[-2] == apart


@pytest.mark.parametrize("speed", [0.25, 1.0])
def test_a_slow_link_that_no_plan_uses_is_probed_seldom_and_seen_to_be_fast_again(
    speed: float,
) -> None:
    mesh = Mesh((3, 3))
    known, real = mesh.slowed(SlowLink(LINK, 0.25)), mesh.slowed(SlowLink(LINK, speed))
    chips, traffic = [LinkSpeeds(known) for _ in mesh.live], Traffic(mesh)
    found: list[tuple[SlowLink, ...]] = []
    n_probes = n_looks = 0

    for _ in range(2000):
        traffic.step(unused=LINK)
        if {chip.is_due() for chip in chips} == {True}:
            n_looks += 1
            (probes,) = {(tuple(ways), n_bytes) for ways, n_bytes in (c.probes() for c in chips)}
            traffic.probe(list(probes[0]), probes[1], real)
            n_probes += bool(probes[0])
            told = [chip.mine(traffic.of(rank), traffic.now_us) for rank, chip in enumerate(chips)]
            found += {chip.conclude(told) for chip in chips}

    assert [each for each in found if each] == ([(SlowLink(LINK, 1.0),)] if speed == 1 else [])
    assert n_probes == (LOOKS if speed == 1 else 4 * LOOKS)
    assert n_looks > 390


def test_what_was_found_is_known_to_the_next_generation_and_only_what_the_mesh_has() -> None:
    mesh = parse_mesh("3x3", wrap="all", slow=["link:1,0-1,1=0.5"])
    chips, traffic = [LinkSpeeds(mesh) for _ in mesh.live], Traffic(mesh)
    now = mesh.slowed("link:1,0-1,1=1", SlowLink(LINK, 0.25))
    looked(chips, traffic, 100, now)
    text = " ".join(map(str, chips[0].found))

    assert text == "link:0,0-0,1=0.25 link:1,0-1,1=1.0"
    assert LinkSpeeds(mesh, text).mesh == now
    assert LinkSpeeds(mesh, text).found == chips[0].found
    less = mesh.without("0,1")
    assert LinkSpeeds(less, text).mesh.speed_of(LINK) == 0.25  # it may return
    assert LinkSpeeds(Mesh((4,)), text).mesh == Mesh((4,))


def test_a_link_that_was_found_slow_stays_known_through_a_loss_and_to_a_newcomer(
    tmp_path: Path,
) -> None:
    """Looks are at most ten steps apart; five of them find the link, and none that follows does."""
    result = elastic(
        tmp_path,
        mesh="2x2",
        steps=110,
        compute_s=0.05,
        slow_link=[[0, 0], [0, 1]],
        inject=["kill 0,1 at 60", "repair 0,1 at 62"],
        gate=[64, [["link-slow", None], ["generation", 3], ["arrived", None]]],
    )

    assert result["finished"], result["why"]
    (found,) = of_kind(result, "link-slow")
    assert (found["link"], found["speed"]) == ("link:0,0-0,1", 0.25)
    newcomer = (tmp_path / "speeds.0,1").read_text().split("\n")
    rows = [line.split() for line in newcomer if line]
    assert {row[2] for row in rows if int(row[0]) == 3} == {"link:0,0-0,1=0.25"}
    audit = result["audit"]
    assert (audit["lost"], audit["repeated"], audit["faults"], audit["split"]) == (0, 0, [], [])
