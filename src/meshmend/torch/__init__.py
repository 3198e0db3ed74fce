"""The c10d backend: `import meshmend.torch`, then `dist.init_process_group("meshmend")`.

Importing this package registers the backend with torch.distributed, makes `monitored_barrier` and
Accelerate accept it, and does nothing else. The code that runs it is imported when a process group
is made.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch.distributed

from meshmend.torch.other_libraries import accept_everywhere
from meshmend.variables import TRANSPORT

if TYPE_CHECKING:
    from meshmend.planning.settings import Settings
    from meshmend.torch.group import MeshmendGroup
    from meshmend.torch.group_factory import runs_on

__all__ = ["MeshmendGroup", "Settings", "register", "runs_on"]

_MODULE_OF = {
    "MeshmendGroup": "meshmend.torch.group",
    "Settings": "meshmend.planning.settings",
    "runs_on": "meshmend.torch.group_factory",
}


def register() -> None:
    """Register the backend with torch.distributed; a second call does nothing."""
    if TRANSPORT.value_in(os.environ) == "nccl":
        # CUDA reads it once. With fewer queues, computing kernels may wait for receiving ones.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if "MESHMEND" not in torch.distributed.Backend._plugins:
        torch.distributed.Backend.register_backend(
            "meshmend", _create, extended_api=True, devices=["cpu", "cuda"]
        )
        accept_everywhere()


def _create(options: Any, settings: Any = None) -> Any:
    from meshmend.torch.group_factory import create_group

    return create_group(options, settings)


def __getattr__(name: str) -> object:
    """Import a public name on first use (PEP 562)."""
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'meshmend.torch' has no attribute {name!r}")


register()
