"""Collectives on CUDA tensors by NCCL's point-to-point messages, checked against sums on the CPU.

    python benchmarks/nccl_check.py --mesh 2x2

Needs CUDA. One process per chip. NCCL refuses two ranks of one host on one GPU: where there are
fewer GPUs than chips, each rank says that it is a host of its own, and they exchange messages
through the loopback interface. That is slow, and checks the results all the same.
"""

import argparse
import faulthandler
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import meshmend.torch  # noqa: F401  # registers the backend
from meshmend.topology.text import parse_mesh

_SIZES = (1, 1000, 300_000)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", default="2x2")
    parser.add_argument("--fail", action="append", default=[])
    parser.add_argument("--algorithm", default="auto")
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
        "MESHMEND_TRANSPORT": "nccl",
    }
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, args=(n_live, str(Path(folder) / "store"), options.patience), nprocs=n_live)  # type: ignore[no-untyped-call]
    print(f"NCCL on {n_live} ranks over {torch.cuda.device_count()} GPU(s): all collectives right")
    return 0


def _rank(rank: int, n_ranks: int, store: str, patience_s: float) -> None:
    faulthandler.dump_traceback_later(patience_s, exit=True)  # where it hangs, if it does
    n_gpus = torch.cuda.device_count()
    if n_gpus < n_ranks:
        os.environ |= {"NCCL_HOSTID": f"chip-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    torch.cuda.set_device(rank % n_gpus)
    dist.init_process_group(
        "meshmend", init_method=f"file://{store}", rank=rank, world_size=n_ranks
    )
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


def _same(what: str, got: Any, wanted: torch.Tensor) -> None:
    torch.cuda.synchronize()
    if not torch.equal(got.cpu(), wanted):
        raise AssertionError(f"{what} of {wanted.numel()} {wanted.dtype}: {got} is not {wanted}")


if __name__ == "__main__":
    raise SystemExit(main())
