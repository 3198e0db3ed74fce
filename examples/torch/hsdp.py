"""A small GPT whose replicas are tiles of four chips each: HSDP, with one special line.

meshmend run --mesh 4x4 --fail 2x2@0,2 examples/torch/hsdp.py
meshmend run --mesh 4x4 examples/torch/hsdp.py --tensor-parallel
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import meshmend.torch

LETTERS, WIDTH, HEADS, LENGTH = 32, 64, 4, 32
BATCH = 4  # texts of each share


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.norms[0](x)
        # With tensor parallelism a chip has some of the heads, each whole.
        heads = (
            project(seen).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.narrow(nn.functional.gelu(self.wide(self.norms[1](x))))


class GPT(nn.Module):
    def __init__(self, n_blocks: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(n_blocks)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LETTERS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over all letters but the first of each text."""
        x = self.letters(text[:, :-1]) + self.places(torch.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x))
        return nn.functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())


def parallelized(model: GPT, mesh: DeviceMesh) -> GPT:
    """Shard a model over the chips of a tile, and repeat it in each tile."""
    names = mesh.mesh_dim_names or ()
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = dict.fromkeys(("query", "key", "value", "wide"), columns) | {"out": rows, "narrow": rows}
    for block in model.blocks:
        if "tensor" in names:
            parallelize_module(block, mesh["tensor"], plan)
        fully_shard(block, mesh=mesh["replicate", "shard"])
    return fully_shard(model, mesh=mesh["replicate", "shard"])


def texts(step: int, n_texts: int) -> torch.Tensor:
    """Return texts in which each letter follows from the two before it, but for some noise."""
    numbers = torch.Generator().manual_seed(step)
    letters = list(torch.randint(LETTERS, (2, n_texts), generator=numbers))
    for _ in range(LENGTH - 1):
        noise = torch.rand(n_texts, generator=numbers) < 0.1
        letters.append((3 * letters[-1] + letters[-2] + noise) % LETTERS)
    return torch.stack(letters, dim=1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="meshmend")
    parser.add_argument("--tensor-parallel", action="store_true")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()

    dist.init_process_group(options.backend)
    names = ("replicate", "shard", "tensor") if options.tensor_parallel else ("replicate", "shard")
    if options.backend == "meshmend":
        mesh = meshmend.torch.tiles("2x2", names)  # the special line
    else:
        shape = (dist.get_world_size() // 4, *((2, 2) if options.tensor_parallel else (4,)))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)

    torch.manual_seed(0)
    model = parallelized(GPT(options.blocks).double(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = mesh["replicate", "shard"]  # chips along "tensor" read the same texts
    n_shares, share = data.size(), data.size(1) * data.get_local_rank(0) + data.get_local_rank(1)
    for step in range(options.steps):
        text = texts(step, BATCH * n_shares)[BATCH * share : BATCH * (share + 1)]
        loss = model(text)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / n_shares
        for name in ("replicate", "shard"):
            dist.all_reduce(mean, group=mesh.get_group(name))
        if dist.get_rank() == 0:
            print(f"{mesh.size(0)} tiles, step {step} loss {mean.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
