"""What crosses a wire or goes into a file: the types of its fields, and how it is read, by msgspec.

Such a value is a `Value`: a frozen `msgspec.Struct`. Several kinds share a tagged base, and a
reader takes their union. A reader checks every field against its type and range. It refuses an
unknown kind, a missing or unknown field, a value of the wrong type and a value out of range.

Knows nothing of what the values mean. Nothing is unpickled.
"""

import reprlib
import sys
from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec

from meshmend.errors import MessageError, TopologyError

LARGEST: Final = (1 << 53) - 1  # whole numbers up to here are exact in every JSON reader
_LARGEST_FLOAT: Final = sys.float_info.max  # infinity and NaN are in no range

Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=_LARGEST_FLOAT)]
Finite = Annotated[float, msgspec.Meta(ge=-_LARGEST_FLOAT, le=_LARGEST_FLOAT)]
Real = float  # may be infinite or not a number (NaN), such as a loss

_SHOWN = 60  # characters of a wrong value that an error shows


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value that crosses a wire or goes into a file."""


def tag_of(value: msgspec.Struct) -> str:
    """Return the name of a value's kind."""
    return str(value.__struct_config__.tag)


def plain(value: object) -> Any:
    """Return a value as what JSON knows: objects, lists, texts and numbers."""
    return msgspec.to_builtins(value, order="deterministic")


def value_of(document: object, kind: Any, what: str) -> Any:
    """Return the value that a JSON document holds; `what` is its name in an error.

    Raises:
        MessageError: it does not hold one of that kind.
    """
    return checked(lambda: msgspec.convert(document, kind), what)


def checked(read: Callable[[], Any], what: str) -> Any:
    """Return what `read` returns; `what` names it in an error.

    Raises:
        MessageError: msgspec refuses it, or one of its parts refuses to be made.
    """
    try:
        return read()
    except (msgspec.MsgspecError, TopologyError, ValueError) as error:
        raise MessageError(f"{what} is not valid: {error}") from None
    except RecursionError:
        raise MessageError(f"{what} is nested too deep") from None


def shown(value: object) -> str:
    """Return a value as an error message shows it: only its beginning if it is long or deep."""
    # Python's own repr fails on values that are nested deeper than its stack.
    short = reprlib.Repr()
    short.maxlevel = 4
    short.maxstring = short.maxlist = short.maxdict = short.maxother = _SHOWN
    text = short.repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
