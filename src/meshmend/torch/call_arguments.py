"""The arguments of c10d's collectives: the many forms in which callers give them, made one.

C++ code and `torch.distributed` pass lists and a value of options. Other Python code also passes
one tensor, an operation, a root or a timeout, as c10d's own process group allows.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from meshmend.errors import InputError
from meshmend.execute.combine import DTYPES

# torch's stubs lack half of what c10d offers to a backend, so it is untyped here.
dist: Any = torch.distributed
c10d: Any = torch.distributed.distributed_c10d

# A ReduceOp compares equal to these, but has another hash.
_OP_NAMES = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "sum"),
    (dist.ReduceOp.PRODUCT, "product"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
)


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
    return next((name for known, name in _OP_NAMES if op == known), "")


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's element type."""
    return str(tensor.dtype).removeprefix("torch.")


def can_combine(tensor: torch.Tensor, op: Any) -> bool:
    """Whether `combine` knows this operation on elements of this type."""
    return bool(op_name(op)) and dtype_name(tensor) in DTYPES


def are_alike(tensors: list[torch.Tensor], like: torch.Tensor) -> bool:
    """Whether all tensors have the shape and the element type of another."""
    return all(part.shape == like.shape and part.dtype == like.dtype for part in tensors)


def check_parts(wholes: list[torch.Tensor], parts: list[torch.Tensor], n_ranks: int) -> None:
    """Raise InputError unless each whole tensor has one part for each rank."""
    for whole, part in zip(wholes, parts, strict=True):
        if whole.numel() != n_ranks * part.numel() or whole.dtype != part.dtype:
            raise InputError(
                f"a tensor that is shared out over {n_ranks} ranks needs {n_ranks} times the "
                f"elements of a part, but got {tuple(whole.shape)} of {whole.dtype} and "
                f"{tuple(part.shape)} of {part.dtype}"
            )


def average(flat: torch.Tensor, op: Any, n_ranks: int) -> None:
    """Divide a sum by the number of ranks if the operation is AVG."""
    if op == dist.ReduceOp.AVG:
        flat.div_(n_ranks, rounding_mode=None if flat.is_floating_point() else "trunc")


def copy_back(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Copy a result back to a tensor that was not contiguous."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))
