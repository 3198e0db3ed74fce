"""Pictures in a notebook: has meshes and plans draw themselves there.

A mesh is a value that knows nothing of pictures, so what draws it is attached to it from here.
`meshmend/__init__.py` calls `register` when a public name is first asked for.
"""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshmend.planning.plan import Plan
    from meshmend.topology.mesh import Mesh


def register() -> None:
    """Give `Mesh` and `Plan` the method that a notebook calls, as far as they are imported.

    Calling it again does nothing more.
    """
    _attach("meshmend.topology.mesh", "Mesh", _mesh_svg)
    _attach("meshmend.planning.plan", "Plan", _plan_svg)


def _attach(module: str, name: str, draw: Any) -> None:
    if module in sys.modules:  # a class that nobody has yet needs no picture, nor its imports
        getattr(sys.modules[module], name)._repr_svg_ = draw  # what IPython looks for


def _mesh_svg(mesh: "Mesh") -> str:
    from meshmend.pages.draw.mesh_picture import mesh_svg

    return mesh_svg(mesh)


def _plan_svg(plan: "Plan") -> str:
    from meshmend.pages.draw.load_picture import link_load_svg

    schedule = plan.schedule
    return link_load_svg(
        plan.placement.mesh,
        plan.channel_loads,
        title=f"{schedule.algorithm} {schedule.collective} on {plan.mesh}: load of each link",
    )
