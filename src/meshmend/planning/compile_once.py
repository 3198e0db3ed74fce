"""Compiles what workers need once per host: one process compiles, the others wait.

Numba keeps compiled loops in a cache on disk, but two processes may still compile the same loop.
Workers that start together without a cache would all compile everything, and would miss their
heartbeats meanwhile.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Final

import llvmlite.binding  # type: ignore[import-untyped]

from meshmend.files import write_whole

_MODULE: Final = "meshmend.planning.warm_up"
# One process each. `plans` also compiles what the others have not yet; the two shares take about
# equally long. Where there are more cores than processes, the wait is that for the longest part.
_TWO_SHARES: Final = (("plans",), ("exchange", "proofs"))
_FOUR_SHARES: Final = (("plans",), ("exchange",), ("simulation",), ("proofs",))
_PACKAGE: Final = Path(__file__).parents[1]


def compile_once(
    announce: Callable[[], None] = lambda: None, meanwhile: Callable[[], None] = lambda: None
) -> None:
    """Return when all that workers need is compiled; call `announce` before compiling here.

    While this process or another one compiles, `meanwhile` is called: there is time for it.
    If no file can be written, nothing is done: each worker then compiles for itself.
    """
    mark = compiled_mark()
    folder = mark.parent
    if mark.exists():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "meshmend-compiling.lock", meanwhile):
            if not mark.exists():
                announce()
                if _compile(meanwhile):
                    write_whole(mark, _fingerprint(), is_durable=False)  # fails on a full disk
    except OSError:
        return


def compiled_mark() -> Path:
    """Return the file that is there once all that workers need is compiled."""
    return _cache_folder() / f"meshmend-compiled-{_fingerprint()}"


def _compile(meanwhile: Callable[[], None]) -> bool:
    """Compile all parts at the same time; return whether all succeeded."""
    n_cores = len(os.sched_getaffinity(0))
    shares = _FOUR_SHARES if n_cores >= len(_FOUR_SHARES) else _TWO_SHARES
    commands = [[sys.executable, "-P", "-m", _MODULE, *share] for share in shares]
    silent = subprocess.DEVNULL
    running = [subprocess.Popen(each, stdout=silent, stderr=silent) for each in commands]
    meanwhile()
    codes = [process.wait() for process in running]
    return not any(codes)


def _cache_folder() -> Path:
    """Return a folder that exists about as long as Numba's cache."""
    if named := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(named)
    if os.access(_PACKAGE, os.W_OK):
        return _PACKAGE / "__pycache__"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshmend"


def _fingerprint() -> str:
    """Return a text that changes when Numba compiles again: other sources, another machine."""
    parts = [version("numba"), sys.version, llvmlite.binding.get_host_cpu_name()]
    for path in sorted(_PACKAGE.rglob("*.py")):
        if b"from numba" in (text := path.read_bytes()) or b"meshmend.kernels" in text:
            stat = path.stat()
            parts.append(f"{path} {stat.st_mtime_ns} {stat.st_size}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@contextmanager
def _locked(path: Path, meanwhile: Callable[[], None]) -> Iterator[None]:
    """Hold a file's lock; the kernel releases it if this process dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            meanwhile()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
