"""Without PyTorch, whatever needs it says in one line what to install."""

import subprocess

import pytest

from forked_script import run_program

WITHOUT_TORCH = "import sys\nsys.modules['torch'] = None\n"


def run_without_torch(program: str) -> subprocess.CompletedProcess[str]:
    return run_program(WITHOUT_TORCH + program)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train", "--framework torch needs torch, but it is not installed"),
        ("run --mesh 2x2 examples/torch/elastic_ddp.py", "meshmend run needs torch"),
        ("bench --mesh 2x2 --compare gloo", "--compare gloo needs torch"),
    ],
)
def test_commands_that_need_torch_end_with_one_line_and_code_2(line: str, words: str) -> None:
    ended = run_without_torch(
        f"from meshmend.cli.main import run_line\nsys.exit(run_line({line.split()!r}))"
    )

    assert ended.returncode == 2, ended.stderr
    assert ended.stdout == ""
    (message,) = [each for each in ended.stderr.splitlines() if " needs " in each]
    assert words in message
    assert "pip install" in message


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (
            "import meshmend.torch",
            "meshmend.torch needs PyTorch, but it is not installed; run: pip install "
            "'meshmend[torch]'",
        ),
        (
            "from meshmend.train import Job",
            "Job needs torch, but it is not installed; run: pip install 'meshmend[torch]'",
        ),
    ],
)
def test_modules_that_need_torch_say_what_to_install(statement: str, message: str) -> None:
    ended = run_without_torch(
        f"from meshmend.errors import InputError\ntry:\n    {statement}\n"
        "except InputError as error:\n    print(error, isinstance(error, ImportError))\n"
    )

    assert (ended.stdout, ended.stderr) == (f"{message} True\n", "")
