"""Temporary folders outlive nobody for long."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from meshmend.scratch import scratch_folder


def test_a_folder_is_there_while_it_is_used_and_then_gone() -> None:
    with scratch_folder() as name:
        assert Path(name).is_dir()

    assert not Path(name).exists()


def test_the_folder_of_a_killed_process_is_swept_and_that_of_a_living_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead, alive, other = (
        tmp_path / f"meshmend-{gone.pid}-x",
        tmp_path / f"meshmend-{os.getppid()}-x",
        tmp_path / "meshmend-soak-x",
    )
    for folder in (dead, alive, other):
        (folder / "inside").mkdir(parents=True)

    with scratch_folder():
        assert not dead.exists()
        assert alive.exists()
        assert other.exists()
