"""Without PyTorch, or with an old one, whatever needs it says in one line what to install."""

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
            "meshmend.torch needs torch, but it is not installed; run: pip install "
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


@pytest.mark.parametrize(
    ("installed", "answer"),
    [
        ("2.11.0+cu130", "Job needs torch 2.13 or newer, but 2.11.0+cu130 is installed; "),
        ("2.13.0a0+git1234", ""),  # a build from sources
        ("2.13.0+cpu", ""),
    ],
)
def test_a_torch_that_is_too_old_is_refused_before_anything_is_run(
    installed: str, answer: str
) -> None:
    ended = run_program(
        f"from meshmend import packages\npackages.version = lambda name: {installed!r}\n"
        "from meshmend.errors import InputError\ntry:\n    from meshmend.train import Job\n"
        "except InputError as error:\n    print(error)\n"
    )

    expected = f"{answer}run: pip install 'meshmend[torch]'\n" if answer else ""
    assert (ended.stdout, ended.stderr) == (expected, "")


def test_a_torch_that_does_not_tell_its_version_is_used() -> None:
    ended = run_program(
        "from meshmend import packages\n"
        "def version(name):\n    raise packages.PackageNotFoundError(name)\n"
        "packages.version = version\n"
        "from meshmend.train import Job\nprint(Job.__name__)\n"
    )

    assert (ended.stdout, ended.stderr) == ("Job\n", "")
