"""What `rings-nd` lays over a mesh: a line of each axis, and where sums turn off before holes."""

import numpy as np

from meshmend.pages.draw.colours import GREEN, series
from meshmend.pages.draw.frame import Key, framed
from meshmend.pages.draw.mesh_picture import ground_keys, mesh_panel
from meshmend.pages.draw.overlays import forwarding_marks, overlay_grid, route_marks
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh
from meshmend.trees.headings import Heading
from meshmend.trees.rings import Ring


def axis_lines_svg(mesh: Mesh) -> str:
    """Return a mesh with the line of each axis through one chip, and all turns before holes.

    All lines would cover each other, and they are alike but for the holes.
    """
    axes = [axis for axis, size in enumerate(mesh.shape) if size > 1]
    lines = [_line_through(mesh, _middle(mesh), axis) for axis in axes]
    colours = [series(number + (number > 1)) for number in range(len(axes))]  # the third is green
    keys = [
        Key(colour, f"axis {axis}: part {number + 1} starts here", "arrow")
        for number, (axis, colour) in enumerate(zip(axes, colours, strict=True))
    ]
    turns = sorted(_turns(mesh, axes))
    if turns:
        keys.append(Key(GREEN, "goes over to a line without the hole", "arrow"))
    grid = overlay_grid(mesh, [*lines, *turns], closed=False)
    marks = [*route_marks(grid, lines, colours), *forwarding_marks(grid, turns)]
    return framed(
        mesh_panel(grid).plus(marks),
        title=f"Sums along the axes of {mesh}",
        keys=[*keys, *ground_keys(mesh)],
        caption="The lines of one chip, one for each axis. Each part of the payload is summed "
        "along its own axis first, both ways of every line at once, then along the others.",
    )


def _middle(mesh: Mesh) -> int:
    """Return the live rank nearest to the middle of the shape."""
    apart = mesh.coordinates - (np.array(mesh.shape) - 1) / 2
    return int(np.argmin((apart**2).sum(axis=1)))


def _line_through(mesh: Mesh, rank: int, axis: int) -> Ring:
    """Return the live chips of a rank's line along an axis, in order, up to the first hole."""
    down, up = (Heading(mesh, axis, way, ()).ahead for way in (-1, 1))
    at, first = mesh.coordinates[:, axis], rank
    while at[first] and (before := int(down[first])) >= 0:
        first = before
    line = [first]
    while (after := int(up[line[-1]])) >= 0 and after != first:
        line.append(after)
    return tuple(mesh.live[each] for each in line)


def _turns(mesh: Mesh, axes: list[int]) -> set[tuple[Chip, Chip]]:
    """Return the hops from chips before a hole to the lines beside them, for the first phases."""
    result = set()
    for axis in axes:
        later = tuple(other for other in axes if other != axis)
        for way in (1, -1):
            for turn in Heading(mesh, axis, way, later).turns:
                pairs = zip(turn.ranks, turn.options[:, 0], strict=True)
                result |= {(mesh.live[src], mesh.live[dst]) for src, dst in pairs}
    return result
