"""Plain DistributedDataParallel on a mesh with a hole; only the backend's name is special.

meshmend run --mesh 4x4 --fail 2x2@0,2 examples/torch/ddp_digits.py
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def images_of_digits(n_images: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy 8x8 pictures of ten fixed patterns, and which pattern each one shows."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(10, 1, 8, 8, generator=generator)
    labels = torch.randint(0, 10, (n_images,), generator=generator)
    noise = torch.randn(n_images, 1, 8, 8, generator=generator)
    return patterns[labels] + 0.5 * noise, labels


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="meshmend")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()

    dist.init_process_group(options.backend)
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * 8 * 8, 10),
    )
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)

    images, labels = images_of_digits(16 * n_ranks * options.steps)
    for step in range(options.steps):
        mine = slice(16 * (n_ranks * step + rank), 16 * (n_ranks * step + rank + 1))
        loss = torch.nn.functional.cross_entropy(ddp(images[mine]), labels[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item() / n_ranks:.6f}")


if __name__ == "__main__":
    main()
