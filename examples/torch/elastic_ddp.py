"""A DDP loop that goes on when chips die, and takes them back. Three lines are special.

meshmend run --elastic --mesh 2x2 --inject "kill 0,1 at 20" examples/torch/elastic_ddp.py
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import meshmend.torch

BATCH = 48


def images_of_digits(n_images: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy 8x8 pictures of ten fixed patterns, and which pattern each one shows."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(10, 64, generator=generator)
    labels = torch.randint(0, 10, (n_images,), generator=generator)
    return patterns[labels] + 0.5 * torch.randn(n_images, 64, generator=generator), labels


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    dist.init_process_group("meshmend")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    images, labels = images_of_digits(BATCH * options.steps)

    meshmend.torch.reconfigure(ddp, optimizer)
    for step in meshmend.torch.steps(options.steps):
        with meshmend.torch.retrying():
            rank, n_ranks = dist.get_rank(), dist.get_world_size()
            first = BATCH * step
            mine = slice(first + BATCH * rank // n_ranks, first + BATCH * (rank + 1) // n_ranks)
            # DDP takes the mean over ranks; this makes it the mean over samples.
            share = (mine.stop - mine.start) * n_ranks / BATCH
            loss = share * torch.nn.functional.cross_entropy(ddp(images[mine]), labels[mine])
            optimizer.zero_grad()
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            optimizer.step()
            if rank == 0:
                print(f"step {step + 1} loss {mean.item() / n_ranks:.6f} on {n_ranks} chips")


if __name__ == "__main__":
    main()
