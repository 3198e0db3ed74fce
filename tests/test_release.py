"""What is released works where nothing else is installed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def done(*command: str | Path, cwd: Path) -> str:
    """Return what a command prints on standard output; fail with all that it says if it fails."""
    ended = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_the_wheel_alone_runs_the_readmes_ten_lines(tmp_path: Path) -> None:
    """Installed with its core dependencies into an empty environment, away from the sources."""
    program = re.search(
        r"```python\n(.*?)```\n\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    assert program is not None
    done(sys.executable, "-m", "hatchling", "build", "--directory", tmp_path / "dist", cwd=ROOT)
    (wheel,) = (tmp_path / "dist").glob("meshmend-*.whl")
    (source,) = (tmp_path / "dist").glob("meshmend-*.tar.gz")
    done(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv/bin/python"
    constraints = ROOT / "constraints.txt"

    done(python, "-m", "pip", "install", "--quiet", "-c", constraints, wheel, cwd=tmp_path)

    assert done(python, "-I", "-c", program[1], cwd=tmp_path) == program[2]
    version = done(python, "-I", "-c", "import meshmend; print(meshmend.__version__)", cwd=tmp_path)
    assert wheel.name.split("-")[1] == version.strip()
    assert source.name == f"meshmend-{version.strip()}.tar.gz"
    done(tmp_path / "venv/bin/meshmend", "plan", "--mesh", "4x4", "--fail", "2x2@0,2", cwd=tmp_path)
    (torch_missing,) = done(
        python, "-I", "-c", "import importlib.util as u; print(u.find_spec('torch'))", cwd=tmp_path
    ).splitlines()
    assert torch_missing == "None", "the core needs no torch"
