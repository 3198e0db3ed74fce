"""What compiled functions have read from outside, such as a teacher's weights in a closure.

JAX puts such values into the program when it compiles it, once. If the loop gives the name another
value later, the program does not hear of it, and would go on with the old one without a word.

Knows functions and their names, but neither steps nor samples. It looks at closures, globals, given
arguments, and what these hold under names that the functions use; not at what functions of
installed packages read from their modules, nor under names that are computed.
"""

import dis
import functools
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

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


class _Parts(NamedTuple):
    """The names of attributes and the keys that stand in the code of a function."""

    attributes: frozenset[str]
    keys: frozenset[str]


@dataclass(frozen=True)
class _Place:
    """Where a function finds a value, and what it may take of it."""

    name: str
    get: Callable[[], Any]
    parts: "_Parts"

    def leaves(self) -> Iterator[Any]:
        """Yield the numbers and arrays of the value that the function may read."""
        for value in self.values():
            if isinstance(value, _Number):
                yield value
            else:
                yield from _arrays(value)

    def values(self) -> Iterator[Any]:
        """Yield the value, and all that it holds under these names, however deep."""
        waiting, seen = [self.get()], set[int]()
        while waiting:
            value = waiting.pop()
            if isinstance(value, _Number):
                yield value
            elif id(value) not in seen:
                seen.add(id(value))
                yield value
                waiting += _held(value, self.parts)


def _held(value: Any, parts: _Parts) -> list[Any]:
    """Return what a value holds under these names: keys, attributes, or all items of a list."""
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, Mapping):
        return [value[key] for key in sorted(parts.keys & value.keys())]
    if isinstance(value, FunctionType | MethodType | jax.Array | np.ndarray):
        return []
    kinds = (value if isinstance(value, type) else type(value)).__mro__
    owned = {} if isinstance(value, type) else getattr(value, "__dict__", {})
    if isinstance(value, ModuleType) and _is_packaged(value.__name__):
        return []
    found = {name: owned[name] for name in parts.attributes & owned.keys()}
    for kind in kinds:
        if not _is_packaged(kind.__module__):
            for name in parts.attributes & kind.__dict__.keys() - found.keys():
                found[name] = _of_class(kind.__dict__[name], value)
    return [found[name] for name in sorted(found)]


def _of_class(attribute: Any, owner: Any) -> Any:
    """Return what an object has of its class: a method of its own, a slot, or a shared value."""
    if isinstance(attribute, property) and attribute.fget is not None:
        return MethodType(attribute.fget, owner)
    if isinstance(attribute, staticmethod | classmethod):
        return attribute.__func__
    if isinstance(attribute, FunctionType) and not isinstance(owner, type):
        return MethodType(attribute, owner)
    if isinstance(attribute, MemberDescriptorType):
        return getattr(owner, attribute.__name__, None)
    return attribute


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
    waiting, seen = list(functions), set[tuple[int, ...]]()
    while waiting:
        function = waiting.pop()
        is_method = isinstance(function, MethodType)  # made anew whenever it is asked for
        key = (id(function.__func__), id(function.__self__)) if is_method else (id(function),)
        if key not in seen:
            seen.add(key)
            found = list(_places_of(function))
            yield from found
            waiting += _inner(function)
            for value in [each for place in found for each in place.values()]:
                waiting += _functions(value)


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
    """Yield where one function finds values: its object, arguments, closure, globals."""
    if isinstance(function, functools.partial) and isinstance(function.func, FunctionType):
        given = [*function.args, *function.keywords.values()]
        yield from _arguments(function.func, given)
    if isinstance(function, MethodType) and isinstance(function.__func__, FunctionType):
        owner = function.__self__
        _, parts = _names(function.__func__.__code__)
        yield _Place(f"an attribute of {type(owner).__name__}", lambda: owner, parts)
    if not isinstance(function, FunctionType):
        return
    given = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    yield from _arguments(function, given)
    names, parts = _names(function.__code__)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        yield _Place(name, functools.partial(_contents, cell), parts)
    if not _is_of_package(function):
        for name in sorted(names & function.__globals__.keys()):
            yield _Place(name, functools.partial(function.__globals__.get, name), parts)


def _arguments(function: FunctionType, given: list[Any]) -> Iterator[_Place]:
    """Yield the place of the arguments that a function has been given before it is called."""
    if given:
        _, parts = _names(function.__code__)
        yield _Place(f"an argument of {function.__name__}", lambda: given, parts)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None


def _is_of_package(function: FunctionType) -> bool:
    """Whether a function is part of an installed package, and no script's."""
    try:
        return _is_package_file(inspect.getfile(function))
    except (OSError, TypeError):
        return False


@functools.cache
def _is_packaged(module: str) -> bool:
    """Whether a module is part of Python or of an installed package, and no script's."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return module in sys.stdlib_module_names or (file is not None and _is_package_file(file))


def _is_package_file(file: str) -> bool:
    return any(Path(file).is_relative_to(folder) for folder in _PACKAGES)


def _names(code: CodeType) -> tuple[frozenset[str], _Parts]:
    """Return the globals that code reads, and the attributes and keys that it names.

    Also those of the functions inside it.
    """
    read, attributes = set[str](), set[str]()
    keys = {each for each in code.co_consts if isinstance(each, str)}
    for each in dis.get_instructions(code):
        if each.opname == "LOAD_GLOBAL":
            read.add(each.argval)
        elif each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(each.argval)
    for each in code.co_consts:
        if isinstance(each, CodeType):
            more_read, more_parts = _names(each)
            read |= more_read
            attributes |= more_parts.attributes
            keys |= more_parts.keys
    return frozenset(read), _Parts(frozenset(attributes), frozenset(keys))
