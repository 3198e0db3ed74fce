"""The backend does all that Gloo does: compared call by call, on the same ranks."""

import re
from pathlib import Path

import pytest

from commanding import Ended, meshmend_run

torch = pytest.importorskip("torch")

# Each check is a function of its name; a worker prints the name when it has passed.
BEGIN = """
import itertools, time, warnings
warnings.filterwarnings("ignore")
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook as power
from torch.nn.parallel import DistributedDataParallel as DDP
import meshmend.torch

dist.init_process_group("meshmend")
rank, n = dist.get_rank(), dist.get_world_size()
gloo = dist.new_group(backend="gloo")

def refused(call, words):
    try:
        call()
    except RuntimeError as error:
        assert words in str(error), error
        return True
    return False

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 4))

def trained(net, steps=3):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    numbers = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(5, 20, generator=numbers)).square().mean().backward()
        optimizer.step()
    whole = [getattr(each, "full_tensor", lambda each=each: each)() for each in net.parameters()]
    return torch.cat([each.detach().flatten() for each in whole])

def are_equal_on_all_ranks(weights):
    first = weights.clone()
    dist.broadcast(first, 0, group=gloo)
    return torch.equal(weights, first)

def check_all(checks):
    for check in checks:
        check()
        if rank == n - 1:
            print("passed", check.__name__, flush=True)
    dist.destroy_process_group()
"""

# A call of `calls` takes a group, an element type and an operation; it returns tensors.
COLLECTIVES = (
    BEGIN
    + """
dtypes = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
dtypes = sorted({each for each in dtypes if each.itemsize in (1, 2, 4, 8, 16)}, key=str)
dtypes = [each for each in dtypes if not str(each).startswith(("torch.q", "torch.bits"))]
ops = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
shape = (3, 2)

def value(dtype, offset=0):
    return torch.full(shape, rank + offset).remainder(3).to(dtype)

def all_reduce(group, dtype, op):
    x = value(dtype)
    dist.all_reduce(x, op, group)
    return [x]

def all_reduce_coalesced(group, dtype, op):
    x = [value(dtype), value(dtype, 1)]
    dist.all_reduce_coalesced(x, op, group)
    return x

def reduce(group, dtype, op):
    x = value(dtype)
    dist.reduce(x, 1, op, group)
    return [x] if rank == 1 else []

def reduce_scatter(group, dtype, op):
    x = value(dtype)
    dist.reduce_scatter(x, [value(dtype, i) for i in range(n)], op, group)
    return [x]

def reduce_scatter_tensor(group, dtype, op):
    x = value(dtype)
    dist.reduce_scatter_tensor(x, torch.cat([value(dtype, i) for i in range(n)]), op, group)
    return [x]

def reduce_scatter_tensor_coalesced(group, dtype, op):
    x = [value(dtype), value(dtype)]
    whole = torch.cat([value(dtype, i) for i in range(n)])
    with dist._coalescing_manager(group):
        for each in x:
            dist.reduce_scatter_tensor(each, whole, op, group)
    return x

def broadcast(group, dtype):
    x = value(dtype)
    dist.broadcast(x, 1, group)
    return [x]

def all_gather(group, dtype):
    x = [value(dtype) for _ in range(n)]
    dist.all_gather(x, value(dtype), group)
    return x

def all_gather_uneven(group, dtype):
    x = [torch.zeros(i + 1).to(dtype) for i in range(n)]
    dist.all_gather(x, torch.full((rank + 1,), 1).to(dtype), group)
    return x

def all_gather_into_tensor(group, dtype):
    x = value(dtype).repeat(n, 1)
    dist.all_gather_into_tensor(x, value(dtype), group)
    return [x]

def all_gather_coalesced(group, dtype):
    x = [[value(dtype), value(dtype)] for _ in range(n)]
    dist.all_gather_coalesced(x, [value(dtype), value(dtype, 1)], group)
    return [part for each in x for part in each]

def gather(group, dtype):
    x = [value(dtype) for _ in range(n)] if rank == 1 else None
    dist.gather(value(dtype), x, 1, group)
    return x or []

def scatter(group, dtype):
    x = value(dtype)
    dist.scatter(x, [value(dtype, i) for i in range(n)] if rank == 1 else None, 1, group)
    return [x]

def all_to_all_single(group, dtype):
    x = value(dtype).repeat(n, 1)
    dist.all_to_all_single(x, x.clone(), group=group)
    return [x]

def all_to_all(group, dtype):
    x = [value(dtype) for _ in range(n)]
    dist.all_to_all(x, [value(dtype, i) for i in range(n)], group)
    return x

def send_and_receive(group, dtype):
    x = value(dtype)
    ways = [dist.P2POp(dist.isend, value(dtype), (rank + 1) % n, group)]
    ways.append(dist.P2POp(dist.irecv, x, (rank - 1) % n, group))
    for work in dist.batch_isend_irecv(ways):
        work.wait()
    return [x]

combining = [all_reduce, all_reduce_coalesced, reduce, reduce_scatter, reduce_scatter_tensor]
combining.append(reduce_scatter_tensor_coalesced)
moving = [broadcast, all_gather, all_gather_uneven, all_gather_into_tensor, all_gather_coalesced]
moving += [gather, scatter, all_to_all_single, all_to_all, send_and_receive]

def outcome(call, group, *arguments):
    try:
        return [x.contiguous().view(torch.uint8) for x in call(group, *arguments)]
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"

def compare(call, *arguments):
    ours, theirs = outcome(call, None, *arguments), outcome(call, gloo, *arguments)
    if isinstance(theirs, str):
        return 0
    words = (call.__name__, *map(str, arguments), ours, theirs)
    assert not isinstance(ours, str) and len(ours) == len(theirs), words
    assert all(map(torch.equal, ours, theirs)), words
    return 1

def every_collective_type_and_operation():
    n_same = 0
    for dtype in dtypes:
        for call, op in itertools.product(combining, ops):
            n_same += compare(call, dtype, getattr(dist.ReduceOp, op))
        for call in moving:
            n_same += compare(call, dtype)
    assert n_same > 300, n_same

def many_exchanges_of_tensors_that_nobody_keeps():
    for _ in range(300):
        dist.all_to_all_single(torch.zeros(n), torch.ones(n))
        send_and_receive(None, torch.float32)

def futures_and_results():
    x, parts = torch.ones(3), [torch.zeros(3) for _ in range(n)]
    for group in (dist.group.WORLD, gloo):
        for work, like in (
            (dist.all_reduce(x.clone(), group=group, async_op=True), x * n),
            (dist.broadcast(x.clone(), 0, group=group, async_op=True), x),
            (dist.all_gather(parts, x, group=group, async_op=True), x),
        ):
            value = work.get_future().wait()
            work.wait()
            assert torch.equal(value[0], like) and torch.equal(work.result()[0], like), value

def forms_of_calls():
    group, two = dist.group.WORLD, timedelta(seconds=60)
    x = torch.ones(4)
    group.allreduce(x).wait()
    group.allreduce([x], dist.ReduceOp.MAX).wait()
    group.allreduce(x, op=dist.ReduceOp.MAX, timeout=two).wait()
    group.broadcast(x, 1).wait()
    group.broadcast(x, root=1, timeout=two).wait()
    parts = [torch.zeros(4) for _ in range(n)]
    group.allgather(parts, x).wait()
    group.allgather([parts], [x]).wait()
    group.reduce_scatter(x, parts).wait()
    group.reduce_scatter(x, parts, dist.ReduceOp.MAX, two).wait()
    group.reduce_scatter([x], [parts]).wait()
    group.barrier().wait()
    group.barrier(timeout=two).wait()
    assert (x == n * n).all(), x

def a_shape_that_does_not_fit_is_refused_in_one_line():
    try:
        dist.all_gather_into_tensor(torch.zeros(5), torch.zeros(2))
    except ValueError as error:
        pass
    except Exception as error:
        assert "needs" in str(error) and "times the elements" in str(error), error

check_all([every_collective_type_and_operation, many_exchanges_of_tensors_that_nobody_keeps,
           futures_and_results, forms_of_calls, a_shape_that_does_not_fit_is_refused_in_one_line])
"""
)

TRAINING = (
    BEGIN
    + """
def futures_nest_several_levels_deep():
    def level(depth):
        future = dist.all_reduce(torch.ones(8), async_op=True).get_future()
        if depth == 0:
            return future
        return future.then(lambda done: [done.value()[0] + level(depth - 1).wait()[0]])
    for future in [level(4) for _ in range(8)]:
        assert (future.wait()[0] == 5 * n).all()

def callbacks_have_run_when_a_wait_returns():
    ran = []
    work = dist.all_reduce(torch.ones(2), async_op=True)
    work.get_future().add_done_callback(lambda future: (time.sleep(0.05), ran.append(1)))
    work.wait()
    assert ran
    work = dist.all_reduce(torch.ones(2), async_op=True)
    assert work.get_future().then(lambda future: work.wait()).wait()

def power_sgd_hooks():
    for hook in (power.powerSGD_hook, default_hooks.fp16_compress_wrapper(power.powerSGD_hook)):
        net = DDP(model(), bucket_cap_mb=0.001)
        state = power.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
        net.register_comm_hook(state, hook)
        assert are_equal_on_all_ranks(trained(net, 4))

def float16_hooks_in_python_and_cpp():
    plain = trained(DDP(model(), process_group=gloo))
    python, cpp = DDP(model()), DDP(model())
    python.register_comm_hook(None, default_hooks.fp16_compress_hook)
    cpp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    for net in (python, cpp):
        weights = trained(net)
        assert are_equal_on_all_ranks(weights)
        assert torch.allclose(weights, plain, atol=1e-2)

def compiled_ddp():
    plain = trained(DDP(model(), process_group=gloo))
    compiled = trained(torch.compile(DDP(model()), backend="aot_eager"))
    assert torch.allclose(compiled, plain, atol=1e-5)

def sharded_models():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    plain = trained(DDP(model(), process_group=gloo))
    for shape, names in (((n,), ("shard",)), ((n // 2, 2), ("replicate", "shard"))):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for name in names:
            assert meshmend.torch.runs_on(mesh.get_group(name)) == "meshmend"
        assert torch.allclose(trained(fully_shard(model(), mesh=mesh)), plain, atol=1e-5)

check_all([futures_nest_several_levels_deep, callbacks_have_run_when_a_wait_returns,
           power_sgd_hooks, float16_hooks_in_python_and_cpp, compiled_ddp, sharded_models])
"""
)

GROUPS = (
    BEGIN
    + """
def groups_of_connected_chips_run_on_our_schedules():
    for ranks, on in (((0, 1), "meshmend"), ((0, 2), "meshmend"), ((0, 1, 3), "meshmend"),
                      ((0, 3), "gloo"), ((2,), "meshmend")):
        group = dist.new_group(list(ranks))
        if rank not in ranks:
            continue
        assert meshmend.torch.runs_on(group) == on, (ranks, meshmend.torch.runs_on(group))
        assert dist.get_backend(group) == "meshmend"
        for size in (1, 1000, 100_000):
            x = torch.full((size,), float(rank))
            dist.all_reduce(x, group=group)
            assert (x == sum(ranks)).all()
            parts = [torch.zeros(size) for _ in ranks]
            dist.all_gather(parts, torch.full((size,), float(rank)), group=group)
            assert [part[0].item() for part in parts] == list(ranks)
            mine = torch.zeros(size)
            dist.reduce_scatter_tensor(mine, torch.ones(size * len(ranks)), group=group)
            assert (mine == len(ranks)).all()
            dist.broadcast(x, ranks[-1], group=group)

def groups_do_not_wait_for_each_other():
    one, other = dist.new_group(), dist.new_group()
    first, second = (one, other) if rank % 2 else (other, one)
    x, y = torch.ones(50_000), torch.ones(50_000)
    works = {group: dist.all_reduce(x if group is one else y, group=group, async_op=True)
             for group in (first, second)}
    works[second].wait()
    works[first].wait()
    assert (x == n).all() and (y == n).all()

def a_wait_ends_when_its_timeout_is_over():
    x = torch.ones(3)
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        assert refused(lambda: work.wait(timedelta(seconds=0.1)), " timeout ")
        assert not work.is_completed()
    dist.barrier(gloo)
    if rank == 0:
        assert work.wait(timedelta(seconds=600))
    else:
        dist.all_reduce(x)
    assert (x == n).all()

def the_timeout_of_a_group_and_of_a_call():
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    longer = dist.new_group(timeout=timedelta(seconds=600))
    if rank == 0:
        assert refused(lambda: dist.all_reduce(torch.ones(2), group=group), " timeout ")
        opts = dist.AllreduceOptions()
        opts.timeout = timedelta(seconds=0.5)
        assert refused(lambda: longer.allreduce([torch.ones(2)], opts).wait(), " timeout ")
    dist.barrier(gloo)
    third = dist.new_group(timeout=timedelta(seconds=600))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5), third)
    if rank == 0:
        assert refused(lambda: dist.all_reduce(torch.ones(2), group=third), " timeout ")
    dist.barrier(gloo)

def a_monitored_barrier_names_the_missing_rank():
    dist.monitored_barrier()
    group = dist.new_group()
    if rank != 1:
        call = lambda: dist.monitored_barrier(group, timedelta(seconds=0.3))
        assert refused(call, "Rank 1 failed" if rank == 0 else "")
    dist.barrier(gloo)

def sequence_numbers():
    group = dist.group.WORLD
    before = group._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1, dtype=torch.int8))
    dist.barrier()
    assert group._get_sequence_number_for_group() == before + 3

def profiler_ranges():
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, record_shapes=True) as profile:
        dist.all_reduce(torch.ones(100))
    events = {event.name: event for event in profile.events()}
    assert events["meshmend:all_reduce"].is_async
    call = events["meshmend call: all_reduce, 400 bytes, one-tree"]
    assert call.kwinputs == {"bytes": 400, "algorithm": "one-tree"}
    assert call.input_shapes == [[100]]

def options_of_another_backend_are_refused():
    try:
        dist.new_group(pg_options=dist.ProcessGroupGloo._Options())
    except Exception as error:
        assert "needs meshmend.torch.Settings(mesh), but got a _Options" in str(error), error
    else:
        assert False

check_all([options_of_another_backend_are_refused,
           groups_of_connected_chips_run_on_our_schedules, groups_do_not_wait_for_each_other,
           a_wait_ends_when_its_timeout_is_over, the_timeout_of_a_group_and_of_a_call,
           a_monitored_barrier_names_the_missing_rank, sequence_numbers, profiler_ranges])
"""
)

SCRIPTS = {"collectives": COLLECTIVES, "training": TRAINING, "groups": GROUPS}


def checks_of(script: str) -> list[str]:
    listed = script[script.rindex("check_all([") + len("check_all([") : script.rindex("])")]
    return [name.strip() for name in listed.split(",")]


ALL = [(name, check) for name, script in SCRIPTS.items() for check in checks_of(script)]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """How each script ended; they run when they are first asked for."""
    folder = tmp_path_factory.mktemp("scripts")

    class Runs(dict[str, Ended]):
        def __missing__(self, name: str) -> Ended:
            path = folder / f"{name}.py"
            path.write_text(SCRIPTS[name])
            self[name] = meshmend_run("--mesh", "2x2", path)
            return self[name]

    return Runs()


@pytest.mark.parametrize(("script", "check"), ALL, ids=[check for _, check in ALL])
def test_what_gloo_does(ended: dict[str, Ended], script: str, check: str) -> None:
    assert f"passed {check}\n" in ended[script].stdout, ended[script].stderr


def test_the_group_overrides_all_that_c10d_would_call_with_the_interpreter_lock_held() -> None:
    from meshmend.torch import group

    header = "include/torch/csrc/distributed/c10d/PyProcessGroup.hpp"
    text = (Path(torch.__file__).parent / header).read_text()
    called = set(re.findall(r"intrusive_ptr<Work> (\w+)\(", text))
    assert {"allreduce", "send", "recv", "all_to_all_single"} <= called
    assert called <= set(vars(group.MeshmendGroup))


DETAIL = """
import torch, torch.distributed as dist
dist.set_debug_level_from_env()
dist.init_process_group("meshmend")
assert dist.get_debug_level() == dist.DebugLevel.DETAIL
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
net(torch.ones(2, 4)).sum().backward()
group = dist.new_group([0, 1])
for dtype in (torch.float32, torch.int8):
    dist.all_reduce(torch.ones(3, dtype=dtype), group=group)
dist.monitored_barrier()
try:
    dist.all_reduce(torch.ones(3 + dist.get_rank()))
except RuntimeError as error:
    print(error)
"""


def test_the_debug_level_detail_works_and_a_mismatch_is_named(tmp_path: Path) -> None:
    script = tmp_path / "detail.py"
    script.write_text(DETAIL)

    ended = meshmend_run("--mesh", "1x2", script, TORCH_DISTRIBUTED_DEBUG="DETAIL")

    assert ended.stdout.count("ranks disagree: chip") == 2, ended.stderr


TRAINER = """
import sys, warnings
warnings.filterwarnings("ignore")
import torch, torch.distributed as dist
from transformers import HfArgumentParser, Trainer, TrainingArguments

class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        y = self.layer(x).squeeze(-1)
        return {"loss": (y - labels).square().mean(), "logits": y}

data = [{"x": torch.full((4,), i / 16), "labels": torch.tensor(i / 4)} for i in range(16)]
arguments, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
trainer = Trainer(Line(), arguments, train_dataset=data)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print("trained on", dist.get_backend(), len(losses))
"""


def test_the_trainer_of_transformers_takes_the_backend_by_its_name(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    options = "--use_cpu true --ddp_backend meshmend --max_steps 2 --logging_steps 1"
    options += " --per_device_train_batch_size 2 --save_strategy no --report_to none"

    ended = meshmend_run(
        *("--mesh", "1x2", "--preload", "transformers.trainer", script),
        *("--output_dir", str(tmp_path / "out"), *options.split()),
    )

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("trained on meshmend 2") == 2, ended.stdout
