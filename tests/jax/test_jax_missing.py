"""Without JAX, `meshmend.jax` says in one line what to install; the rest needs none."""

import subprocess
import sys

from forked_script import run_program
from virtual_devices import needs_jax


def test_without_jax_the_package_says_what_to_install() -> None:
    program = (
        "import sys\n"
        "sys.modules['jax'] = None\n"
        "from meshmend.errors import InputError\n"
        "try:\n"
        "    import meshmend.jax\n"
        "except InputError as error:\n"
        "    print(error)\n"
    )
    done = run_program(program)

    assert done.stderr == ""
    assert done.stdout == (
        "meshmend.jax needs jax, but it is not installed; run: pip install 'meshmend[jax]'\n"
    )


def test_lowering_a_plan_needs_no_jax() -> None:
    program = (
        "import sys\n"
        "sys.modules['jax'] = sys.modules['torch'] = None\n"
        "from meshmend.cli.main import run_line\n"
        "sys.exit(run_line(['plan', '--mesh', '2x2', '--lower', 'jax', '--json']))\n"
    )
    done = run_program(program)

    assert done.returncode == 0, done.stderr
    assert '"lowered": {"steps": ' in done.stdout


@needs_jax
def test_importing_the_collectives_imports_no_torch() -> None:
    program = (
        "import sys\n"
        "import meshmend.jax\n"
        "from meshmend.jax import allreduce, check_neighbours, device_mesh\n"
        "print([name for name in ('torch', 'transformers', 'typer') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert (done.stdout, done.stderr) == ("[]\n", "")
