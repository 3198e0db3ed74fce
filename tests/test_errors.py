"""Every error of meshmend is in one tree, and the drawing of the tree is true."""

import ast
import inspect
import re
from pathlib import Path

from meshmend import errors

SOURCE = Path(errors.__file__).parent


def drawn() -> dict[str, str]:
    """Return the parent of each class that the docstring draws."""
    parents, above = {}, ["MeshmendError"]
    assert errors.__doc__ is not None
    for line in errors.__doc__.splitlines():
        if match := re.match(r" {4}((?:│ {3}| {4})*)[├└]── (\w+)", line):
            depth = len(match[1]) // 4 + 1
            parents[match[2]] = above[depth - 1]
            above[depth:] = [match[2]]
    return parents


def test_the_drawing_shows_every_class_below_its_parent() -> None:
    defined = {
        name: kind.__bases__[0].__name__
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.MeshmendError) and kind is not errors.MeshmendError
    }

    assert drawn() == defined


def test_the_one_class_outside_the_tree_is_named_below_it() -> None:
    outside = {
        name
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if kind.__module__ == errors.__name__ and not issubclass(kind, errors.MeshmendError)
    }

    assert outside == {"TerminatedError"}
    assert "    TerminatedError (a BaseException, not a MeshmendError)" in (errors.__doc__ or "")


def test_no_other_module_defines_a_public_error() -> None:
    """A class counts that has an error's name, or is derived from a class with one."""
    elsewhere = [
        f"{path.relative_to(SOURCE)}: {node.name}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path != Path(errors.__file__)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        if any(
            name.endswith(("Error", "Exception", "Interrupt"))
            for name in (node.name, *(ast.unparse(base) for base in node.bases))
        )
    ]

    assert elsewhere == []
