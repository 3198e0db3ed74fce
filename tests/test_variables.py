"""The table of environment variables: it is the only one, and the documentation shows it."""

import re
from pathlib import Path

import pytest

from meshmend import config
from meshmend.config import MESH, VARIABLES, variable_table, warn_of_unknown

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_warned", set())


def test_the_documentation_shows_the_table() -> None:
    text = (ROOT / "docs" / "environment.md").read_text()
    table = "".join(f"{line}\n" for line in text.splitlines() if line.startswith("|"))

    assert table == variable_table()


def test_no_other_module_spells_a_name() -> None:
    owner = ROOT / "src" / "meshmend" / "config.py"
    modules = [path for path in sorted((ROOT / "src").rglob("*.py")) if path != owner]

    assert {
        path: found for path in modules if (found := re.findall("MESHMEND_.*", path.read_text()))
    } == {}


def test_every_name_in_the_documentation_is_in_the_table() -> None:
    known = {each.name for each in VARIABLES}
    pages = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]

    for page in pages:
        assert set(re.findall(r"MESHMEND_\w+", page.read_text())) <= known, page


def test_names_are_used_once() -> None:
    names = [each.name for each in VARIABLES]

    assert len(set(names)) == len(names)


def test_an_empty_value_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert MESH.value_in({"MESHMEND_MESH": ""}) == ""
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "advice"),
    [("MESHMEND_MASH", "; did you mean MESHMEND_MESH?"), ("MESHMEND_QQQQQQQQQQQQQQQQ", "")],
)
def test_an_unknown_name_is_one_line_once(
    name: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        warn_of_unknown({name: "4x4", "MESHMEND_MESH": "4x4", "HOME": "/"})

    assert (
        capsys.readouterr().err == f"meshmend: there is no variable {name}, it is ignored{advice}\n"
    )
