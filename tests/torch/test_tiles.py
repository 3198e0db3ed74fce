"""HSDP on tiles of a mesh trains as one process does; its sums between tiles share one plan."""

from pathlib import Path

import pytest

from commanding import Ended, import_sharding, meshmend_run

torch = pytest.importorskip("torch")

BEGIN = """
import logging, sys, time, warnings
warnings.filterwarnings("ignore")
from contextlib import nullcontext
from datetime import timedelta
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
import meshmend.torch

dist.init_process_group("meshmend", timeout=timedelta(seconds=30))
dist.barrier()  # while others still connect, Gloo does not bear a spare that ends

def model(width=301, seed=0):
    torch.manual_seed(seed)  # 301 rows do not divide by 4
    return torch.nn.Sequential(
        torch.nn.Linear(20, width), torch.nn.GELU(), torch.nn.Linear(width, 7)).double()

def loss_of(net, samples):
    x = samples.to(next(net.parameters()).dtype)
    return (net(x) - torch.sin(x[:, :7])).square().mean()

def samples(step, n_shares, mine=None):
    all_of_them = torch.randn(
        4 * n_shares, 20, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return all_of_them if mine is None else all_of_them[4 * mine : 4 * mine + 4]

def step_on(*optimizers):
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()

def are_close(plain, sharded, within=1e-9):
    return all(
        torch.allclose(one.to(other.dtype), other.full_tensor(), rtol=0, atol=within)
        for one, other in zip(plain.parameters(), sharded.parameters(), strict=True))
"""

LOSSES = (
    BEGIN
    + """
mesh = meshmend.torch.tiles("2x2", spares="--spares" in sys.argv)
if mesh.get_coordinate() is None:
    print("spare", flush=True)
    sys.exit()
assert mesh.mesh_dim_names == ("replicate", "shard")
for name in mesh.mesh_dim_names:
    assert meshmend.torch.runs_on(mesh.get_group(name)) == "meshmend"
mine, n_shares = mesh.get_local_rank(0) * mesh.size(1) + mesh.get_local_rank(1), mesh.size()
plain, sharded = model(), model()
for layer in (sharded[0], sharded[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(sharded, mesh=mesh)
optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (plain, sharded)]
for step in range(4):
    expected = loss_of(plain, samples(step, n_shares))
    loss = loss_of(sharded, samples(step, n_shares, mine))
    expected.backward()
    loss.backward()
    step_on(*optimizers)
    mean = loss.detach() / n_shares
    for name in mesh.mesh_dim_names:
        dist.all_reduce(mean, group=mesh.get_group(name))
    assert abs(mean.item() - expected.item()) < 1e-9, (mean, expected)
assert are_close(plain, sharded)
twin = torch.cat([each.to_local().flatten() for each in sharded.parameters()])
first = twin.clone()
dist.broadcast(first, group=mesh.get_group("replicate"), group_src=0)
assert torch.equal(twin, first)  # bit for bit
print("trained", mesh.size(0), "tiles", flush=True)
"""
)

FORMS = (
    BEGIN
    + """
mesh = meshmend.torch.tiles("2x2")
group = mesh.get_group("replicate")
n_tiles, n_shares = mesh.size(0), mesh.size()
tile, colour = mesh.get_coordinate()
mine = 4 * tile + colour

def tensor_parallel_inside_a_tile():
    cube = meshmend.torch.tiles("2x2", ("replicate", "shard", "tensor"))
    plain, sharded = model(304), model(304)
    parallelize_module(sharded, cube["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(sharded, mesh=cube["replicate", "shard"])
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (plain, sharded)]
    share = 2 * cube.get_local_rank("replicate") + cube.get_local_rank("shard")
    for step in range(2):
        loss_of(plain, samples(step, 2 * n_tiles)).backward()
        loss_of(sharded, samples(step, 2 * n_tiles, share)).backward()
        step_on(*optimizers)
    assert are_close(plain, sharded)

def gradients_that_are_accumulated_and_clipped():
    plain, sharded = model(), fully_shard(model(), mesh=mesh)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (plain, sharded)]
    for wait in (sharded.set_requires_gradient_sync, sharded.set_requires_all_reduce):
        for part in range(3):
            wait(part == 2)
            loss_of(plain, samples(part, n_shares)).backward()
            loss_of(sharded, samples(part, n_shares, mine)).backward()
        for net in (plain, sharded):
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        step_on(*optimizers)
    assert are_close(plain, sharded)

def several_models_at_once():
    pairs = [(model(width, width), fully_shard(model(width, width), mesh=mesh))
             for width in (401, 1000, 30)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for pair in pairs for net in pair]
    for step in range(2):
        sum(loss_of(plain, samples(step, n_shares)) for plain, _ in pairs).backward()
        sum(loss_of(sharded, samples(step, n_shares, mine)) for _, sharded in pairs).backward()
        step_on(*optimizers)
    assert all(are_close(*pair) for pair in pairs)

def sums_in_bfloat16():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    plain, sharded = model().float(), fully_shard(model().float(), mesh=mesh, mp_policy=policy)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (plain, sharded)]
    for step in range(2):
        loss_of(plain, samples(step, n_shares)).backward()
        loss_of(sharded, samples(step, n_shares, mine)).backward()
        step_on(*optimizers)
    assert are_close(plain, sharded, 1e-2)

def calls_of_twins():
    ranks = dist.get_process_group_ranks(group)
    largest = torch.full((5000,), float(dist.get_rank()))
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    assert (largest == max(ranks)).all()
    apart, whole = torch.arange(8000.0)[::2], torch.ones(3000)
    works = [dist.all_reduce(each, group=group, async_op=True) for each in (apart, whole)]
    assert all(work.wait() for work in works)
    assert apart[5] == 10 * n_tiles and (whole == n_tiles).all()
    assert (functional.all_reduce(torch.ones(9000), "avg", group) == 1).all()
    dist.barrier(group=group)
    gathered = [None] * n_tiles
    dist.all_gather_object(gathered, dist.get_rank(), group=group)
    assert gathered == ranks
    for odd in (torch.ones(0), torch.ones(6000, dtype=torch.int8)):
        dist.all_reduce(odd, group=group)
        assert (odd == n_tiles).all()
    if colour == 0:  # a short sum is of the twins alone
        loss = torch.ones(1)
        dist.all_reduce(loss, group=group)
        assert loss.item() == n_tiles

def one_rank_may_be_profiled():
    twins = meshmend.torch.tiles("2x2").get_group("replicate")
    with torch.profiler.profile() if dist.get_rank() == 0 else nullcontext() as profiler:
        for size in (5000, 100_000):
            x = torch.ones(size)
            dist.all_reduce(x, group=twins)
            assert (x == n_tiles).all()
    names = [event.key for event in profiler.key_averages()] if profiler else []
    assert not names or "meshmend call: all_reduce, 20000 bytes, colours" in names

def tiles_again_and_of_one_chip():
    assert meshmend.torch.tiles("1x1").shape == (dist.get_world_size(), 1)
    other = meshmend.torch.tiles("1x4")
    x = torch.ones(20_000)
    dist.all_reduce(x, group=other.get_group("replicate"))
    assert (x == n_tiles).all()

def wrong_calls_are_told():
    def told(call, words):
        try:
            call()
        except Exception as error:
            assert words in str(error) and "\\n" not in str(error), error
            return True
        return False
    assert told(lambda: meshmend.torch.tiles("3x2"), "leave 2 chips of 2x4 in no tile")
    assert told(lambda: meshmend.torch.tiles("4x4"), "needs 16 connected live chips")
    assert told(lambda: meshmend.torch.tiles("2x2", ("a",)), "need 2 axes, or 3")
    for size in (2000 + 100 * colour, 2000 if colour else 200_000):  # the same plan, and another
        twins = meshmend.torch.tiles("2x2").get_group("replicate")
        n_told = torch.zeros(1)
        try:
            dist.all_reduce(torch.ones(size), group=twins)
        except RuntimeError as error:
            assert "\\n" not in str(error), error
            n_told += "ranks disagree" in str(error)
        else:
            raise AssertionError("all ranks of the mesh need tensors of one size")
        dist.all_reduce(n_told)
        assert n_told.item() >= 1

for check in (tensor_parallel_inside_a_tile, gradients_that_are_accumulated_and_clipped,
              several_models_at_once, sums_in_bfloat16, calls_of_twins,
              one_rank_may_be_profiled, tiles_again_and_of_one_chip, wrong_calls_are_told):
    check()
    if dist.get_rank() == dist.get_world_size() - 1:
        print("passed", check.__name__, flush=True)
"""
)


# Two steps of AdamW on samples that are shared by however many chips there are.
RESUMED = (
    BEGIN
    + """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

tile, folder, first = *sys.argv[1:3], int(sys.argv[3])
mesh = meshmend.torch.tiles(tile)
n_shares, mine = 24, mesh.get_local_rank(0) * mesh.size(1) + mesh.get_local_rank(1)
net = fully_shard(model(), mesh=mesh)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
if first:
    parts = dict(zip(("net", "optimizer"), get_state_dict(net, optimizer)))
    dcp.load(parts, checkpoint_id=folder)
    set_state_dict(net, optimizer,
                   model_state_dict=parts["net"], optim_state_dict=parts["optimizer"])
for step in range(first, first + 2):
    share = torch.tensor_split(samples(step, n_shares), mesh.size())[mine]
    loss_of(net, share).backward()
    step_on(optimizer)
if first:
    plain = model()
    steps = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step in range(first + 2):
        loss_of(plain, samples(step, n_shares)).backward()
        step_on(steps)
    assert are_close(plain, net)
    print("went on", flush=True)
else:
    dcp.save(dict(zip(("net", "optimizer"), get_state_dict(net, optimizer))), checkpoint_id=folder)
"""
)


def test_a_checkpoint_of_dcp_goes_on_with_other_tiles_and_fewer_chips(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    began = run(tmp_path, RESUMED, "--mesh 2x4", "2x2", str(saved), "0")
    assert began.returncode == 0, began.stderr

    resumed = run(tmp_path, RESUMED, "--mesh 2x4 --fail 0,3 --fail 1,3", "1x2", str(saved), "2")

    assert resumed.stdout.count("went on\n") == 6, resumed.stderr
    state_bytes = 3 * 8 * (21 * 301 + 302 * 7)  # weights, and twice as much of AdamW
    on_disk = sum(file.stat().st_size for file in saved.glob("*.distcp"))
    assert state_bytes < on_disk < 1.5 * state_bytes  # each part once, not once a tile


@pytest.mark.parametrize(
    ("mesh", "n_tiles"),
    [
        pytest.param("--mesh 4x4", 4, marks=pytest.mark.slow),
        ("--mesh 4x4 --fail 2x2@0,2", 3),
    ],
)
def test_losses_are_those_of_one_process(mesh: str, n_tiles: int, tmp_path: Path) -> None:
    ended = run(tmp_path, LOSSES, mesh)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count(f"trained {n_tiles} tiles\n") == 4 * n_tiles
    assert "Gloo" not in ended.stderr


def test_tiles_of_shifted_boxes_leave_spares_to_which_they_owe_nothing(tmp_path: Path) -> None:
    ended = run(tmp_path, LOSSES, "--mesh 4x4 --fail 0,0", "--spares")

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("trained 3 tiles\n") == 12
    assert ended.stdout.count("spare\n") == 3
    assert "Gloo" not in ended.stderr


def test_spares_are_refused_in_one_line_unless_they_are_asked_for(tmp_path: Path) -> None:
    ended = run(tmp_path, LOSSES, "--mesh 2x3")

    assert ended.returncode == 2
    assert "tiles of 2x2 leave 2 chips of 2x3 in no tile" in ended.stderr
    assert "pass spares=True" in ended.stderr.splitlines()[-1]


def test_tiles_need_a_process_group_of_ours() -> None:
    import meshmend.torch
    from meshmend.errors import InputError

    with pytest.raises(InputError, match=r"but there is none; call dist.init_process_group"):
        meshmend.torch.tiles("2x2")


@pytest.mark.parametrize("level", ["OFF", pytest.param("DETAIL", marks=pytest.mark.slow)])
def test_what_else_trains_on_tiles(level: str, tmp_path: Path) -> None:
    ended = run(tmp_path, FORMS, "--mesh 2x4", TORCH_DISTRIBUTED_DEBUG=level)

    assert ended.stdout.count("passed ") == FORMS.count("\ndef ") - BEGIN.count("\ndef "), (
        ended.stdout + ended.stderr
    )


def run(folder: Path, script: str, mesh: str, *arguments: str, **variables: str) -> Ended:
    path = folder / "script.py"
    path.write_text(script, encoding="utf-8")
    import_sharding()
    return meshmend_run(*mesh.split(), path, *arguments, **variables)
