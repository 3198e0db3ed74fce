"""Lets libraries that know backends by name accept ours.

`torch.distributed.monitored_barrier` refuses every backend but Gloo, though our groups have one.
Accelerate, and so the Trainer of transformers, replaces every backend on CPUs by Gloo.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from datetime import timedelta
from functools import wraps
from types import ModuleType
from typing import Any

import torch.distributed

_NAME = "meshmend"
_ACCELERATE = "accelerate.state"

dist: Any = torch.distributed
c10d: Any = torch.distributed.distributed_c10d


def accept_everywhere() -> None:
    """Make `monitored_barrier` and Accelerate accept our backend; call this once."""
    dist.monitored_barrier = c10d.monitored_barrier = _with_ours(c10d.monitored_barrier)
    if _ACCELERATE in sys.modules:
        _accept_in_accelerate(sys.modules[_ACCELERATE])
    else:
        sys.meta_path.insert(0, _AfterImport())


def _with_ours(monitored_barrier: Any) -> Any:
    @wraps(monitored_barrier)
    def barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Do what Gloo's does, also for groups of our backend."""
        if c10d._rank_not_in_group(group) or c10d.get_backend(group) != _NAME:
            monitored_barrier(group, timeout, wait_all_ranks)
            return
        if isinstance(timeout, float | int):
            timeout = timedelta(seconds=timeout)
        (group or dist.group.WORLD).monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    return barrier


def _accept_in_accelerate(module: ModuleType) -> None:
    state: Any = module.PartialState  # type: ignore[attr-defined]
    prepare = state._prepare_backend

    @wraps(prepare)
    def with_ours(
        self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str, Any]:
        chosen, kind = prepare(self, cpu, sagemaker_dp, backend)
        is_ours = backend == _NAME and chosen == "gloo"
        return (_NAME if is_ours else chosen), kind

    state._prepare_backend = with_ours


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it waits until Accelerate is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return how Accelerate is loaded, and then changed; None for all other modules."""
        if fullname != _ACCELERATE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_accept(module: ModuleType) -> None:
                load(module)
                _accept_in_accelerate(module)

            spec.loader.exec_module = load_and_accept  # type: ignore[method-assign]
        return spec
