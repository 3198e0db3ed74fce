"""Plan, prove and price gradient summation on mesh-connected chips when chips fail.

    Mesh           chips and links, some of them failed
    plan, Plan     a schedule of the sum around them, proved right and free of deadlock
    load_plan      a plan that `Plan.save` wrote, proved again
    simulate       how long a plan, or the fastest plan of a mesh, takes
    limit          how long any plan takes at least
    Fabric         how fast links and chips are; presets go by name, such as "tpu-v3"
    MeshmendError  the root of all errors that are raised on purpose

A board of an 8x8 mesh has failed; 60 chips sum their gradients around it:

    >>> import numpy as np
    >>> from meshmend import Mesh, limit, plan
    >>> mesh = Mesh((8, 8)).without("2x2@2,2")
    >>> mended = plan(mesh, payload="10MB")
    >>> sums = mended.run([np.ones(1000)] * 60)  # all 60 chips in this process
    >>> sums[59][:3].tolist()
    [60.0, 60.0, 60.0]
    >>> f"{mended.predicted().time_s * 1e6:.0f} us, at best {limit(mesh, '10MB').time_s * 1e6:.0f}"
    '107 us, at best 86'

Each name is imported when it is first used, so that `import meshmend` costs nothing and has no
effect.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshmend.errors import MeshmendError
    from meshmend.planning.performance import limit, simulate
    from meshmend.planning.plan import Plan, load_plan, plan
    from meshmend.topology.fabric import Fabric
    from meshmend.topology.mesh import Mesh

__version__ = "0.2.0"
__all__ = [
    "Fabric",
    "Mesh",
    "MeshmendError",
    "Plan",
    "__version__",
    "limit",
    "load_plan",
    "plan",
    "simulate",
]

_MODULE_OF = {
    "Fabric": "meshmend.topology.fabric",
    "Mesh": "meshmend.topology.mesh",
    "MeshmendError": "meshmend.errors",
    "Plan": "meshmend.planning.plan",
    "limit": "meshmend.planning.performance",
    "load_plan": "meshmend.planning.plan",
    "plan": "meshmend.planning.plan",
    "simulate": "meshmend.planning.performance",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'meshmend' has no attribute {name!r}")
    found = getattr(import_module(_MODULE_OF[name]), name)
    import_module("meshmend.pages.draw.notebook").register()
    return found
