"""A GPT as a workload: it predicts the next letter of a text, on one chip or on tiles.

Written out here, because tensor parallelism splits its matrices by name. `full` has the size of
nanoGPT's model of Shakespeare's letters. There is no dropout, because a step that is done again
must give the same result.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from meshmend.errors import InputError
from meshmend.lab.workloads.texts import HELD_OUT_EVERY, folder_texts, library_texts
from meshmend.lab.workloads.workload import Batch, Scores, Workload

_ROWS: Final = ("out", "narrow")  # matrices that tensor parallelism splits by rows
_COLUMNS: Final = ("query", "key", "value", "wide")


@dataclass(frozen=True)
class Sizes:
    """The sizes of a GPT; `length` is how many letters it sees."""

    length: int
    width: int
    n_blocks: int
    n_heads: int


TINY: Final = Sizes(length=32, width=64, n_blocks=2, n_heads=4)
FULL: Final = Sizes(length=256, width=384, n_blocks=6, n_heads=6)


@dataclass(frozen=True, eq=False)
class Passages:
    """Pieces of text (samples, letters); a sample: all letters but the last, all but the first."""

    letters: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.letters)

    def __getitem__(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        passage = self.letters[index]
        return passage[:-1], passage[1:]


def _matrix(n_in: int, n_out: int) -> nn.Linear:
    return nn.Linear(
        n_in, n_out, bias=False
    )  # as in Llama: fewer tensors, each of which has a cost


class Block(nn.Module):
    """One layer: attention to the letters before, and two matrices for each letter."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.head_width = width // sizes.n_heads
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.query, self.key, self.value, self.out = (_matrix(width, width) for _ in range(4))
        self.wide, self.narrow = _matrix(width, 4 * width), _matrix(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.norms[0](x)
        # With tensor parallelism a chip has some of the heads, each whole.
        query, key, value = (
            project(seen).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.narrow(functional.gelu(self.wide(self.norms[1](x))))  # type: ignore[no-any-return]  # nn.Module returns Any


class GPT(nn.Module):
    """Returns scores of the next letter, for each letter of all texts in turn."""

    def __init__(self, sizes: Sizes, n_letters: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(n_letters, sizes.width)
        self.places = nn.Embedding(sizes.length, sizes.width)
        self.blocks = nn.ModuleList([Block(sizes) for _ in range(sizes.n_blocks)])
        self.norm, self.head = nn.RMSNorm(sizes.width), _matrix(sizes.width, n_letters)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        x = self.letters(letters) + self.places(torch.arange(letters.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).flatten(0, 1))  # type: ignore[no-any-return]  # nn.Module returns Any


def tiny_gpt(data: Path | None, *, seed: int) -> Workload:
    """Return a GPT of 2 blocks of width 64 that sees 32 letters."""
    return _gpt(TINY, data, name="tiny GPT", rate=2e-3, seed=seed)


def full_gpt(data: Path | None, *, seed: int) -> Workload:
    """Return a GPT of 6 blocks of width 384 that sees 256 letters."""
    return _gpt(FULL, data, name="GPT", rate=1e-3, seed=seed)


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Spread a GPT over the chips of a tile: FSDP, and tensor parallelism along a third axis."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        RowwiseParallel,
        parallelize_module,
    )

    assert isinstance(model, GPT)
    names = mesh.mesh_dim_names or ()
    data = mesh[tuple(names[:2])]
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in _COLUMNS}
    plan |= {name: RowwiseParallel() for name in _ROWS}
    for block in model.blocks:
        if len(names) > 2:
            parallelize_module(block, mesh[names[2]], plan)
        fully_shard(block, mesh=data)
    fully_shard(model, mesh=data)
    return model


def passages(texts: list[str], length: int) -> tuple[Passages, Passages, int]:
    """Return pieces of texts to train on, pieces that are held out, and how many letters there are.

    Raises:
        InputError: there is too little text.
    """
    text = "\n".join(texts)
    n_pieces = len(text) // (length + 1)
    if n_pieces <= HELD_OUT_EVERY:
        raise InputError(
            f"a GPT needs texts of at least {(HELD_OUT_EVERY + 1) * (length + 1)} letters, but got "
            f"{len(text)}; add text files"
        )
    number_of = {letter: number for number, letter in enumerate(sorted(set(text)))}
    numbers = [number_of[letter] for letter in text[: n_pieces * (length + 1)]]
    pieces = np.array(numbers, dtype=np.int64).reshape(n_pieces, length + 1)
    is_held_out = np.arange(n_pieces) % HELD_OUT_EVERY == 1
    return Passages(pieces[~is_held_out]), Passages(pieces[is_held_out]), len(number_of)


def _gpt(sizes: Sizes, data: Path | None, *, name: str, rate: float, seed: int) -> Workload:
    texts = library_texts() if data is None else folder_texts(data)
    train, held_out, n_letters = passages(texts, sizes.length)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=rate, fused=True)

    return Workload(
        f"{name} on {'the help texts of Python' if data is None else data}",
        train,
        held_out,
        lambda: GPT(sizes, n_letters),
        optimizer,
        _scores,
        seed,
        shard,
    )


def _scores(model: nn.Module, batch: Batch) -> Scores:
    letters, following = batch
    guesses, following = model(letters), following.flatten()
    return {
        "loss": functional.cross_entropy(guesses, following),
        "accuracy": (guesses.detach().argmax(1) == following).float().mean(),
    }
