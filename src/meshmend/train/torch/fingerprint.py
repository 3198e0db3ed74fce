"""What a PyTorch job must have in common on all workers, as its fingerprint."""

from collections.abc import Sequence
from typing import Any

import torch

from meshmend.membership.job_fingerprint import JobFingerprint
from meshmend.train.core.job_core import JobSettings
from meshmend.train.state.fingerprint import SEED, job_fingerprint, parameter_words, sample_words
from meshmend.train.state.torch_state import TORCH
from meshmend.train.torch.optimizers import Optimizers, optimizers_of


def fingerprint_of(
    model: torch.nn.Module,
    optimizer: Optimizers,
    dataset: Any,
    settings: JobSettings,
    *,
    mirror_domains: Sequence[str] = (),
    has_masters: bool = False,
) -> JobFingerprint:
    """Return what must be equal on all workers of a job; reads a few samples, each twice.

    A sharded optimizer has domains of mirrors.
    """
    words = ", ".join(_optimizer_words(each) for each in optimizers_of(optimizer).values())
    sharded = f"sharded by {', '.join(mirror_domains)}: " if mirror_domains else ""
    kinds = sharded + "master weights of " * has_masters
    parameters = {
        name: (str(each.dtype), tuple(each.shape)) for name, each in model.named_parameters()
    }
    return job_fingerprint(
        settings,
        framework="torch",
        model=parameter_words(parameters),
        optimizer=kinds + words,
        samples=sample_words(_Seeded(dataset), TORCH.packed),
    )


def _optimizer_words(optimizer: torch.optim.Optimizer) -> str:
    """Return the class of an optimizer and the names of its settings.

    The values may differ: a worker that gets another worker's state gets its values too.
    """
    keys = sorted({str(key) for group in optimizer.param_groups for key in group} - {"params"})
    return f"{type(optimizer).__name__}({', '.join(keys)})"


class _Seeded:
    """A data set that draws torch's random numbers with a fixed seed for each sample."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(SEED)
        try:
            return self._dataset[index]
        finally:
            torch.set_rng_state(before)
