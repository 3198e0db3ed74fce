"""Slow links are found from how long links are busy: soon, the same on all chips, and no others."""

import numpy as np
import pytest

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
        self.speeds, self._noise = mesh.port_speeds, noise
        self._work = np.zeros((*self.speeds.shape, 2))
        self._random = np.random.default_rng(seed)
        self.now_us = 0

    def step(self, speeds: Mesh | None = None) -> None:
        part = (self.speeds if speeds is None else speeds.port_speeds) * FULL
        slower = 1 + self._noise * self._random.random(part.shape)
        self._work[..., 0] += STEP_BYTES
        self._work[..., 1] += STEP_BYTES / part * slower
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
