"""The c10d backend, on real processes, one per live chip of a mesh with a hole."""

import threading
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from commanding import Ended, meshmend_run
from forked_script import run_forked
from meshmend.errors import InputError, StoppedError
from meshmend.topology.text import parse_mesh
from waiting import HANG_S, until

torch = pytest.importorskip("torch")

from meshmend.planning.catalogue import (  # noqa: E402
    Catalogue,
    CollectiveCall,
    default_slices,
)
from meshmend.planning.environment import settings_from  # noqa: E402
from meshmend.planning.settings import Settings  # noqa: E402
from meshmend.torch.group_factory import check_world  # noqa: E402
from meshmend.torch.progress_thread import CompletionThreads, Future, Progress  # noqa: E402
from meshmend.torch.transports import (  # noqa: E402
    SocketTensorTransport,
    listening_transport,
)

# Each check is a function of its name; a worker prints the name when it has passed.
CHECKS = """
import warnings
warnings.filterwarnings("ignore", category=FutureWarning)
import torch, torch.distributed as dist

dist.init_process_group("meshmend")
rank, n = dist.get_rank(), dist.get_world_size()
total = n * (n + 1) // 2

def all_reduce_every_type():
    for dtype in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "int8"):
        for op, value in (("SUM", total), ("MAX", n), ("MIN", 1)):
            for size in (0, 1, 7, 50_000):
                x = torch.full((size,), rank + 1).to(getattr(torch, dtype))
                dist.all_reduce(x, getattr(dist.ReduceOp, op))
                assert (x == torch.tensor(value).to(x.dtype)).all(), (dtype, op, size)

def all_reduce_mean_and_product():
    x = torch.full((100,), float(rank))
    dist.all_reduce(x, dist.ReduceOp.AVG)
    assert torch.allclose(x, torch.full((100,), (n - 1) / 2))
    x = torch.full((100,), 2.0)
    dist.all_reduce(x, dist.ReduceOp.PRODUCT)
    assert (x == 2.0**n).all()

def all_reduce_is_bitwise_alike_on_all_ranks_and_every_time():
    torch.manual_seed(rank)
    given, results = torch.randn(100_003), []
    for _ in range(2):
        x = given.clone()
        dist.all_reduce(x)
        first = x.clone()
        dist.broadcast(first, 0)
        assert torch.equal(x, first)
        results.append(x)
    assert torch.equal(*results)

def all_reduce_of_a_transposed_tensor():
    x = torch.arange(12.0).view(3, 4).t()
    dist.all_reduce(x)
    assert torch.equal(x, n * torch.arange(12.0).view(3, 4).t())

def handles_of_many_collectives():
    tensors = [torch.full((1000 * i + 1,), 1.0) for i in range(8)]
    handles = [dist.all_reduce(x, async_op=True) for x in tensors]
    for handle in handles:
        assert handle.wait()
    assert all(handle.is_completed() and handle.is_success() for handle in handles)
    assert all((x == n).all() for x in tensors)
    assert handles[0].get_future().wait() is not None

def broadcast_from_every_rank():
    for root in range(n):
        x = torch.arange(20_000) if rank == root else torch.zeros(20_000, dtype=torch.int64)
        dist.broadcast(x, root)
        assert torch.equal(x, torch.arange(20_000))

def all_gather_lists_and_tensors():
    parts = [torch.zeros(3, 2) for _ in range(n)]
    dist.all_gather(parts, torch.full((3, 2), float(rank)))
    assert all((part == i).all() for i, part in enumerate(parts))
    whole = torch.zeros(5 * n, dtype=torch.int16)
    dist.all_gather_into_tensor(whole, torch.full((5,), rank, dtype=torch.int16))
    assert torch.equal(whole, torch.arange(n, dtype=torch.int16).repeat_interleave(5))

def reduce_scatter_lists_and_tensors():
    mine = torch.zeros(5)
    dist.reduce_scatter_tensor(mine, torch.arange(5.0 * n))
    assert torch.equal(mine, n * torch.arange(5.0 * rank, 5.0 * rank + 5))
    dist.reduce_scatter(mine, [torch.full((5,), float(i)) for i in range(n)])
    assert (mine == n * rank).all()

def barrier():
    dist.barrier()

def what_is_not_planned_goes_through_gloo():
    everyone = [None] * n
    dist.all_gather_object(everyone, {"rank": rank})
    assert everyone == [{"rank": i} for i in range(n)]
    x = torch.full((4,), float(rank))
    dist.reduce(x, 2)
    assert rank != 2 or (x == total - n).all()
    if rank == 0:
        dist.send(torch.ones(1), 1)
    elif rank == 1:
        y = torch.zeros(1)
        dist.recv(y, 0)
        assert y == 1
    exchanged = torch.zeros(n)
    dist.all_to_all_single(exchanged, torch.full((n,), float(rank)))
    assert torch.equal(exchanged, torch.arange(float(n)))

def groups_of_some_ranks_work():
    group = dist.new_group([0, 2])
    if rank in (0, 2):
        x = torch.ones(3)
        dist.all_reduce(x, group=group)
        assert (x == 2).all()

for check in [value for value in list(globals().values()) if callable(value)
              and getattr(value, "__module__", "") == __name__]:
    check()
    if rank == n - 1:
        print("passed", check.__name__)
dist.destroy_process_group()
"""
NAMES = [line[4 : line.index("(")] for line in CHECKS.splitlines() if line.startswith("def ")]


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    script = tmp_path_factory.mktemp("scripts") / "checks.py"
    script.write_text(CHECKS)
    return meshmend_run("--mesh", "2x3", "--fail", "0,1", script)


@pytest.mark.parametrize("name", NAMES)
def test_collectives(checked: Ended, name: str) -> None:
    assert f"passed {name}\n" in checked.stdout, checked.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "hole", "transport"), [("4x4", "2x2@0,2", "sockets"), ("2x3", "0,1", "gloo")]
)
def test_the_same_on_more_chips_and_over_messages_of_gloo(
    tmp_path: Path, mesh: str, hole: str, transport: str
) -> None:
    script = tmp_path / "checks.py"
    script.write_text(CHECKS)

    ended = meshmend_run("--mesh", mesh, "--fail", hole, script, MESHMEND_TRANSPORT=transport)

    assert ended.stdout.count("passed") == len(NAMES), ended.stderr


TORUS = ("--mesh", "2x4", "--wrap", "all")


@pytest.mark.parametrize("algorithm", ["auto", "exchange"])
def test_sums_on_a_full_torus_end(tmp_path: Path, algorithm: str) -> None:
    script = tmp_path / "sum.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        'dist.init_process_group("meshmend")\n'
        "x = torch.ones(20_000)\ndist.all_reduce(x)\nassert (x == 8).all()\n"
        'print("summed")\ndist.destroy_process_group()\n'
    )

    ended = meshmend_run(*TORUS, "--algorithm", algorithm, script)

    assert ended.stdout.count("summed") == 8, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["sockets", "gloo"])
@pytest.mark.parametrize("algorithm", ["exchange", "exchange-1"])
@pytest.mark.parametrize("hole", [(), ("--fail", "0,1")], ids=["full", "hole"])
def test_the_same_with_sums_exchanged_through_scratch(
    tmp_path: Path, hole: tuple[str, ...], algorithm: str, transport: str
) -> None:
    script = tmp_path / "checks.py"
    script.write_text(CHECKS)

    ended = meshmend_run(
        *TORUS, *hole, "--algorithm", algorithm, script, MESHMEND_TRANSPORT=transport
    )

    assert ended.stdout.count("passed") == len(NAMES), ended.stderr


MISMATCH = """
import torch, torch.distributed as dist
dist.init_process_group("meshmend")
try:
    dist.all_reduce(torch.ones(1000 + (dist.get_rank() == 1)))
except Exception as error:
    print(type(error).__name__, error)
"""


def test_sizes_that_differ_give_an_error_on_every_rank(tmp_path: Path) -> None:
    script = tmp_path / "mismatch.py"
    script.write_text(MISMATCH)

    ended = meshmend_run("--mesh", "2x3", script)

    lines = ended.stdout.splitlines()
    assert len(lines) == 6, ended.stderr
    assert all("ranks disagree: chip" in line and "4004 bytes" in line for line in lines)


GONE = """
import os
import torch, torch.distributed as dist
dist.init_process_group("meshmend")
rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
store.set(f"ready {rank}", "")
store.wait([f"ready {each}" for each in range(4)])
if rank == 0:
    os._exit(0)
try:
    dist.all_reduce(torch.ones(1000))
except RuntimeError as error:
    print(f"rank {rank}: {error}", flush=True)
store.set(f"told {rank}", "")
store.wait([f"told {each}" for each in range(1, 4)])
os._exit(0)
"""


def test_a_rank_that_leaves_before_the_first_collective_is_missed_by_all(tmp_path: Path) -> None:
    """None of them calls it, and two are not connected with who misses it; Gloo's timeout is long.

    Who waits for a rank that is there but has given up would wait for the whole timeout.
    """
    script = tmp_path / "gone.py"
    script.write_text(GONE)

    ended = meshmend_run("--mesh", "1x4", script)

    lines = ended.stdout.splitlines()
    assert len(lines) == 3, ended.stdout + ended.stderr
    assert any("(rank 0) did not connect to chip (0, 1) (rank 1), and is gone" in x for x in lines)


def test_an_abort_of_a_group_that_was_left_does_not_reach_the_next_at_its_address() -> None:
    secret, settings = b"of all groups of a job", Settings(parse_mesh("1x2"))
    first, second = (
        listening_transport(rank, settings.mesh.live, settings, secret) for rank in range(2)
    )
    gone, told = ("127.0.0.1", 1), threading.Event()
    with closing(first), closing(second):
        now = {0: first.address, 1: second.address}
        present = SocketTensorTransport(second, now, secret)
        present.on_abort = told.set
        old = SocketTensorTransport(first, {0: gone, 1: second.address}, secret)
        old._tell_of_abort(second.address)
        assert not told.wait(0.2)

        SocketTensorTransport(first, now, secret).abort()

        assert told.wait(HANG_S)


@pytest.mark.parametrize(
    ("environment", "match"),
    [
        ({}, "MESHMEND_MESH is not set; start the script with 'meshmend run"),
        ({"MESHMEND_MESH": "4by4"}, "--mesh needs positive extents"),
        ({"MESHMEND_MESH": "4x4", "MESHMEND_SLICES": "two"}, "MESHMEND_SLICES needs a whole"),
        ({"MESHMEND_MESH": "4x4", "MESHMEND_TRANSPORT": "mpi"}, "MESHMEND_TRANSPORT needs one of"),
        ({"MESHMEND_MESH": "4x4", "MESHMEND_FAIL": "2x2@0,2; 9,9"}, "inside the mesh 4x4"),
    ],
)
def test_an_environment_that_cannot_be_read_is_refused(
    environment: dict[str, str], match: str
) -> None:
    with pytest.raises(InputError, match=match):
        settings_from(environment)


def test_a_world_of_another_size_is_refused() -> None:
    with pytest.raises(InputError, match=r"each of the 12 live chips .* but the world size is 16"):
        check_world(parse_mesh("4x4", fail=["2x2@0,2"]), 16)


def test_an_error_reaches_whoever_waits_in_python_and_in_cpp() -> None:
    progress = Progress("test")

    def fail() -> None:
        raise InputError("no such thing")

    handle = progress.submit("a test", fail, [torch.ones(1)])
    with pytest.raises(InputError, match="no such thing"):
        handle.wait(timedelta(seconds=HANG_S))
    with pytest.raises(RuntimeError, match="no such thing"):
        handle.get_future().wait()
    assert handle.is_completed()
    assert not handle.is_success()
    assert progress.finish(HANG_S)


def test_an_error_that_is_no_message_of_ours_says_where_it_was_raised() -> None:
    progress = Progress("test")

    def fail() -> None:
        raise ValueError("a bug")

    handle = progress.submit("a test", fail, [torch.ones(1)])
    with pytest.raises(ValueError, match="a bug") as raised:
        handle.wait(timedelta(seconds=HANG_S))
    assert "in fail" in "".join(raised.value.__notes__)
    assert progress.finish(HANG_S)


_A_THREAD_ENDS_WHILE_ITS_ERROR_IS_TOLD = """
import gc, threading, torch
from meshmend.torch.progress_thread import Progress

def collected(phase, info):  # the n-th collection of garbage lets the thread of the sum end
    global n_left
    if threading.current_thread().name == "test-callbacks" and phase == "stop":
        n_left -= 1
        if n_left == 0:
            may_end.set()
            first.join(0.2)

gc.callbacks.append(collected)
gc.freeze()  # what was imported is never garbage, and looking through it takes seconds
for n_left in range(1, 9):
    may_end, is_next, progress = threading.Event(), threading.Event(), Progress("test")
    [first] = progress._threads

    def rest():
        is_next.wait()
        raise ValueError("no such thing")

    def next_one():
        is_next.set()
        may_end.wait(0.2)

    progress.submit("a sum", lambda: rest, [torch.ones(1)], lambda future: None)
    progress.submit("another", next_one, [torch.ones(1)])
    gc.set_threshold(1, 1, 1)
    assert progress.finish(60)
    gc.set_threshold(700, 10, 10)
"""


def test_an_error_is_told_while_the_thread_that_raised_it_ends(tmp_path: Path) -> None:
    """The text of an error names frames; of a thread that had ended they were no more (SIGSEGV)."""
    script = tmp_path / "script.py"
    script.write_text(_A_THREAD_ENDS_WHILE_ITS_ERROR_IS_TOLD)

    ended = run_forked(str(script))

    assert ended.returncode == 0, ended.stderr


def test_callbacks_wait_for_each_other_and_never_for_a_thread() -> None:
    threads = CompletionThreads("test")
    gates = [threading.Event() for _ in range(50)]

    def open_after(gate: threading.Event, later: threading.Event) -> None:
        later.wait(HANG_S)
        gate.set()

    for gate, later in pairwise(gates):  # each job waits for the one that is submitted after it
        threads.run(partial(open_after, gate, later))
    threads.run(gates[-1].set)

    assert gates[0].wait(HANG_S)
    threads.close()
    until(lambda: not [each for each in threading.enumerate() if each.name == "test"])


def test_a_group_that_ends_has_run_the_callbacks_of_its_collectives() -> None:
    progress = Progress("test")
    is_open, begins = threading.Event(), threading.Event()
    found: list[bool] = []

    def callback(_: object) -> None:
        begins.set()
        is_open.wait(HANG_S)
        found.append(True)

    def watch(future: Future) -> None:
        future.then(callback)

    handle = progress.submit("a test", lambda: None, [torch.ones(1)], watch)
    assert begins.wait(HANG_S)

    assert not progress.finish(0.05)  # the callback still runs
    is_open.set()
    assert progress.finish(HANG_S)
    assert found
    assert handle.is_completed()


def test_a_future_that_is_asked_for_late_is_complete() -> None:
    progress = Progress("test")
    tensors = [torch.ones(1)]

    handle = progress.submit("a test", lambda: None, tensors)
    handle.wait()

    assert handle.get_future().done()
    assert handle.get_future().value() is tensors
    assert handle.result() is tensors
    assert progress.finish(HANG_S)


def test_a_caller_that_waits_runs_its_collective_itself_after_all_earlier_ones() -> None:
    progress, may_end, ran = Progress("test"), threading.Event(), list[tuple[str, bool]]()

    def noting(name: str) -> Callable[[], None]:
        return lambda: ran.append((name, threading.current_thread() is threading.main_thread()))

    def slow_to_start() -> None:
        may_end.wait(HANG_S)
        noting("slow")()

    def fail() -> None:
        raise InputError("no such thing")

    assert progress.submit("a test", noting("alone"), [], waits=True).is_completed()
    slow = progress.submit("a test", slow_to_start, [])
    after = progress.submit("a test", noting("after the slow one"), [], waits=True)
    assert not after.is_completed()
    may_end.set()
    slow.wait()
    after.wait()
    with pytest.raises(InputError, match="no such thing"):
        progress.submit("a test", fail, [], waits=True).wait()

    assert ran == [("alone", True), ("slow", False), ("after the slow one", False)]
    assert progress.finish(HANG_S)


def test_a_collective_in_the_handler_of_a_signal_that_interrupts_another_is_refused() -> None:
    """It would wait for itself."""
    progress = Progress("test")

    def interrupted() -> None:
        progress.submit("all_reduce", lambda: None, [], waits=True)

    with pytest.raises(InputError, match=r"all_reduce needs .* handler of a signal that interrupt"):
        progress.submit("broadcast", interrupted, [], waits=True).wait()

    progress.submit("all_reduce", lambda: None, [], waits=True).wait()
    assert progress.finish(HANG_S)


def test_a_group_that_ends_waits_for_callers_that_run_their_collective() -> None:
    progress, began, may_end = Progress("test"), threading.Event(), threading.Event()

    def run() -> Callable[[], None]:
        began.set()
        return lambda: assert_set(may_end)

    def assert_set(event: threading.Event) -> None:
        assert event.wait(HANG_S)

    caller = threading.Thread(target=partial(progress.submit, "a test", run, [], waits=True))
    caller.start()
    assert began.wait(HANG_S)

    assert not progress.finish(0.05)
    may_end.set()
    assert progress.finish(HANG_S)
    caller.join()


def test_a_collective_of_a_group_that_was_destroyed_is_refused() -> None:
    progress = Progress("test")
    assert progress.finish(HANG_S)

    with pytest.raises(StoppedError, match="a test needs a process group, but this one was destr"):
        progress.submit("a test", lambda: None, [torch.ones(1)])


_A_FORK_CALLS_A_COLLECTIVE = """
import os, warnings
warnings.filterwarnings("ignore")  # of a fork while there are threads
from meshmend.errors import StoppedError
from meshmend.torch.progress_thread import Progress

progress = Progress("test")
if not (pid := os.fork()):
    try:
        progress.submit("a test", lambda: None, []).wait()
    except StoppedError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
progress.submit("a test", lambda: None, []).wait()
print("the process that made it goes on")
"""


def test_a_collective_in_a_fork_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_A_FORK_CALLS_A_COLLECTIVE)

    ended = run_forked(str(script))

    assert ended.stdout == (
        "a test needs the process that made the process group, but was called in one that was "
        "forked from it; make a group in each process\nthe process that made it goes on\n"
    ), ended.stderr


_COUNTS_COMPILING = """
import os
from unittest import mock
import torch.distributed as dist
import meshmend.torch
from meshmend.torch import group_factory

os.environ["MESHMEND_MESH"] = "1"
with mock.patch.object(group_factory, "compile_once") as compiled:
    dist.init_process_group("meshmend", store=dist.HashStore(), rank=0, world_size=1)
    dist.new_group([0])
    print(compiled.call_count)
    dist.destroy_process_group()
    os.environ["MESHMEND_CHIP"] = "0"
    dist.init_process_group("meshmend", store=dist.HashStore(), rank=0, world_size=1)
    print(compiled.call_count)
"""


def test_ranks_that_another_launcher_started_compile_once_before_peers_can_wait(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(_COUNTS_COMPILING)

    ended = run_forked(str(script))

    assert ended.stdout == "1\n1\n", ended.stderr


def test_payloads_are_cut_by_their_size_and_by_the_shape_of_the_schedule() -> None:
    from meshmend.schedule.ring_builders import rank_ring
    from meshmend.schedule.spanning import broadcast
    from meshmend.schedule.table import Collective

    mesh = parse_mesh("4x4")
    ring, tree = rank_ring(mesh, Collective.ALLREDUCE), broadcast(mesh, 0)
    assert default_slices(ring, 1 << 20) == 1
    assert default_slices(tree, 1 << 20) == 16
    assert default_slices(tree, 100) == 1


def test_processes_of_one_host_sum_long_payloads_on_a_ring() -> None:
    """Loopback has no slow link, and a ring has the fewest messages."""
    mesh = parse_mesh("4x4").without("1,1")
    here, elsewhere = Settings(mesh), Settings(mesh, bind="10.0.0.1")

    def summed_by(settings: Settings, n_bytes: int) -> str:
        catalogue = Catalogue(settings.mesh, settings.planned_algorithm, 0, 0)
        return catalogue.algorithm(CollectiveCall("allreduce"), n_bytes)

    assert summed_by(here, 4 << 20) == "rank-ring"
    assert summed_by(elsewhere, 4 << 20) == "trees"
    assert summed_by(Settings(mesh, algorithm="trees"), 4 << 20) == "trees"
    assert summed_by(Settings(mesh.without("link:0,0-0,1")), 4 << 20) == "trees"
    assert summed_by(here, 1 << 17) == "trees"
    assert summed_by(here, 1 << 10) == "one-tree"
