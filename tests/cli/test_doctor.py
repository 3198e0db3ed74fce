"""`meshmend doctor`, and what a shell completes."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from meshmend import packages
from meshmend.cli import doctor, main
from meshmend.cli.main import run_line

Captured = pytest.CaptureFixture[str]


def states(capsys: Captured) -> dict[str, str]:
    capsys.readouterr()
    assert run_line(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["works"] is True
    return {each["name"]: each["state"] for each in document["findings"]}


def test_the_doctor_says_what_works_and_what_to_install(capsys: Captured) -> None:
    found = states(capsys)

    assert (found["system"], found["plan, simulate"]) == ("works", "works")
    assert {
        "compiled loops",
        "JAX",
        "train",
        "explore",
        "Slurm",
        "OpenMPI",
        "browser",
        "load",
    } <= set(found)
    assert run_line(["doctor"]) == 0
    assert "ok  system" in capsys.readouterr().out


def test_the_doctor_knows_every_extra() -> None:
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]

    assert set(doctor._EXTRAS) == set(extras) - {"dev"}


@pytest.mark.parametrize(
    ("missing", "first"),
    [((), "meshmend train"), (("torch",), "--export page.html"), (("sklearn",), "[train]")],
)
def test_the_help_proposes_what_works_with_what_is_installed(
    missing: tuple[str, ...], first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "find_spec", lambda name: None if name in missing else object())

    assert first in main._first_command()


def test_what_is_not_installed_is_no_fault(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "_EXTRAS", {"nothing": "Nothing"})
    monkeypatch.setattr(packages, "requires", lambda _: ["no-such-package>=1; extra=='nothing'"])
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("os.getloadavg", lambda: (1000.0, 0.0, 0.0))
    found = states(capsys)

    assert [found[name] for name in ("Nothing", "Slurm", "OpenMPI", "browser")] == ["missing"] * 4
    assert found["load"] == "warning"
    assert run_line(["doctor"]) == 0
    assert "pip install 'meshmend[nothing]'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("needed", "state", "words"),
    [
        ("pytest>=3", "works", "pytest "),
        ("pytest>=1000", "missing", "is too old, the oldest is 1000"),
        ("pytest>=3,<4", "warning", "was tried with pytest<4,>=3 alone"),
    ],
)
def test_the_doctor_compares_versions_with_those_that_are_asked_for(
    needed: str, state: str, words: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_EXTRAS", {"any": "Any"})
    monkeypatch.setattr(packages, "requires", lambda _: [f"{needed}; extra == 'any'", "numpy>=2"])

    assert states(capsys)["Any"] == state
    run_line(["doctor"])
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("meshmend si", "simulate"),
        ("meshmend testbed ch", "check"),
        ("meshmend plan --coll", "--collective"),
        ("meshmend plan --algorithm ft", "ft-two-d"),
        ("meshmend plan --fabric tpu-v3", "tpu-v3"),
    ],
)
def test_a_shell_gets_the_completions_of_a_line(words: str, wanted: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "meshmend"],
        env={
            "PATH": "/usr/bin",
            "PYTHONPATH": ":".join(sys.path),
            "_MESHMEND_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        },
        capture_output=True,
        text=True,
    )

    assert wanted in ended.stdout.split(), ended.stderr
