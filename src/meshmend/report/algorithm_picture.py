"""What an algorithm lays over a mesh, by the algorithm's name."""

from meshmend.errors import InputError
from meshmend.overlay.pairs import fault_tolerant_layout, row_pair_layout
from meshmend.overlay.rings import hamiltonian_ring, line_rings
from meshmend.report.overlays import layout_svg, rings_svg
from meshmend.topology.mesh import Mesh

_PICTURES = {
    "ring-1d": lambda mesh: rings_svg(mesh, [hamiltonian_ring(mesh)]),
    "rank-ring": lambda mesh: rings_svg(mesh, [mesh.live]),
    "two-d": lambda mesh: rings_svg(mesh, [*line_rings(mesh, 1), *line_rings(mesh, 0)]),
    "row-pair": lambda mesh: layout_svg(mesh, row_pair_layout(mesh)),
    "ft-two-d": lambda mesh: layout_svg(mesh, fault_tolerant_layout(mesh)),
}


def algorithm_svg(mesh: Mesh, algorithm: str) -> str:
    """Return the picture of an algorithm's rings on a connected mesh.

    Raises:
        UnsupportedError: the algorithm does not do this mesh.
        InputError: there is no picture of that name.
    """
    if algorithm not in _PICTURES:
        raise InputError(
            f"there is no picture of the algorithm {algorithm!r}; choose one of "
            f"{', '.join(_PICTURES)}"
        )
    return _PICTURES[algorithm](mesh)
