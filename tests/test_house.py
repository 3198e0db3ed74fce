"""The rule of the house that no linter knows: every module says what it is."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "src" / "meshmend").rglob("*.py"))


def test_every_module_says_what_it_is() -> None:
    silent = [
        path.relative_to(ROOT).as_posix()
        for path in MODULES
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]

    assert len(MODULES) > 100
    assert not silent
