"""A training job that survives: five lines changed in a plain PyTorch loop.

    job = Job(model, optimizer, dataset, batch=64, steps=1000)
    for inputs, labels in job:
        loss = cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        job.step(loss)

The job hands out this chip's share of each step's samples. `step` sums the gradients over all
chips and steps the optimizer. If the mesh changed meanwhile, the step does not count: the job
joins the new generation, and hands out its new share of the same step. The sums begin while
`backward` still computes; `step` waits for the last.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from meshmend.errors import InputError, hides_frames
from meshmend.membership.job import JobFingerprint
from meshmend.train.core.chip_job import ChipJob, added
from meshmend.train.core.job_core import JobCore
from meshmend.train.core.job_settings import JobSettings
from meshmend.train.core.step_sums import RAISE
from meshmend.train.core.worker_environment import worker_environment
from meshmend.train.data.random_numbers import seed_all
from meshmend.train.data.sample_source import JobData
from meshmend.train.sharding.sharded_update import ShardedUpdate
from meshmend.train.sharding.update_shares import DEFAULT_DOMAINS
from meshmend.train.state.checkpoint import Saving
from meshmend.train.state.comparison import COMPARE_EVERY
from meshmend.train.state.fingerprint import job_fingerprint, parameter_words, sample_words
from meshmend.train.state.resume import Resume
from meshmend.train.state.torch_state import TORCH
from meshmend.train.torch.learner import Models, TorchLearner, one_module
from meshmend.train.torch.loop_state import Stateful
from meshmend.train.torch.optimizers import Optimizers, optimizers_of


class Job(ChipJob):
    """One chip's part in training a PyTorch model on the samples of a data set.

    The data set has `len()` and `[]`, or is an `IterableDataset`, or a `DataLoader` around either:
    its workers then make the samples of the next steps ahead. A step uses `batch` samples over all
    chips together, by default the loader's; with `policy="shrink"`, fewer while chips are missing.
    `model` and `optimizer` may each be several, in a list or a dict. `also` are further objects
    with a state, such as schedulers; a `scaler` scales the loss of all chips alike. `resume` is a
    folder of checkpoints: the job begins with the newest one that is complete and undamaged; with
    "auto", with that of the folder of `saving`, or anew if there is none.
    `non_finite` says what becomes of a step whose gradients are not finite: "raise" or "skip".
    The states of all chips are compared every `compare_every` steps. In one of every `check_shares`
    steps each chip also computes the samples of another one, in a turn that does not count: a chip
    that computes wrong numbers is found and left out, and `on_wrong_result` says what to do with
    the steps since it was right: "restore", "continue" or "stop". With `shares="speed"`, a chip
    that computes steadily slower than the others gets fewer samples of each step. Gradients are
    summed in buckets of up to `bucket_bytes`. With `shard_optimizer`, each chip keeps the
    optimizer's state of its share of the parameters, and of one share that it mirrors; the two are
    never in one of the `mirror_domains`: board, host, row, column, or blocks such as 4x2. With
    `master_weights`, the optimizer steps on float32 copies of the parameters that have 16 bits.
    """

    @hides_frames
    def __init__(
        self,
        model: Models,
        optimizer: Optimizers,
        dataset: Any,
        *,
        batch: int | None = None,
        steps: int,
        seed: int = 0,
        policy: str = "constant",
        collate: Callable[[list[Any]], Any] | None = None,
        also: Sequence[Stateful] = (),
        scaler: torch.amp.GradScaler | None = None,
        saving: Saving | None = None,
        resume: Resume = None,
        non_finite: str = RAISE,
        compare_every: int = COMPARE_EVERY,
        check_shares: int | None = None,
        on_wrong_result: str | None = None,
        shares: str | None = None,
        bucket_bytes: int | None = None,
        shard_optimizer: bool = False,
        mirror_domains: Sequence[str] = DEFAULT_DOMAINS,
        master_weights: bool = False,
    ) -> None:
        data = JobData(dataset, collate)
        settings = JobSettings(
            data.n_samples,
            data.batch_size(batch),
            steps,
            seed,
            policy,
            saving,
            resume,
            non_finite,
            compare_every,
            check_shares,
            on_wrong_result,
            shares,
        )
        self.model, self.optimizer, self.steps = model, optimizer, steps
        is_one = isinstance(mirror_domains, str)
        domains = (str(mirror_domains),) if is_one else tuple(mirror_domains)
        self._collate, self._source = data.collate, data.source(settings.order())
        self._learner: TorchLearner = TorchLearner(
            model,
            optimizer,
            also,
            scaler=scaler,
            bucket_bytes=bucket_bytes,
            shard_optimizer=shard_optimizer,
            master_weights=master_weights,
            n_notes=settings.n_notes,
        )
        make_sharding = partial(
            ShardedUpdate,
            self._learner,
            environment=worker_environment(),
            mirror_domains=domains,
        )
        self._core = JobCore(
            self._learner,
            settings,
            lambda: fingerprint_of(
                one_module(model),
                optimizer,
                self._source,
                settings,
                mirror_domains=domains if shard_optimizer else (),
                has_masters=master_weights,
            ),
            make_sharding if shard_optimizer else None,
        )
        self._core.seen_of_stream = lambda: self._source.seen

    @property
    def optimizer_bytes(self) -> int:
        """The bytes of the optimizer's state that this chip keeps now."""
        return self._learner.n_state_bytes()

    @property
    def grad_norm(self) -> float | None:
        """The norm of the last gradients that `clip_grad_norm` was called for, before clipping."""
        return self._learner.norm

    def __iter__(self) -> Iterator[Any]:
        """Yield this chip's samples, step by step, until all steps are done on all chips.

        Raises:
            JobFailedError: neither a chip nor a checkpoint has a state to go on from.
        """
        try:
            for _ in self._core:
                share, n_steps = self._core.share_to_step_on(), self.steps - self._core.step_number
                batch = self._source.batch(share, n_steps)
                seed_step(self._core.step_seed)
                self._learner.begin(share, self._core.start_sum)
                yield batch
                self._learner.end_turn(self._core.world_size)
        finally:
            self._source.close()
            self._learner.end()

    def accumulate(self) -> AbstractContextManager[None]:
        """Return a context for all backward passes of a step but the last.

        Their gradients are added up, and summed over the chips together with those of the last.
        """
        return self._learner.accumulating()

    def weigh(self, weight: float) -> None:
        """Say over how many things this chip's loss is a mean, if not over its samples.

        Call it before the last backward pass of the step, so that sums can begin during it.
        """
        self._core.share_to_step_on()
        self._learner.weigh(weight)

    def clip_grad_norm(self, max_norm: float) -> None:
        """Clip the summed gradients of this step to a norm, before the optimizer steps.

        Call it before `step`; `grad_norm` has the norm afterwards. It is the same on all chips.
        """
        self._core.share_to_step_on()
        if not max_norm > 0:
            raise InputError(f"clip_grad_norm needs a norm above 0, but got {max_norm}")
        self._learner.clip(max_norm)

    def step(self, loss: torch.Tensor, *, weight: float | None = None) -> bool:
        """Sum the gradients over all chips and step the optimizer; return whether it counted.

        The loss is a mean over this chip's samples. If it is a mean over something else, such as
        masked words, pass their number as `weight`, here or earlier to `weigh`.

        Raises:
            InputError: there are no samples to step on, or they were stepped on already.
            NonFiniteError: the sums are not finite, and the job was not told to skip such steps.
        """
        self._core.share_to_step_on()
        self._learner.gather(loss, weight, is_last=self._core.is_stopping)
        counts = self._core.complete_step()
        if not counts:
            self._learner.loop_state.keep()
        return counts

    def evaluate(self, dataset: Any, scores: Callable[[Any], Any], *, batch: int = 64) -> Any:
        """Return the sum of `scores(samples)` over all samples of a data set, shared by the chips.

        `scores` gets up to `batch` collated samples, and returns a number, a tensor, or a dict of
        them, each a sum over these samples. Every sample counts exactly once, also if chips die
        meanwhile, and every chip gets the same bits, whatever the number of chips. The models are
        in evaluation mode. Call it after `step`, on all chips.

        Raises:
            InputError: the data set is empty, or a step is in flight.
        """
        batches = batches_of(dataset, batch)

        def compute(number: int) -> bytes:
            samples = self._collate([dataset[index] for index in batches[number]])
            return self._learner.framework.packed(scores(samples)).tobytes()

        with evaluating(one_module(self.model)):
            parts = self._core.share_out(len(batches), compute)
        return added([self._unpacked(part) for part in parts])

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


def batches_of(dataset: Any, batch: int) -> list[range]:
    """Return the indices of each batch of a data set.

    Raises:
        InputError: there are no samples, or a batch has none.
    """
    if not hasattr(dataset, "__getitem__"):
        raise InputError(
            "an evaluation needs a data set with samples by number, but got a "
            f"{type(dataset).__name__}; of a DataLoader, pass loader.dataset"
        )
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


def seed_step(number: int) -> None:
    """Seed all random numbers, those of GPUs if they are in use."""
    seed_all(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's stubs
        torch.cuda.manual_seed_all(number)


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
    return job_fingerprint(
        settings,
        framework="torch",
        model=parameter_words(dict(model.named_parameters())),
        optimizer=kinds + words,
        samples=sample_words(dataset, TORCH.packed),
    )


def _optimizer_words(optimizer: torch.optim.Optimizer) -> str:
    """Return the class of an optimizer and the names of its settings.

    The values may differ: a worker that gets another worker's state gets its values too.
    """
    keys = sorted({str(key) for group in optimizer.param_groups for key in group} - {"params"})
    return f"{type(optimizer).__name__}({', '.join(keys)})"
