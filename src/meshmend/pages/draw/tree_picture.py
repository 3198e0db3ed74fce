"""Spanning trees drawn over a mesh, side by side or on one another.

A tree is an array over ranks: each rank's parent, -1 at the root. Edges near the root are drawn
dark and broad, those far from it light and thin.
"""

import math
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.pages.draw.colours import lighter, series
from meshmend.pages.draw.frame import Key, framed, surrounded
from meshmend.pages.draw.grid import Grid, fitting_grid
from meshmend.pages.draw.lanes import LanePath, traces
from meshmend.pages.draw.mesh_picture import ground_keys, mesh_panel
from meshmend.pages.draw.svg import Attributes, Panel, arrow_head, line_path, mark, tiled
from meshmend.topology.mesh import Mesh
from meshmend.units import counted

_SHADES = 6
_SHEET_WIDTH = 1100.0
_ARROWED_PITCH = 18.0


def trees_svg(
    mesh: Mesh,
    parents: NDArray[np.int32],
    *,
    overlaid: bool = False,
    title: str = "",
    caption: str = "",
) -> str:
    """Return the trees `parents[k]` over the ranks, a panel each or all on one mesh.

    Raises:
        InputError: the array is not (trees, ranks), names no such rank, or runs in a circle.
    """
    depths = _depths(mesh, parents)
    if overlaid:
        grid = fitting_grid(mesh, fill=0.5, roomy=True)
        panel = mesh_panel(grid).plus(tree_marks(grid, parents, first_colour=0))
    else:
        panel = _side_by_side(mesh, parents, depths)
    n_trees = len(parents)
    return framed(
        panel,
        title=title or f"{counted(n_trees, 'tree')} on {mesh}",
        keys=[*(_keys(n_trees) if overlaid else []), *_layer_keys(mesh), *ground_keys(mesh)],
        caption=caption,
    )


def tree_marks(
    grid: Grid, parents: NDArray[np.int32], *, first_colour: int, downwards: bool = False
) -> list[str]:
    """Return the marks of trees on one mesh: `tree` lines in lanes, and a dot for each `root`.

    Arrows lead up to the roots, or with `downwards` from them.
    """
    mesh, depths = grid.mesh, _depths(grid.mesh, parents)
    tree, child = np.nonzero(parents >= 0)
    edges = [(mesh.live[c], mesh.live[parents[t, c]]) for t, c in zip(tree, child, strict=True)]
    if downwards:
        edges = [(parent, child) for child, parent in edges]
    deepest = max(1, int(depths.max(initial=0)))
    shade = (depths[tree, child] - 1) * _SHADES // deepest
    by_shade: dict[tuple[int, int], list[LanePath]] = defaultdict(list)
    for trace, t, s in zip(traces(grid, edges), tree.tolist(), shade.tolist(), strict=True):
        by_shade[t, min(s, _SHADES - 1)].append(trace)
    marks = []
    for (t, s), own in sorted(by_shade.items(), key=lambda item: (-item[0][1], item[0][0])):
        marks += _edges(grid, own, series(first_colour + t), s / _SHADES)
    for t, root in zip(*np.nonzero(parents < 0), strict=True):
        x, y = grid.centre(mesh.live[root])
        radius = (0.22 - 0.12 * t / len(parents)) * grid.pitch
        place: Attributes = {"cx": x, "cy": y, "r": radius}
        look: Attributes = {"fill": series(first_colour + int(t)), "stroke": "#ffffff"}
        marks.append(mark("circle", {"class": "root", **place, **look}))
    return marks


def _edges(grid: Grid, own: list[LanePath], colour: str, paleness: float) -> list[str]:
    """Return the edges of one tree and one shade as one line mark and one mark of arrow heads."""
    tint = lighter(colour, 0.6 * paleness)
    width = max(1.0, (0.085 - 0.045 * paleness) * grid.pitch)
    data = "".join(line_path(line, radius=0.2 * grid.pitch) for t in own for line in t.lines)
    look: Attributes = {"stroke": tint, "stroke-width": width, "fill": "none"}
    marks = [mark("path", {"class": "tree", "d": data, **look, "stroke-linecap": "round"})]
    if grid.pitch >= _ARROWED_PITCH:
        size = 2.2 * width + 0.05 * grid.pitch
        heads = "".join(arrow_head(tip, way, size) for t in own for tip, way in t.arrows)
        marks.append(mark("path", {"class": "tree-heads", "d": heads, "fill": tint}))
    return marks


def _side_by_side(mesh: Mesh, parents: NDArray[np.int32], depths: NDArray[np.int32]) -> Panel:
    # A tree over layers takes a row of its own, or its slanted arrows could not be told apart.
    n_columns = 1 if len(mesh.shape) > 2 else min(math.ceil(math.sqrt(len(parents))), 4)
    natural = fitting_grid(mesh, fill=0.5)
    share = (_SHEET_WIDTH / n_columns - 24) / natural.size[0]
    pitch = max(6.0, min(natural.pitch, natural.pitch * share))
    grid = Grid(mesh, pitch, 0.5, numbered=pitch >= 14)
    ground = mesh_panel(grid)
    panels = [
        surrounded(
            ground.plus(tree_marks(grid, parents[k : k + 1], first_colour=k)),
            title=f"tree {k}, depth {depths[k].max()}",
            size=12,
        )
        for k in range(len(parents))
    ]
    return tiled(panels, n_columns)


def _keys(n_trees: int) -> list[Key]:
    return [Key(series(k), f"tree {k}", "line") for k in range(min(n_trees, 8))]


def _layer_keys(mesh: Mesh) -> list[Key]:
    """Return what slanted arrows mean, if there are any."""
    if len(mesh.shape) < 3:
        return []
    return [
        Key(series(0), "slanted, up and right: to the next layer; down and left: back", "arrow")
    ]


def _depths(mesh: Mesh, parents: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return each rank's hops to its root in each tree."""
    if parents.ndim != 2 or parents.shape[1] != mesh.n_live or not len(parents):
        raise InputError(
            f"trees_svg needs an array (trees, {mesh.n_live} ranks) of parents, but got one of "
            f"shape {parents.shape}"
        )
    if parents.min() < -1 or parents.max() >= mesh.n_live:
        raise InputError(
            f"trees_svg needs parents from -1 to {mesh.n_live - 1}, but got "
            f"{parents.min()} to {parents.max()}"
        )
    hops = _hops_to_parents(mesh, parents)
    depth, ancestor = hops.copy(), parents
    for _ in range(mesh.n_live):
        depth += np.where(ancestor >= 0, np.take_along_axis(hops, ancestor, axis=1), 0)
        ancestor = np.where(ancestor >= 0, np.take_along_axis(parents, ancestor, axis=1), -1)
        if (ancestor < 0).all():
            return depth
    circling = int(np.nonzero((ancestor >= 0).any(axis=1))[0][0])
    raise InputError(
        f"trees_svg needs trees, but in tree {circling} rank "
        f"{int(np.argmax(ancestor[circling] >= 0))} is its own ancestor"
    )


def _hops_to_parents(mesh: Mesh, parents: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return how far each rank's parent is: more than one hop if messages pass chips on a line."""
    sizes = np.array(mesh.shape)
    apart = np.abs(mesh.coordinates[parents] - mesh.coordinates[None])
    apart = np.where(mesh.wrap, np.minimum(apart, sizes - apart), apart).sum(axis=2)
    hops: NDArray[np.int32] = np.where(parents >= 0, apart, 0).astype(np.int32)
    return hops
