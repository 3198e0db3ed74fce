"""`make docs`: the site builds offline with every link checked, and has what it promises."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(
    find_spec("mkdocs") is None, reason="needs MkDocs: pip install 'meshmend[docs]'"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir"]
    ended = subprocess.run([*command, str(folder)], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return folder


def test_every_document_is_a_page(site: Path) -> None:
    for document in sorted((ROOT / "docs").rglob("*.md")):
        page = site / document.relative_to(ROOT / "docs").with_suffix(".html")
        assert page.is_file(), document


def test_references_come_from_the_code(site: Path) -> None:
    commands = (site / "reference-cli.html").read_text(encoding="utf-8")
    python = (site / "reference-api.html").read_text(encoding="utf-8")

    assert all(f">{name}" in commands for name in ("meshmend train", "meshmend testbed up"))
    assert all(name in python for name in ("load_plan", "MeshmendError", "Return a proved plan"))
    assert "has the sum: True" in (site / "tutorial.html").read_text(encoding="utf-8")


def test_no_page_loads_anything_from_the_network(site: Path) -> None:
    for page in sorted(site.rglob("*.html")):
        text = page.read_text(encoding="utf-8")
        assert 'src="http' not in text, page
        assert '<link href="http' not in text, page
