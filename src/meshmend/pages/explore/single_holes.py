"""What a click on the page can fail: each board, host, chip and link of a mesh, alone."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from meshmend.topology.failures import REGION_SHAPES, Link, region
from meshmend.topology.mesh import Mesh

UNITS: Final = (*REGION_SHAPES, "chip", "link")

Hole = str  # the numbers of the failed chips, then the ends of failed links: "17,18|3-4"


def broken_meshes(full: Mesh, unit: str) -> Iterator[Mesh]:
    """Yield a mesh for each chip, link, board or host that a click on the page fails."""
    if unit == "link":
        for one, other in full.links.tolist():
            yield full.without(Link.between(full.live[one], full.live[other]))
        return
    if unit != "chip" and len(full.shape) < 2:
        return
    seen = set()
    for chip in full.live:
        hit = {chip} if unit == "chip" else {*region(unit, chip).chips()} & {*full.live}
        if min(hit) not in seen and len(hit) < full.n_chips:
            seen.add(min(hit))
            yield replace(full, failed=frozenset(hit))


def hole_of(mesh: Mesh) -> Hole:
    """Return what failed, as a text by which the page finds the plan."""
    number = {chip: place for place, chip in enumerate(np.ndindex(mesh.shape))}
    chips = sorted(number[chip] for chip in mesh.failed)
    links = sorted((number[link.first], number[link.second]) for link in mesh.failed_links)
    return f"{','.join(map(str, chips))}|{','.join(f'{one}-{other}' for one, other in links)}"
