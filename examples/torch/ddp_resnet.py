"""A small ResNet under DistributedDataParallel; only the backend's name is special.

meshmend run --mesh 4x4 --fail 2x2@0,2 examples/torch/ddp_resnet.py
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import ResNetConfig, ResNetForImageClassification


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="meshmend")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()

    dist.init_process_group(options.backend)
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    config = ResNetConfig(
        num_channels=1,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        num_labels=10,
    )
    ddp = DistributedDataParallel(ResNetForImageClassification(config))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)

    patterns = torch.rand(10, 1, 16, 16)  # the same on every rank: the seed is
    draws = torch.Generator().manual_seed(1 + rank)
    for step in range(options.steps):
        labels = torch.randint(0, 10, (8,), generator=draws)
        noise = torch.randn(8, 1, 16, 16, generator=draws)
        loss = ddp(pixel_values=patterns[labels] + 0.3 * noise, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item() / n_ranks:.8f}")


if __name__ == "__main__":
    main()
