"""What one chip holds of a tensor: all of it, or its part of a `DTensor`."""

import math
import sys
from typing import Any

import torch

from meshmend.errors import InputError


def is_dtensor(leaf: Any) -> bool:
    """Whether a value is a tensor that is spread over chips."""
    # To import it takes a while, and where nobody has imported it there is none.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(leaf, module.DTensor)


def local_of(tensor: Any) -> torch.Tensor:
    """Return the memory of a tensor: of a `DTensor`, what this chip holds of it."""
    local: torch.Tensor = tensor._local_tensor if is_dtensor(tensor) else tensor
    return local.detach()


def as_tensor_like(like: Any, value: Any) -> Any:
    """Return a plain tensor in the form of another: as a `DTensor`, or as it is."""
    if not is_dtensor(like):
        return value
    if value.dtype == like.dtype and value.shape == like._local_tensor.shape:
        return type(like)(value, like._spec, requires_grad=False)
    return type(like).from_local(
        value,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def own_box(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where the part of a `DTensor` that this chip holds begins, and its shape.

    Raises:
        InputError: that cannot be told.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    held = tuple(tensor._local_tensor.shape)
    if tuple(shape) != held:
        raise InputError(
            "a checkpoint of tiles needs to know which part of a tensor a chip has, but one is "
            f"{tensor.placements}, of which this one has {held}; save it with "
            "torch.distributed.checkpoint"
        )
    return tuple(offsets), held


def first_element(tensor: Any) -> int:
    """Return the number of the first element of a tensor that this chip holds."""
    if not is_dtensor(tensor):
        return 0
    shape, (offsets, _) = tuple(tensor.shape), own_box(tensor)
    return sum(offset * math.prod(shape[axis + 1 :]) for axis, offset in enumerate(offsets))
