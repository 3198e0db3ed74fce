"""Values of any kind of a union, drawn from the types of their fields; and damage to them."""

import copy
import types
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st
from msgspec import Meta, structs

from meshmend.topology.failures import Link
from meshmend.transport.codec import LARGEST

Document = dict[str, Any]

CHIPS = st.tuples(st.integers(0, 31), st.integers(0, 31))
LINKS = (
    st.tuples(CHIPS, CHIPS)
    .filter(lambda ends: ends[0] != ends[1])
    .map(lambda ends: Link.between(*ends))
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)
_SIMPLE: Mapping[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-LARGEST, LARGEST),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: st.text(max_size=12),
    Link: LINKS,
    type(None): st.none(),
}


def values(kinds: Any) -> st.SearchStrategy[Any]:
    """Draw a value of any of the kinds of a union, NaN aside: it equals nothing."""
    return _of(kinds)


def _of_class(kind: Any) -> st.SearchStrategy[Any]:
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if issubclass(kind, Enum):
        return st.sampled_from(list(kind))
    hints = get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{each.name: _of(hints[each.name]) for each in structs.fields(kind)})


def _of(hint: Any) -> st.SearchStrategy[Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _limited(arguments[0], arguments[1])
    if origin in (Union, types.UnionType):
        return st.one_of(*(_of(each) for each in arguments))
    if origin is tuple and arguments[-1] is not Ellipsis:
        return st.tuples(*(_of(each) for each in arguments))
    if origin is tuple:
        return st.lists(_of(arguments[0]), max_size=3).map(tuple)
    if origin is frozenset:
        return st.frozensets(_of(arguments[0]), max_size=3)
    if origin is not None:
        return st.dictionaries(st.text(max_size=6), _of(arguments[1]), max_size=2)
    return _of_class(hint)


def _limited(kind: type, limit: Meta) -> st.SearchStrategy[Any]:
    if kind is bytes:
        return st.binary(min_size=limit.min_length or 0, max_size=limit.max_length)
    assert limit.ge is not None
    assert limit.le is not None
    if kind is int:
        return st.integers(int(limit.ge), int(limit.le))
    return st.floats(limit.ge, limit.le)


def places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container of a JSON document with each of its keys or indices."""
    keys: Any = ()
    if isinstance(document, dict):
        keys = list(document)
    elif isinstance(document, list):
        keys = range(len(document))
    for key in keys:
        yield document, key
        yield from places(document[key])


@st.composite
def damaged(draw: st.DrawFn, document: Document) -> Document:
    """Draw a document with one value replaced, removed or added, anywhere inside."""
    other = copy.deepcopy(document)
    container, key = draw(st.sampled_from(list(places(other))))
    match draw(st.sampled_from(["replace", "remove", "add"])):
        case "remove":
            del container[key]
        case "add" if isinstance(container, dict):
            container[draw(st.text(max_size=4))] = draw(JSON)
        case _:
            container[key] = draw(JSON)
    return other
