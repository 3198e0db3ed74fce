"""Seeds the random numbers that a data set draws for one sample, by the sample's place in the row.

So random augmentation does not depend on the chip or the process that makes the sample: a step done
again, or shared out among fewer chips, has the same samples.
"""

import hashlib
import random

import numpy as np
import torch


def seed_sample(seed: int, place: int) -> None:
    """Seed the random numbers of Python, NumPy and torch for the sample at a place of the row."""
    _seed_all(f"sample {seed} {place}")


def seed_collation(seed: int, place: int) -> None:
    """Seed the same for making a batch of the samples from this place on."""
    _seed_all(f"batch {seed} {place}")


def _seed_all(words: str) -> None:
    number = int.from_bytes(hashlib.blake2b(words.encode(), digest_size=4).digest(), "little")
    random.seed(number)
    np.random.seed(number)
    torch.default_generator.manual_seed(number)
