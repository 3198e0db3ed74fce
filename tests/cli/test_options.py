"""Options that were renamed: the old name works for one release, says so, and is not in --help."""

import pytest

from meshmend.cli.main import run_line

Captured = pytest.CaptureFixture[str]

COMMANDS = {
    "train": ["train"],
    "run": ["run", "--elastic", "--mesh", "2x2"],
    "coordinator": ["coordinator", "--mesh", "2x2", "--listen", "127.0.0.1:0"],
}
RENAMED = {"--stall": "--straggler-timeout", "--heartbeat": "--heartbeat-timeout"}


def lines_of(capsys: Captured, *arguments: str) -> list[str]:
    """The lines on standard error of a command that refuses its arguments."""
    assert run_line(list(arguments)) == 2
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("form", ["{} -1", "{}=-1"])
@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_name_sets_the_new_option_and_says_so_in_one_line(
    capsys: Captured, command: list[str], form: str, old: str, new: str
) -> None:
    said, refused = lines_of(capsys, *command, *form.format(old).split(), "script.py")

    assert said == f"meshmend: {old} is now {new}; the next release removes the old name"
    assert f"'{new}'" in refused
    assert "-1.0 is not in the range" in refused


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_help_lists_the_new_name_only(
    capsys: Captured, command: list[str], old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run_line([command[0], "--help"]) == 0
    out, err = capsys.readouterr()

    assert new in out.split()
    assert old not in out.split()
    assert err == ""


def test_the_options_of_a_script_are_its_own(capsys: Captured) -> None:
    (refused,) = lines_of(capsys, "run", "--mesh", "2x2", "nowhere.py", "--stall", "5")

    assert "there is no file nowhere.py" in refused
