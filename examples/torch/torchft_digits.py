"""One replica of a job of torchft's Manager, on our schedules. Start one for each chip of the mesh.

torchft_lighthouse --min_replicas 2 --join_timeout_ms 1000 --bind 127.0.0.1:29510 &
for chip in 0,0 0,1 1,0 1,1; do
    python examples/torch/torchft_digits.py --mesh 2x2 --chip $chip \\
        --lighthouse http://127.0.0.1:29510 &
done

Kill one and the others go on without it; start it again and it heals from them.

This is for torchft 0.2.0. Newer ones take PyTorch's own groups, so they need nothing of ours but
the backend: with `--store HOST:PORT`, the address of a TCPStore that outlives the replicas, the
group is `init_process_group("meshmend", enable_reconfigure=True)` (torch 2.15).
"""

import argparse
import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchft import Manager

import meshmend.torch
from meshmend.topology.text import parse_mesh

BATCH = 48
TIMEOUT = timedelta(seconds=10)


def group_of(options: argparse.Namespace) -> tuple[Any, str]:
    """Return the process group of this replica, and a name: ranks are in the order of names."""
    mesh = parse_mesh(options.mesh)
    chip = tuple(int(at) for at in options.chip.split(","))
    if not options.store:
        from meshmend.torch.torchft import MeshmendReplicas

        group = MeshmendReplicas(mesh, chip, timeout=TIMEOUT)
        return group, group.replica_id
    host, _, port = options.store.rpartition(":")
    os.environ["MESHMEND_MESH"] = options.mesh
    meshmend.torch.register()  # where meshmend is installed, torch does it by itself
    dist.init_process_group(
        "meshmend",
        store=dist.TCPStore(host, int(port), is_master=False),
        rank=mesh.rank_of[chip],
        world_size=mesh.n_live,
        timeout=TIMEOUT,
        enable_reconfigure=True,
    )
    return dist.group.WORLD, f"chip-{mesh.rank_of[chip]:06d}"


def images_of_digits(n_images: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy 8x8 pictures of ten fixed patterns, and which pattern each one shows."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(10, 64, generator=generator)
    labels = torch.randint(0, 10, (n_images,), generator=generator)
    return patterns[labels] + 0.5 * torch.randn(n_images, 64, generator=generator), labels


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", required=True, help="such as 2x2")
    parser.add_argument("--chip", required=True, help="this replica's, such as 0,1")
    parser.add_argument("--lighthouse", required=True, help="the address of torchft_lighthouse")
    parser.add_argument("--store", default="", help="HOST:PORT of a TCPStore, for new torchfts")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that a step takes longer")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    images, labels = images_of_digits(BATCH * options.steps)

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group, replica_id = group_of(options)
    manager = Manager(
        pg=group,
        replica_id=replica_id,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,  # who shares the batch out must know among how many
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=options.lighthouse,
        hostname="127.0.0.1",
        init_sync=False,
    )
    while (step := manager.current_step()) < options.steps:
        time.sleep(options.pause)
        manager.start_quorum()
        step, rank, n_ranks = (
            manager.current_step(),
            manager.participating_rank(),
            manager.num_participants(),
        )
        first = BATCH * (step % options.steps)
        mine = slice(first + BATCH * rank // n_ranks, first + BATCH * (rank + 1) // n_ranks)
        loss = torch.nn.functional.cross_entropy(model(images[mine]), labels[mine], reduction="sum")
        optimizer.zero_grad()
        (loss / BATCH).backward()
        flat = torch.nn.utils.parameters_to_vector([each.grad for each in model.parameters()])
        manager.allreduce(flat, reduce_op=dist.ReduceOp.SUM).wait()
        if manager.should_commit():
            torch.nn.utils.vector_to_parameters(flat, [each.grad for each in model.parameters()])
            optimizer.step()
            total = sum(float(each.double().sum()) for each in model.parameters())
            print(f"step {step + 1} of {n_ranks} replicas, weights {total:.9f}", flush=True)
    manager.shutdown()
    if options.store:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
