"""Temporary folders of running processes; those of processes that were killed are deleted."""

import os
import re
import shutil
import tempfile
from pathlib import Path

_NAME = re.compile(r"meshmend-(\d+)-")


def scratch_folder() -> "tempfile.TemporaryDirectory[str]":
    """Return a new temporary folder, and delete those whose processes are gone.

    A process that was killed cannot delete its own folder. Folders of other users stay, and so
    does a folder whose process number belongs to another process by now.
    """
    for folder in Path(tempfile.gettempdir()).glob("meshmend-*"):
        owner = _NAME.match(folder.name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            shutil.rmtree(folder, ignore_errors=True)
    return tempfile.TemporaryDirectory(prefix=f"meshmend-{os.getpid()}-")
