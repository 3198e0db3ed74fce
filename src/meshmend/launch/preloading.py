"""Imports once, in a launcher, what its workers need; they are forked from it and inherit it.

A launcher may import JAX but must not compute with it: JAX then starts threads, which no fork
inherits, and the first computation of a worker would wait for them for ever.
"""

import os
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from meshmend.errors import InputError

_CACHE_VARIABLE: Final = "JAX_COMPILATION_CACHE_DIR"


def preload_modules(names: Iterable[str]) -> None:
    """Import modules by their names.

    Raises:
        InputError: a module cannot be imported, or has computed with JAX.
    """
    for name in names:
        try:
            import_module(name)
        except ImportError as error:
            raise InputError(
                f"--preload needs a module, but cannot import {name}: {error}"
            ) from None
    if _has_computed_with_jax():
        raise InputError(
            "--preload needs modules that only import JAX, but one of them has computed with it, "
            "and workers forked from this process would hang; make arrays in functions, or leave "
            "out that module"
        )


def keep_jax_programs(folder: Path) -> None:
    """Make JAX keep what it compiles in a folder, unless the user has named another.

    Call it before JAX is imported. Workers that are started again then compile nothing.
    """
    if not os.environ.get(_CACHE_VARIABLE):
        os.environ[_CACHE_VARIABLE] = str(folder)
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def preload_training(names: Iterable[str]) -> None:
    """Import modules by their names, and the framework that workers train with.

    That is JAX if one of the modules imports it, else PyTorch if it is installed.

    Raises:
        InputError: a module cannot be imported, or has computed with JAX.
    """
    preload_modules(names)
    if "jax" in sys.modules:
        preload_modules(["meshmend.train.jax.job"])
    elif find_spec("torch"):
        import torch

        preload_modules(["meshmend.train.torch.job", "meshmend.torch"])
        torch.optim.SGD([torch.zeros(1)])  # imports torch's compiler here, not in each worker


def _has_computed_with_jax() -> bool:
    bridge = sys.modules.get("jax._src.xla_bridge")  # JAX has no public name for this
    return bridge is not None and bool(bridge.backends_are_initialized())
