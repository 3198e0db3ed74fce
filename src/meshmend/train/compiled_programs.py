"""Keeps the programs that JAX compiles in the folder of the run, for all workers of a host.

One worker compiles, the others wait and load what it has compiled. A worker that is started again
compiles nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Final

import jax
from jax.experimental.compilation_cache import compilation_cache

from meshmend.locks import folder_lock

_WAIT_S: Final = 600.0  # a large model compiles for minutes; who waits in vain compiles itself


@contextmanager
def shared_programs(run_dir: Path | None) -> Iterator[None]:
    """Compile inside this block as the only worker of the run on this host.

    If JAX has a folder for compiled programs already, that one is used.
    """
    folder = jax.config.jax_compilation_cache_dir
    if folder is None and run_dir is not None:
        folder = str(run_dir / "compiled")
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        compilation_cache.reset_cache()  # JAX looks at these settings only once
    with folder_lock(Path(folder), timeout_s=_WAIT_S) if folder else nullcontext():
        yield
