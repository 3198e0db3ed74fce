"""A disk of a few pages, to be filled: a tmpfs of its own. Needs root and mount."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, *, n_bytes: int) -> Iterator[Path]:
    """Yield a folder on a disk of its own with room for so many bytes; skip where none can be."""
    if shutil.which("mount") is None:
        pytest.skip("there is no mount")
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={n_bytes}", "tmpfs", str(folder)]
    done = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no small disk can be mounted: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)
