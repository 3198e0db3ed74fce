"""A workload: a model, its optimizer, its samples and its loss, as one value.

Knows nothing about chips. `torch.utils.data.default_collate` turns samples into a batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.utils.data import default_collate

Batch = Sequence[torch.Tensor]
# The scores of a batch by name, such as "loss" and "accuracy"; each is a mean over its samples.
Scores = Mapping[str, torch.Tensor]

MAX_EVALUATED = 1024  # held-out samples; enough for the figures at the end of a run
_EVALUATION_BATCH = 64


class SampleSet(Protocol):
    """A map-style data set: its samples are tuples of tensors, all of the same shapes."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, ...]: ...


@dataclass(frozen=True)
class Workload:
    """A model to train on samples; `loss` and `scores` are means over the samples of a batch."""

    name: str
    dataset: SampleSet
    held_out: SampleSet
    new_model: Callable[[], torch.nn.Module]
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer]
    scores: Callable[[torch.nn.Module, Batch], Scores]
    seed: int = 0

    def model(self) -> torch.nn.Module:
        """Return a new model; every call, in every process, returns the same bits."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self.new_model()

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the loss that training minimises: a mean over the batch's samples."""
        return self.scores(model, batch)["loss"]

    def evaluate(self, model: torch.nn.Module) -> dict[str, float]:
        """Return the means of all scores over held-out samples; does not change the model."""
        n_samples = min(len(self.held_out), MAX_EVALUATED)
        totals: dict[str, float] = {}
        was_training = model.training
        model.eval()
        with torch.no_grad():
            for start in range(0, n_samples, _EVALUATION_BATCH):
                chosen = range(start, min(start + _EVALUATION_BATCH, n_samples))
                for name, mean in self.scores(model, batch_of(self.held_out, chosen)).items():
                    totals[name] = totals.get(name, 0.0) + mean.item() * len(chosen)
        model.train(was_training)
        return {name: total / n_samples for name, total in totals.items()}


def batch_of(samples: SampleSet, indices: Sequence[int]) -> Batch:
    """Return the samples with these indices, stacked."""
    batch: Batch = default_collate([samples[index] for index in indices])
    return batch
