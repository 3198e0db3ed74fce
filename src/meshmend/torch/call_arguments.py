"""The arguments of c10d's collectives: the many forms in which callers give them, made one.

C++ code and `torch.distributed` pass lists and a value of options. Other Python code also passes
one tensor, an operation, a root or a timeout, as c10d's own process group allows.
"""

from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed

from meshmend.errors import TensorShapeError
from meshmend.transport.combine import DTYPES

# torch's stubs lack half of what c10d offers to a backend, so it is untyped here.
dist: Any = torch.distributed
c10d: Any = torch.distributed.distributed_c10d

_OP_NAMES = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "sum",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
}


def as_list(tensors: Any) -> list[Any]:
    """Return the tensors as a list, also if there is one alone."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def options_of(kind: Any, given: Any = None, timeout: timedelta | None = None) -> Any:
    """Return options of a kind: those given, or new ones with this operation, root or timeout."""
    if isinstance(given, kind):
        return given
    options = kind()
    if isinstance(given, timedelta):
        options.timeout = given
    elif isinstance(given, int) and kind is dist.BroadcastOptions:
        options.rootRank = given
    elif given is not None:
        options.reduceOp = given
    if timeout is not None:
        options.timeout = timeout
    return options


def op_name(op: Any) -> str:
    """Return the name of an operation in `combine`, or an empty text if it has none."""
    return _OP_NAMES.get(getattr(op, "op", op), "")  # c10d wraps an operation in a ReduceOp


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's element type."""
    return str(tensor.dtype).removeprefix("torch.")


def can_combine(tensor: torch.Tensor, op: Any) -> bool:
    """Whether `combine` knows this operation on elements of this type."""
    return bool(op_name(op)) and dtype_name(tensor) in DTYPES


def are_alike(tensors: list[torch.Tensor], like: torch.Tensor) -> bool:
    """Whether all tensors have the shape and the element type of another."""
    return all(part.shape == like.shape and part.dtype == like.dtype for part in tensors)


def are_of_one_type(tensors: list[torch.Tensor]) -> bool:
    """Whether all tensors have the same element type."""
    return all(tensor.dtype == tensors[0].dtype for tensor in tensors)


def check_parts(wholes: list[torch.Tensor], parts: list[torch.Tensor], n_ranks: int) -> None:
    """Raise TensorShapeError unless each whole tensor has one part for each rank.

    Gloo does not check this where there are several: it reads what lies beside the tensors.
    """
    if len(wholes) != len(parts):
        raise TensorShapeError(
            f"a collective of tensors that are shared out over {n_ranks} ranks needs as many whole "
            f"tensors as parts, but got {len(wholes)} and {len(parts)}"
        )
    for whole, part in zip(wholes, parts, strict=True):
        if whole.numel() != n_ranks * part.numel() or whole.dtype != part.dtype:
            raise TensorShapeError(
                f"a tensor that is shared out over {n_ranks} ranks needs {n_ranks} times the "
                f"elements of a part, but got {tuple(whole.shape)} of {whole.dtype} and "
                f"{tuple(part.shape)} of {part.dtype}"
            )


def flat_tensors(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return flat contiguous tensors of the same elements, of which no two share memory.

    A tensor that is contiguous and shares memory with no other of them is returned as a view.
    """
    if share_memory(tensors):
        return [tensor.clone(memory_format=torch.contiguous_format).view(-1) for tensor in tensors]
    return [tensor.contiguous().view(-1) for tensor in tensors]


def share_memory(tensors: list[torch.Tensor]) -> bool:
    """Whether two of the tensors may share memory: their spans from first to last byte overlap."""
    if len(tensors) < 2:
        return False
    spans = sorted(_span(tensor) for tensor in tensors if tensor.numel())
    return any(end > start for (_, end), (start, _) in pairwise(spans))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    steps = ((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (sum(steps) + 1) * tensor.element_size()


def average(flat: torch.Tensor, op: Any, n_ranks: int) -> None:
    """Divide a sum by the number of ranks if the operation is AVG."""
    if op == dist.ReduceOp.AVG:
        flat.div_(n_ranks, rounding_mode=None if flat.is_floating_point() else "trunc")


def copy_back(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Copy a result back to a tensor that was not contiguous."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))
