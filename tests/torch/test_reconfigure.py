"""PyTorch's `reconfigure` on real processes, and backends of their own for each kind of device."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from commanding import Ended, meshmend_run
from forked_script import run_forked
from meshmend.errors import ReconfigureError

torch = pytest.importorskip("torch")

from meshmend import __version__  # noqa: E402
from meshmend.topology.text import parse_mesh  # noqa: E402
from meshmend.torch.reconfigurable_group import (  # noqa: E402
    GroupHandle,
    mesh_of,
    parse_handles,
)
from meshmend.torch.versions import HAS_PYTHON_BACKENDS  # noqa: E402

needs_torch_214 = pytest.mark.skipif(not HAS_PYTHON_BACKENDS, reason="torch has no reconfigure")

# Each check is a function of its name; every rank prints the name when it has passed.
CHECKS = """
import os, sys, time, threading
from datetime import timedelta
import torch, torch.distributed as dist
import meshmend.torch
from meshmend.topology.text import parse_mesh

dist.init_process_group("meshmend", enable_reconfigure=True)
first, n = dist.get_rank(), dist.get_world_size()
store = dist.distributed_c10d._get_default_store()
assert dist._supports_reconfigure()
rounds = 0

def meet(value="-"):
    global rounds
    rounds += 1
    store.set(f"{rounds} {first}", value)
    return [store.get(f"{rounds} {peer}").decode() for peer in range(n)]

def handles():
    return meet(dist._get_reconfigure_handle())

def again(uuid, chosen, seconds=60):
    dist._reconfigure(uuid, chosen, timeout=timedelta(seconds=seconds)).wait()

def sums(expected, size=1000):
    x = torch.full((size,), first + 1.0)
    dist.all_reduce(x)
    assert (x == expected).all(), (x[0], expected)

def refused(words, uuid, chosen, seconds=60):
    try:
        again(uuid, chosen, seconds)
    except RuntimeError as error:
        assert words in str(error) and "\\n" not in str(error), error
    else:
        raise AssertionError(words)

def before_the_first_nothing_runs():
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        assert "reconfigure" in str(error), error
    else:
        raise AssertionError("ran")

def all_ranks():
    again(1, handles())
    assert (dist.get_rank(), dist.get_world_size()) == (first, n)
    assert meshmend.torch.runs_on() == "meshmend"
    sums(21)
    dist.barrier()

def a_hole_and_back():
    everyone = handles()
    if first == 1:
        again(11, [everyone[1]])
        sums(2)
    else:
        again(10, [each for at, each in enumerate(everyone) if at != 1])
        assert dist.get_rank() == first - (first > 1)
        assert dist.group.WORLD.settings.mesh == parse_mesh("2x3", fail=["0,1"])
        for size in (1, 1000, 300_000):
            sums(19, size)
        x = torch.full((2,), first + 1.0)
        parts = [torch.zeros(2) for _ in range(n - 1)]
        dist.all_gather(parts, x)
        assert [int(part[0]) for part in parts] == [1, 3, 4, 5, 6]
        everything = [None] * (n - 1)
        dist.all_gather_object(everything, first)  # through Gloo
        assert everything == [0, 2, 3, 4, 5]
    again(12, set(handles()))
    assert dist.get_rank() == first
    assert dist.group.WORLD.settings.mesh == parse_mesh("2x3")
    sums(21)

def groups_of_some_ranks_after_a_reconfigure():
    group = dist.new_group([0, 1, 2])
    if first < 3:
        x = torch.full((3,), first + 1.0)
        dist.all_reduce(x, group=group)
        assert (x == 6).all()
        assert meshmend.torch.runs_on(group) == "meshmend"
    dist.barrier()

def what_does_not_fit_is_refused_and_the_group_goes_on():
    good = handles()
    other_job = good[1].replace('"job":"', '"job":"f')
    other_version = good[1].replace('"version":"', '"version":"9')
    refused("handle 1 (chip 0,1) is of another", 20, [good[0], other_job, *good[2:]])
    refused("but got one of 9", 20, [good[0], other_version, *good[2:]])
    twin = good[1].replace('"token":"', '"token":"x')
    refused("handles 1 and 2 are both of chip 0,1", 20, [good[0], good[1], twin, *good[2:]])
    refused("but got 'gloo:0:0:0:'", 20, ["gloo:0:0:0:", *good[1:]])
    refused("own handle among", 20, [each for at, each in enumerate(good) if at != first])
    if first in (0, 2):
        refused("connected", 20, [good[0], good[2]])
    refused("own handle among", 20, [])
    refused("was already used", 12, good)
    sums(21)
    dist.barrier()

def who_does_not_come_is_named_and_the_group_goes_on():
    good = handles()
    if first:
        refused("for chip 0,0", 30, good, seconds=1)
    meet()
    sums(21)
    dist.barrier()
    if first:
        refused("was already used", 30, good, seconds=1)

def what_one_rank_is_refused_all_are_told():
    good = handles()
    if first == 2:
        refused("but got 'gloo:1'", 31, ["gloo:1", *good[1:]])
    else:
        refused("failed on chip 0,2: reconfigure needs handles of the backend", 31, good)
    refused("was already used", 31, good)
    sums(21)
    meet()
    others = good[::-1] if first == 2 else good
    refused("chip 0,2 gave others" if first != 2 else "gave others", 32, others)
    sums(21)
    dist.barrier()

def a_second_thread_and_a_forked_process_are_refused():
    good = handles()
    if first:
        waits = threading.Thread(target=again, args=(33, good))
        waits.start()
        key = "reconfigure/33/here " + os.environ["MESHMEND_CHIP"]
        dist.group.WORLD.get_group_store().wait([key])
        refused("one thread at a time", 34, good)
        meet()
        waits.join()
    else:
        if not (child := os.fork()):
            code = 1
            try:
                refused("in one that was forked from it", 33, good)
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        meet()
        again(33, good)
    sums(21)
    dist.barrier()

def ranks_in_another_order_run_on_gloo():
    again(40, handles()[::-1])
    assert dist.get_rank() == n - 1 - first
    sums(21)
    dist.barrier()
    parts = [torch.zeros(1) for _ in range(n)]
    dist.all_gather(parts, torch.tensor([float(first)]))
    assert [int(part) for part in parts] == [5, 4, 3, 2, 1, 0]
    again(41, handles())
    sums(21)

def an_abort_fails_what_is_under_way_on_every_rank():
    called = []
    dist.group.WORLD.register_abort_hook(0, lambda: called.append(1))
    backend = dist.get_backend_impl(None, torch.device("cpu"))
    assert backend.supports_reconfigure and backend.supports_abort_hooks
    began = time.monotonic()
    if first == 4:
        work = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(3)]
        meet()
        time.sleep(0.5)
        backend.abort()
        assert called == [1]
    else:
        n_sums = 2 if first == 2 else 3  # so that the third can end nowhere
        work = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(n_sums)]
        meet()
    if first != 2:
        try:
            work[-1].wait()
        except RuntimeError as error:
            assert first != 4 or "aborted" in str(error), error
        else:
            raise AssertionError("did not fail")
    assert time.monotonic() - began < 30, time.monotonic() - began
    if first == 4:
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            assert "aborted" in str(error)
        else:
            raise AssertionError("ran after an abort")
    again(50, handles())
    sums(21)

def a_reconfigure_fails_what_is_under_way():
    good = handles()
    if first == 0:
        again(60, good)
    else:
        work = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(20)]
        again(60, good)
        for each in work:
            try:
                each.wait()
            except RuntimeError as error:
                assert "aborted" in str(error) or "hung up" in str(error), error
            else:
                raise AssertionError("cannot have ended")
    sums(21)
    assert backend_is_right()

def a_sum_that_begins_while_the_group_is_made_again_fails():
    good, made, group = handles(), threading.Event(), dist.group.WORLD
    plan = group._catalogue.task
    group._catalogue.task = lambda *given: made.wait(60) and plan(*given)
    under_way = dist.all_reduce(torch.ones(10), async_op=True)
    time.sleep(0.2)  # its thread waits for its plan now
    again = dist._reconfigure(70, good)
    made.set()
    again.wait()
    try:
        under_way.wait()
    except RuntimeError as error:
        assert "aborted" in str(error), error
    else:
        raise AssertionError("ran in the new group")
    sums(21)

def backend_is_right():
    backend = dist.get_backend_impl(None, torch.device("cpu"))
    return (backend.rank(), backend.size()) == (dist.get_rank(), dist.get_world_size())

for name in %r:
    globals()[name]()
    print("passed", name, flush=True)
dist.destroy_process_group()
"""
NAMES = [
    line[4 : line.index("(")]
    for line in CHECKS[CHECKS.index("def before") : CHECKS.index("def backend_is")].splitlines()
    if line.startswith("def ")
]


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    script = tmp_path_factory.mktemp("scripts") / "checks.py"
    script.write_text(CHECKS % (NAMES,))
    return meshmend_run("--mesh", "2x3", script)


@needs_torch_214
@pytest.mark.parametrize("name", NAMES)
def test_reconfigure(checked: Ended, name: str) -> None:
    assert checked.stdout.count(f"passed {name}\n") == 6, checked.stdout + checked.stderr


RETURN = """
import os, signal
import torch, torch.distributed as dist
import meshmend.torch
from meshmend.topology.text import parse_mesh

rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
others, has_returned = [peer for peer in range(n) if peer != 1], False
if rank == 1 and (first_life := os.fork()):
    os.waitpid(first_life, 0)
    has_returned = True
dist.init_process_group("meshmend", enable_reconfigure=True)
store = dist.distributed_c10d._get_default_store()

def handles(name, ranks):
    store.set(f"{name} {rank}", dist._get_reconfigure_handle())
    return [store.get(f"{name} {peer}").decode() for peer in ranks]

def total():
    x = torch.full((50_000,), rank + 1.0)
    dist.all_reduce(x)
    return int(x[0])

if not has_returned:
    dist._reconfigure(1, handles("all", range(n))).wait()
    assert total() == 21
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        total()
    except RuntimeError as error:
        print("lost", flush=True)
    dist._reconfigure(2, handles("survivors", others)).wait()
    assert dist.group.WORLD.settings.mesh == parse_mesh("2x3", fail=["0,1"])
    assert total() == 19
dist._reconfigure(3, handles("all again", range(n))).wait()
assert dist.get_rank() == rank and total() == 21
print("whole", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@needs_torch_214
def test_the_survivors_of_a_kill_go_on_and_its_chip_returns(tmp_path: Path) -> None:
    script = tmp_path / "return.py"
    script.write_text(RETURN)

    ended = meshmend_run("--mesh", "2x3", script)

    assert ended.stdout.count("lost\n") == 5, ended.stdout + ended.stderr
    assert ended.stdout.count("whole\n") == 6, ended.stdout + ended.stderr


def handle(chip: tuple[int, ...], **other: Any) -> str:
    given = GroupHandle(
        version=__version__,
        job="job",
        shape="2x3",
        wrap="none",
        links=(),
        chip=chip,
        token=f"token of {chip}",
    )
    return msgspec.json.encode(msgspec.structs.replace(given, **other)).decode()


def test_handles_alone_tell_the_mesh_and_its_holes() -> None:
    texts = [handle(chip) for chip in ((0, 0), (0, 2), (1, 0), (1, 1), (1, 2))]

    handles = parse_handles(texts, texts[3])

    assert mesh_of(handles) == parse_mesh("2x3", fail=["0,1"])


def test_a_link_that_one_rank_knows_to_be_broken_is_avoided_by_all() -> None:
    texts = [handle((1, 0), links=("link:0,0-1,0",)), handle((0, 0)), handle((0, 1))]
    texts.append(handle((1, 1)))

    mesh = mesh_of(parse_handles(texts, texts[0]))

    assert mesh == parse_mesh("2x3", fail=["2x1@0,2", "link:0,0-1,0"])


@pytest.mark.parametrize(
    ("texts", "match"),
    [
        ([handle((0, 0)), handle((0, 1), job="x")], r"handle 1 \(chip 0,1\) is of another"),
        ([handle((0, 0)), handle((0, 1), shape="4x4")], "is of 4x4 wrap none, and this rank of"),
        ([handle((0, 0)), handle((0, 1), version="9.9")], "but got one of 9.9"),
        (
            [handle((0, 0)), handle((0, 1)), handle((0, 1), token="")],
            "1 and 2 are both of chip 0,1",
        ),
        ([handle((0, 0)), "gloo:1:2:3:"], "handles of the backend meshmend, but got 'gloo:1:2:3:'"),
        ([handle((0, 0)), '{"version":"' + __version__ + '"}'], "missing required field"),
        ([handle((0, 1))], "own handle among the 1, but chip 0,0 has none"),
        ([], "own handle among the 0"),
        ([handle((0, 0)), handle((0, 2))], "connected, but those of its 2 handles are not: 2x3 le"),
        ([handle((0, 0)), handle((0, 1), version="9\n")], "but got .{.version.:"),
        ([handle((0, 0)), handle((0,) * 999)], "of length <= 60"),
        ([handle((0, 0)), '{"version":' + 10**5 * "["], 'but got \'{"version":'),
        ([handle((0, 0)), handle((0, 9))], "chips of the mesh 2x3, but got chip 0,9"),
        ([handle((0, 0)), handle((0, 1, 1))], "chips of the mesh 2x3, but got chip 0,1,1"),
        ([handle((0, 0)), handle((0, 1), links=("link:a",))], "handles of a mesh, but: "),
    ],
)
def test_handles_that_do_not_fit_are_refused_in_one_sentence(texts: list[str], match: str) -> None:
    with pytest.raises(ReconfigureError, match=match) as refused:
        mesh_of(parse_handles(texts, handle((0, 0))))
    assert "\n" not in str(refused.value)


SEVERAL = """
import gc
import torch, torch.distributed as dist
import meshmend.torch

dist.init_process_group("cpu:meshmend,cuda:gloo")
gc.collect()
rank, n = dist.get_rank(), dist.get_world_size()
assert type(dist.group.WORLD) is dist.ProcessGroup
assert meshmend.torch.runs_on() == "meshmend"
for dtype in (torch.float32, torch.int8, torch.bfloat16):
    x = torch.full((1000,), rank + 1).to(dtype)
    dist.all_reduce(x)
    assert (x == 15).all()
work = [dist.all_reduce(torch.ones(1 << 10), async_op=True) for _ in range(20)]
assert all(each.wait() for each in work)
parts = [torch.zeros(3) for _ in range(n)]
dist.all_gather(parts, torch.full((3,), float(rank)))
assert [int(part[0]) for part in parts] == list(range(n))
whole = torch.zeros(2 * n)
dist.all_gather_into_tensor(whole, torch.full((2,), float(rank)))
assert torch.equal(whole, torch.arange(float(n)).repeat_interleave(2))
mine = torch.zeros(2)
dist.reduce_scatter_tensor(mine, torch.arange(2.0 * n))
assert torch.equal(mine, n * torch.arange(2.0 * rank, 2.0 * rank + 2))
dist.broadcast(x, 3)
dist.reduce(x, 2)
everyone = [None] * n
dist.all_gather_object(everyone, rank)
assert everyone == list(range(n))
exchanged = torch.zeros(n)
dist.all_to_all_single(exchanged, torch.full((n,), float(rank)))
assert torch.equal(exchanged, torch.arange(float(n)))
if rank == 0:
    dist.send(torch.ones(1), 1)
elif rank == 1:
    dist.recv(torch.zeros(1), 0)
dist.barrier()
dist.monitored_barrier()
group = dist.new_group([0, 2])
if rank in (0, 2):
    assert meshmend.torch.runs_on(group) == "meshmend"
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    assert (x == 2).all()
torch.manual_seed(0)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
net(torch.ones(2, 4)).sum().backward()
from torch.distributed._functional_collectives import all_reduce
assert (all_reduce(torch.ones(3), "sum", dist.group.WORLD).wait() == n).all()
try:
    dist.all_gather_into_tensor(torch.zeros(3), torch.zeros(2))
except (RuntimeError, ValueError) as error:
    print("refused", flush=True)
dist.destroy_process_group()
print("done", flush=True)
"""


def test_beside_a_backend_for_another_kind_of_device(tmp_path: Path) -> None:
    script = tmp_path / "several.py"
    script.write_text(SEVERAL)

    ended = meshmend_run("--mesh", "2x3", "--fail", "0,1", script)

    if HAS_PYTHON_BACKENDS:
        assert ended.stdout.count("refused") == ended.stdout.count("done") == 5, ended.stderr
    else:
        assert "needs torch 2.14 or newer, but this is torch" in ended.stderr


_A_PLAIN_GROUP = """
import os
from types import SimpleNamespace
import torch.distributed as dist
import meshmend.torch

os.environ["MESHMEND_MESH"] = "1"
dist.init_process_group("meshmend", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
assert not group.supports_reconfigure
options = SimpleNamespace(uuid=1, handles=[])
for call in (group.get_reconfigure_handle, lambda: group.reconfigure(options)):
    try:
        call()
    except RuntimeError as error:
        print(error)
"""


def test_a_group_that_was_not_made_for_it_refuses_to_be_made_again(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(_A_PLAIN_GROUP)

    ended = run_forked(str(script))

    line = "reconfigure needs a process group that was made for it, but this one was not; make the "
    line += "default group with init_process_group(..., enable_reconfigure=True)\n"
    assert ended.stdout == 2 * line, ended.stderr


def test_the_backend_of_one_kind_of_device_alone_is_a_whole_group(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text(
        "import torch, torch.distributed as dist, meshmend.torch\n"
        'dist.init_process_group("cpu:meshmend")\n'
        "x = torch.ones(20)\nwork = dist.all_reduce(x, async_op=True)\nwork.wait()\n"
        "assert (x == 2).all() and work.is_completed()\n"
        "print(meshmend.torch.runs_on())\ndist.destroy_process_group()\n"
    )

    ended = meshmend_run("--mesh", "1x2", script)

    assert ended.stdout.count("meshmend\n") == 2, ended.stderr
