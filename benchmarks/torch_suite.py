"""PyTorch's own tests of torch.distributed on our backend, beside the same tests on Gloo.

    python benchmarks/torch_suite.py [--only NAME ...] [--log FILE] [--no-write]

Runs `DistributedTest._DistTestBase` of `torch.testing`, 4 ranks on the mesh 2x2. Each test runs on
Gloo first, and if it passes there, on meshmend. The exit code is 1 if one of those fails. What both
skip needs what this machine lacks (GPUs, MPI, 8 ranks), or is skipped by PyTorch itself.
"""

import argparse
import os
import sys
import tempfile
import time
import unittest
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from record import record

# Read when PyTorch's tests are imported: they choose by the name of the backend what to skip.
os.environ.update(
    BACKEND="gloo",
    WORLD_SIZE="4",
    INIT_METHOD="file://",
    MESHMEND_MESH="2x2",
    DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="120",
)

import torch.testing._internal.distributed.distributed_test as theirs

import meshmend.torch.group_factory  # noqa: F401  # registers the backend
from meshmend.planning.catalogue import prepare
from meshmend.planning.compile_once import compile_once
from meshmend.planning.environment import settings_from

# What passes with Gloo and not with us, and why. The run fails for any other test, and for one of
# these that passes.
KNOWN: dict[str, str] = {}

_SKIPPED = "skipped: "
_BARRIER_S = 60  # on a busy machine the 10 s of PyTorch are too few

Bases: Any = (theirs.TestDistBackend, theirs.DistributedTest._DistTestBase)


class Meshmend(str):
    """The name of our backend; it equals `gloo` too, so that tests take their path for CPUs."""

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)

    __hash__ = str.__hash__


class Suite(*Bases):  # type: ignore[misc]  # untyped
    """PyTorch's tests in processes forked from this one."""

    def setUp(self) -> None:
        super().setUp()
        theirs.INIT_METHOD = os.environ["INIT_METHOD"]
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    def _barrier(self, wait_for: int | None = None, timeout: int = 0) -> None:
        sync: Any = theirs.Barrier.sync
        sync(wait_for, timeout=max(timeout, _BARRIER_S))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], help="names of tests, or parts of names")
    parser.add_argument("--log", type=Path, default=None, help="what the ranks print")
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a process that is forked from one with more of them hangs
    compile_once()
    settings = settings_from(os.environ)
    prepare(settings.mesh, settings.algorithm)
    log = arguments.log or Path(tempfile.mkdtemp()) / "torch_suite.log"
    print(f"what the ranks print goes to {log}")
    names = [
        name
        for name in unittest.TestLoader().getTestCaseNames(Suite)
        if not arguments.only or any(part in name for part in arguments.only)
    ]
    if not names:
        print(f"torch_suite needs the name of a test, but none holds {arguments.only}")
        return 2
    outcomes = {name: run_on_both(name, log) for name in names}
    return report(outcomes, write=not (arguments.no_write or arguments.only))


def run_on_both(name: str, log: Path) -> dict[str, str]:
    """Return how a test ended on Gloo and, if it passed there, on our backend."""
    ended: dict[str, str] = {}
    times: list[str] = []
    for backend in ("gloo", Meshmend("meshmend")):
        theirs.BACKEND = backend
        began = time.monotonic()
        with redirected(log):
            ended[str(backend)] = outcome_of(Suite(name))
        times.append(f"{time.monotonic() - began:.1f} s")
        if ended["gloo"] != "passed":
            break
    if not ended["gloo"].startswith(_SKIPPED):
        words = ", ".join(f"{key} {value.splitlines()[0]}" for key, value in ended.items())
        print(f"{name}: {words} ({', '.join(times)})", flush=True)
    return ended


def outcome_of(case: Any) -> str:
    result = unittest.TestResult()
    case.run(result)
    if result.skipped:
        return f"{_SKIPPED}{result.skipped[0][1]}"
    if wrong := [*result.errors, *result.failures]:
        last = [line for line in wrong[0][1].splitlines() if line.strip()][-1]
        return f"failed: {last[:200]}"
    return "passed"


@contextmanager
def redirected(log: Path) -> Iterator[None]:
    """Send what this process and its children print to a file."""
    sys.stdout.flush()
    kept = [os.dup(fd) for fd in (1, 2)]
    with log.open("a") as file:
        for fd in (1, 2):
            os.dup2(file.fileno(), fd)
        try:
            yield
        finally:
            sys.stdout.flush()
            for fd, old in zip((1, 2), kept, strict=True):
                os.dup2(old, fd)
                os.close(old)


def report(outcomes: dict[str, dict[str, str]], *, write: bool) -> int:
    passed = [name for name, ended in outcomes.items() if ended["gloo"] == "passed"]
    ours = [name for name in passed if outcomes[name]["meshmend"] == "passed"]
    skipped = Counter(
        ended["gloo"].removeprefix(_SKIPPED)
        for ended in outcomes.values()
        if ended["gloo"].startswith(_SKIPPED)
    )
    other = [name for name, ended in outcomes.items() if ended["gloo"].startswith("failed")]
    print(f"Gloo passes {len(passed)}, skips {skipped.total()}, fails {len(other)}: {other}")
    for reason, count in skipped.most_common():
        print(f"  skips {count}: {reason}")
    print(f"meshmend passes {len(ours)} of the {len(passed)}")
    missing = [name for name in passed if name not in ours]
    for name in missing:
        print(f"  {name}: {KNOWN.get(name, outcomes[name]['meshmend'])}")
    if write:
        figures: dict[str, Any] = {
            "gloo": len(passed),
            "meshmend": len(ours),
            "not passed": missing,
        }
        figures["skipped"] = dict(skipped.most_common())
        record("torch-suite", {"torch": torch.__version__, **figures})
    unknown = [name for name in missing if name not in KNOWN]
    mended = [name for name in ours if name in KNOWN]
    if mended:
        print(f"these pass now: take them out of KNOWN: {mended}")
    return 1 if unknown or mended else 0


if __name__ == "__main__":
    sys.exit(main())
