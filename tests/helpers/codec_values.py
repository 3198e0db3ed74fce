"""Values of any kind that a codec knows, drawn from the types of its fields; and damage to them."""

import copy
import dataclasses
import types
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from meshmend.topology.failures import Link
from meshmend.transport.codec import LARGEST, AnyReal, Codec, Within

Document = dict[str, Any]

CHIPS = st.tuples(st.integers(0, 31), st.integers(0, 31))
LINKS = (
    st.tuples(CHIPS, CHIPS)
    .filter(lambda ends: ends[0] != ends[1])
    .map(lambda ends: Link.between(*ends))
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)
_SIMPLE: Mapping[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-LARGEST, LARGEST),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    str: st.text(max_size=12),
    Link: LINKS,
}


def values(codec: Codec, nested: Mapping[type, Codec] | None = None) -> st.SearchStrategy[Any]:
    """Draw a value of any kind that a codec knows; `nested` as the codec has it."""
    others = {kind: values(own) for kind, own in (nested or {}).items()}
    return st.one_of(*(_of_class(kind, others) for kind in codec.kinds.values()))


def _of_class(kind: Any, others: Mapping[Any, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    known = {**_SIMPLE, **others}
    if kind in known:
        return known[kind]
    if issubclass(kind, Enum):
        return st.sampled_from(list(kind))
    hints = get_type_hints(kind, include_extras=True)
    return st.builds(
        kind, **{each.name: _of(hints[each.name], others) for each in dataclasses.fields(kind)}
    )


def _of(hint: Any, others: Mapping[Any, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _number(arguments[0], arguments[1])
    if origin in (Union, types.UnionType):
        parts = [each for each in arguments if each is not type(None)]
        return st.none() | st.one_of(*(_of(each, others) for each in parts))
    if origin is tuple and arguments[-1] is not Ellipsis:
        return st.tuples(*(_of(each, others) for each in arguments))
    if origin is tuple:
        return st.lists(_of(arguments[0], others), max_size=3).map(tuple)
    if origin is frozenset:
        return st.frozensets(_of(arguments[0], others), max_size=3)
    if origin is not None:
        return st.dictionaries(st.text(max_size=6), _of(arguments[1], others), max_size=2)
    return _of_class(hint, others)


def _number(kind: type, limit: Within | AnyReal) -> st.SearchStrategy[Any]:
    """Draw a number within a limit; NaN, which equals nothing, is not drawn."""
    if isinstance(limit, AnyReal):
        return st.floats(allow_nan=False)
    if kind is int:
        return st.integers(int(limit.least), int(min(limit.most, LARGEST)))
    return st.floats(limit.least, min(limit.most, 1e12), allow_nan=False)


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
