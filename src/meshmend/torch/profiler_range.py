"""Ranges that torch's profiler shows: `meshmend:all_reduce` with its bytes and its algorithm."""

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd

# Private, and the only one that takes the tensors of a range and may end in another thread.
_Range: Any = torch._C._profiler._RecordFunctionFast


def no_range() -> None:
    """End a range that never began."""


def begin_range(
    name: str, tensors: list[torch.Tensor], details: Callable[[], dict[str, int | str]]
) -> Callable[[], None]:
    """Begin a range if this thread is profiled; return what ends it, in any thread."""
    if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # not in the stubs
        return no_range
    began = _Range(name, tensors, details())
    began.__enter__()
    return lambda: began.__exit__(None, None, None)
