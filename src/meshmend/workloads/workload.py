"""What is trained: a model, its optimizer, its samples and its loss, as one value.

Nothing here knows about chips. A batch is what `torch.utils.data.default_collate` makes of samples.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.utils.data import default_collate

Batch = Sequence[torch.Tensor]
# What a batch scored, each a mean over its samples: "loss", "accuracy".
Scores = Mapping[str, torch.Tensor]

EVALUATED = 1024  # held-out samples at most: enough for the last line of a run
_AT_ONCE = 64


class SampleSet(Protocol):
    """A map-style data set: its samples are tuples of tensors, alike in shape."""

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
        """Return the mean over the batch's samples of what training makes small."""
        return self.scores(model, batch)["loss"]

    def evaluate(self, model: torch.nn.Module) -> dict[str, float]:
        """Return the means of all scores over held-out samples, the model left as it was."""
        n_samples = min(len(self.held_out), EVALUATED)
        totals: dict[str, float] = {}
        was_training = model.training
        model.eval()
        with torch.no_grad():
            for start in range(0, n_samples, _AT_ONCE):
                chosen = range(start, min(start + _AT_ONCE, n_samples))
                for name, mean in self.scores(model, batch_of(self.held_out, chosen)).items():
                    totals[name] = totals.get(name, 0.0) + mean.item() * len(chosen)
        model.train(was_training)
        return {name: total / n_samples for name, total in totals.items()}


def batch_of(samples: SampleSet, indices: Sequence[int]) -> Batch:
    """Return the samples of these numbers, stacked."""
    batch: Batch = default_collate([samples[index] for index in indices])
    return batch
