"""An input error in a script of a user: the traceback ends at the user's own line."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = {
    "plan": "from meshmend import Mesh, plan\nplan(Mesh((4, 4)), payload='10 apples')\n",
    "limit": "from meshmend import Mesh, limit\nlimit(Mesh((4, 4)), '10 apples')\n",
    "simulate": "from meshmend import Mesh, simulate\nsimulate(Mesh((4, 4)), fabric='apples')\n",
    "load_plan": "from meshmend import load_plan\nload_plan('apples.json')\n",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_input_error_shows_the_users_line_and_one_of_ours(name: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPTS[name])

    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, check=False
    )

    files = [line for line in run.stderr.splitlines() if line.strip().startswith("File ")]
    assert run.returncode == 1
    assert len(files) == 2, run.stderr
    assert "train.py" in files[0]
    assert "apples" in run.stderr.splitlines()[-1]
