"""Structured logs: whatever a process writes to standard error is one JSON object per line."""

import json
import subprocess
import sys
from typing import Any

import pytest

from forked_script import run_program

PROGRAM = """
import logging, sys, threading, warnings
from meshmend.cli.console import note
from meshmend.cli.console import set_log_context, start_json_log

logging.getLogger("meshmend").info("plain logs leave this out")
start_json_log()
start_json_log()
set_log_context(job="ours", chip=(0, 1))
{body}
"""

MAIN = "import sys\nfrom meshmend.cli.main import main\nsys.argv[1:] = {line}\nmain()\n"


def written(body: str) -> list[dict[str, Any]]:
    """Return what a program writes to standard error, after it has begun a structured log."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body=body)], capture_output=True, check=False
    )
    return [json.loads(line) for line in done.stderr.splitlines()]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("note('meshmend: a note')", [("info", "meshmend", "a note")]),
        ("note('meshmend: wrong', level='error')", [("error", "meshmend", "wrong")]),
        ("note(' 1.0 s  text', message='text')", [("info", "meshmend", "text")]),
        ("logging.getLogger('a.b').warning('of %s', 3)", [("warning", "a.b", "of 3")]),
        ("logging.getLogger('a').debug('no')", []),
        (r"print('one\ntwo', file=sys.stderr)",
         [("info", "stderr", "one"), ("info", "stderr", "two")]),
        ("print('no line break', end='', file=sys.stderr)", [("info", "stderr", "no line break")]),
        (r"print('10 %\r20 %\r', end='', file=sys.stderr)",
         [("info", "stderr", "10 %"), ("info", "stderr", "20 %")]),
        (r"""print('\ud800 \x00 "quoted"', file=sys.stderr)""",
         [("info", "stderr", '\ud800 \x00 "quoted"')]),
    ],
)  # fmt: skip
def test_everything_becomes_an_object(body: str, expected: list[tuple[str, str, str]]) -> None:
    found = written(body)

    assert [(each["level"], each["logger"], each["message"]) for each in found] == expected
    assert all(each["job"] == "ours" and each["chip"] == [0, 1] for each in found)


@pytest.mark.parametrize(
    "body",
    [
        "raise ValueError('it broke')",
        "threading.Thread(target=lambda: 1 / 0).start()",
        "warnings.warn('it broke')",
        "logging.getLogger('a').exception('it broke')",
    ],
)
def test_what_goes_wrong_is_json_too(body: str) -> None:
    text = " ".join(each["message"] for each in written(body))

    assert "it broke" in text or "ZeroDivisionError" in text


def test_threads_do_not_mix_their_lines() -> None:
    found = written(
        "def say(name):\n"
        "    for _ in range(200): logging.getLogger('a').info(name * 500)\n"
        "threads = [threading.Thread(target=say, args=[name]) for name in 'abcd']\n"
        "[each.start() for each in threads]; [each.join() for each in threads]"
    )

    assert len(found) == 800
    assert {each["message"] for each in found} == {name * 500 for name in "abcd"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["coordinator", "--log-json", "--frob"], "No such option: --frob"),
        (["coordinator", "--log-json"], "Missing option '--listen'"),
        (["coordinator", "--mesh", "2x2", "--listen", "x", "--log-json"], "--listen needs HOST"),
        (["worker", "--log-json", "--coordinator", "x", "--mesh", "2x2", "a.py"], "needs HOST:PO"),
    ],
)
def test_bad_input_is_one_object(line: list[str], words: str) -> None:
    done = run_program(MAIN.format(line=line))

    (found,) = [json.loads(each) for each in done.stderr.splitlines()]
    assert done.returncode == 2
    assert words in found["message"]
    assert found["level"] == "error"


def test_the_option_of_a_script_is_not_ours() -> None:
    line = ["worker", "--coordinator", "x", "--mesh", "2x2", "a.py", "--log-json"]
    done = run_program(MAIN.format(line=line))

    assert done.stderr.startswith("meshmend: --coordinator needs HOST:PORT")
