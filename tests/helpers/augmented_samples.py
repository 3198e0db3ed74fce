"""Samples with random numbers in them, in a module that loader workers of any start can import."""

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

N_SAMPLES = 50


def drawn(index: int) -> torch.Tensor:
    """Return an index with numbers of three random generators."""
    numbers = [index, random.random(), np.random.rand(), torch.rand(()).item()]
    return torch.tensor(numbers, dtype=torch.float64)


class Augmented(Dataset[Any]):
    """Fifty samples, each augmented at random."""

    def __len__(self) -> int:
        return N_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return drawn(index)
