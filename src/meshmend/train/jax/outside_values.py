"""What compiled functions have read from outside, such as a teacher's weights in a closure.

JAX puts such values into the program when it compiles it, once. If the loop gives the name another
value later, the program does not hear of it, and would go on with the old one without a word.

Knows functions and their names, but neither steps nor samples. It looks at closures, globals, and
attributes that a method names; not at what functions of installed packages read from their modules.
"""

import dis
import functools
import inspect
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import jax
import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.train.jax.program import is_key
from meshmend.train.state.digest import hash_bytes

_PACKAGES: Final = tuple(
    Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib", "platlib")
)
_SMALL: Final = 1 << 16  # bytes of an array whose contents are looked at in each step

_Number = bool | int | float | complex | np.generic | str


class OutsideValues:
    """The numbers and arrays that some functions read from outside, as they are now."""

    def __init__(self, *functions: Callable[..., Any]) -> None:
        self._places = list(_places(functions))
        self._seen = [list(place.leaves()) for place in self._places]

    def changed(self) -> str | None:
        """Return the name of one that has changed since, or None."""
        for place, seen in zip(self._places, self._seen, strict=True):
            found = list(place.leaves())
            if len(found) != len(seen) or not all(map(_is_same, found, seen)):
                return place.name
        return None

    def refuse_changes(self) -> None:
        """Raise InputError if one of them has changed since."""
        if (name := self.changed()) is not None:
            raise InputError(
                f"JaxJob compiles loss and optimizer once, with the values that they read from "
                f"outside, but the loop has changed {name} since, of which they do not hear; put "
                "it into the samples, or into params, with optax.set_to_zero() as its optimizer, "
                "and change it there"
            )


@dataclass(frozen=True)
class _Place:
    """Where a function finds a value, and the names of attributes and keys that it may take."""

    name: str
    get: Callable[[], Any]
    parts: frozenset[str]

    def leaves(self) -> Iterator[Any]:
        """Yield the numbers and arrays of the value that the function may read."""
        value = self.get()
        if isinstance(value, _Number):
            yield value
            return
        yield from _arrays(value)
        if isinstance(value, type | ModuleType | FunctionType):
            return
        is_mapping = isinstance(value, Mapping)  # whose arrays are found already
        held = value if is_mapping else getattr(value, "__dict__", {})
        for part in (held[name] for name in self.parts & held.keys()):
            if isinstance(part, _Number):
                yield part
            elif not is_mapping:
                yield from _arrays(part)


def _arrays(value: Any) -> Iterator[Any]:
    """Yield the arrays of a tree, each small one that can change in place with its hash."""
    for leaf in _leaves(value):
        if isinstance(leaf, jax.Array):
            yield leaf
        elif isinstance(leaf, np.ndarray):
            yield leaf, _hash(leaf) if leaf.nbytes <= _SMALL and not leaf.dtype.hasobject else 0


def _leaves(tree: Any) -> list[Any]:
    try:
        return jax.tree.leaves(tree)
    except (TypeError, ValueError):  # such as a dict of texts and numbers, which JAX cannot sort
        return []


def _hash(array: NDArray[Any]) -> int:
    return hash_bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _is_same(found: Any, seen: Any) -> bool:
    """Whether two leaves are one array with one hash, or equal numbers, or small equal arrays."""
    if isinstance(found, tuple) and isinstance(seen, tuple):
        return found[0] is seen[0] and bool(found[1] == seen[1])
    if isinstance(found, _Number) and isinstance(seen, _Number):
        is_equal = found == seen or (found != found and seen != seen)
        return type(found) is type(seen) and bool(is_equal)
    if found is seen or not (isinstance(found, jax.Array) and isinstance(seen, jax.Array)):
        return bool(found is seen)
    two = found, seen
    if found.dtype != seen.dtype or any(is_key(each) or each.is_deleted() for each in two):
        return False
    return found.nbytes <= _SMALL and bool(np.array_equal(found, seen))


def _places(functions: tuple[Any, ...]) -> Iterator[_Place]:
    """Yield where these functions, and those that they call, find values outside."""
    waiting, seen = list(functions), set[int]()
    while waiting:
        function = waiting.pop()
        if id(function) not in seen:
            seen.add(id(function))
            found = list(_places_of(function))
            yield from found
            waiting += _inner(function)
            waiting += _functions([place.get() for place in found])


def _functions(tree: Any) -> list[Any]:
    """Return what can be called of a tree; an object that is no tree is itself."""
    return [each for each in _leaves(tree) if callable(each) and not isinstance(each, type)]


def _inner(function: Any) -> list[Any]:
    """Return the functions that another object calls when it is called."""
    if isinstance(function, functools.partial):
        return [function.func, *_functions((function.args, function.keywords))]
    if isinstance(function, MethodType):
        return [function.__func__]
    if isinstance(function, FunctionType):
        return []
    inner = getattr(function, "__wrapped__", None), function.__call__
    return [each for each in inner if isinstance(each, FunctionType | MethodType)]


def _places_of(function: Any) -> Iterator[_Place]:
    """Yield where one function finds values: its object, its closure, its globals."""
    if isinstance(function, MethodType) and isinstance(function.__func__, FunctionType):
        owner = function.__self__
        _, parts = _names(function.__func__.__code__)
        yield _Place(f"an attribute of {type(owner).__name__}", lambda: owner, parts)
    if not isinstance(function, FunctionType):
        return
    names, parts = _names(function.__code__)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        yield _Place(name, functools.partial(_contents, cell), parts)
    if not _is_of_package(function):
        for name in sorted(names & function.__globals__.keys()):
            yield _Place(name, functools.partial(function.__globals__.get, name), parts)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None


def _is_of_package(function: FunctionType) -> bool:
    """Whether a function is part of an installed package, and no script's."""
    try:
        file = Path(inspect.getfile(function))
    except (OSError, TypeError):
        return False
    return any(file.is_relative_to(folder) for folder in _PACKAGES)


def _names(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the globals that code reads, and the names of attributes and keys in it.

    Also those of the functions inside it.
    """
    read, parts = set[str](), {each for each in code.co_consts if isinstance(each, str)}
    for each in dis.get_instructions(code):
        if each.opname == "LOAD_GLOBAL":
            read.add(each.argval)
        elif each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            parts.add(each.argval)
    for each in code.co_consts:
        if isinstance(each, CodeType):
            more_read, more_parts = _names(each)
            read |= more_read
            parts |= more_parts
    return frozenset(read), frozenset(parts)
