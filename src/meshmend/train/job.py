"""A training job that survives: five lines changed in a plain PyTorch loop.

    job = Job(model, optimizer, dataset, batch=64, steps=1000)
    for inputs, labels in job:
        loss = cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        job.step(loss)

The job hands out this chip's share of each step's samples. `step` sums the gradients over all
chips and steps the optimizer. If the mesh changed meanwhile, the step does not count: the job
joins the new generation, and hands out its new share of the same step.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import default_collate

from meshmend.topology.failures import Chip
from meshmend.train.checkpoint import Saving
from meshmend.train.job_core import JobCore
from meshmend.train.job_settings import JobSettings
from meshmend.train.random_seed import seed_torch
from meshmend.train.torch_fingerprint import fingerprint_of
from meshmend.train.torch_learner import Stateful, TorchLearner


class Job:
    """One chip's part in training a PyTorch model on the samples of a data set.

    A step uses `batch` samples over all chips together; with `policy="shrink"`, fewer while chips
    are missing. `also` are further objects with a state, such as schedulers. `resume` is a folder
    of checkpoints: the job begins with the newest one that is complete and undamaged.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Any,
        *,
        batch: int,
        steps: int,
        seed: int = 0,
        policy: str = "constant",
        collate: Callable[[list[Any]], Any] = default_collate,
        also: Sequence[Stateful] = (),
        saving: Saving | None = None,
        resume: Path | None = None,
    ) -> None:
        settings = JobSettings(len(dataset), batch, steps, seed, policy, saving, resume)
        self.model, self.optimizer, self.steps = model, optimizer, steps
        self._dataset, self._collate = dataset, collate
        self._learner = TorchLearner(model, optimizer, also)
        self._core = JobCore(
            self._learner, settings, lambda: fingerprint_of(model, optimizer, dataset, settings)
        )

    @property
    def step_number(self) -> int:
        """The number of steps that are done."""
        return self._core.step_number

    @property
    def loss(self) -> float | None:
        """The mean loss over all samples of the last step; None before the first."""
        return self._core.loss

    @property
    def chips(self) -> tuple[Chip, ...]:
        """The chips that train now."""
        return self._core.chips

    @property
    def is_leader(self) -> bool:
        """Whether this chip has rank 0: use it to print or plot once, not on every chip."""
        return self._core.is_leader

    def __iter__(self) -> Iterator[Any]:
        """Yield this chip's samples, step by step, until all steps are done on all chips.

        Raises:
            JobFailedError: neither a chip nor a checkpoint has a state to go on from.
        """
        for samples in self._core:
            seed_torch(self._core.step_seed)
            yield self._collate([self._dataset[index] for index in samples.tolist()])

    def step(self, loss: torch.Tensor, *, weight: float | None = None) -> bool:
        """Sum the gradients over all chips and step the optimizer; return whether it counted.

        The loss is a mean over this chip's samples. If it is a mean over something else, such as
        masked words, pass their number as `weight`.

        Raises:
            InputError: there are no samples to step on, or they were stepped on already.
        """
        share = self._core.share_to_step_on()
        scale = (share.n_samples if weight is None else weight) / share.batch
        self._learner.gather(loss, scale, normalise=weight is not None)
        return self._core.complete_step()

    def begin_at(self, step: int) -> None:
        """Begin after a step, whose state the caller has put into model and optimizer.

        Raises:
            InputError: the job has begun, or ends before that step.
        """
        self._core.begin_at(step)

    def end_after(self, step: int) -> None:
        """Make this step the last. All chips must decide so in the same step, from the same state.

        A step that is done already ends the job now.
        """
        self.steps = step
        self._core.end_after(step)

    def state(self) -> dict[str, Any]:
        """Return the training state at this step: model, optimizer, `also`, and progress."""
        return self._core.state()
