"""`meshmend doctor`: what works on this machine, and what to install for the rest."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, Literal

from meshmend import __version__
from meshmend.cli.console import cache_dir, print_json
from meshmend.cli.options import JsonOption
from meshmend.errors import MeshmendError
from meshmend.packages import is_older, oldest_of, packages_of

State = Literal["works", "missing", "warning", "broken"]
_SIGNS: Final[dict[State, str]] = {"works": "ok", "missing": "-", "warning": "!", "broken": "NO"}

# What an extra is for. `pyproject.toml` has the packages.
_EXTRAS: Final = {
    "torch": "PyTorch backend, run",
    "train": "train",
    "jax": "JAX",
    "explore": "explore",
    "hf": "Hugging Face Trainer",
    "lightning": "Lightning",
    "ray": "Ray",
    "docs": "site of the documents",
}
_BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome", "firefox")
_BUSY_SHARE = 0.5  # of the cores, by the load of the last minute


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: its state, what was found, and what to do about it."""

    name: str
    state: State
    detail: str
    advice: str = ""


def doctor_command(as_json: JsonOption = False) -> int:
    """Say what works on this machine: extras, network namespaces, schedulers, caches, load.

    It installs nothing and changes nothing. The exit code is 1 only if meshmend itself does not
    work here; what is missing for an extra is no fault.

    **Examples**

    - meshmend doctor

    - meshmend doctor --json
    """
    found = list(findings())
    broken = any(each.state == "broken" for each in found)
    if as_json:
        print_json({"works": not broken, "findings": [asdict(each) for each in found]})
        return int(broken)
    for each in found:
        print(f"{_SIGNS[each.state]:<3} {each.name:<22} {each.detail}")
        if each.advice:
            print(f"{'':<4}{'':<22} {each.advice}")
    return int(broken)


def findings() -> Iterator[Finding]:
    """Yield what was found, the most important things first."""
    yield _system()
    yield _core()
    yield _compile_cache()
    yield _plan_cache()
    yield from (_extra(*each) for each in _EXTRAS.items())
    yield _gpu()
    yield _namespaces()
    yield _commands("OpenMPI", ("mpirun", "mpicc"), "apt-get install openmpi-bin libopenmpi-dev")
    yield _commands("Slurm", ("sbatch", "srun"), "apt-get install slurm-wlm")
    yield _commands("Kubernetes", ("kubectl",), "install kubectl")
    yield _browser()
    yield _load()


def _system() -> Finding:
    words = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    if sys.platform != "linux":
        return Finding("system", "broken", words, "meshmend runs on Linux alone")
    return Finding("system", "works", words)


def _core() -> Finding:
    """Plan for a small mesh, which uses every part of the core."""
    try:
        from meshmend.planning.plan import plan
        from meshmend.topology.mesh import Mesh

        made = plan(Mesh((2, 2)), "ring-1d")
    except (MeshmendError, ImportError, OSError) as error:
        return Finding("plan, simulate", "broken", str(error), "install meshmend again")
    words = f"meshmend {__version__}, numba {version('numba')}, numpy {version('numpy')}"
    return Finding("plan, simulate", "works", f"{words}; proved {made.proof.method}")


def _compile_cache() -> Finding:
    from meshmend.planning.compile_once import compiled_mark

    mark = compiled_mark()
    if mark.exists():
        return Finding("compiled loops", "works", f"kept in {mark.parent}")
    if _is_writable(mark.parent):
        words = f"not yet compiled, or not all; will be kept in {mark.parent}"
        return Finding("compiled loops", "warning", words, "the first job waits for that, once")
    return Finding(
        "compiled loops",
        "warning",
        f"cannot be kept: {mark.parent} cannot be written",
        "every process compiles again; set NUMBA_CACHE_DIR to a folder of yours",
    )


def _plan_cache() -> Finding:
    folder = cache_dir()
    if not _is_writable(folder):
        advice = "set XDG_CACHE_HOME to a folder of yours"
        return Finding("plans", "warning", f"cannot be kept: {folder} cannot be written", advice)
    n_kept = sum(1 for _ in folder.glob("*.json")) if folder.is_dir() else 0
    return Finding("plans", "works", f"{n_kept} answers kept in {folder}")


def _is_writable(folder: Path) -> bool:
    """Whether a folder, or the nearest one above it that exists, can be written."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return os.access(there, os.W_OK | os.X_OK)


def _extra(extra: str, name: str) -> Finding:
    there, absent, old, untried = [], [], [], []
    for package in packages_of(extra):
        try:
            found = version(package.name)
        except PackageNotFoundError:
            absent.append(package.name)
            continue
        there.append(f"{package.name} {found}")
        if is_older(found, package):
            old.append(f"{there[-1]} is too old, the oldest is {oldest_of(package)}")
        elif not package.specifier.contains(found, prereleases=True):
            untried.append(f"{package.name}{package.specifier}")
    install = f"pip install 'meshmend[{extra}]'"
    if old:
        return Finding(name, "missing", "; ".join(old), install)
    if absent:
        return Finding(name, "missing", f"without {', '.join(absent)}", install)
    if untried:
        advice = f"was tried with {', '.join(untried)} alone"
        return Finding(name, "warning", ", ".join(there), advice)
    if not there:
        advice = "install meshmend, so that its packages are known"
        return Finding(name, "warning", "meshmend runs from a folder of sources", advice)
    return Finding(name, "works", ", ".join(there))


def _gpu() -> Finding:
    """Look for the driver only: asking PyTorch would take seconds."""
    if Path("/proc/driver/nvidia/version").exists():
        return Finding("GPU", "works", "the driver of NVIDIA is loaded")
    return Finding("GPU", "missing", "no driver of NVIDIA", "chips are processes on cores")


def _namespaces() -> Finding:
    """Start what keeps a testbed's namespaces, with one chip, and end it again."""
    from meshmend.lab.testbed.kernel import command_path, start_holder, stop_holder
    from meshmend.scratch import scratch_folder

    name = "network namespaces"
    try:
        for command in ("ip", "tc", "nsenter"):
            command_path(command)
        with scratch_folder() as folder:
            holder, is_user = start_holder(1, Path(folder) / "doctor")
            stop_holder(holder)
    except (MeshmendError, OSError) as error:
        what, _, advice = str(error).partition("; ")
        return Finding(name, "missing", what, advice)
    how = "with a user namespace" if is_user else "as root"
    return Finding(name, "works", f"testbed, bench --testbed, train --testbed ({how})")


def _commands(name: str, commands: tuple[str, ...], advice: str) -> Finding:
    absent = [each for each in commands if shutil.which(each) is None]
    if absent:
        return Finding(name, "missing", f"without {' and '.join(absent)}", advice)
    return Finding(name, "works", ", ".join(str(shutil.which(each)) for each in commands))


def _browser() -> Finding:
    for name in _BROWSERS:
        if path := shutil.which(name):
            return Finding("browser", "works", path)
    return Finding("browser", "missing", "none found", "pages open in one on another machine")


def _load() -> Finding:
    load, n_cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    cores = "1 core" if n_cores == 1 else f"{n_cores} cores"
    words = f"{load:.1f} on {cores}"
    if load > _BUSY_SHARE * n_cores:
        return Finding("load", "warning", words, "measured times will be longer and vary")
    return Finding("load", "works", words)
