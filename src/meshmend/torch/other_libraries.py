"""Lets libraries that know backends by name accept ours.

`torch.distributed.monitored_barrier` refuses every backend but Gloo, though our groups have one.
Accelerate, and so the Trainer of transformers, replaces every backend on CPUs by Gloo, and the
command line of TrainingArguments has a list of names. These libraries are changed when they are
imported, and are not imported here.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from types import ModuleType
from typing import Any

import torch.distributed

_NAME = "meshmend"

dist: Any = torch.distributed
c10d: Any = torch.distributed.distributed_c10d


def accept_everywhere() -> None:
    """Make torch, Accelerate and transformers accept our backend; call this once."""
    dist.monitored_barrier = c10d.monitored_barrier = _with_ours(c10d.monitored_barrier)
    changes = {
        "accelerate.state": _accept_in_accelerate,
        "transformers.training_args": _accept_in_training_arguments,
    }
    for name, change in changes.items():
        if name in sys.modules:
            change(sys.modules[name])
        else:
            sys.meta_path.insert(0, _AfterImport(name, change))


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
    state: Any = module.PartialState
    prepare = getattr(state, "_prepare_backend", None)
    if prepare is None:  # another version: it is no worse off than without us
        return

    @wraps(prepare)
    def with_ours(
        self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str, Any]:
        chosen, kind = prepare(self, cpu, sagemaker_dp, backend)
        is_ours = backend == _NAME and chosen == "gloo"
        return (_NAME if is_ours else chosen), kind

    state._prepare_backend = with_ours


def _accept_in_training_arguments(module: ModuleType) -> None:
    field: Any = module.TrainingArguments.__dataclass_fields__.get("ddp_backend")
    names = field.metadata.get("choices", []) if field is not None else []
    if _NAME not in names:
        names.append(_NAME)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it waits until a module is imported, and then changes it."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._change = change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return how the module is loaded and then changed; None for all other modules."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_change(module: ModuleType) -> None:
                load(module)
                self._change(module)

            spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec
