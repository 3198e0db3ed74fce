"""Trees with two roots drawn over a mesh: up to the roots, across to the gates, down to all."""

from meshmend.pages.draw.colours import series
from meshmend.pages.draw.frame import framed, surrounded
from meshmend.pages.draw.grid import Grid, fitting_grid
from meshmend.pages.draw.mesh_picture import ground_keys, mesh_panel
from meshmend.pages.draw.overlays import route_marks
from meshmend.pages.draw.svg import tiled
from meshmend.pages.draw.tree_picture import tree_marks
from meshmend.topology.mesh import Mesh
from meshmend.trees.two_root_trees import TwoRootTrees, two_root_trees

_SHEET_WIDTH = 1100.0
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
