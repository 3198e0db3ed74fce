"""The tensors of PyTorch as raw arrays and back: all that its states need to become bytes."""

from collections.abc import Iterator
from typing import Any, Final

import torch

from meshmend.errors import InputError
from meshmend.train.state.state_tree import Bytes, Framework, RawArray


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


def _raw(leaf: Any, where: str) -> RawArray | None:
    if not isinstance(leaf, torch.Tensor):
        return None
    if leaf.layout != torch.strided:
        raise InputError(
            f"a training state needs dense tensors, but {where} is {leaf.layout}; store "
            "tensor.to_dense()"
        )
    tensor = leaf.detach()
    element_bytes, is_conj, is_neg = tensor.element_size(), tensor.is_conj(), tensor.is_neg()
    is_plain = tensor.is_cpu and tensor.is_contiguous() and not (is_conj or is_neg)
    flat: list[torch.Tensor] = []  # made once: of a tensor in several pieces it is a copy
    memory: list[Bytes] = []  # of a tensor that is in one piece of the host's memory

    def read(start: int, stop: int) -> Bytes:
        if not flat:
            flat.append(tensor.view(-1) if is_plain else tensor.reshape(-1))
            if is_plain and flat[0].stride(0) == 1:
                memory.append(flat[0].view(torch.uint8).numpy())
        if memory:
            return memory[0][start * element_bytes : stop * element_bytes]
        some = flat[0][start:stop].resolve_conj().resolve_neg().cpu()
        if some.stride(0) != 1:  # also of one element, which `contiguous` would leave as it is
            some = some.clone(memory_format=torch.contiguous_format)
        found: Bytes = some.view(torch.uint8).numpy()
        return found

    return RawArray(
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        element_bytes,
        read,
        memory=(
            *(tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()),
            *(is_conj, is_neg),
        ),
    )


def _tensor(array: RawArray) -> torch.Tensor:
    """Return a tensor that shares no memory with the array, on the CPU."""
    kind: torch.dtype = getattr(torch, array.dtype)
    found = torch.empty(array.n_elements, dtype=kind, device="cpu")
    # As bytes: to read elements of 16 bytes from anywhere in memory would crash.
    found.view(torch.uint8).copy_(torch.from_numpy(array.data))
    return found.reshape(array.shape)


def _room(dtype: str, shape: tuple[int, ...], own: Any) -> tuple[torch.Tensor, Bytes]:
    """Return a tensor on the CPU, and its memory: `own` if it is one of this type and shape."""
    kind: torch.dtype = getattr(torch, dtype)
    is_room = (
        isinstance(own, torch.Tensor)
        and type(own.detach()) is torch.Tensor
        and (own.device.type, own.dtype, tuple(own.shape)) == ("cpu", kind, shape)
        and own.is_contiguous()
        and not own.is_conj()
        and not own.is_neg()
    )
    tensor = own.detach() if is_room else torch.empty(shape, dtype=kind, device="cpu")
    memory: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return tensor, memory


TORCH: Final = Framework("torch", _raw, _tensor, _room, lazy=True)
