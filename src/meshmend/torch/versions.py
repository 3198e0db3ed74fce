"""What the installed torch offers: the one place that knows which version has what.

It looks for the thing itself, not for a number: a build of torch may have more or less than its
version says. `docs/pytorch.md` has the table of what needs which version.
"""

import sys
from contextlib import suppress
from importlib import import_module
from types import FrameType, WrapperDescriptorType
from typing import Any, Final

import torch.distributed

bindings: Final[Any] = torch._C._distributed_c10d

# Since torch 2.14: a class written in Python can be the backend of one kind of device. Before, the
# class of backends had no constructor of its own.
HAS_PYTHON_BACKENDS: Final = not isinstance(
    vars(bindings.Backend)["__init__"], WrapperDescriptorType
)


def forget_meshes() -> None:
    """Let `DTensor` work out anew what it has kept for each DeviceMesh that it has seen.

    PyTorch offers this for debugging only, under names that a version may change. Without them what
    was kept stays.
    """
    _call_if_there("torch.distributed.tensor.debug", "_clear_sharding_prop_cache")
    _call_if_there("torch.distributed.tensor._redistribute", "_gen_transform_infos", "cache_clear")


def _call_if_there(module: str, *names: str) -> None:
    with suppress(ImportError):
        found: Any = import_module(module)
        for name in names:
            found = getattr(found, name, None)
        if found is not None:
            found()


def asks_for_reconfigure(options: Any) -> bool:
    """Whether `init_process_group` was called with `enable_reconfigure`, known since torch 2.14."""
    return bool(getattr(options, "enable_reconfigure", False))


def is_one_of_several() -> bool:
    """Whether torch is making a group in which another backend serves another kind of device.

    torch tells a backend's creator nothing of the others, so this reads it from torch's own call.
    If a version of torch calls it otherwise, the answer is no.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back
    config = frame.f_locals.get("backend_config") if frame is not None else None
    return config is not None and len(set(config.get_device_backend_map().values())) > 1
