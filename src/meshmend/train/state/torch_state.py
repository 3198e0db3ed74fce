"""The states of PyTorch as bytes: what `state_dict` of modules, optimizers and schedulers returns.

A state that is packed and unpacked is equal bit for bit. `raw_state.py` knows the bytes.
"""

from collections.abc import Iterator
from typing import Any

import torch

from meshmend.train.state.digest import digests_of, total_of
from meshmend.train.state.raw_state import Bytes, RawArray, map_state, pack_raw, unpack_raw


def packed(state: Any) -> Bytes:
    """Return a state as bytes that `unpacked` reads.

    Raises:
        InputError: the state holds something that is neither a tensor nor a plain value.
    """
    return pack_raw(map_state(raw_leaf, state))


def unpacked(data: Bytes) -> Any:
    """Return the state that `packed` wrote; it does not share memory with the bytes."""
    return map_state(_tensor_leaf, unpack_raw(data))


def tensors_of(state: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a nested state in their order."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors_of(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from tensors_of(value)


def digest(state: Any) -> str:
    """Return a hash of all of a state: the bits of its tensors, and its plain values."""
    return total_of(digest_parts(state))


def digest_parts(state: Any) -> dict[str, str]:
    """Return a hash of each tensor of a state by its name, and each plain value."""
    return digests_of(map_state(raw_leaf, state))


def _raw(tensor: torch.Tensor) -> RawArray:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return RawArray(dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy())


def raw_leaf(leaf: Any) -> Any:
    """Return a tensor as a `RawArray`, and anything else as it is."""
    return _raw(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _tensor_leaf(leaf: Any) -> Any:
    if not isinstance(leaf, RawArray):
        return leaf
    kind: torch.dtype = getattr(torch, leaf.dtype)
    return torch.from_numpy(leaf.data).view(kind).reshape(leaf.shape).clone()
