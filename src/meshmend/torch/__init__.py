"""The c10d backend: `import meshmend.torch`, then `dist.init_process_group("meshmend")`.

Importing this package registers the backend with torch.distributed, and a rendezvous for workers
of elastic jobs, makes `monitored_barrier` and Accelerate accept the backend, and does nothing else.
The code that runs it is imported when a process group is made.

In a job of `meshmend run --elastic`, `reconfigure`, `steps`, `retrying` and `elastic_step` keep the
process group alive; `meshmend.train.torch.elastic_group` has them.
"""

import os
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshmend.errors import InputError
from meshmend.packages import need

need("meshmend.torch", "torch", extra="torch")

import torch.distributed

from meshmend.config import COORDINATOR, TRANSPORT
from meshmend.torch.other_libraries import accept_everywhere

if TYPE_CHECKING:
    from meshmend.planning.settings import Settings
    from meshmend.torch.group import MeshmendGroup
    from meshmend.torch.group_factory import runs_on
    from meshmend.torch.tile_groups import tiles

# torch's stubs lack the stores.
dist: Any = torch.distributed

__all__ = [
    "MeshmendGroup",
    "Settings",
    "elastic_step",
    "reconfigure",
    "register",
    "retrying",
    "runs_on",
    "steps",
    "tiles",
]

# Four of them are found by name alone: this package is below `train`, and does not know it.
_MODULE_OF = {
    "MeshmendGroup": "meshmend.torch.group",
    "Settings": "meshmend.planning.settings",
    "elastic_step": "meshmend.train.torch.elastic_group",
    "reconfigure": "meshmend.train.torch.elastic_group",
    "retrying": "meshmend.train.torch.elastic_group",
    "runs_on": "meshmend.torch.group_factory",
    "steps": "meshmend.train.torch.elastic_group",
    "tiles": "meshmend.torch.tile_groups",
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
        _begin_alone_if_elastic()


def _create(options: Any, settings: Any = None) -> Any:
    from meshmend.torch.group_factory import create_group

    return create_group(options, settings)


def _begin_alone_if_elastic() -> None:
    """Make `init_process_group` give a worker of an elastic job a group of its own.

    The worker joins the others with `reconfigure`, and its optimizers do not step before. Who sets
    MASTER_ADDR to something else than the launcher does gets what torch does.
    """
    # The attribute torch.distributed.rendezvous is a function; it hides the module of that name.
    handlers = import_module("torch.distributed.rendezvous")._rendezvous_handlers
    usual = handlers["env"]

    def rendezvous(url: str, **arguments: Any) -> Iterator[tuple[Any, int, int]]:
        coordinator, variables = COORDINATOR.value_in(os.environ), os.environ
        master = f"{variables.get('MASTER_ADDR', '')}:{variables.get('MASTER_PORT', '')}"
        if coordinator and master in (":", coordinator):
            _refuse_steps_alone()
            yield dist.HashStore(), 0, 1
        else:
            yield from usual(url, **arguments)

    handlers["env"] = rendezvous


def _refuse_steps_alone() -> None:
    """Refuse that an optimizer steps in an elastic job that this worker has not joined.

    It has a group of its own until then, and its weights would be unlike those of the others.
    """
    # By name: this package is below `train`, and does not know it.
    client = import_module("meshmend.train.core.worker_environment").coordinator_client
    register = import_module("torch.optim.optimizer").register_optimizer_step_pre_hook

    def refuse(*_: object) -> None:
        if not client().has_joined:
            raise InputError(
                "an optimizer in a job of meshmend run --elastic needs a group of all chips, but "
                "this worker has not joined them and would train alone; call "
                "meshmend.torch.reconfigure(model, optimizer) before the first step"
            )

    register(refuse)


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'meshmend.torch' has no attribute {name!r}")


register()
