"""Compiled code on disk is used again, but never after a change in what it contains."""

import subprocess
import sys
from pathlib import Path

import pytest

from forked_script import run_forked

FILES = {
    "numbers_of_others.py": "STEP = 1\nTABLE = (10, 20)\n",
    "inner.py": (
        "from meshmend.kernels import plain_kernel\n"
        "from numbers_of_others import STEP\n\n"
        "@plain_kernel\ndef grow(number):\n    return number + STEP\n"
    ),
    "outer.py": (
        "from meshmend.kernels import kernel\n"
        "from numbers_of_others import TABLE\n"
        "from inner import grow\n\n"
        "@kernel\ndef answer(number):\n    return later(number) + TABLE[0]\n\n"
        "@kernel\ndef later(number):\n    return grow(number)\n"
    ),
    # Python would take its own compiled code of a file that changed within a second for the same.
    "main.py": (
        "import sys\nsys.dont_write_bytecode = True\n"
        "from outer import answer\n"
        "print(answer(100), 'compiled' if answer.stats.cache_misses else 'from disk')\n"
    ),
}
C_FUNCTION = """
from meshmend.kernels import c_function
from numba import types

def twice(number):
    return 2 * number

print(c_function(twice, types.int64(types.int64)).ctypes(21))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def said(program: Path) -> str:
    done = run_forked(str(program / "main.py"), imported=("meshmend.kernels",))
    return done.stdout.strip() or done.stderr


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_a_kernel_is_compiled_again_after_a_change_in_another_file(program: Path) -> None:
    """A kernel that it calls, a constant of a kernel that it calls, and a constant of its own."""
    assert said(program) == "111 compiled"
    assert said(program) == "111 from disk"

    change(program / "inner.py", "number + STEP", "number - STEP")
    assert said(program) == "109 compiled"
    change(program / "numbers_of_others.py", "STEP = 1", "STEP = 7")
    assert said(program) == "103 compiled"
    change(program / "numbers_of_others.py", "(10, 20)", "(50, 20)")
    assert said(program) == "143 compiled"
    assert said(program) == "143 from disk"


def test_without_compilation_kernels_are_plain_functions(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own: Numba reads the variable when it is imported."""
    change(program / "main.py", "print(answer(100), ", "print(answer(100)) #")
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")

    command = [sys.executable, str(program / "main.py")]
    assert subprocess.check_output(command, text=True) == "111\n"


def test_a_kernel_is_compiled_once_whatever_constants_it_is_called_with(program: Path) -> None:
    change(program / "outer.py", "grow(number)", "grow(number) + grow(0) + grow(1)")
    change(program / "main.py", "print(answer(100), ", "import inner\nprint(answer(100), ")
    change(program / "main.py", "'compiled' if answer.stats.cache_misses", "inner.grow.signatures")
    change(program / "main.py", " else 'from disk'", "")

    assert said(program) == "114 [(int64,)]"


def test_a_disk_that_takes_no_compiled_code_stops_nobody_and_leaves_no_old_code(
    program: Path,
) -> None:
    """What is too long for it is compiled code; the index, which names it, is shorter."""
    assert said(program) == "111 compiled"
    text = (program / "main.py").read_text()
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
    change(program / "outer.py", "+ TABLE[0]", "+ TABLE[1]")

    (program / "main.py").write_text(limit + text)
    assert said(program) == "121 compiled"
    (program / "main.py").write_text(text)
    assert said(program) == "121 compiled"
    assert said(program) == "121 from disk"


def test_without_a_folder_that_can_be_written_each_process_compiles(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (program / "__pycache__").touch()  # no folder can have this name
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(program / "main.py" / "cache"))

    assert [said(program) for _ in range(2)] == ["111 compiled", "111 compiled"]
    (program / "main.py").write_text(C_FUNCTION)
    assert said(program) == "42"


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("n_bytes", [0, 30])
def test_compiled_code_that_was_cut_off_is_compiled_again(
    program: Path, suffix: str, n_bytes: int
) -> None:
    assert said(program) == "111 compiled"
    for file in (program / "__pycache__").glob(f"*.{suffix}"):
        file.write_bytes(file.read_bytes()[:n_bytes])

    assert said(program) == "111 compiled"
    assert said(program) == "111 from disk"
