"""Slow links are found from how long links are busy: soon, the same on all chips, and no others."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from elastic_job import elastic, of_kind
from meshmend.topology.failures import Link, SlowLink
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from meshmend.train.core.link_speeds import LOOKS, PROBES, LinkSpeeds, Work

LINK = Link((0, 0), (0, 1))
STEP_US = 100_000
STEP_BYTES = 100_000  # over each link, each way
FULL = 2.5  # bytes in a microsecond


class Traffic:
    """What the kernels of all chips count, while links have some speeds and hosts are busy.

    A message is on its way for `wait_us` longer than its bytes need; each step has one on each
    link, which is `part` of the usual size on `LINK`.
    """

    def __init__(
        self, mesh: Mesh, *, noise: float = 0.0, seed: int = 0, wait_us: int = 0, part: float = 1.0
    ) -> None:
        self._mesh, self._noise, self._wait_us = mesh, noise, wait_us
        is_link = mesh.slowed(SlowLink(LINK, 0.1)).port_speeds != mesh.port_speeds
        self._bytes = STEP_BYTES * np.where(is_link, part, 1.0)
        self._work = np.zeros((*mesh.port_speeds.shape, 2))
        self._random = np.random.default_rng(seed)
        self.now_us = self.n_probes = 0

    def send(self, n_bytes: float | NDArray[np.float64], speeds: Mesh) -> None:
        """Send a message over each link, each way; those of no bytes are not sent."""
        slower = 1 + self._noise * self._random.random(self._bytes.shape)
        rate = FULL * speeds.port_speeds
        sent = n_bytes * np.ones(rate.shape)
        self._work[..., 0] += sent
        self._work[..., 1] += (sent / rate + self._wait_us * (sent > 0)) * slower

    def step(self, speeds: Mesh | None = None) -> None:
        self.send(self._bytes, speeds or self._mesh)
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
        (is_due,) = {chip.is_due() for chip in chips}
        if is_due and (each := look(chips, traffic, speeds or chips[0].mesh)):
            found.append((step, each))
    return found


def look(chips: list[LinkSpeeds], traffic: Traffic, speeds: Mesh) -> tuple[SlowLink, ...]:
    found = conclude(chips, traffic)
    while {chip.probe_bytes > 0 for chip in chips} == {True}:
        (n_bytes,) = {chip.probe_bytes for chip in chips}
        for rank, chip in enumerate(chips):
            chip.mine(traffic.of(rank), traffic.now_us)
        traffic.send(n_bytes, speeds)
        traffic.n_probes += 1
        found = conclude(chips, traffic)
    return found


def conclude(chips: list[LinkSpeeds], traffic: Traffic) -> tuple[SlowLink, ...]:
    told = [chip.mine(traffic.of(rank), traffic.now_us) for rank, chip in enumerate(chips)]
    (found,) = {chip.conclude(told) for chip in chips}
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
    ((_, mended),) = looked(chips, traffic, 60, mesh)
    assert mended == (SlowLink(LINK, 1.0),)
    assert chips[0].mesh == mesh


def test_it_is_found_as_soon_if_steps_take_three_times_as_long_because_of_it() -> None:
    """Looks are counted in steps, and each takes 0.8 s then; the probes take half a second."""
    mesh = Mesh((3, 3))
    chips, traffic = [LinkSpeeds(mesh) for _ in mesh.live], Traffic(mesh)

    def steps(speeds: Mesh, step_us: int) -> Iterator[tuple[SlowLink, ...]]:
        while True:
            traffic.step(speeds)
            traffic.now_us += step_us - STEP_US
            (is_due,) = {chip.is_due() for chip in chips}
            yield look(chips, traffic, speeds) if is_due else ()

    assert not any(islice(steps(mesh, 250_000), 40))
    began = traffic.now_us
    found = next(filter(None, steps(mesh.slowed(SlowLink(LINK, 0.25)), 800_000)))
    assert found == (SlowLink(LINK, 0.25),)
    assert traffic.now_us - began < 2.5e6


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


def test_looks_are_a_quarter_of_a_second_apart_whatever_a_step_takes() -> None:
    for step_us, apart in ((1_000, 250), (100_000, 3), (5_000_000, 1)):
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
    chips, traffic = [LinkSpeeds(known) for _ in mesh.live], Traffic(mesh, part=0)
    found: list[tuple[SlowLink, ...]] = []
    for _ in range(2000):
        traffic.step()
        if {chip.is_due() for chip in chips} == {True}:
            found.append(look(chips, traffic, real))

    assert [each for each in found if each] == ([(SlowLink(LINK, 1.0),)] if speed == 1 else [])
    assert traffic.n_probes == (PROBES if speed == 1 else 4 * PROBES)
    assert len(found) > 390


@pytest.mark.parametrize("wait_us", [20_000, 40_000])
def test_a_link_with_short_messages_is_not_taken_for_a_slow_one_unless_it_is(wait_us: int) -> None:
    """Short messages wait as long as others: bytes over busy time show less than the link does.

    A plan gave a link in a corner such messages after a cut, on a busy host, and it was told as
    slow. Its probes are as long as those of other links.
    """
    mesh = Mesh((4, 4))
    chips = [LinkSpeeds(mesh) for _ in mesh.live]
    traffic = Traffic(mesh, noise=0.2, wait_us=wait_us, part=0.2)

    assert looked(chips, traffic, 300) == []
    assert 0 < traffic.n_probes <= 2 * PROBES
    ((step, found),) = looked(chips, traffic, 60, mesh.slowed(SlowLink(LINK, 0.1)))
    assert [each.link for each in found] == [LINK]
    assert step * STEP_US < 3e6


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
    (measured,) = of_kind(result, "fabric")
    assert measured["link_bandwidth_bytes_per_s"] > 0
    (found,) = of_kind(result, "link-slow")
    assert (found["link"], found["speed"]) == ("link:0,0-0,1", 0.25)
    newcomer = (tmp_path / "speeds.0,1").read_text().split("\n")
    rows = [line.split() for line in newcomer if line]
    assert {row[2] for row in rows if int(row[0]) == 3} == {"link:0,0-0,1=0.25"}
    audit = result["audit"]
    assert (audit["lost"], audit["repeated"], audit["faults"], audit["split"]) == (0, 0, [], [])
