"""What an algorithm lays over a mesh, by the algorithm's name."""

from collections.abc import Callable

from meshmend.draw.axis_picture import axis_lines_svg
from meshmend.draw.overlays import layout_svg, rings_svg
from meshmend.draw.tree_picture import trees_svg
from meshmend.errors import InputError
from meshmend.overlay.pairs import fault_tolerant_layout, row_pair_layout
from meshmend.overlay.rings import hamiltonian_ring, line_rings
from meshmend.overlay.tree_packing import tree_packing
from meshmend.topology.mesh import Mesh

_TREES_SHOWN = 4


def _trees(mesh: Mesh) -> str:
    """Draw a few trees side by side; more would not be told apart."""
    packing = tree_packing(mesh, n_trees=_TREES_SHOWN)
    return trees_svg(
        mesh,
        packing.parents,
        title=f"{_TREES_SHOWN} spanning trees on {mesh}",
        caption="Each carries its part of the payload up to its root and the sum back down, all "
        f"at once: no link carries more than {packing.max_load:.3g} of the payload each way.",
    )


_PICTURES: dict[str, Callable[[Mesh], str]] = {
    "trees": _trees,
    "ring-1d": lambda mesh: rings_svg(mesh, [hamiltonian_ring(mesh)]),
    "rank-ring": lambda mesh: rings_svg(mesh, [mesh.live]),
    "two-d": lambda mesh: rings_svg(mesh, [*line_rings(mesh, 1), *line_rings(mesh, 0)]),
    "row-pair": lambda mesh: layout_svg(mesh, row_pair_layout(mesh)),
    "rings-nd": axis_lines_svg,
    "ft-two-d": lambda mesh: layout_svg(mesh, fault_tolerant_layout(mesh)),
}


def algorithm_svg(mesh: Mesh, algorithm: str) -> str:
    """Return the picture of an algorithm's rings on a connected mesh.

    Raises:
        UnsupportedError: the algorithm does not support this mesh.
        InputError: there is no picture of that name.
    """
    if algorithm not in _PICTURES:
        raise InputError(
            f"there is no picture of the algorithm {algorithm!r}; choose one of "
            f"{', '.join(_PICTURES)}"
        )
    return _PICTURES[algorithm](mesh)
