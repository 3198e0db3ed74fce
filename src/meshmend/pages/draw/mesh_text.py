"""A mesh as characters, for a terminal: `o` lives, `x` failed, `?` is cut off."""

import itertools

from meshmend.topology.failures import Chip
from meshmend.topology.graph import stranded
from meshmend.topology.mesh import Mesh

_WIDEST_WITH_LINKS = 40  # columns; wider meshes leave the links out


def mesh_text(mesh: Mesh) -> str:
    """Return a drawing with one character for each chip, layer by layer for more than two axes."""
    sign = dict.fromkeys(mesh.live, "o") | dict.fromkeys(stranded(mesh), "?")
    parts = []
    for layer in itertools.product(*map(range, mesh.shape[:-2])):
        if layer:
            parts.append(f"layer {','.join(map(str, layer))}")
        parts.extend(_layer(mesh, layer, sign))
    return "\n".join(parts)


def _layer(mesh: Mesh, layer: Chip, sign: dict[Chip, str]) -> list[str]:
    rows, cols = (1, *mesh.shape)[-2:]
    linked = cols <= _WIDEST_WITH_LINKS

    def chip(row: int, col: int) -> Chip:
        return (*layer, row, col)[-len(mesh.shape) :]

    def joined(one: Chip, other: Chip) -> bool:
        return one in mesh.rank_of and other in mesh.neighbors(one)

    lines = []
    for row in range(rows):
        line, below = "", ""
        for col in range(cols):
            here = chip(row, col)
            line += sign.get(here, "x")
            below += "|" if row + 1 < rows and joined(here, chip(row + 1, col)) else " "
            if linked and col + 1 < cols:
                line += "-" if joined(here, chip(row, col + 1)) else " "
                below += " "
        lines.append(line)
        if linked and row + 1 < rows:
            lines.append(below.rstrip())
    return lines
