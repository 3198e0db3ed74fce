"""PyTorch's own tests of torch.distributed on our backend, beside the same tests on Gloo.

    python benchmarks/torch_suite.py [--checkout FOLDER] [--suite NAME ...] [--only NAME ...]
                                     [--log FILE] [--no-write]

| suite | tests |
| --- | --- |
| `distributed` | `DistributedTest._DistTestBase` of `torch.testing`, 4 ranks on the mesh 2x2 |
| `gloo` | Gloo's own: `ProcessGroupGlooTest`, with our group in place of Gloo's |
| `fault-tolerance` | `test_c10d_fault_tolerance.py` (since torch 2.14), 3 ranks on a ring of 3 |

The last two are not in the package: `--checkout` names a folder with PyTorch's source of the
installed version, or with only its `test/distributed`. With it both run, as far as their files are
there; without it, the first. `--suite` chooses. Each test runs on Gloo first, and if it passes
there, on meshmend. The exit code is 1 if one of those fails. What both skip needs what this machine
lacks (GPUs, MPI, 8 ranks), or is skipped by PyTorch itself.
"""

import argparse
import os
import sys
import tempfile
import time
import unittest
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import torch
import torch.distributed

from record import record

# Read when PyTorch's tests are imported: they choose by the name of the backend what to skip.
os.environ.update(
    BACKEND="gloo",
    WORLD_SIZE="4",
    INIT_METHOD="file://",
    DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="120",
    PYTORCH_PRINT_REPRO_ON_FAILURE="0",  # so that the last line of a failure is its error
)

import torch.testing._internal.distributed.distributed_test as theirs

from meshmend.planning.catalogue import prepare
from meshmend.planning.compile_once import compile_once
from meshmend.planning.environment import settings_from
from meshmend.torch.group_factory import create_group  # registers the backend

# What passes with Gloo and not with us, or not always, and why. The run fails for any other test.
_RACE = "a race, which Gloo loses at times too: the peers may be gone before 1 ms is over"
KNOWN = {
    "test_allreduce_basics": "the float16 sum of numbers that nearly cancel, in another order",
    "test_allreduce_op_timeout": _RACE,
    "test_allreduce_overall_timeout": _RACE,
    "test_gloo_set_pg_timeout_api": _RACE,
}

_OURS = "meshmend"
_SKIPPED = "skipped: "
_BARRIER_S = 60  # on a busy machine the 10 s of PyTorch are too few

c10d: Any = torch.distributed.distributed_c10d
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


class Choice(Protocol):
    """A class of tests that can run on either backend; `mesh` and `wrap` describe our ranks."""

    name: str
    mesh: tuple[str, str]
    cases: Any

    def select(self, backend: str) -> None:
        """Make the next tests run on this backend."""


class DistributedTests:
    """The tests that torch itself carries: they ask for a backend by its name."""

    name = "torch-suite"
    mesh = ("2x2", "none")
    cases = Suite

    def select(self, backend: str) -> None:
        """Make the next tests run on this backend."""
        theirs.BACKEND = Meshmend(backend) if backend == _OURS else backend


class GlooTests:
    """Gloo's own tests of a checkout: they make Gloo groups, and get ours in their place."""

    name = "torch-gloo-suite"
    mesh = ("2x2", "none")

    def __init__(self) -> None:
        given: Any = import_module("test_c10d_gloo").ProcessGroupGlooTest
        choice = self
        self._backend = "gloo"

        class GlooSuite(given):  # type: ignore[misc]  # untyped
            def _spawn_processes(self) -> None:
                self._start_processes(torch.multiprocessing.get_context("fork").Process)

            def _create_process_group_gloo(
                self, store: Any, rank: int, world_size: int, opts: Any
            ) -> Any:
                if choice._backend == "gloo":
                    return super()._create_process_group_gloo(store, rank, world_size, opts)
                options: Any = c10d._DistributedBackendOptions()
                options.store, options.timeout = store, opts._timeout
                options.group_rank, options.group_size = rank, world_size
                group = create_group(options)
                torch.distributed.barrier(group=group)
                return group

        self.cases = GlooSuite
        make_default: Any = torch.distributed.init_process_group

        def with_choice(backend: str, **options: Any) -> None:
            make_default(self._backend if backend == "gloo" else backend, **options)

        mock.patch.object(torch.distributed, "init_process_group", with_choice).start()

    def select(self, backend: str) -> None:
        """Make the next tests run on this backend."""
        self._backend = backend


class FaultToleranceTests:
    """The tests of groups that are made again: a class for any backend."""

    name = "torch-fault-tolerance-suite"
    mesh = ("3", "all")  # whichever two of its chips are left, they are neighbours

    def __init__(self) -> None:
        module: Any = import_module("test_c10d_fault_tolerance")
        given: Any = module._make_fault_tolerance_test_class("gloo", "cpu")

        class FaultToleranceSuite(given):  # type: ignore[misc]  # untyped
            def _spawn_processes(self) -> None:
                self._start_processes(torch.multiprocessing.get_context("fork").Process)

        self.cases = FaultToleranceSuite

    def select(self, backend: str) -> None:
        """Make the next tests run on this backend."""
        self.cases.backend_name = backend


_FOLDER = Path("test", "distributed")  # in PyTorch's source
SUITES: dict[str, tuple[str, Callable[[], Choice]]] = {  # with the file that each needs
    "distributed": ("", DistributedTests),
    "gloo": ("test_c10d_gloo.py", GlooTests),
    "fault-tolerance": ("test_c10d_fault_tolerance.py", FaultToleranceTests),
}


def chosen_suites(names: list[str], checkout: Path | None) -> list[str]:
    """Return the suites to run; print what is missing for the others.

    Raises:
        SystemExit: a suite was asked for by name, and its file is not there.
    """
    is_asked = bool(names)
    chosen = []
    for name in names or (["gloo", "fault-tolerance"] if checkout else ["distributed"]):
        file, _ = SUITES[name]
        path = checkout / _FOLDER / file if checkout else None
        if not file or (path is not None and path.exists()):
            chosen.append(name)
            continue
        lacks = f"{path} is missing" if path else "--checkout is not given"
        print(f"the suite {name} needs {_FOLDER / file} of PyTorch's source, but {lacks}")
        if is_asked:
            raise SystemExit(2)
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkout", type=Path, default=None, help="PyTorch's source")
    parser.add_argument("--suite", nargs="+", choices=SUITES, default=[], help="what to run")
    parser.add_argument("--only", nargs="+", default=[], help="names of tests, or parts of names")
    parser.add_argument("--log", type=Path, default=None, help="what the ranks print")
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    chosen = chosen_suites(arguments.suite, arguments.checkout)
    if not chosen:
        return 2
    if arguments.checkout:
        sys.path.insert(0, str(arguments.checkout / _FOLDER))
    torch.set_num_threads(1)  # a process that is forked from one with more of them hangs
    compile_once()
    log = arguments.log or Path(tempfile.mkdtemp()) / "torch_suite.log"
    print(f"what the ranks print goes to {log}")
    codes = []
    for choice in (SUITES[name][1]() for name in chosen):
        os.environ["MESHMEND_MESH"], os.environ["MESHMEND_WRAP"] = choice.mesh
        settings = settings_from(os.environ)
        prepare(settings.mesh, settings.algorithm)
        names = [
            name
            for name in unittest.TestLoader().getTestCaseNames(choice.cases)
            if not arguments.only or any(part in name for part in arguments.only)
        ]
        outcomes = {name: run_on_both(choice, name, log) for name in names}
        if not names:
            print(f"{choice.name} needs the name of a test, but none holds {arguments.only}")
            codes.append(2)
        else:
            is_whole = not (arguments.no_write or arguments.only)
            codes.append(report(choice.name, outcomes, write=is_whole))
    return max(codes)


def run_on_both(choice: Choice, name: str, log: Path) -> dict[str, str]:
    """Return how a test ended on Gloo and, if it passed there, on our backend."""
    ended: dict[str, str] = {}
    times: list[str] = []
    for backend in ("gloo", _OURS):
        choice.select(backend)
        began = time.monotonic()
        with redirected(log):
            ended[backend] = outcome_of(choice.cases(name))
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


def report(suite: str, outcomes: dict[str, dict[str, str]], *, write: bool) -> int:
    passed = [name for name, ended in outcomes.items() if ended["gloo"] == "passed"]
    ours = [name for name in passed if outcomes[name][_OURS] == "passed"]
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
        print(f"  {name}: {KNOWN.get(name, outcomes[name][_OURS])}")
    if write:
        figures: dict[str, Any] = {
            "gloo": len(passed),
            _OURS: len(ours),
            "not passed": missing,
        }
        figures["skipped"] = dict(skipped.most_common())
        record(suite, {"torch": torch.__version__, **figures})
    return 1 if any(name not in KNOWN for name in missing) else 0


if __name__ == "__main__":
    sys.exit(main())
