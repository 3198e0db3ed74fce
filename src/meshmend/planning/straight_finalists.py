"""Finds the straight trees that are worth simulating for a payload (`trees/straight_trees.py`).

They suit payloads that take about as long to pass a link as to go up and down the mesh. Nothing is
simulated here.
"""

from collections.abc import Iterator

from meshmend.planning.packed_trees import Trees, TreeShape, is_straight, trees_of
from meshmend.planning.tree_formula import PipelineRequest, TreeFigures, TreeFormula
from meshmend.topology.figures import MeshFigures, mesh_figures
from meshmend.topology.mesh import Mesh
from meshmend.trees.straight_trees import GAP, root_choices
from meshmend.trees.tree_counts import pace

# Found by trying on 32x32 less 4x2@14,14, from 1 to 20 MB.
#
# Twice as many trees as a corner has links where the gap is at least this part of the time, else
# three times as many. 3 MB take 1.39 times the limit with 4 and 1.42 with 6, 10 MB take 1.47 with 4
# and 1.36 with 6. On small meshes both are tried.
_FEW_TREES_GAP = 0.93
_SHORTEST_GAP, _LONGEST_GAP = 0.42, 4.0
# Between these other trees are slower, and searching for them takes seconds on large meshes.
_SHORTEST_ENOUGH_GAP, _LONGEST_ENOUGH_GAP = 0.5, 1.6
_MOST_BENT, _MOST_FOUND = 8, 3  # choices of roots to bend for long, and to simulate
# Times differ by half a percent between them. A full mesh must not be slower than one with a hole.
_MOST_FOUND_IF_FULL = 6
_LEAST_RANKS, _SMALL_RANKS, _HUGE_RANKS = 32, 256, 2048


def straight_finalists(mesh: Mesh, request: PipelineRequest) -> list[Trees]:
    """Return straight trees that may be fastest; none on tori and on huge meshes."""
    figures = mesh_figures(mesh)
    return [
        trees_of(mesh, shape)
        for n_trees in _tree_counts(figures, request)
        for shape in _found(figures, n_trees)
    ]


def need_no_others(found: list[Trees], request: PipelineRequest) -> bool:
    """Whether no other trees need to be tried, because the mesh is large and the gap is right."""
    if not found or found[0].mesh.n_live <= _SMALL_RANKS:
        return False
    gap = _gap(request.formula(found[0].figures), request)
    return _SHORTEST_ENOUGH_GAP <= gap <= _LONGEST_ENOUGH_GAP


def _tree_counts(figures: MeshFigures, request: PipelineRequest) -> Iterator[int]:
    """Yield the numbers of trees that suit a payload."""
    mesh, degree = figures.mesh, figures.min_degree
    if not _LEAST_RANKS <= mesh.n_live <= _HUGE_RANKS or any(mesh.wrap) or degree < 2:
        return
    for n_trees in (2 * degree, 3 * degree):
        likely = TreeFigures(n_trees, figures.radius + 1, pace(figures, n_trees, GAP))
        gap = _gap(request.formula(likely), request) if request.payload_bytes else 0.0
        is_right = (n_trees == 2 * degree) == (gap >= _FEW_TREES_GAP)
        if _SHORTEST_GAP <= gap <= _LONGEST_GAP and (is_right or mesh.n_live <= _SMALL_RANKS):
            yield n_trees


def _gap(formula: TreeFormula, request: PipelineRequest) -> float:
    return formula.gap(request.slices or formula.best_slices())


def _found(figures: MeshFigures, n_trees: int) -> list[TreeShape]:
    """Return the first straight trees whose links need no more than the pace."""
    found: list[TreeShape] = []
    n_wanted = _MOST_FOUND if figures.mesh.has_failures else _MOST_FOUND_IF_FULL
    for choice in root_choices(figures, n_trees)[:_MOST_BENT]:
        shape = TreeShape(n_trees, choice.slack, straight=choice.seed)
        if is_straight(figures.mesh, shape):
            found.append(shape)
        if len(found) == n_wanted:
            break
    return found
