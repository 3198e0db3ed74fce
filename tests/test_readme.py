"""The README's program prints what the README says; pages link to what is there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_ten_lines_print_what_stands_below_them() -> None:
    match = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", README, re.DOTALL)
    assert match is not None

    ended = subprocess.run([sys.executable, "-c", match[1]], capture_output=True, text=True)

    assert ended.stdout == match[2]
    assert ended.returncode == 0


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", pages(), ids=named)
def test_every_file_that_a_page_links_to_is_there(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))

    for target in targets:
        path = page.parent / target
        assert path.exists(), target


@pytest.mark.parametrize("page", pages()[2:], ids=named)
def test_a_page_says_first_whom_it_is_for(page: Path) -> None:
    title, first, *_ = re.split(r"\n\n+", page.read_text(encoding="utf-8"))

    assert title.startswith("# ")
    assert first.startswith("For "), first
