"""Training that survives failures: the step loop, recovery, checkpoints, the ledger.

    from meshmend.train import Job, Saving  # PyTorch
    from meshmend.train import JaxJob, Saving  # JAX

All are imported on first use: a coordinator imports neither framework, a JAX job no PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshmend.packages import need

if TYPE_CHECKING:
    from meshmend.train.jax.job import JaxJob
    from meshmend.train.sharding.layerwise import LAMB, LARS, layerwise_groups
    from meshmend.train.state.checkpoint import Saving
    from meshmend.train.torch.job import Job
    from meshmend.train.torch.tile_job import TileJob

__all__ = ["LAMB", "LARS", "JaxJob", "Job", "Saving", "TileJob", "layerwise_groups"]

_MODULE_OF = {
    "LAMB": "meshmend.train.sharding.layerwise",
    "LARS": "meshmend.train.sharding.layerwise",
    "JaxJob": "meshmend.train.jax.job",
    "Job": "meshmend.train.torch.job",
    "Saving": "meshmend.train.state.checkpoint",
    "TileJob": "meshmend.train.torch.tile_job",
    "layerwise_groups": "meshmend.train.sharding.layerwise",
}
# The extra that holds the packages a name needs, and these packages.
_NEEDS = {
    "JaxJob": ("jax", ("jax", "optax")),
    **dict.fromkeys(("Job", "LAMB", "LARS", "TileJob", "layerwise_groups"), ("torch", ("torch",))),
}


def __getattr__(name: str) -> Any:
    extra, packages = _NEEDS.get(name, ("", ()))
    if packages:
        need(name, *packages, extra=extra)
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
