"""What a plan lays over a mesh: its trees, its rings, or else the load of its links."""

import math
from collections import defaultdict
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.pages.draw.grid import Grid, LanePath, fitting_grid, traces
from meshmend.pages.draw.load_picture import link_load_svg
from meshmend.pages.draw.mesh_picture import ground_keys, mesh_panel
from meshmend.pages.draw.overlays import (
    forwarding_marks,
    layout_svg,
    overlay_grid,
    rings_svg,
    route_marks,
)
from meshmend.pages.draw.svg import (
    GREEN,
    Attributes,
    Key,
    Panel,
    arrow_head,
    framed,
    lighter,
    line_path,
    mark,
    series,
    surrounded,
    tiled,
)
from meshmend.planning.plan import Plan
from meshmend.schedule.trees import trees_in
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh
from meshmend.trees.axis_ways import Heading
from meshmend.trees.rings import (
    AXIS_NAMES,
    Ring,
    fault_tolerant_layout,
    hamiltonian_ring,
    line_rings,
    row_pair_layout,
)
from meshmend.trees.two_root_trees import TwoRootTrees, two_root_trees
from meshmend.units import counted

_SHADES = 6
_SHEET_WIDTH = 1100.0
_ARROWED_PITCH = 18.0


def trees_svg(mesh: Mesh, parents: NDArray[np.int32], *, title: str = "", caption: str = "") -> str:
    """Return the trees `parents[k]` over the ranks, a panel each.

    Raises:
        InputError: the array is not (trees, ranks), names no such rank, or runs in a circle.
    """
    return framed(
        _side_by_side(mesh, parents, _depths(mesh, parents)),
        title=title or f"{counted(len(parents), 'tree')} on {mesh}",
        keys=[*_layer_keys(mesh), *ground_keys(mesh)],
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


_STEPS = 3  # up, across, down: a panel each
_LEAST_PITCH = 6.0


def two_roots_svg(mesh: Mesh) -> str:
    """Return the picture of `two-roots`: a row of panels for each chunk.

    Raises:
        UnsupportedError: the mesh has no slit.
    """
    trees = two_root_trees(mesh)
    natural = fitting_grid(mesh, fill=0.5)
    share = (_SHEET_WIDTH / _STEPS - 24) / natural.size[0]
    pitch = max(_LEAST_PITCH, min(natural.pitch, natural.pitch * share))
    grid = Grid(mesh, pitch, 0.5, numbered=pitch >= 14)
    ground = mesh_panel(grid)
    panels = [
        surrounded(ground.plus(marks), title=title, size=12)
        for chunk in range(len(trees.up))
        for title, marks in _steps(grid, trees, chunk)
    ]
    return framed(
        tiled(panels, _STEPS),
        title=f"Trees with two roots on {mesh}",
        keys=ground_keys(mesh),
        caption="Each side sums its chips at a root of its own. Both sums are carried to a gate at "
        "each end of the slit, past chips without stopping. The gates add them up, and every chip "
        "gets the total from the gate that has it there first.",
    )


def _steps(grid: Grid, trees: TwoRootTrees, chunk: int) -> list[tuple[str, list[str]]]:
    """Return the title and the marks of each panel of a chunk."""
    mesh, one = grid.mesh, slice(chunk, chunk + 1)
    carries = [carry for carry in trees.carries if carry.chunk == chunk]
    paths = [[mesh.live[rank] for rank in carry.path] for carry in carries if len(carry.path) > 1]
    across = route_marks(grid, paths, [series(chunk)] * len(paths))
    return [
        (f"part {chunk}: up to the roots", tree_marks(grid, trees.up[one], first_colour=chunk)),
        ("across to the gates", across),
        (
            "down to all",
            tree_marks(grid, trees.down[one], first_colour=chunk, downwards=True),
        ),
    ]


_TREES_SHOWN = 6  # more would not be told apart
_TREES_SHOWN_3D = 2  # each has several layers


def _line_rings(mesh: Mesh) -> str:
    rows, columns = line_rings(mesh, 1), line_rings(mesh, 0)
    names = [f"rings along {AXIS_NAMES[0]}"] * len(rows)
    names += [f"rings along {AXIS_NAMES[1]}"] * len(columns)
    return rings_svg(
        mesh,
        [*rows, *columns],
        names=names,
        caption="Half of the payload is summed along its row first and then along its column, the "
        "other half the other way round.",
    )


# What the other algorithms lay over a mesh depends on the mesh alone.
_PICTURES: dict[str, Callable[[Mesh], str]] = {
    "ring-1d": lambda mesh: rings_svg(mesh, [hamiltonian_ring(mesh)]),
    "two-d": _line_rings,
    "row-pair": lambda mesh: layout_svg(mesh, row_pair_layout(mesh)),
    "rings-nd": axis_lines_svg,
    "ft-two-d": lambda mesh: layout_svg(mesh, fault_tolerant_layout(mesh)),
    "two-roots": two_roots_svg,
}


def plan_svg(plan: Plan) -> str:
    """Return the picture of a plan: what its own schedule lays over the mesh.

    A schedule of an unknown algorithm is drawn as trees where it has them, else by link load.
    """
    name = plan.schedule.algorithm
    if name in _PICTURES:
        return _PICTURES[name](plan.placement.mesh)
    if name == "rank-ring":
        return _rank_ring(plan)
    return _trees(plan) or plan_load_svg(plan)


def plan_load_svg(plan: Plan, *, darkest: float | None = None) -> str:
    """Return the mesh of a plan with its links coloured by what they carry of the payload."""
    return link_load_svg(
        plan.placement.mesh,
        plan.channel_loads,
        title=f"Link load of {plan.schedule.algorithm} on {plan.mesh}",
        darkest=darkest,
    )


def _trees(plan: Plan) -> str | None:
    """Draw the trees of a schedule side by side, the first few if there are many."""
    parents = trees_in(plan.schedule)
    if parents is None:
        return None
    mesh = plan.placement.mesh
    different = np.unique(parents, axis=0, return_index=True)[1]
    shown = np.sort(different)[: _TREES_SHOWN if len(mesh.shape) < 3 else _TREES_SHOWN_3D]
    n_trees = len(different)
    which = f"{len(shown)} of the {n_trees}" if len(shown) < n_trees else str(n_trees)
    noun = counted(n_trees, "spanning tree").split(" ", 1)[1]
    return trees_svg(
        mesh,
        parents[shown],
        title=f"{which} {noun} on {plan.mesh}",
        caption="Each carries its part of the payload up to its root and the sum back down, all at "
        f"once: no link carries more than {plan.channel_loads.max():.3g} of the payload each way. "
        "Thick and dark: near the root.",
    )


def _rank_ring(plan: Plan) -> str:
    """Draw the ring in rank order, hop by hop along the routes that its messages take."""
    mesh, routes, n_ranks = plan.placement.mesh, plan.placement.routes, plan.schedule.n_ranks
    path: list[Chip] = [mesh.live[0]]
    for rank in range(n_ranks if n_ranks > 1 else 0):
        path += routes.path(mesh, rank, (rank + 1) % n_ranks)[1:]
    return rings_svg(
        mesh,
        [tuple(path[:-1] or path)],
        title=f"1 ring in rank order on {plan.mesh}",
        caption="Ranks are numbered row by row, and the ring ignores the mesh: a message to the "
        "next rank takes several links, and some links carry several messages.",
    )
