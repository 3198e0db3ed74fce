"""What a click on the page can break: each board, host, chip and link of a mesh, alone."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from meshmend.topology.failures import REGION_SHAPES, Chip, Link, SlowLink, region
from meshmend.topology.mesh import Mesh

SLOW: Final = "slow"  # a link that a click slows
SLOW_SPEED: Final = 0.25  # to this
UNITS: Final = (*REGION_SHAPES, "chip", "link", SLOW)

# The numbers of the failed chips, the ends of failed links, and slow links if there are any:
# "17,18|3-4|5-6=0.25".
Hole = str


def broken_meshes(full: Mesh, unit: str) -> Iterator[Mesh]:
    """Yield a mesh for each chip, link, board or host that a click on the page breaks."""
    if unit in {"link", SLOW}:
        for link in full.live_links():
            yield full.slowed(SlowLink(link, SLOW_SPEED)) if unit == SLOW else full.without(link)
        return
    if unit != "chip" and len(full.shape) < 2:
        return
    seen = set()
    for chip in full.live:
        hit = {chip} if unit == "chip" else {*region(unit, chip).chips()} & {*full.live}
        if min(hit) not in seen and len(hit) < full.n_chips:
            seen.add(min(hit))
            yield replace(full, failed=frozenset(hit))


def what_is_broken(mesh: Mesh) -> str:
    """Return the first of the failures and slow links of a mesh in words."""
    return str((*mesh.failures(), *sorted(mesh.slow))[0])


def hole_of(mesh: Mesh) -> Hole:
    """Return what is broken, as a text by which the page finds the plan."""
    number: dict[Chip, int] = {chip: place for place, chip in enumerate(np.ndindex(mesh.shape))}

    def ends(link: Link) -> str:
        return f"{number[link.first]}-{number[link.second]}"

    chips = sorted(number[chip] for chip in mesh.failed)
    links = sorted((number[link.first], number[link.second]) for link in mesh.failed_links)
    hole = f"{','.join(map(str, chips))}|{','.join(f'{one}-{other}' for one, other in links)}"
    if not mesh.slow:
        return hole
    return f"{hole}|{','.join(f'{ends(each.link)}={each.speed!r}' for each in sorted(mesh.slow))}"
