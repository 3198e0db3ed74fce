"""Every option of every command takes any text: it works, or it is refused in one line.

The lines below are right but for one thing that keeps them from starting processes, or they plan
for a tiny mesh. In each, one option after another gets a value that nobody should write.
"""

from pathlib import Path
from typing import Any

import pytest

from meshmend import Mesh, plan
from meshmend.cli.main import commands_by_name, run_line

Captured = pytest.CaptureFixture[str]

VALUES = (
    "",
    "0",
    "-1",
    "99999999999999999999",
    "1" * 5000,  # more digits than Python reads
    "1e400",
    "nan",
    "\u0663",  # a digit, but no ASCII
    "/",
    "x" * 3000,
)
LINES = {
    "plan": "--mesh 2x2 --fabric nope",
    "verify": "plan.json --mesh 2x3",
    "export": "plan.json --to csv --slices 0",
    "import": "plan.json --mesh 2x2",
    "simulate": "--mesh 2x2 --algorithm nope",
    "forecast": "--mesh 4x4 --fabric nope",
    "show": "--mesh 2x2 --algorithm nope",
    "train": "--mesh 1x1 --resume /nowhere --steps 3 --allow-faults",  # without --explore
    "run": "nowhere.py --mesh 2x2",
    "coordinator": "--mesh 2x2 --listen 999.0.0.1:0",
    "worker": "nowhere.py --coordinator 127.0.0.1:1 --mesh 2x2 --chip 0,0",
    "agent": "nowhere.py --coordinator 127.0.0.1:1 --mesh 2x2",
    "status": "--coordinator 127.0.0.1:1",
    "explore": "--algorithm nope",
    "bench": "--mesh 2x2 --algorithm nope",
    "reproduce": "--fabric nope",
    "checkpoint list": "nowhere",
    "checkpoint check": "nowhere",
    "checkpoint export": "nowhere --output out",
    "checkpoint import": "nowhere --output out",
    "testbed status": "nobody",
    "testbed check": "nobody",
    "testbed fail": "0,0 --name nobody",
    "testbed repair": "0,0 --name nobody",
    "submit slurm": "script.py --mesh 2x2 --hosts 2",
    "submit jobset": "script.py --mesh 2x2 --image x --name y",
    "submit job": "script.py --mesh 2x2 --image x --name y",
    "wormhole run": "--mesh 2x2 --library nowhere.so",
}
COMMANDS = commands_by_name()


def lines_with(line: str, params: list[Any], value: str) -> list[list[str]]:
    """Return the line once for each of its options that take a value, with that value."""
    words = line.split()
    names = [each.opts[-1] for each in params if each.opts[-1].startswith("--")]
    flags = {
        each.opts[-1]
        for each in params
        if getattr(each, "is_flag", False) or getattr(each, "hidden", False)
    }
    lines = []
    for name in names:
        if name in flags:
            continue
        rest = list(words)
        if name in rest:
            del rest[rest.index(name) : rest.index(name) + 2]
        # Options come first: what follows a script belongs to it.
        lines.append([f"{name}={value}", *rest])
    return lines


@pytest.mark.parametrize("command", LINES)
def test_any_value_works_or_is_refused_in_one_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MESHMEND_SECRET", "only the chips of this test know")
    plan(Mesh((2, 2)), "ring-1d").save("plan.json")
    Path("script.py").touch()

    for value in VALUES:
        for line in lines_with(LINES[command], COMMANDS[f"meshmend {command}"].params, value):
            code = run_line([*command.split(), *line])

            said = capsys.readouterr().err.splitlines()
            shown = [word[:60] for word in line]
            assert code in {0, 2}, (shown, said)
            assert code == 0 or len(said) == 1, (shown, said)
