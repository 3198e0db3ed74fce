"""Ranges that torch's profiler shows: `meshmend:all_reduce`, with its bytes and its algorithm.

The range lasts from the call to the end of the collective. Within it, at its begin, is a short one
whose name says the bytes and the algorithm; a profile of shapes also has them as its arguments.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd

Future = torch.futures.Future[Any]


def begin_range(
    name: str, tensors: list[torch.Tensor], algorithm: Callable[[], str]
) -> Callable[[Future], None] | None:
    """Begin a range if this thread is profiled; return what ends it together with a future."""
    if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # not in the stubs
        return None
    profiler: Any = torch.ops.profiler
    began = profiler._record_function_enter_new(f"meshmend:{name}")
    details = {"bytes": sum(tensor.nbytes for tensor in tensors), "algorithm": algorithm()}
    call = f"meshmend call: {name}, {details['bytes']} bytes, {details['algorithm']}"
    with torch._C._profiler._RecordFunctionFast(call, tensors, details):
        pass

    def end_with(future: Future) -> None:
        # The profiler knows the threads that it watches, and ours is none of them. This callback
        # takes the state of the calling thread along.
        profiler._call_end_callbacks_on_jit_fut(began, future)

    return end_with
