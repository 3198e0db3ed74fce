"""Collectives on CUDA tensors by NCCL's point-to-point messages, checked against sums on the CPU.

    python benchmarks/nccl_check.py --mesh 2x2
    python benchmarks/nccl_check.py --mesh 2x2 --beside-nccl

The second checks the group "cpu:meshmend,cuda:nccl" (torch 2.14): tensors on CPUs are summed on our
plans, and DistributedDataParallel averages the gradients of a model on a GPU with NCCL.

Needs CUDA. One process per chip. NCCL refuses two ranks of one host on one GPU: where there are
fewer GPUs than chips, each rank says that it is a host of its own, and they exchange messages
through the loopback interface. That is slow, and checks the results all the same.
"""

import argparse
import copy
import faulthandler
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import meshmend.torch  # registers the backend
from meshmend.topology.text import parse_mesh

_SIZES = (1, 1000, 300_000)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", default="2x2")
    parser.add_argument("--fail", action="append", default=[])
    parser.add_argument("--algorithm", default="auto")
    parser.add_argument(
        "--beside-nccl", action="store_true", help='the group "cpu:meshmend,cuda:nccl"'
    )
    parser.add_argument("--patience", type=float, default=230.0, help="seconds, then say where")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("nccl_check needs CUDA, but this machine has none", file=sys.stderr)
        return 2
    n_live = parse_mesh(options.mesh, fail=options.fail).n_live
    os.environ |= {
        "MESHMEND_MESH": options.mesh,
        "MESHMEND_FAIL": " ".join(options.fail),
        "MESHMEND_ALGORITHM": options.algorithm,
        "MESHMEND_TRANSPORT": "sockets" if options.beside_nccl else "nccl",
    }
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        spawn(_rank, args=(n_live, store, options.beside_nccl, options.patience), nprocs=n_live)  # type: ignore[no-untyped-call]
    print(f"NCCL on {n_live} ranks over {torch.cuda.device_count()} GPU(s): all collectives right")
    return 0


def _rank(rank: int, n_ranks: int, store: str, is_beside_nccl: bool, patience_s: float) -> None:
    faulthandler.dump_traceback_later(patience_s, exit=True)  # where it hangs, if it does
    n_gpus = torch.cuda.device_count()
    if n_gpus < n_ranks:
        os.environ |= {"NCCL_HOSTID": f"chip-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    torch.cuda.set_device(rank % n_gpus)
    name = "cpu:meshmend,cuda:nccl" if is_beside_nccl else "meshmend"
    dist.init_process_group(name, init_method=f"file://{store}", rank=rank, world_size=n_ranks)
    if is_beside_nccl:
        _check_sums_on_cpus(rank, n_ranks)
        _check_gradients_of_ddp(rank, n_ranks)
        dist.destroy_process_group()
        return
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for size in _SIZES:
            _check(rank, n_ranks, size, dtype)
            if rank == 0:
                print(f"{size} of {dtype}: right", flush=True)
    dist.destroy_process_group()


def _check(rank: int, n_ranks: int, size: int, dtype: torch.dtype) -> None:
    every = [torch.arange(size).remainder(7 + each).to(dtype) for each in range(n_ranks)]
    total = torch.stack(every).sum(0).to(dtype)
    tensor = every[rank].cuda()
    dist.all_reduce(tensor)
    _same("all_reduce", tensor, total)
    tensor = every[rank].cuda()
    dist.broadcast(tensor, 1)
    _same("broadcast", tensor, every[1])
    gathered = [torch.empty_like(tensor) for _ in range(n_ranks)]
    dist.all_gather(gathered, every[rank].cuda())
    for got, wanted in zip(gathered, every, strict=True):
        _same("all_gather", got, wanted)
    part = torch.empty(size, dtype=dtype, device="cuda")
    dist.reduce_scatter(part, [every[rank].cuda() + each for each in range(n_ranks)])
    _same("reduce_scatter", part, (total + n_ranks * rank).to(dtype))
    dist.barrier()


def _check_sums_on_cpus(rank: int, n_ranks: int) -> None:
    if meshmend.torch.runs_on() != "meshmend":
        raise AssertionError(f"tensors on CPUs are summed by {meshmend.torch.runs_on()}")
    for size in _SIZES:
        every = [torch.arange(size).remainder(7 + each) for each in range(n_ranks)]
        tensor = every[rank].clone()
        dist.all_reduce(tensor)
        _same("all_reduce on CPUs", tensor, torch.stack(every).sum(0))


def _check_gradients_of_ddp(rank: int, n_ranks: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 10)
    ).double()
    shares = torch.randn(n_ranks, 32, 256, dtype=torch.float64)
    model(shares.flatten(0, 1)).square().mean().backward()  # equal shares: the mean of their means
    wanted = [parameter.grad for parameter in model.parameters()]
    ours = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model).cuda())
    ours.zero_grad()
    ours(shares[rank].cuda()).square().mean().backward()
    for parameter, gradient in zip(ours.parameters(), wanted, strict=True):
        averaged = parameter.grad
        assert averaged is not None
        torch.testing.assert_close(averaged.cpu(), gradient, rtol=1e-9, atol=1e-12)


def _same(what: str, got: Any, wanted: torch.Tensor) -> None:
    torch.cuda.synchronize()
    if not torch.equal(got.cpu(), wanted):
        raise AssertionError(f"{what} of {wanted.numel()} {wanted.dtype}: {got} is not {wanted}")


if __name__ == "__main__":
    raise SystemExit(main())
