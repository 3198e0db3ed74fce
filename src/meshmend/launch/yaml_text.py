"""Writes documents as YAML: mappings, lists, texts, whole numbers, booleans and null.

A text is quoted unless it is plainly a word. So no reader takes a text such as `yes` or `1e3` for
something else, and the project needs no YAML library.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

_WORD: Final = re.compile(r"(--?)?[A-Za-z/][A-Za-z0-9_./-]*")
_NOT_TEXT: Final = frozenset(["y", "n", "yes", "no", "on", "off", "true", "false", "null"])


def yaml_text(documents: Sequence[Mapping[str, Any]]) -> str:
    """Return documents as one YAML stream, separated by lines of three dashes."""
    return "---\n".join("".join(f"{line}\n" for line in _lines(each)) for each in documents)


def _lines(value: Any) -> Iterator[str]:
    """Yield the lines of a mapping or list that is not empty."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            name = _scalar(str(key))
            if _is_block(item):
                yield f"{name}:"
                yield from (f"  {line}" for line in _lines(item))
            else:
                yield f"{name}: {_scalar(item)}"
        return
    for item in value:
        if _is_block(item):
            first, *others = _lines(item)
            yield f"- {first}"
            yield from (f"  {line}" for line in others)
        else:
            yield f"- {_scalar(item)}"


def _is_block(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple) and len(value) > 0


def _scalar(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)  # numbers, booleans, null and what is empty are written as in JSON
    if _WORD.fullmatch(value) and value.lower() not in _NOT_TEXT:
        return value
    return f'"{"".join(map(_character, value))}"'


def _character(character: str) -> str:
    """Return a character of a quoted text; all but printable ASCII is written as its number."""
    if character in '"\\':
        return f"\\{character}"
    return character if " " <= character <= "~" else f"\\U{ord(character):08x}"
