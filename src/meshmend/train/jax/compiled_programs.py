"""Keeps the programs that JAX compiles in the folder of the run, for all workers of a host.

One worker compiles, the others wait and load what it has compiled. A worker that is started again
compiles nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import jax
from jax.experimental.compilation_cache import compilation_cache

from meshmend.locks import folder_lock

_WAIT_S: Final = 600.0  # a large model compiles for minutes; who waits in vain compiles itself


@contextmanager
def shared_programs(run_dir: Path | None) -> Iterator[None]:
    """Compile inside this block as the only worker of the run on this host.

    If JAX has a folder for compiled programs already, that one is used.
    """
    settings: Any = jax.config  # half typed
    folder = settings.jax_compilation_cache_dir
    if folder is None and run_dir is not None:
        folder = str(run_dir / "compiled")
        settings.update("jax_compilation_cache_dir", folder)
        settings.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        settings.update("jax_persistent_cache_min_entry_size_bytes", -1)
        compilation_cache.reset_cache()  # JAX looks at these settings only once
    if folder is None:
        yield
        return
    done = Path(folder) / f"meshmend-{jax.__version__}.done"
    with folder_lock(Path(folder), timeout_s=_WAIT_S, is_needless=done.exists):
        yield
    with suppress(OSError):
        done.touch()  # from now on all workers load what was compiled, at the same time
