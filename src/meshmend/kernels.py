"""How inner loops are compiled, and when compiled code on disk may be used again.

The compiled code of a kernel contains the kernels that it calls and the constants that it uses.
Numba itself forgets compiled code only when the file of the kernel changes. So after a change in
another file it would run the old code there: an event loop that knows nothing of new kinds of moves
waits for ever.

A disk that cannot be read or written stops nobody: each process then compiles for itself.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, Final

import numpy as np
from numba import njit
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature
from numba.core.types import Type, unliteral

_CONSTANTS: Final = (bool, int, float, complex, str, bytes, tuple, np.generic, Type)


class _KernelCache(FunctionCache):
    """Numba's files on disk, which also notice changes in what a kernel calls and uses."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return compiled code from disk, or None; Numba then compiles, and saves here."""
        self._cache_file._source_stamp = _stamp(self._py_func)
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception:  # a pickle that a power failure has cut off may raise anything
            self._forget()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep compiled code on disk, if the disk takes it."""
        try:
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        except OSError:
            self._forget()  # the new index may name a file that still has the old code

    def _forget(self) -> None:
        """Delete the index, so that no process reads what it names."""
        try:
            Path(self._cache_file._index_path).unlink(missing_ok=True)
        except OSError:
            self.disable()  # type: ignore[no-untyped-call]


def _compiled(*, is_kept: bool = True, **options: Any) -> Callable[[Any], Any]:
    """Return a decorator that compiles a kernel without the interpreter's lock.

    Nothing uses a C function pointer of a kernel; making none saves a tenth of the time to compile.
    """
    compiled: Any = njit(nogil=True, no_cfunc_wrapper=True, **options)  # type: ignore[call-overload]  # not in Numba's stubs

    def decorate(function: Any) -> Any:
        dispatcher = compiled(function)
        if not hasattr(dispatcher, "py_func"):
            return dispatcher  # NUMBA_DISABLE_JIT is set
        _compile_once_for_all_constants(dispatcher)
        if is_kept:
            _keep(dispatcher, function)
        return dispatcher

    return decorate


def _keep(compiled: Any, function: Any) -> None:
    """Make Numba keep the compiled code of a function on disk, if it finds a folder to write to."""
    with suppress(RuntimeError):  # there is none
        compiled._cache = _KernelCache(function)  # type: ignore[no-untyped-call]
    _file_stamp(function.__code__.co_filename)  # now, while the file is what was imported


def _compile_once_for_all_constants(dispatcher: Any) -> None:
    """Let kernels that call one with 0, with 1 and with a variable call the same code.

    Numba would compile it for each of them, and so all that it calls.
    """
    template_of = dispatcher.get_call_template

    def get_call_template(args: Any, kws: Any) -> Any:
        by_name = dict(zip(kws, map(unliteral, kws.values()), strict=True))
        return template_of(tuple(map(unliteral, args)), by_name)

    dispatcher.get_call_template = get_call_template


kernel = _compiled()

# For kernels that make no array and call no kernel that does. Numba then counts no references,
# which would take four fifths of the time where many small kernels call each other.
plain_kernel = _compiled(_nrt=False)

# For small kernels that other kernels call many times: compiled into the caller, because passing
# many arrays costs more than what a small kernel does with them.
inlined = _compiled(is_kept=False, _nrt=False, forceinline=True)

# For kernels that only kernels call: no wrapper that unpacks Python objects is made. With arguments
# of many arrays, making it takes longer than compiling the kernel.
inner_kernel = _compiled(no_cpython_wrapper=True, _nrt=False)


def c_function(function: Any, signature: Any) -> Any:
    """Return a function compiled, or loaded from disk, for a caller that knows its `address`."""
    compiled: Any = CFunc(function, normalize_signature(signature), locals={}, options={})  # type: ignore[no-untyped-call]
    _keep(compiled, function)
    compiled.compile()
    return compiled


def _stamp(function: Any) -> tuple[str, ...]:
    """Return a text for each file and each constant that the compiled code of a kernel contains."""
    parts, seen, left = set[str](), {function}, [function]
    while left:
        caller = left.pop()
        parts.add(_file_stamp(caller.__code__.co_filename))
        for name in _names(caller.__code__):
            used = caller.__globals__.get(name)
            if (called := getattr(used, "py_func", None)) is not None:
                if called not in seen:
                    seen.add(called)
                    left.append(called)
            elif isinstance(used, _CONSTANTS):
                parts.add(f"{caller.__module__} {name} {used!r}")
            elif isinstance(used, np.ndarray):
                parts.add(f"{caller.__module__} {name} {used.tolist()!r}")
            elif (file := _file_of(used)) is not None:
                parts.add(_file_stamp(file))
    return tuple(sorted(parts))


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that code uses, and that functions inside it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _file_of(used: object) -> str | None:
    """Return the file of a class or an intrinsic of this package; None for what others made."""
    name = getattr(used, "__module__", None)
    if not isinstance(name, str) or name.partition(".")[0] != __name__.partition(".")[0]:
        return None
    return getattr(sys.modules.get(name), "__file__", None)


@cache
def _file_stamp(path: str) -> str:
    stat = Path(path).stat()
    return f"{path} {stat.st_mtime_ns} {stat.st_size}"
