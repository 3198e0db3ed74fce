"""What a launcher imports before it forks: JAX without its threads, and PyTorch only if needed."""

import subprocess
import sys
from pathlib import Path

import pytest

from packages import needs
from waiting import HANG_S

pytestmark = needs("jax", "optax")

EXAMPLES = Path(__file__).parents[2] / "examples" / "jax"


def python(program: str) -> str:
    """Run a program and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_module_that_computes_with_jax_is_refused(tmp_path: Path) -> None:
    (tmp_path / "computes.py").write_text("import jax.numpy\nONE = jax.numpy.ones(())\n")
    said = python(
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
        "from meshmend.errors import InputError\n"
        "from meshmend.launch.script import preload_training\n"
        "preload_training(['jax', 'optax'])\n"
        "print('torch' in sys.modules, 'meshmend.train.jax.job' in sys.modules)\n"
        "try:\n    preload_training(['computes'])\nexcept InputError as error:\n    print(error)\n"
    )

    assert said.startswith("False True\n--preload needs modules that only import JAX, but one of")


@needs("sklearn")
def test_a_launcher_that_prepares_a_jax_workload_does_not_compute_with_it() -> None:
    said = python(
        "import os, sys\n"
        "from meshmend.launch.script import preload_modules\n"
        "from meshmend.lab.workloads.jax_models import jax_workload\n"
        "from meshmend.config import JobConfig\n"
        "work = jax_workload('resnet')\n"
        "config = JobConfig()\n"
        "work.preload(config, (4, 3))\n"
        "state = work.fresh_state()\n"
        "print(work.n_parameters, work.sum_sizes(config, 4), len(state['optimizer']))\n"
        "preload_modules([])  # raises if JAX has computed\n"
        "print('torch' in sys.modules)\n"
    )

    assert said == "19810 [(19812, 'float32')] 29\nFalse\n"


@pytest.mark.parametrize("missing", ["jax", "optax"])
def test_without_its_packages_a_jax_job_says_what_to_install(missing: str) -> None:
    said = python(
        f"import sys\nsys.modules[{missing!r}] = None\n"
        "from meshmend.errors import InputError\n"
        "try:\n    from meshmend.train import JaxJob\n"
        "except InputError as error:\n    print(error)\n"
    )

    assert said == (
        f"JaxJob needs {missing}, but it is not installed; run: pip install 'meshmend[jax]'\n"
    )


def test_the_mended_loop_needs_no_torch_and_differs_from_the_plain_one_in_its_loop() -> None:
    plain, mended = ((EXAMPLES / f"{name}.py").read_text() for name in ("plain_loop", "survives"))
    shared = [text.partition("def spirals")[2].partition("def main")[0] for text in (plain, mended)]
    assert shared[0] == shared[1]

    said = python(
        "import runpy, sys\nsys.modules['torch'] = None\n"
        f"runpy.run_path({str(EXAMPLES / 'survives.py')!r}, run_name='__main__')\n"
    ).splitlines()

    assert len(said) == 600
    assert said[0].startswith("step 1 loss 1.")
    assert float(said[-1].split()[-1]) < 0.1


@pytest.mark.slow
def test_the_plain_loop_learns_too() -> None:
    said = python(
        f"import runpy\nrunpy.run_path({str(EXAMPLES / 'plain_loop.py')!r}, run_name='__main__')\n"
    ).splitlines()

    assert float(said[-1].split()[-1]) < 0.1


@pytest.mark.slow
def test_without_torch_the_mended_loop_outlives_a_chip_and_takes_it_back(tmp_path: Path) -> None:
    line = ["run", "--elastic", "--mesh", "2x2", "--preload", "optax"]
    line += ["--inject", "kill 0,1 at 100", "--inject", "repair 0,1 at 110"]
    program = (
        "import sys\nsys.modules['torch'] = None\n"
        "from meshmend.cli.main import run_line\n"
        f"sys.exit(run_line({[*line, str(EXAMPLES / 'survives.py')]!r}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S, check=False
    )

    assert done.returncode == 0, done.stderr
    assert "repair 0,1 at step 110 done in" in done.stderr
    assert done.stderr.splitlines()[-1] == (
        "meshmend: 600 steps; samples: 28800 used, 0 lost, 0 repeated; replicas equal bit for bit"
    )
