"""The backend does all that Gloo does: compared call by call, on the same ranks."""

import re
from pathlib import Path

import pytest

from commanding import Ended, meshmend_run

torch = pytest.importorskip("torch")

# Each check is a function of its name; a worker prints the name when it has passed.
BEGIN = """
import itertools, sys, time, warnings
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
EVERY = "--every" in sys.argv
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
    for call, dtype, op in itertools.product(combining, dtypes, ops):
        # All of them combine as `all_reduce` does, which tries every type with every operation.
        if EVERY or call is all_reduce or dtype in (torch.float32, torch.int64) or op == "SUM":
            n_same += compare(call, dtype, getattr(dist.ReduceOp, op))
    for call, dtype in itertools.product(moving, dtypes):
        n_same += compare(call, dtype)
    assert n_same > (400 if EVERY else 250), n_same

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

def tensors_that_share_memory_are_summed_once():
    x, y = torch.full((5,), rank + 1.0), torch.arange(6.0).view(2, 3)
    dist.all_reduce_coalesced([x, x])
    assert (x == n * (n + 1) / 2).all(), x
    dist.all_reduce_coalesced([y.t(), y])
    assert torch.equal(y, n * torch.arange(6.0).view(2, 3)), y

def tensors_of_the_inference_mode():
    with torch.inference_mode():
        for call in (all_reduce, reduce_scatter, reduce_scatter_tensor, all_reduce_coalesced):
            compare(call, torch.float32, dist.ReduceOp.AVG)
        for call in (broadcast, all_gather, all_gather_into_tensor, all_gather_coalesced):
            assert compare(call, torch.float32), call
        x = torch.ones(4, 3).t()
        dist.all_reduce(x, dist.ReduceOp.AVG)
        dist.broadcast(x, 0)
        assert (x == 1).all()
    dist.all_reduce(x)  # now outside of it
    assert (x == n).all()

def arguments_that_do_not_fit_are_refused_in_the_words_of_gloo():
    group, x, y = dist.group.WORLD, torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    root = dist.BroadcastOptions()
    root.rootRank = n
    tensor = dist.BroadcastOptions()
    tensor.rootTensor = 1
    for call, words in (
        (lambda: group.allreduce([]), "requires non-empty tensor list"),
        (lambda: group.allreduce([x, y]), "invalid tensor type"),
        (lambda: group.allreduce([x, torch.zeros(2)]), "invalid tensor size"),
        (lambda: group.allreduce_coalesced([]), "requires non-empty tensor list"),
        (lambda: group.allreduce_coalesced([x, y]), "must all have the same type"),
        (lambda: group.allreduce_coalesced([x, x.to_sparse()]), "invalid tensor layout"),
        (lambda: group.broadcast([x], root), "invalid root rank"),
        (lambda: group.broadcast([x], tensor), "invalid root tensor"),
        (lambda: group.allgather([], []), "requires non-empty input tensor list"),
        (lambda: group.allgather([[x] * (n + 1)], [x]), "invalid output tensor list"),
        (lambda: group.allgather([[x, y] * (n // 2)], [x]), "invalid tensor type"),
        (lambda: group.gather([], []), "requires a single-element input tensor list"),
        (lambda: group.scatter([], []), "requires a single-element output tensor list"),
        (lambda: group.reduce_scatter([x], [[x]]), "size"),
        (lambda: group.all_gather_single(torch.zeros(5), x), "times the elements of a part"),
        (lambda: group.reduce_scatter_single(x, torch.zeros(5)), "times the elements of a part"),
        (lambda: group.all_gather_single_coalesced([x], []), "as many whole tensors as parts"),
    ):
        assert refused(call, words), words

check_all([every_collective_type_and_operation, many_exchanges_of_tensors_that_nobody_keeps,
           futures_and_results, forms_of_calls, tensors_that_share_memory_are_summed_once,
           tensors_of_the_inference_mode,
           arguments_that_do_not_fit_are_refused_in_the_words_of_gloo])
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
                      ((0, 3), "gloo"), ((2,), "meshmend"), ((3, 0, 1), "meshmend"),
                      ((1, 3, 2, 0), "meshmend")):
        group = dist.new_group(list(ranks), sort_ranks=False)
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
            for_all = torch.arange(len(ranks)).repeat_interleave(size).float()
            dist.reduce_scatter_tensor(mine, for_all, group=group)
            assert (mine == len(ranks) * ranks.index(rank)).all()
            x[:] = rank
            dist.broadcast(x, ranks[-1], group=group)
            assert (x == ranks[-1]).all()

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

# Each call is compared with Gloo's for each way in which a caller may hold its tensors.
PROPERTY = (
    BEGIN
    + """
import random

def of(shape, dtype=torch.float32, offset=0):
    size = torch.Size(shape).numel()
    return (torch.arange(size).reshape(shape) * (rank + 1) + rank + offset).remainder(5).to(dtype)

# How a caller may hold the tensors of a call: each maker returns `count` tensors of a shape.
def plain(shape, count):
    return [of(shape, offset=i) for i in range(count)]

def aliased(shape, count):
    return [of(shape)] * count

def overlapping(shape, count):
    size = torch.Size(shape).numel()
    whole = of((size + count,))
    return [whole[i : i + size].view(shape) for i in range(count)]

def transposed(shape, count):
    return [of(shape[::-1], offset=i).permute(*reversed(range(len(shape)))) for i in range(count)]

def needing_gradients(shape, count):
    return [of(shape, offset=i).requires_grad_() for i in range(count)]

def empty(shape, count):
    return [of((0, *shape[1:])) for _ in range(count)]

def of_mixed_types(shape, count):
    return [of(shape, torch.float64 if i % 2 else torch.float32) for i in range(count)]

def of_mixed_shapes(shape, count):
    return [of((shape[0] + i % 2, *shape[1:])) for i in range(count)]

makers = [plain, aliased, overlapping, transposed, needing_gradients, empty, of_mixed_types,
          of_mixed_shapes]

# A call takes a group, a maker, a shape and an operation; it returns what it was given to write.
def all_reduce(group, make, shape, op):
    given = make(shape, 1)
    dist.all_reduce(given[0], op, group)
    return given

def all_reduce_of_two(group, make, shape, op):
    given = make(shape, 2)
    opts = dist.AllreduceOptions()
    opts.reduceOp = op
    (group or dist.group.WORLD).allreduce(given, opts).wait()
    return given

def all_reduce_coalesced(group, make, shape, op):
    given = make(shape, 3)
    dist.all_reduce_coalesced(given, op, group)
    return given

def broadcast(group, make, shape, op):
    given = make(shape, 1)
    dist.broadcast(given[0], n - 1, group)
    return given

def broadcast_of_two(group, make, shape, op):
    given = make(shape, 2)
    opts = dist.BroadcastOptions()
    opts.rootRank, opts.rootTensor = 1, 1
    (group or dist.group.WORLD).broadcast(given, opts).wait()
    return given

def all_gather(group, make, shape, op):
    given = make(shape, n + 1)
    dist.all_gather(given[:n], given[n], group)
    return given

def all_gather_of_too_few(group, make, shape, op):
    given = make(shape, n)
    dist.all_gather(given[:-1], given[-1], group)
    return given

def all_gather_single(group, make, shape, op):
    given, whole = make(shape, 1), make((n * shape[0], *shape[1:]), 1)
    dist.all_gather_single(whole[0], given[0], group)
    return whole

def all_gather_in_place(group, make, shape, op):
    whole = make((n * shape[0], *shape[1:]), 1)
    mine = whole[0].detach().chunk(n)[rank] if whole[0].numel() else whole[0]
    dist.all_gather_single(whole[0], mine, group)
    return whole

def all_gather_single_of_a_wrong_size(group, make, shape, op):
    given, whole = make(shape, 1), make((n * shape[0] + 1, *shape[1:]), 1)
    dist.all_gather_single(whole[0], given[0], group)
    return whole

def reduce_scatter(group, make, shape, op):
    given = [each.detach() for each in make(shape, n)]
    mine = torch.empty_like(given[rank])
    dist.reduce_scatter(mine, given, op, group)
    return [mine]

def reduce_scatter_single(group, make, shape, op):
    given, whole = make(shape, 1), make((n * shape[0], *shape[1:]), 1)
    dist.reduce_scatter_single(given[0].detach(), whole[0].detach(), op, group)
    return given

def reduce_scatter_coalesced(group, make, shape, op):
    whole = of((n * n * shape[0], *shape[1:]))
    wholes, parts = [whole.chunk(n)[0], whole.chunk(n)[1]], whole.chunk(n * n)[n - 1 : n + 1]
    group = group or dist.group.WORLD
    opts = dist.ReduceScatterOptions()
    opts.reduceOp = op
    group.reduce_scatter_tensor_coalesced(list(parts), wholes, opts).wait()
    return list(parts)

def reduce(group, make, shape, op):
    given = make(shape, 1)
    dist.reduce(given[0], 0, op, group)
    return given if rank == 0 else []

def gather(group, make, shape, op):
    given = make(shape, n + 1)
    dist.gather(given[n], given[:n] if rank == 0 else None, 0, group)
    return given[:n] if rank == 0 else []

def scatter(group, make, shape, op):
    given = make(shape, n + 1)
    dist.scatter(given[n], given[:n] if rank == 0 else None, 0, group)
    return given[n:]

def all_to_all_single(group, make, shape, op):
    given = make((n * shape[0], *shape[1:]), 2)
    dist.all_to_all_single(given[0], given[1], group=group)
    return given[:1]

calls = [all_reduce, all_reduce_of_two, all_reduce_coalesced, broadcast, broadcast_of_two,
         all_gather, all_gather_of_too_few, all_gather_single, all_gather_in_place,
         all_gather_single_of_a_wrong_size, reduce_scatter, reduce_scatter_single,
         reduce_scatter_coalesced, reduce, gather, scatter, all_to_all_single]
# Gloo moves the memory of a transposed tensor as it lies there; it overwrites what it still has to
# send; and where one rank alone refuses, the others wait for it.
not_for_gloo = {(reduce, transposed), (all_to_all_single, transposed),
                *itertools.product([all_reduce_of_two, broadcast_of_two, scatter,
                                    all_to_all_single], [aliased, overlapping]),
                *itertools.product([gather, scatter], [of_mixed_types, of_mixed_shapes])}

def outcome(call, group, *arguments):
    try:
        return [x.detach().clone() for x in call(group, *arguments)]
    except Exception as error:
        return next(kind for kind in (RuntimeError, ValueError) if isinstance(error, kind))

def every_call_gives_what_gloo_gives():
    numbers = random.Random(n)
    n_same, ops = 0, [getattr(dist.ReduceOp, op) for op in ("SUM", "AVG", "MIN", "MAX", "PRODUCT")]
    for call, make in itertools.product(calls, makers):
        if (call, make) in not_for_gloo:
            continue
        for inference in (False, True):
            shape = tuple(numbers.choices((1, 2, 3, 7), k=numbers.choice((1, 2, 3))))
            op = numbers.choice(ops)
            with torch.inference_mode(inference):
                ours, theirs = (outcome(call, group, make, shape, op) for group in (None, gloo))
            words = (call.__name__, make.__name__, shape, str(op), inference, ours, theirs)
            if ours is not theirs and make is needing_gradients and theirs is RuntimeError:
                # Gloo writes them in some calls and refuses to in others; we write them.
                theirs = outcome(call, gloo, plain, shape, op)
            if isinstance(theirs, type):
                assert ours is theirs, words
            else:
                assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs)), words
            n_same += 1
    assert n_same > 200, n_same

check_all([every_call_gives_what_gloo_gives])
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


@pytest.mark.slow
def test_every_collective_with_every_type_and_operation(tmp_path: Path) -> None:
    script = tmp_path / "collectives.py"
    script.write_text(COLLECTIVES)

    ended = meshmend_run("--mesh", "2x2", script, "--every")

    assert "passed every_collective_type_and_operation\n" in ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("mesh", "transport"),
    [
        *(("1x2", "gloo"), ("1x3", "sockets"), ("2x2", "sockets")),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("1x2", "sockets"), ("2x2", "gloo"))
        ),
    ],
)
def test_every_call_gives_what_gloo_gives_however_its_tensors_are_held(
    mesh: str, transport: str, tmp_path: Path
) -> None:
    script = tmp_path / "property.py"
    script.write_text(PROPERTY)

    ended = meshmend_run("--mesh", mesh, script, MESHMEND_TRANSPORT=transport)

    assert "passed every_call_gives_what_gloo_gives\n" in ended.stdout, ended.stderr


def test_the_group_overrides_all_that_c10d_would_call_with_the_interpreter_lock_held() -> None:
    from meshmend.torch import group

    headers = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"
    (header,) = headers.rglob("PyProcessGroup.hpp")
    called = set(re.findall(r"intrusive_ptr<Work> (\w+)\(", header.read_text()))
    assert {"allreduce", "send", "recv", "all_to_all_single"} <= called
    called = {"recv_anysource" if name == "recvAnysource" else name for name in called}
    called -= {"endCoalescing", "reconfigure"}  # Gloo's coalesces nothing; no collective
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
first = dist.get_rank() == 0
shape = (2, 3) if first else (3, 2)
parts = [torch.ones(shape), torch.ones(shape)]
calls = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(shape)),
    "type": lambda: dist.all_reduce(torch.ones(3, dtype=torch.int8 if first else torch.int32)),
    "broadcast": lambda: dist.broadcast(torch.ones(shape), 1),
    "all_gather": lambda: dist.all_gather(parts, parts[0]),
    "into_tensor": lambda: dist.all_gather_single(torch.cat(parts), parts[0]),
    "reduce_scatter": lambda: dist.reduce_scatter(parts[0], parts),
    "scatter_tensor": lambda: dist.reduce_scatter_single(parts[0], torch.cat(parts)),
    "other": lambda: dist.barrier() if first else dist.reduce(parts[0], 0),
}
for name, call in calls.items():
    try:
        call()
    except RuntimeError as error:
        assert "Detected mismatch between collectives on ranks" in str(error), error
        print("refused", name, flush=True)
x = torch.ones(2)
dist.all_reduce(x)
assert (x == 2).all()
print("goes on", flush=True)
"""


def test_at_the_debug_level_detail_ranks_that_differ_are_refused_and_go_on(tmp_path: Path) -> None:
    script = tmp_path / "detail.py"
    script.write_text(DETAIL)

    ended = meshmend_run("--mesh", "1x2", script, TORCH_DISTRIBUTED_DEBUG="DETAIL")

    assert ended.stdout.count("refused ") == 2 * 8, ended.stdout + ended.stderr
    assert ended.stdout.count("goes on") == 2


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
