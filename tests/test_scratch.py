"""Temporary folders outlive nobody for long."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from meshmend.scratch import scratch_folder

_USER = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from meshmend.scratch import scratch_folder
with scratch_folder() as name:
    print(name, flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_there_while_it_is_used_and_then_gone() -> None:
    with scratch_folder() as name:
        assert Path(name).is_dir()

    assert not Path(name).exists()


@pytest.mark.parametrize("namespace", [[], ["unshare", "--pid", "--fork"]], ids=["", "container"])
def test_a_folder_in_use_stays_also_in_another_pid_namespace_and_that_of_a_killed_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespace: list[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if namespace and subprocess.run([*namespace, "true"], check=False).returncode:
        pytest.skip("this user may not make a PID namespace")
    command = [*namespace, sys.executable, "-c", _USER, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as user:  # type: ignore[call-overload]
        in_use = Path(user.stdout.readline().strip())
        other = tmp_path / "meshmend-soak-x"
        other.mkdir()

        with scratch_folder():
            assert in_use.is_dir()

        user.communicate()
    assert not in_use.exists()
    assert other.exists()


def test_the_folder_of_a_killed_process_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command = [sys.executable, "-c", _USER, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as user:  # type: ignore[call-overload]
        left = Path(user.stdout.readline().strip())
        user.kill()
    assert left.is_dir()

    with scratch_folder():
        assert not left.exists()
