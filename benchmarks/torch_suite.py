"""PyTorch's own tests of torch.distributed on our backend, beside the same tests on Gloo.

    python benchmarks/torch_suite.py [--checkout FOLDER] [--suite NAME ...] [--only NAME ...]
                                     [--log FILE] [--no-write]

| suite | tests |
| --- | --- |
| `distributed` | `DistributedTest._DistTestBase` of `torch.testing`, 4 ranks on the mesh 2x2 |
| `gloo` | Gloo's own: `ProcessGroupGlooTest`, with our group in place of Gloo's |
| `fault-tolerance` | `test_c10d_fault_tolerance.py` (since torch 2.14), 3 ranks on a ring of 3 |
| `functional` | functional collectives |
| `device-mesh` | `DeviceMesh` |
| `fsdp2` | `fully_shard` and `replicate` |
| `dtensor` | `DTensor` and tensor parallelism |
| `checkpoint` | DCP, the distributed checkpoints |

All but the first are not in the package: `--checkout` names a folder with PyTorch's source of the
installed version, or with only its `test/distributed`. With it they run, as far as their files are
there; without it, the first. `--suite` chooses. Each test runs on Gloo first, and if it passes
there, on meshmend. The exit code is 1 if one of those fails. What both skip needs what this machine
lacks (GPUs, MPI, 8 ranks), or is skipped by PyTorch itself. Of the last five suites run the classes
whose ranks are processes; the others need no backend, because their ranks are threads.
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
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
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
_PLUGIN = "it takes every group that c10d calls custom, as it does all plugins, for a fake one"
KNOWN = {
    "test_backend_override_argument_dict_with_idx_and_backend_eager": _PLUGIN,
    "test_backend_override_argument_dict_with_idx_and_backend_lazy": _PLUGIN,
    "test_allreduce_basics": "the float16 sum of numbers that nearly cancel, in another order",
    "test_allreduce_op_timeout": _RACE,
    "test_allreduce_overall_timeout": _RACE,
    "test_gloo_set_pg_timeout_api": _RACE,
}
KNOWN |= {
    f"{name}_thread_count_{count}": "ShardedTensor takes every backend but Gloo for one of GPUs"
    for name in (
        "test_load_rowwise_to_colwise",
        "test_load_with_different_shard_plan",
        "test_switch_between_sharded_tensor_to_tensor",
    )
    for count in (1, 2)
}

_OURS = "meshmend"
SHAPES = {4: "2x2", 6: "2x3", 8: "2x4"}  # of our mesh, by the number of ranks; else a line
_SKIPPED = "skipped: "
_BARRIER_S = 60  # on a busy machine the 10 s of PyTorch are too few

c10d: Any = torch.distributed.distributed_c10d
common: Any = import_module("torch.testing._internal.common_distributed")
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
    """Classes of tests that can run on either backend; `mesh` and `wrap` describe our ranks."""

    name: str
    mesh: tuple[str, str]
    cases: list[Any]

    def select(self, backend: str) -> None:
        """Make the next tests run on this backend."""


class DistributedTests:
    """The tests that torch itself carries: they ask for a backend by its name."""

    name = "torch-suite"
    mesh = ("2x2", "none")

    def __init__(self) -> None:
        self.cases: list[Any] = [Suite]

    def select(self, backend: str) -> None:
        """Make the next tests run on this backend."""
        theirs.BACKEND = Meshmend(backend) if backend == _OURS else backend


class OwnGroups:
    """Makes `init_process_group` take the chosen backend wherever a test asks for Gloo."""

    mesh = ("2x2", "none")

    def __init__(self) -> None:
        self._backend = "gloo"
        make: Any = c10d.init_process_group

        def with_choice(backend: str | None = None, *more: Any, **options: Any) -> None:
            chosen = self._backend if backend is None else backend.replace("gloo", self._backend)
            if self._backend == _OURS and (n_ranks := options.get("world_size", 0)) > 0:
                os.environ["MESHMEND_MESH"] = SHAPES.get(n_ranks, str(n_ranks))
            make(chosen, *more, **options)

        for module in (torch.distributed, c10d, import_module("torch.distributed.device_mesh")):
            mock.patch.object(module, "init_process_group", with_choice).start()

    def select(self, backend: str) -> None:
        """Make the next tests run on this backend."""
        self._backend = backend


class GlooTests(OwnGroups):
    """Gloo's own tests of a checkout: they make Gloo groups, and get ours in their place."""

    name = "torch-gloo-suite"

    def __init__(self) -> None:
        super().__init__()
        given: Any = import_module("test_c10d_gloo").ProcessGroupGlooTest
        choice = self

        class GlooSuite(given):  # type: ignore[misc]  # untyped
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

        self.cases = [GlooSuite]


class FaultToleranceTests:
    """The tests of groups that are made again: their class for Gloo asks for it by its name."""

    name = "torch-fault-tolerance-suite"
    mesh = ("3", "all")  # whichever two of its chips are left, they are neighbours

    def __init__(self) -> None:
        module: Any = import_module("test_c10d_fault_tolerance")
        self.cases = [module.GlooFaultToleranceTest]

    def select(self, backend: str) -> None:
        """Make the next tests run on this backend."""
        self.cases[0].backend_name = backend


class FileTests(OwnGroups):
    """All classes of some files whose ranks are processes."""

    def __init__(self, name: str, files: list[Path]) -> None:
        super().__init__()
        self.name = f"torch-{name}-suite"
        self.cases = []
        kinds = tuple(
            getattr(common, kind)
            for kind in ("MultiProcessTestCase", "MultiProcContinuousTest")
            if hasattr(common, kind)
        )
        device_types: Any = import_module("torch.testing._internal.common_device_type")
        make: Any = device_types.instantiate_device_type_tests

        def for_cpus(case: Any, scope: Any, **_: Any) -> None:
            make(case, scope, only_for="cpu")  # some files ask for classes for GPUs alone

        mock.patch.object(device_types, "instantiate_device_type_tests", for_cpus).start()
        for file in files:
            module = "_".join(file.with_suffix("").parts[-2:])
            try:
                found = vars(_imported(module, file)).values()
            except Exception as error:  # such as a package that is not installed
                print(f"{file.name} cannot be imported: {str(error).splitlines()[0]}")
                continue
            self.cases += [
                each
                for each in found
                if isinstance(each, type) and issubclass(each, kinds) and each.__module__ == module
                if not each.__name__.endswith("WithLocalTensor")  # all ranks in one process
            ]


def _imported(name: str, file: Path) -> ModuleType:
    """Import a file under a name of its own: several folders have files of the same name."""
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    vars(module).update(DEVICE="cpu", BACKEND="gloo")  # some files have GPUs here on any machine
    return module


_FOLDER = Path("test", "distributed")  # in PyTorch's source
SUITES: dict[str, tuple[str, ...]] = {  # with the files that each needs
    "distributed": (),
    "gloo": ("test_c10d_gloo.py",),
    "fault-tolerance": ("test_c10d_fault_tolerance.py",),
    "functional": ("test_functional_api.py", "test_functional_differentials.py"),
    "device-mesh": ("test_device_mesh.py",),
    "fsdp2": ("_composable/fsdp/test_*.py", "_composable/test_*.py"),
    "dtensor": ("tensor/test_*.py", "tensor/*/test_*.py"),
    "checkpoint": ("checkpoint/test_*.py", "checkpoint/*/test_*.py"),
}


def suite_named(name: str, folder: Path) -> Choice:
    kinds: dict[str, Callable[[], Choice]] = {
        "distributed": DistributedTests,
        "gloo": GlooTests,
        "fault-tolerance": FaultToleranceTests,
    }
    if name in kinds:
        return kinds[name]()
    return FileTests(name, sorted({file for part in SUITES[name] for file in folder.glob(part)}))


def chosen_suites(names: list[str], checkout: Path | None) -> list[str]:
    """Return the suites to run; print what is missing for the others.

    Raises:
        SystemExit: a suite was asked for by name, and its file is not there.
    """
    is_asked = bool(names)
    chosen = []
    for name in names or (list(SUITES)[1:] if checkout else ["distributed"]):
        folder = checkout / _FOLDER if checkout else None
        missing = [part for part in SUITES[name] if folder is None or not any(folder.glob(part))]
        if len(missing) < max(1, len(SUITES[name])):
            chosen.append(name)
        if missing:
            lacks = f"{folder} has none" if folder else "--checkout is not given"
            print(
                f"the suite {name} needs {', '.join(missing)} of PyTorch's {_FOLDER}, but {lacks}"
            )
            if is_asked and name not in chosen:
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
    torch.multiprocessing.set_start_method("fork")
    fork: Any = torch.multiprocessing.get_context("fork").Process
    common.MultiProcessTestCase._spawn_processes = lambda case: case._start_processes(fork)
    for suite in chosen:
        choice = suite_named(suite, (arguments.checkout or Path()) / _FOLDER)
        os.environ["MESHMEND_MESH"], os.environ["MESHMEND_WRAP"] = choice.mesh
        settings = settings_from(os.environ)
        prepare(settings.mesh, settings.algorithm)
        cases = {
            f"{kind.__name__}.{name}": (kind, name)
            for kind in choice.cases
            for name in unittest.TestLoader().getTestCaseNames(kind)
        }
        outcomes = {
            label: run_on_both(choice, kind, name, log)
            for label, (kind, name) in cases.items()
            if not arguments.only or any(part in label for part in arguments.only)
        }
        mock.patch.stopall()
        if not outcomes:
            print(f"{choice.name} needs the name of a test, but none holds {arguments.only}")
            codes.append(2)
        else:
            is_whole = not (arguments.no_write or arguments.only)
            codes.append(report(choice.name, outcomes, write=is_whole))
    return max(codes)


def run_on_both(choice: Choice, kind: Any, name: str, log: Path) -> dict[str, str]:
    """Return how a test ended on Gloo and, if it passed there, on our backend."""
    ended: dict[str, str] = {}
    times: list[str] = []
    for backend in ("gloo", _OURS):
        choice.select(backend)
        began = time.monotonic()
        with redirected(log):
            ended[backend] = outcome_of(kind(name))
        times.append(f"{time.monotonic() - began:.1f} s")
        if ended["gloo"] != "passed":
            break
    if not ended["gloo"].startswith(_SKIPPED):
        words = ", ".join(f"{key} {value.splitlines()[0]}" for key, value in ended.items())
        print(f"{kind.__name__}.{name}: {words} ({', '.join(times)})", flush=True)
    return ended


def outcome_of(case: Any) -> str:
    result = unittest.TestResult()
    if hasattr(case, "poison_pill"):  # its ranks serve all tests of a class, and have ended before
        type(case)._processes_spawned = type(case).poison_pill = False
    unittest.TestSuite([case]).run(result)  # with what its class sets up
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
        print(f"  {name}: {why_known(name) or outcomes[name][_OURS]}")
    if write:
        figures: dict[str, Any] = {
            "gloo": len(passed),
            _OURS: len(ours),
            "not passed": missing,
        }
        figures["skipped"] = dict(skipped.most_common())
        record(suite, {"torch": torch.__version__, **figures})
    return 0 if all(map(why_known, missing)) else 1


def why_known(label: str) -> str:
    """Return why a test is known not to pass, or an empty text."""
    return KNOWN.get(label.rpartition(".")[2], "")


if __name__ == "__main__":
    sys.exit(main())
