"""Sums of nested values: numbers, arrays of any framework, and dicts and lists of them."""

from collections.abc import Sequence
from typing import Any

from meshmend.errors import InputError


def added(values: Sequence[Any]) -> Any:
    """Return the sum of values, in their order: numbers, arrays, or dicts and lists of them.

    Raises:
        InputError: two values have different keys or lengths, or cannot be added.
    """
    first = values[0]
    if isinstance(first, dict):
        if any(not isinstance(each, dict) or each.keys() != first.keys() for each in values):
            raise InputError(f"a sum needs the same keys everywhere, but got {list(values)!r:.200}")
        return {key: added([each[key] for each in values]) for key in first}
    if isinstance(first, list | tuple):
        if any(not isinstance(each, list | tuple) or len(each) != len(first) for each in values):
            raise InputError(f"a sum needs equally long lists, but got {list(values)!r:.200}")
        return type(first)(added(items) for items in zip(*values, strict=True))
    if first is None or isinstance(first, str):
        raise InputError(f"a sum needs numbers and tensors, but got {first!r:.60}")
    try:
        return sum(values[1:], start=first)
    except (TypeError, ValueError, RuntimeError) as error:  # such as two shapes
        raise InputError(f"a sum needs values alike, but: {error}") from None
