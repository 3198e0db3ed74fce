"""The rules of the house that no linter knows: sizes, names, docstrings, and plain words."""

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "meshmend"
MODULES = sorted(SOURCE.rglob("*.py"))
PROGRAMS = [
    *MODULES,
    *sorted((ROOT / "benchmarks").rglob("*.py")),
    *sorted((ROOT / "examples").rglob("*.py")),
]

MOST_FILE_LINES = 400
MOST_FUNCTION_LINES = 60

# Words of a dialect that this code once spoke; the glossary has the words of the field.
DIALECT = frozenset(
    [
        *("Here", "harm", "mischief", "chaos", "door", "reception", "errand", "Errand"),
        *("foresight", "shelve", "recollect", "telling", "laggards", "urgency", "movers", "crew"),
        *("Wish", "Ground", "Race", "Lap", "meeting_svg"),
    ]
)
DIALECT_FUNCTIONS = frozenset(["here"])  # as a variable it is a place in a mesh


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions_in(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def n_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def repeated(names: list[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)


def identifiers_in(tree: ast.AST) -> set[str]:
    """Return every name that a program gives or uses; words in text and comments are none."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.ClassDef(name=name):
                found.add(name)
            case ast.keyword(arg=str(name)):
                found.add(name)
            case ast.ImportFrom(module=str(module)):
                found.update(module.split("."))
            case ast.alias(name=name, asname=other):
                found.update(name.split("."), [other] if other else [])
    return found


def functions_named_in(tree: ast.AST) -> set[str]:
    """Return the names of all functions that a program defines, imports or calls."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.alias(name=name):
                found.add(name)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                found.add(name)
    return found


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_source_file_has_more_than_400_lines(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_FILE_LINES


def test_no_function_has_more_than_60_lines_but_for_the_option_lists_of_commands() -> None:
    long = [
        f"{name_of(path)}: {function.name} has {n_lines(function)} lines"
        for path in MODULES
        for function in functions_in(path)
        if n_lines(function) > MOST_FUNCTION_LINES and not function.name.endswith("_command")
    ]

    assert not long


def test_no_module_name_is_used_twice_below_the_command_line() -> None:
    names = [
        path.stem
        for path in MODULES
        if SOURCE / "cli" not in path.parents and not path.stem.startswith("__")
    ]

    assert len(names) > 100
    assert not repeated(names)


def test_no_public_class_name_is_used_twice() -> None:
    names = [
        node.name
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]

    assert len(names) > 100
    assert not repeated(names)


def test_every_module_says_what_it_is() -> None:
    assert not [name_of(path) for path in MODULES if not ast.get_docstring(tree_of(path))]


@pytest.mark.parametrize("path", PROGRAMS, ids=name_of)
def test_programs_use_the_words_of_the_field(path: Path) -> None:
    tree = tree_of(path)

    assert not sorted({*identifiers_in(tree), path.stem} & DIALECT)
    assert not sorted(functions_named_in(tree) & DIALECT_FUNCTIONS)


def test_the_documents_name_no_function_or_module_by_a_word_of_the_dialect() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    used = [
        f"{name_of(page)}: {word}"
        for page in pages
        for word in sorted(DIALECT | DIALECT_FUNCTIONS)
        if any(form in page.read_text(encoding="utf-8") for form in (f"`{word}`", f"{word}()"))
    ]

    assert not used


@pytest.mark.parametrize(
    "program",
    ["def door(): ...", "x.door", "import a.door", "from door import a", "f(door=1)", "door: int"],
)
def test_a_word_of_the_dialect_is_found_wherever_a_program_names_it(program: str) -> None:
    assert "door" in identifiers_in(ast.parse(program))
    assert "door" not in identifiers_in(ast.parse("'door'  # door"))


@pytest.mark.parametrize("program", ["def here(): ...", "here()", "a.here()", "from a import here"])
def test_a_function_of_the_dialect_is_found_and_a_place_is_none(program: str) -> None:
    assert "here" in functions_named_in(ast.parse(program))
    assert "here" not in functions_named_in(ast.parse("here, there = 1, 2"))
