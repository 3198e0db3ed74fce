"""What an evaluation is made of: batches of a data set, and models in evaluation mode."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from meshmend.errors import InputError


def batches_of(dataset: Any, batch: int) -> list[range]:
    """Return the indices of each batch of a data set.

    Raises:
        InputError: there are no samples, or a batch has none.
    """
    if batch < 1 or len(dataset) < 1:
        raise InputError(
            f"an evaluation needs samples and a batch of at least 1, but got {len(dataset)} "
            f"samples and batch={batch}"
        )
    return [range(at, min(at + batch, len(dataset))) for at in range(0, len(dataset), batch)]


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, without gradients; afterwards each part is as it was."""
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part in training:
            part.training = True
