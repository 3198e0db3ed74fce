"""What the installed torch offers: the one place that knows which version has what.

It looks for the thing itself, not for a number: a build of torch may have more or less than its
version says. `docs/pytorch.md` has the table of what needs which version.
"""

import sys
from types import FrameType, WrapperDescriptorType
from typing import Any, Final

import torch.distributed

bindings: Final[Any] = torch._C._distributed_c10d

# Since torch 2.14: a class written in Python can be the backend of one kind of device. Before, the
# class of backends had no constructor of its own.
HAS_PYTHON_BACKENDS: Final = not isinstance(
    vars(bindings.Backend)["__init__"], WrapperDescriptorType
)


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
