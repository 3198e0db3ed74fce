"""The progress bar: on a terminal, on standard error, and only for what takes its time."""

import io
import sys
import time

import pytest

from meshmend.cli import console
from meshmend.cli.console import progress
from waiting import HANG_S, until


class Terminal(io.StringIO):
    """Text that takes itself for a terminal."""

    def isatty(self) -> bool:
        return True


def _terminal(monkeypatch: pytest.MonkeyPatch, *, patience_s: float) -> Terminal:
    """Return a terminal that stands in for standard error from here on."""
    result = Terminal()
    monkeypatch.setattr(sys, "stderr", result)
    monkeypatch.setattr(console, "_SHOW_BAR_AFTER_S", patience_s)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return result


def _wait_for(terminal: Terminal, text: str) -> None:
    until(lambda: text in terminal.getvalue(), why=terminal.getvalue)


def test_long_work_shows_its_step_and_percentage(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch, patience_s=0.01)

    with progress() as bar:
        bar("trees: packing")
        _wait_for(terminal, "trees: packing")
        bar("trees: simulating", 0.375)
        _wait_for(terminal, "38%")
        bar("ring-1d: building", 0.25)  # a part never falls
        _wait_for(terminal, "ring-1d: building")

    assert "25%" not in terminal.getvalue()


def test_short_work_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch, patience_s=HANG_S)

    with progress() as bar:
        bar("step", 0.5)

    assert terminal.getvalue() == ""


def test_results_printed_aside_go_to_standard_output_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = _terminal(monkeypatch, patience_s=0.01)

    with progress() as bar:
        bar("step", 0.5)
        _wait_for(terminal, "50%")
        with bar.aside():
            print("a result")

    assert capsys.readouterr().out == "a result\n"
    assert "a result" not in terminal.getvalue()


@pytest.mark.parametrize("quiet", [True, False])
def test_quiet_commands_and_files_get_no_bar(
    quiet: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = _terminal(monkeypatch, patience_s=0.0)
    if not quiet:
        monkeypatch.setattr(terminal, "isatty", lambda: False)

    with progress(quiet=quiet) as bar:
        bar("step", 0.5)
        time.sleep(0.05)

    assert capsys.readouterr().out == ""
    assert terminal.getvalue() == ""


def test_a_command_that_asks_for_it_says_its_step_once_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = _terminal(monkeypatch, patience_s=0.01)
    monkeypatch.setattr(terminal, "isatty", lambda: False)

    with progress(or_line=True) as bar:
        bar("loading the model", 0.5)
        _wait_for(terminal, "\n")
        bar("loading the data")
        time.sleep(0.05)

    assert terminal.getvalue() in {
        "meshmend: loading the model ... 50%\n",
        "meshmend: starting ...\n",  # on a busy machine
    }


def test_long_work_says_its_step_again_and_again_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = _terminal(monkeypatch, patience_s=0.01)
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    monkeypatch.setattr(console, "_LINE_EVERY_S", 0.01)

    with progress(or_line=True) as bar:
        bar("simulating years", 0.25)
        _wait_for(terminal, "meshmend: simulating years ... 25%\n" * 2)
        bar("simulating years", 0.75)
        _wait_for(terminal, "meshmend: simulating years ... 75%\n")

    n_lines = terminal.getvalue().count("\n")
    time.sleep(0.05)
    assert terminal.getvalue().count("\n") == n_lines
