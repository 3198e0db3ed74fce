"""Options that several commands share, so that shapes and failures are written alike everywhere.

Imported at start-up: only what argument parsing needs.
"""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from meshmend.topology.mesh import Mesh

MeshOption = Annotated[
    str, typer.Option("--mesh", metavar="RxC", help="Extents of the mesh, any number of axes.")
]
WrapOption = Annotated[
    str, typer.Option("--wrap", metavar="AXES", help="Axes that wrap around: none, all, or 0,1.")
]
FailOption = Annotated[
    list[str] | None,
    typer.Option(
        "--fail",
        metavar="WHAT",
        help="What failed; repeat for more: 4x2@6,8 (block), 3,4 (chip), link:3,4-3,5, "
        "board:3,4, host:3,4.",
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output, nothing else.")
]


def mesh_of(mesh: str, wrap: str, fail: list[str] | None) -> "Mesh":
    """Return the mesh that the shared options describe."""
    from meshmend.topology.text import parse_mesh

    return parse_mesh(mesh, wrap=wrap, fail=fail or ())
