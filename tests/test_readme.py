"""The README's programs and commands print what the README says, and name what there is."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from meshmend.cli.main import commands_by_name, run_line

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Commands in the README, with the block of what they print where one follows.
SHOWN = re.findall(r"```\n\$ (meshmend [^\n]*)\n```\n\n```\n(.*?)```", README, re.DOTALL)
NAMED = sorted(
    {
        *re.findall(r"`(meshmend [a-z][^`]*)`", README),
        *re.findall(r"^\$ (meshmend .*)$", README, re.MULTILINE),
    }
)
NUMBER = re.compile(r"\d[\d.,]*")


COMMANDS = commands_by_name()


def test_the_ten_lines_print_what_stands_below_them() -> None:
    match = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", README, re.DOTALL)
    assert match is not None

    ended = subprocess.run([sys.executable, "-c", match[1]], capture_output=True, text=True)

    assert ended.stdout == match[2]
    assert ended.returncode == 0


def shape_of(text: str) -> list[str]:
    """Return the words of a text without its numbers and units, which vary with the machine."""
    words = NUMBER.sub("", text).split()
    return [word for word in words if word not in {"s", "ms"}]


def test_simulate_prints_the_table_in_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = [each for each in SHOWN if each[0].startswith("meshmend simulate")]

    assert run_line(shlex.split(shown[0])[1:]) == 0
    assert capsys.readouterr().out == shown[1]


@pytest.mark.slow
def test_train_prints_the_summary_in_the_readme(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (shown,) = [each for each in SHOWN if each[0].startswith("meshmend train")]

    line = [sys.executable, "-m", *shlex.split(shown[0]), "--run-dir", str(tmp_path / "run")]
    ended = subprocess.run(line, capture_output=True, text=True)
    printed = ended.stdout.partition("report ")[0]

    assert ended.returncode == 0, ended.stderr
    assert shape_of(printed) == shape_of(shown[1])


@pytest.mark.parametrize("line", NAMED)
def test_every_command_and_option_that_the_readme_names_exists(line: str) -> None:
    words = shlex.split(line)
    depths = [n for n in range(1, len(words) + 1) if " ".join(words[:n]) in COMMANDS]
    assert depths, "there is no such command"
    depth = max(depths)
    command = COMMANDS[" ".join(words[:depth])]

    options = [option for each in command.params for option in each.opts]
    for word in words[depth:]:
        if word.startswith("-"):
            assert word in options, word


def test_every_file_that_the_readme_names_is_there() -> None:
    paths = re.findall(r"\]\(([^)#:]+)\)", README)

    assert paths
    for path in paths:
        assert (ROOT / path).exists(), path
