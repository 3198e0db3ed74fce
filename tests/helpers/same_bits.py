"""Whether two nested values of tensors are the same, to the last bit."""

from typing import Any

import torch


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
    # Through NumPy: torch makes a Python object of each byte of a storage.
    data: bytes = flat.view(torch.uint8).numpy().tobytes()
    return data


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal bit for bit, down to the types."""
    if isinstance(one, torch.Tensor):
        kinds = [(tensor.dtype, tensor.shape) for tensor in (one, other)]
        return kinds[0] == kinds[1] and bits(one) == bits(other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)
