"""The notebook prints what stands in it, and the example with a hole that moves runs as it says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshmend.cli.main import run_line
from virtual_devices import environment, needs_jax

pytestmark = needs_jax

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGE = (ROOT / "docs" / "jax.md").read_text(encoding="utf-8")
NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))


def without_flags() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}


def printed_in(path: Path) -> str:
    """Return what the cells of a notebook printed when it was saved."""
    document = json.loads(path.read_text(encoding="utf-8"))
    return "".join(
        "".join(output["text"])
        for cell in document["cells"]
        for output in cell.get("outputs", ())
        if output["output_type"] == "stream" and output["name"] == "stdout"
    )


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_stands_in_it(notebook: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("notebook_run.py")), str(notebook)],
        capture_output=True,
        text=True,
        env=without_flags(),
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout == printed_in(notebook)


def test_the_program_of_the_page_sums_over_links() -> None:
    first, proof = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[:2]
    program = (
        f"{first}\n"
        "import numpy as np\n"
        "gradients = np.arange(24.0).reshape(12, 2)\n"
        "assert (summed(gradients) == gradients.sum(axis=0)).all()\n"
        f"{proof}\n"
        "assert not use.routed\n"
    )

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        env=environment(12),
    )

    assert done.returncode == 0, done.stderr


def test_the_command_of_the_page_prints_what_stands_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    match = re.search(r"```\n\$ meshmend (.*?)\n```\n\n```\n(.*?)```", PAGE, re.DOTALL)
    assert match is not None

    assert run_line(match[1].split()) == 0

    assert match[2] in capsys.readouterr().out


def test_a_hole_that_moves_swaps_tables_or_recompiles_and_learns_the_same() -> None:
    example = EXAMPLES / "jax" / "virtual_devices.py"
    # As where only the extra `jax` is installed.
    program = (
        "import runpy, sys\n"
        "sys.modules['torch'] = None\n"
        f"runpy.run_path({str(example)!r}, run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        env=environment(16),
    )

    assert done.returncode == 0, done.stderr
    swapped, recompiled = re.findall(
        r"(?:swapped|recompiled): loss (\S+ to \S+), replicas equal", done.stdout
    )
    assert swapped == recompiled
    apart = re.search(r"differ by at most (\S+)", done.stdout)
    assert apart is not None
    assert float(apart[1]) < 1e-6
