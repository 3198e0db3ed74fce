"""Every command in the README and in docs/ is run, and prints what the page shows.

Commands of one page run one after another in one folder, as a reader would type them. `NOT_RUN`
says which are not run, and why.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from unittest.mock import patch

import pytest

from documented_commands import DocumentedCommand, documented_commands
from forked_script import COMMAND_LINE, run_forked
from meshmend.cli.main import commands_by_name
from testbeds import why_not
from waiting import HANG_S

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = [
    command
    for path in PAGES
    for command in documented_commands(path, path.relative_to(ROOT).as_posix())
]

# What a command begins with or, after `*`, holds: why no test of this file runs it.
NOT_RUN = {
    "pip install": "installs packages; `make test` installs the project in the same way",
    "make ": "is run by those who work on the project; its targets are in the Makefile",
    "python benchmarks/thousand_kills.py": "takes most of an hour; tests/launch has a short one",
    "export ": "sets a variable to what the reader chooses",
    "torchrun ": "needs several machines; tests/launch/test_torchrun.py starts workers so",
    "sbatch ": "needs Slurm; tests/engines/test_slurm.py submits jobs to a real one",
    "meshmend explore": "serves until it is interrupted; tests/pages/explore/test_page.py opens it",
    "meshmend train --mesh 32x32": "is a thousand processes, which take 16 cores a minute",
    "* --explore": "serves a page; tests/pages/explore/test_live_page.py opens it",
    "meshmend wormhole run": "needs a simulator's library; tests/wormhole/test_machine.py has one",
    "meshmend import system": "needs a machine's file; tests/planning/formats makes some",
    "*--run-dir runs/two train.py": "goes on with a job that tests/launch/test_elastic.py kills",
    '*"repair 0,1 at 80" train.py': "tests/test_your_loop.py runs it with the loop of its page",
    "*10.0.0.1:": "needs several machines; tests/launch/test_separate_hosts.py has such",
}
NETWORKS = ("meshmend bench", "meshmend testbed")  # need a kernel that grants network namespaces
# These train or measure, which takes more than a few seconds.
SLOW = ("meshmend train", "meshmend run", "meshmend checkpoint", "meshmend forecast", *NETWORKS)
# What `--preload` and `--framework` need beyond the extras of `make test`.
NEEDED = {"--preload lightning": "lightning", "--preload transformers": "transformers"}
NAMED = sorted(
    {
        (path.relative_to(ROOT).as_posix(), line)
        for path in PAGES
        for line in re.findall(
            r"`(meshmend [a-z-]+(?: [^`\n]*)?)`", path.read_text(encoding="utf-8")
        )
    }
    | {(each.page, each.line) for each in COMMANDS if each.line.startswith("meshmend ")}
)
BY_NAME = commands_by_name()
HIDDEN = {"meshmend slurm-job"}  # a job file runs it
GROUPS = {name.rpartition(" ")[0] for name in BY_NAME}


def why_not_run(command: DocumentedCommand) -> str:
    """Return why a command is not run here, or an empty text."""
    for key, why in NOT_RUN.items():
        if key[1:] in command.line if key.startswith("*") else command.line.startswith(key):
            return why
    return ""


def is_slow(command: DocumentedCommand) -> bool:
    return command.line.startswith(SLOW)


RUN = [command for command in COMMANDS if not why_not_run(command)]
QUICK_PAGES = sorted({command.page for command in RUN if not is_slow(command)})
SLOW_PAGES = sorted({command.page for command in RUN if is_slow(command)})


def is_possible(command: DocumentedCommand) -> bool:
    """Whether this machine has what a command needs."""
    packages = (package for option, package in NEEDED.items() if option in command.line)
    if not all(map(find_spec, packages)):
        return False
    if "openmpi" in command.line and which("mpirun") is None:
        return False
    return not command.line.startswith(NETWORKS) or why_not() is None


def run_in(folder: Path, command: DocumentedCommand) -> None:
    """Run a command as a reader would type it, and compare what it prints with the page."""
    if not is_possible(command):
        return
    program = folder / "bin" / "meshmend"
    if not program.exists():
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m meshmend "$@"\n')
        program.chmod(0o755)
        (folder / "examples").symlink_to(ROOT / "examples")
        (folder / "forked.py").write_text("from meshmend.cli.main import main\nmain()\n")
        (folder / "train.py").write_text("")
    variables = {
        "PATH": f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "COLUMNS": "200",
        "MESHMEND_TESTBED_DIR": str(folder / "testbeds"),
    }
    with chdir(folder), patch.dict(os.environ, variables):
        ended = run_forked_if_quick(command)

    printed = ended.stdout + (ended.stderr or "")
    assert ended.returncode == 0, f"{command.line}\n{printed}"
    missing = command.missing(printed)
    assert not missing, f"{command.line}\ndid not print {missing}, but\n{printed}"


def run_forked_if_quick(command: DocumentedCommand) -> subprocess.CompletedProcess[str]:
    """Run a command; importing what a quick one needs takes longer than what it does."""
    program, *words = shlex.split(command.line, comments=True)
    if program == "meshmend" and not is_slow(command) and ">" not in words:
        return run_forked("forked.py", *words, imported=COMMAND_LINE)
    return subprocess.run(
        ["bash", "-c", command.line],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * HANG_S,
    )


@pytest.mark.parametrize("page", QUICK_PAGES)
def test_the_quick_commands_of_a_page_print_what_it_shows(page: str, tmp_path: Path) -> None:
    for command in RUN:
        if command.page == page and not is_slow(command):
            run_in(tmp_path, command)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A reader's folder, whose testbeds are taken down at last."""
    yield tmp_path
    if (tmp_path / "testbeds").exists():
        run_in(tmp_path, DocumentedCommand("", "meshmend testbed down --all"))


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW_PAGES)
def test_all_commands_of_a_page_print_what_it_shows(page: str, folder: Path) -> None:
    for command in RUN:
        if command.page == page:
            run_in(folder, command)


def whole_commands_of_the_table() -> list[DocumentedCommand]:
    """Return those that stand there whole, and that no other test of this file runs."""
    table = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`meshmend [^|]*) \|", table, re.M)
    lines = [line for cell in cells for line in re.findall(r"`([^`]+)`", cell) if " " in line]
    partial = re.compile(r"\.\.\.|HOST|RUN|script\.py|meshmend (coordinator|worker|agent)$")
    elsewhere = {command.line for command in COMMANDS}
    whole = [line for line in lines if not partial.search(line) and line not in elsewhere]
    assert len(whole) > 12
    commands = [DocumentedCommand("docs/commands.md", line) for line in whole]
    return [command for command in commands if not why_not_run(command)]


@pytest.mark.slow
@pytest.mark.parametrize("command", whole_commands_of_the_table(), ids=lambda it: it.line)
def test_the_commands_of_the_table_end_well(command: DocumentedCommand, folder: Path) -> None:
    """A reader has a `plan.json` and an XML of it already."""
    if "plan.json" in command.line or "allreduce.xml" in command.line:
        run_in(folder, DocumentedCommand("", "meshmend plan --mesh 4x4 -o plan.json"))
        export = "meshmend export plan.json --to msccl-xml -o allreduce.xml"
        run_in(folder, DocumentedCommand("", export))

    run_in(folder, command)


@pytest.mark.parametrize("key", NOT_RUN)
def test_what_is_not_run_is_documented_and_tested_elsewhere(key: str) -> None:
    assert any(why_not_run(command) == NOT_RUN[key] for command in COMMANDS), "no such command"
    for path in re.findall(r"tests/\S+\.py", NOT_RUN[key]):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize(("page", "line"), NAMED)
def test_every_command_and_option_that_a_page_names_exists(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)
    if " ".join(words) in GROUPS | HIDDEN:
        return
    depths = [n for n in range(1, len(words) + 1) if " ".join(words[:n]) in BY_NAME]
    assert depths, "there is no such command"
    command = BY_NAME[" ".join(words[: depths[0]])]
    takes_value = {
        option: not getattr(each, "is_flag", False)
        for each in command.params
        for option in each.opts
    }
    required = {each.opts[0] for each in command.params if each.required and each.opts[0][0] == "-"}
    rest = iter(words[depths[0] :])
    for word in rest:
        if word.endswith(".py") or word in {"ip", ">"}:
            assert "..." in words or required <= set(words), f"{page}: {line} needs {required}"
            return  # what follows belongs to another program
        if word.startswith("-") and word != "--help":
            assert word in takes_value, f"{page}: {word}"
            if takes_value[word]:
                next(rest, None)
