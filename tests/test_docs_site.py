"""`make docs`: the site builds offline with every link checked, and has what it promises."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from browsing import browsed, browser
from served_folder import served_folder

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


def test_pages_are_legible_in_both_schemes_and_fit_a_phone(site: Path) -> None:
    with browser() as chromium, served_folder(site) as address:
        for name in ("index", "your-loop", "training", "tutorial", "reference-cli"):
            for scheme in ("light", "dark"):
                options = {"color_scheme": scheme, "viewport": {"width": 375, "height": 900}}
                with browsed(chromium, f"{address}/{name}.html", **options) as page:
                    page.wait_until(f"document.documentElement.dataset.bsTheme === '{scheme}'")

                    assert page.faint_texts() == [], (name, scheme)
                    assert page.page.evaluate("document.documentElement.scrollWidth") <= 375


def test_a_reader_can_switch_to_the_dark_scheme(site: Path) -> None:
    with (
        browser() as chromium,
        served_folder(site) as address,
        browsed(chromium, f"{address}/index.html", color_scheme="light") as page,
    ):
        page.page.click("#theme-menu")
        page.page.click("[data-bs-theme-value=dark]")

        assert page.page.evaluate("document.documentElement.dataset.bsTheme") == "dark"
