"""Plan, prove and price gradient summation on mesh-connected chips when chips fail.

The public surface is listed here; each name is imported when it is first used, so that
`import meshmend` costs nothing and has no effect.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshmend.planning.plan import Plan, plan
    from meshmend.topology.mesh import Mesh

__version__ = "0.1.0"
__all__ = ["Mesh", "Plan", "__version__", "plan"]

_HOME = {
    "Mesh": "meshmend.topology.mesh",
    "Plan": "meshmend.planning.plan",
    "plan": "meshmend.planning.plan",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use (PEP 562)."""
    if name in _HOME:
        import_module("meshmend.draw.notebook").register()
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'meshmend' has no attribute {name!r}")
