"""Runs checks in a process of its own with many virtual JAX devices, many checks per process.

A process decides once how many devices it has, and JAX warns when a process that runs it is forked.
"""

import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from meshmend.errors import InputError
from packages import needs

needs_jax = needs("jax")

Checks = Mapping[str, Callable[[], object]]


def environment(n_devices: int, **more: str) -> dict[str, str]:
    """Return the environment of a process with so many virtual devices.

    LLVM optimizes nothing: these programs run once, and compiling them takes most of the time.
    """
    devices = f"--xla_force_host_platform_device_count={n_devices}"
    flags = f"{devices} --xla_backend_optimization_level=0"
    return {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", **more}


def outcomes(script: Path, n_devices: int, *names: str) -> dict[str, str]:
    """Run a script of checks; return what each printed: `ok`, or its traceback."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), *names],
        env=environment(n_devices, PYTHONPATH=os.pathsep.join(filter(None, sys.path))),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    parts = [part.partition("\n") for part in done.stdout.split("== ")[1:]]
    return {name: text.strip() for name, _, text in parts}


def run_checks(checks: Checks, names: list[str]) -> None:
    """Run the named checks, or all, and print how each ended."""
    for name in names or checks:
        print("==", name, flush=True)
        try:
            checks[name]()
            print("ok", flush=True)
        except Exception:
            print(traceback.format_exc(), flush=True)


def refused(words: str, function: Callable[[], object]) -> None:
    """Check that a function refuses its arguments with these words."""
    with pytest.raises(InputError, match=re.escape(words)):
        function()
