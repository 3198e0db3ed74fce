"""Values as JSON and back: one codec for every dataclass that crosses a wire or goes into a file.

A codec knows its **kinds**: frozen dataclasses, each under a name. It writes a value as one JSON
object that holds the name and the fields. When it reads one, it checks every field against the
field's type; `Within` adds a range to a number. It refuses an unknown kind, a missing or unknown
field, a value of the wrong type and a value out of range.

Knows nothing of what the values mean. Nothing is unpickled.
"""

import dataclasses
import math
import reprlib
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from meshmend.errors import MessageError


@dataclass(frozen=True)
class Within:
    """The range of a number, both ends included; infinity and NaN are in no range."""

    least: float
    most: float = math.inf

    def __str__(self) -> str:
        if self.most >= LARGEST:
            return f"of {self.least:g} or more"
        return f"from {self.least:g} to {self.most:g}"


@dataclass(frozen=True)
class AnyReal:
    """Marks a float that may be infinite or not a number (NaN), such as a loss."""


LARGEST: Final = (1 << 53) - 1  # whole numbers up to here are exact in every JSON reader
Count = Annotated[int, Within(0, LARGEST)]
Seconds = Annotated[float, Within(0)]
Real = Annotated[float, AnyReal()]

Value = TypeVar("Value")
Reader = Callable[[object], Any]
_SHOWN = 60  # characters of a wrong value that an error shows


class _FieldError(Exception):
    """A value does not fit its type: what the type needs, the value, and the field it is in."""

    def __init__(self, wanted: str, value: object, where: str = "") -> None:
        super().__init__(wanted)
        self.wanted, self.value, self.where = wanted, value, where


class Codec:
    """Writes and reads values of some kinds; `key` is the field that holds a kind's name.

    `texts` maps each type that is written with `str` to the function that reads it back. `nested`
    maps each type that another codec writes to that codec.
    """

    def __init__(
        self,
        what: str,
        kinds: Mapping[str, type],
        *,
        key: str = "kind",
        texts: Mapping[type, Callable[[str], Any]] | None = None,
        nested: Mapping[type, "Codec"] | None = None,
    ) -> None:
        self._what = what
        self._key = key
        self._kinds = dict(kinds)
        self._names = {kind: name for name, kind in kinds.items()}
        self._texts = dict(texts or {})
        self._nested = dict(nested or {})
        self._readers = cache(self._fields_of)

    @property
    def kinds(self) -> Mapping[str, type]:
        """The dataclass of each kind by its name."""
        return types.MappingProxyType(self._kinds)

    def name_of(self, value: object) -> str:
        """Return the name of a value's kind."""
        return self._names[type(value)]

    def encode(self, value: object) -> dict[str, Any]:
        """Return a value of one of the kinds as a JSON object."""
        return {self._key: self._names[type(value)], **self._object(value)}

    def decode(self, document: object) -> Any:
        """Return the value that a JSON object holds.

        Raises:
            MessageError: it is not one that `encode` writes.
        """
        if not isinstance(document, dict) or not isinstance(document.get(self._key), str):
            raise MessageError(
                f"{self._what} needs an object with a text under {self._key!r}, but got "
                f"{shown(document)}"
            )
        name = document[self._key]
        if name not in self._kinds:
            raise MessageError(
                f"{self._what} needs a kind among {', '.join(self._kinds)}, but got {name!r}"
            )
        try:
            fields = {field: each for field, each in document.items() if field != self._key}
            return self._read_object(self._kinds[name], fields)
        except _FieldError as wrong:
            raise MessageError(
                f"{self._what} {name!r} needs {wrong.wanted} under {wrong.where!r}, but got "
                f"{shown(wrong.value)}"
            ) from None

    def _object(self, value: Any) -> dict[str, Any]:
        return {
            each.name: self._plain(getattr(value, each.name)) for each in dataclasses.fields(value)
        }

    def _plain(self, value: Any) -> Any:
        for kind, codec in self._nested.items():
            if isinstance(value, kind):
                return codec.encode(value)
        if isinstance(value, Enum):
            return value.value
        if type(value) in self._texts:
            return str(value)
        if dataclasses.is_dataclass(value):
            return self._object(value)
        if isinstance(value, frozenset):
            return sorted(self._plain(each) for each in value)
        if isinstance(value, tuple | list):
            return [self._plain(each) for each in value]
        if isinstance(value, Mapping):
            return {str(name): self._plain(each) for name, each in value.items()}
        return value

    def _fields_of(self, kind: type) -> dict[str, tuple[Reader, bool]]:
        """Return how to read each field of a dataclass, and whether it must be there."""
        hints = get_type_hints(kind, include_extras=True)
        missing = dataclasses.MISSING
        return {
            each.name: (
                self._reader(hints[each.name]),
                each.default is missing and each.default_factory is missing,
            )
            for each in dataclasses.fields(kind)
        }

    def _read_object(self, kind: type, document: Mapping[str, object]) -> Any:
        fields = self._readers(kind)
        for name in document:
            if name not in fields:
                raise _FieldError("nothing", document[name], name)
        values = {}
        for name, (read, is_needed) in fields.items():
            if name not in document:
                if is_needed:
                    raise _FieldError("a value", None, name)
                continue
            try:
                values[name] = read(document[name])
            except _FieldError as wrong:
                inner = f"{name}.{wrong.where}" if wrong.where else name
                raise _FieldError(wrong.wanted, wrong.value, inner) from None
        return kind(**values)

    def _reader(self, hint: Any) -> Reader:
        """Return the function that reads values of a type."""
        origin, arguments = get_origin(hint), get_args(hint)
        if origin is Annotated:
            return _limited(self._reader_of_number(arguments[0]), arguments[1])
        if origin in (Union, types.UnionType):
            return _optional([self._reader(each) for each in arguments if each is not type(None)])
        if origin is tuple:
            if len(arguments) == 2 and arguments[1] is Ellipsis:
                return _list_of(self._reader(arguments[0]))
            return _fixed_list_of([self._reader(each) for each in arguments])
        if origin is frozenset:
            read = _list_of(self._reader(arguments[0]))
            return lambda value: frozenset(read(value))
        if origin is not None:  # a mapping of texts
            return _mapping_of(self._reader(arguments[1]))
        return self._reader_of_class(hint)

    def _reader_of_class(self, kind: Any) -> Reader:
        if kind in self._nested:
            return self._nested[kind].decode
        if kind in self._texts:
            return _text_as(self._texts[kind], kind.__name__)
        if issubclass(kind, Enum):
            return _enum(kind)
        if hasattr(kind, "__dataclass_fields__"):
            return self._dataclass(kind)
        return _limited(self._reader_of_number(kind), None) if kind is float else _SIMPLE[kind]

    def _dataclass(self, kind: type) -> Reader:
        return lambda value: self._read_object(kind, _mapping(value))

    @staticmethod
    def _reader_of_number(kind: Any) -> Reader:
        return _SIMPLE[kind]


def shown(value: object) -> str:
    """Return a value as an error message shows it: only its beginning if it is long or deep."""
    # Python's own repr fails on values that are nested deeper than its stack.
    short = reprlib.Repr()
    short.maxlevel = 4
    short.maxstring = short.maxlist = short.maxdict = short.maxother = _SHOWN
    text = short.repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _FieldError("a whole number", value)
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _FieldError("a number", value)
    try:
        return float(value)
    except OverflowError:
        raise _FieldError("a number", value) from None


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise _FieldError("true or false", value)
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _FieldError("a text", value)
    return value


def _mapping(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise _FieldError("an object", value)
    return value


_SIMPLE: Final[Mapping[type, Reader]] = {int: _integer, float: _number, bool: _boolean, str: _text}


def _limited(read: Reader, limit: object) -> Reader:
    """Return a reader of numbers within a limit; without a limit a number must be finite."""

    def limited(value: object) -> Any:
        number = read(value)
        if isinstance(limit, Within):
            if not limit.least <= number <= limit.most or number == math.inf:
                kind = "whole number" if isinstance(number, int) else "number"
                raise _FieldError(f"a {kind} {limit}", value)
        elif not isinstance(limit, AnyReal) and not math.isfinite(number):
            raise _FieldError("a finite number", value)
        return number

    return limited


def _optional(readers: list[Reader]) -> Reader:
    """Return a reader of null, or of what one of the readers takes; they are tried in turn."""

    def read(value: object) -> Any:
        if value is None:
            return None
        errors = []
        for each in readers:
            try:
                return each(value)
            except _FieldError as error:
                errors.append(error)
        if len(errors) == 1:
            raise errors[0]
        raise _FieldError(" or ".join(error.wanted for error in errors), value)

    return read


def _items(value: object) -> list[object]:
    if not isinstance(value, list | tuple):
        raise _FieldError("a list", value)
    return list(value)


def _list_of(read: Reader) -> Reader:
    return lambda value: tuple(read(each) for each in _items(value))


def _fixed_list_of(readers: list[Reader]) -> Reader:
    def fixed_list(value: object) -> tuple[Any, ...]:
        items = _items(value)
        if len(items) != len(readers):
            raise _FieldError(f"a list of {len(readers)}", value)
        return tuple(read(each) for read, each in zip(readers, items, strict=True))

    return fixed_list


def _mapping_of(read: Reader) -> Reader:
    return lambda value: {name: read(each) for name, each in _mapping(value).items()}


def _enum(kind: type[Enum]) -> Reader:
    def member(value: object) -> Enum:
        try:
            return kind(value)
        except ValueError:
            names = ", ".join(str(each.value) for each in kind)
            raise _FieldError(f"one of {names}", value) from None

    return member


def _text_as(read: Callable[[str], Any], name: str) -> Reader:
    def value_of(value: object) -> Any:
        try:
            return read(_text(value))
        except Exception:
            raise _FieldError(f"the text of a {name.lower()}", value) from None

    return value_of
