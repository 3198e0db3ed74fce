"""Compiling once per host: one process does it, the others wait and find it done."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshmend.planning import compile_once as module
from meshmend.planning.compile_once import compile_once
from waiting import until


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that has a line for each time that all was compiled."""
    done = tmp_path / "done"
    done.touch()

    def compile_slowly(meanwhile: Callable[[], None]) -> bool:
        meanwhile()
        time.sleep(0.2)
        with done.open("a") as stream:
            stream.write("compiled\n")
        return True

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_compile", compile_slowly)
    return done


def test_of_several_processes_one_compiles_and_the_others_wait(compiled: Path) -> None:
    children = []
    for _ in range(3):
        if (pid := os.fork()) == 0:
            compile_once()
            os._exit(0 if compiled.read_text() == "compiled\n" else 1)
        children.append(pid)

    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
    assert compiled.read_text() == "compiled\n"


def test_who_compiles_and_who_waits_both_use_the_time(
    compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_until_both_came(meanwhile: Callable[[], None]) -> bool:
        meanwhile()
        until(lambda: len(list(tmp_path.glob("used *"))) == 2)
        return True

    monkeypatch.setattr(module, "_compile", compile_until_both_came)
    children = []
    for number in range(2):
        if (pid := os.fork()) == 0:
            compile_once(meanwhile=(tmp_path / f"used {number}").touch)
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    compile_once(meanwhile=(tmp_path / "used without a wait").touch)

    assert sorted(path.name for path in tmp_path.glob("used*")) == ["used 0", "used 1"]


def test_who_compiles_says_so_first_and_only_then(compiled: Path) -> None:
    said: list[str] = []

    compile_once(lambda: said.append(compiled.read_text()))
    compile_once(lambda: said.append("again"))

    assert said == [""]


def test_what_failed_is_tried_again(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[bool] = []

    def fail(meanwhile: Callable[[], None]) -> bool:
        tries.append(True)
        return False

    monkeypatch.setattr(module, "_compile", fail)

    compile_once()
    compile_once()

    assert len(tries) == 2


def test_a_cache_that_cannot_be_written_stops_nobody(
    compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(compiled / "no folder"))

    compile_once()

    assert compiled.read_text() == ""
