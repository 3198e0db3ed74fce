"""Pictures in a notebook: has meshes and plans draw themselves there.

A mesh is a value that knows nothing of pictures, so what draws it is attached to it from here.
`meshmend/__init__.py` calls `register` when `Mesh` or `Plan` is first asked for.
"""

from typing import Any


def register() -> None:
    """Give `Mesh` and `Plan` the method that a notebook calls; calling it again does nothing."""
    from meshmend.topology.mesh import Mesh

    _attach(Mesh, _mesh_svg)


def _attach(kind: type, draw: Any) -> None:
    kind._repr_svg_ = draw  # type: ignore[attr-defined]  # what IPython looks for


def _mesh_svg(mesh: Any) -> str:
    from meshmend.draw.mesh_picture import mesh_svg

    return mesh_svg(mesh)
