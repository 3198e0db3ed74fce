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

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate

from meshmend.errors import CheckpointDamageError, InputError
from meshmend.faults.fault import Moment
from meshmend.faults.self_injection import SelfInjection
from meshmend.membership.events import WorkerSaved, WorkerStepped, WriteFailed
from meshmend.membership.messages import FRESH
from meshmend.membership.status_responder import StatusResponder
from meshmend.topology.failures import Chip
from meshmend.train import checkpoint
from meshmend.train.checkpoint import Saving
from meshmend.train.checkpoint_names import newest_complete, why_not_shared
from meshmend.train.exchange import Exchange
from meshmend.train.fingerprint import fingerprint_of
from meshmend.train.gradients import Gradients
from meshmend.train.ledger import Ledger
from meshmend.train.random_seed import seed_torch
from meshmend.train.resume import resumable
from meshmend.train.samples import Indices, Order, Share, batch_of, share_of
from meshmend.train.torch_state import digest, packed, tensors_of, unpacked
from meshmend.train.worker_environment import (
    WorkerEnvironment,
    coordinator_client,
    worker_environment,
)
from meshmend.train.worker_loop import Bytes, SumSizes, WorkerLoop

_log = logging.getLogger(__name__)


class Stateful(Protocol):
    """Anything whose state is part of the training, such as a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, numbers and text."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Replace the state."""


class Job:
    """One chip's part in training a model on the samples of a data set.

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
        if batch < 1 or steps < 0:
            raise InputError(
                f"Job needs a batch of at least 1 and at least 0 steps, but got batch={batch} "
                f"and steps={steps}"
            )
        self._environment: WorkerEnvironment = worker_environment()
        batch_of(policy, batch, 1, 1)  # refuses an unknown policy
        self.model, self.optimizer = model, optimizer
        self._dataset, self._collate, self._also = dataset, collate, tuple(also)
        self._order = Order(len(dataset), seed)
        self._batch, self._policy, self._seed = batch, policy, seed
        self.steps = steps
        self._saving = saving
        self._gradients = Gradients(model)
        self._write_failures: set[str] = set()  # what cannot be written, and was reported
        self._ledger = Ledger(
            self._environment.run_dir / "ledger" if self._environment.run_dir else None,
            self._environment.chip,
            self._order,
            on_failure=lambda why: self._report_write_failure("its ledger", why),
        )
        self.step_number = 0  # steps done
        self.loss: float | None = None  # mean over all samples of the last step
        self._position = 0
        self._share: Share | None = None
        self._samples: Indices | None = None  # of the share
        self._reported = 0  # the last generation in which this chip reported a step
        self._last_save = (0, -1)  # the step and the generation of this chip's last shard
        self._unreadable: set[int] = set()  # steps whose checkpoints turned out to be damaged
        self._self_injection = SelfInjection(self._environment.chip, self._environment.faults)
        if resume is not None:
            self._resume(resume)
        self._exchange: Exchange | None = None
        self._loop: WorkerLoop | None = None
        if self._environment.identity is not None:
            env = self._environment
            coordinator_client().set_fingerprint(
                fingerprint_of(
                    model, optimizer, dataset, batch=batch, steps=steps, seed=seed, policy=policy
                )
            )
            self._exchange = _exchange_of(env)
            self._loop = WorkerLoop(
                env.chip, self, coordinator_client(), self._exchange, self._self_injection
            )

    @property
    def chips(self) -> tuple[Chip, ...]:
        """The chips that train now."""
        generation = self._loop.generation if self._loop else None
        return generation.chips if generation else (self._environment.chip,)

    @property
    def is_leader(self) -> bool:
        """Whether this chip has rank 0: use it to print or plot once, not on every chip."""
        if self._exchange is None or self._loop is None:
            return True
        return self._exchange.rank == 0 and not self._loop.was_waiting

    @property
    def _rank_and_count(self) -> tuple[int, int]:
        """The rank of this chip, and the number of chips that train."""
        return (self._exchange.rank, self._exchange.mesh.n_live) if self._exchange else (0, 1)

    def __iter__(self) -> Iterator[Any]:
        """Yield this chip's samples, step by step, until all steps are done on all chips.

        Raises:
            JobFailedError: neither a chip nor a checkpoint has a state to go on from.
        """
        loop = self._loop
        if loop is not None:
            loop.start()
        while not (loop and loop.is_over):
            if not self.is_finished:
                yield from self._next_samples()
            elif loop is None:
                break
            else:
                loop.finish()
        self._close()

    def step(self, loss: torch.Tensor, *, weight: float | None = None) -> bool:
        """Sum the gradients over all chips and step the optimizer; return whether it counted.

        The loss is a mean over this chip's samples. If it is a mean over something else, such as
        masked words, pass their number as `weight`.

        Raises:
            InputError: there are no samples to step on, or they were stepped on already.
        """
        share = self._share
        if share is None:
            raise InputError(
                "Job.step needs samples of a new step; call it once for each turn of the loop over "
                "the job"
            )
        scale = (share.n_samples if weight is None else weight) / share.batch
        self._gradients.gather(float(loss.detach()), scale, normalise=weight is not None)
        return self._complete_step(share)

    def state(self) -> dict[str, Any]:
        """Return the training state at this step: model, optimizer, `also`, and progress."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "also": [part.state_dict() for part in self._also],
            "progress": {
                "step": self.step_number,
                "position": self._position,
                "seed": self._seed,
                "n_samples": self._order.n_samples,
                "loss": self.loss,
            },
        }

    def _next_samples(self) -> Iterator[Any]:
        """Yield this chip's samples of the next step; a chip without samples contributes zeros."""
        rank, n_live = self._rank_and_count
        batch = batch_of(self._policy, self._batch, n_live, self._environment.n_live_at_start)
        share = share_of(self._position, batch, rank, n_live)
        seed_torch(hash((self._seed, self.step_number, rank)) & 0x7FFFFFFF)
        self._self_injection.at(Moment.FORWARD, self.step_number)
        self._samples = self._order.samples(share.start, share.stop)
        if share.n_samples == 0:
            self._gradients.clear()
            self._complete_step(share)
            return
        self._share = share
        yield self._collate([self._dataset[index] for index in self._samples.tolist()])
        if self._share is not None:
            raise InputError("the loop over a Job needs to call job.step(loss) once in each turn")

    def _complete_step(self, share: Share) -> bool:
        """Complete the step, or recover if the mesh changed; return whether the step counts."""
        self._share = None
        number = self._loop.number if self._loop else 0
        self._ledger.write_try(self.step_number + 1, number, share, self._samples)
        self._self_injection.at(Moment.REDUCE, self.step_number)
        if self._loop is not None and not self._loop.try_sum(self._payloads()):
            self._gradients.restore()
            self._loop.recover(after=number)
            return False
        self._self_injection.at(Moment.UPDATE, self.step_number)
        self.loss = self._gradients.scatter()
        self.optimizer.step()
        self.step_number += 1
        self._position += share.batch
        self._ledger.write_done(self.step_number, number, self._position)
        self._report_and_save(share.batch)
        return True

    def _payloads(self) -> Iterator[tuple[Bytes, int, str]]:
        sizes = self._gradients.sizes()
        for payload, (n_elements, dtype) in zip(self._gradients.payloads(), sizes, strict=True):
            yield payload, n_elements, dtype

    def _report_and_save(self, batch: int) -> None:
        """Report a step that is done, and save a checkpoint if one is due."""
        if self._environment.checks:
            self._write_state_hash()
        rank, n_live = self._rank_and_count
        if self._loop is not None:
            self._loop.note_step()
            if rank == 0 or self._reported != self._loop.number:
                self._report(self._loop.number, batch)
        saving = self._saving
        if saving and self.step_number % saving.every == 0:
            self._save(saving, rank, n_live)

    def _report(self, generation: int, batch: int) -> None:
        """Report the last step: rank 0 every step, other chips their first in a generation."""
        is_first, self._reported = self._reported != generation, generation
        stepped = WorkerStepped(
            chip=self._environment.chip,
            step=self.step_number,
            generation=generation,
            at=time.monotonic(),
            leads=self._rank_and_count[0] == 0,
            first=is_first,
            loss=self.loss,
            samples=batch,
            sums=tuple(self._gradients.sizes()) if is_first else (),
        )
        coordinator_client().report(stepped)

    def _save(self, saving: Saving, rank: int, n_live: int) -> None:
        """Write this chip's shard of a checkpoint; training goes on if that fails."""
        try:
            checkpoint.save_shard(
                saving.folder, self.state(), step=self.step_number, shard=rank, n_shards=n_live
            )
            if rank == 0:
                self._check_last_save(saving.folder)
                checkpoint.prune(saving.folder, keep=saving.keep)
            self._last_save = self.step_number, self._loop.number if self._loop else 0
        except (InputError, OSError) as error:
            self._report_write_failure("its part of a checkpoint", str(error))
            return
        self._write_failures.discard("its part of a checkpoint")
        is_whole = "a whole checkpoint" not in self._write_failures
        if rank == 0 and is_whole and self._exchange is not None:
            saved = WorkerSaved(
                self._environment.chip, self.step_number, time.monotonic(), str(saving.folder)
            )
            coordinator_client().report(saved)

    def _check_last_save(self, folder: Path) -> None:
        """Report if this chip does not see all shards of the last checkpoint."""
        step, generation = self._last_save
        if self._loop is None or generation != self._loop.number:
            return
        if why := why_not_shared(folder, step):
            self._report_write_failure("a whole checkpoint", why)
        else:
            self._write_failures.discard("a whole checkpoint")

    def _report_write_failure(self, what: str, why: str) -> None:
        """Log and report, once, that something cannot be written; training goes on."""
        if what in self._write_failures:
            return
        self._write_failures.add(what)
        _log.warning("chip %s cannot write %s: %s", self._environment.chip, what, why)
        if self._environment.identity is not None:
            coordinator_client().report(WriteFailed(self._environment.chip, what, why))

    def _write_state_hash(self) -> None:
        state = self.state()
        bits = digest(tensors_of([state["model"], state["optimizer"], state["also"]]))
        self._ledger.write_hold(self.step_number, self._loop.number if self._loop else 0, bits)

    def _resume(self, folder: Path) -> None:
        def warn(path: Path, why: str) -> None:
            _log.warning("checkpoint %s is not used: %s", path, why)

        loaded = resumable(folder, self.state(), steps=self.steps, on_damage=warn)
        self._load(loaded.state)
        self._ledger.write_resume(self.step_number, self._position)

    def _load(self, state: dict[str, Any]) -> None:
        """Replace this chip's state by that of another chip or of a checkpoint."""
        self.model.load_state_dict(state["model"])
        self._gradients.remember()
        self.optimizer.load_state_dict(state["optimizer"])
        for part, part_state in zip(self._also, state["also"], strict=True):
            part.load_state_dict(part_state)
        self.step_number = int(state["progress"]["step"])
        self._position = int(state["progress"]["position"])
        self.loss = state["progress"]["loss"]

    # The methods that `WorkerLoop` calls: this class is its `Replica`.

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done."""
        return self.step_number >= self.steps

    def sum_sizes(self) -> SumSizes:
        """Return the number of elements and their type, for each sum of one step."""
        return self._gradients.sizes()

    def packed_state(self) -> Bytes:
        """Return the training state at this step, as bytes."""
        return packed(self.state())

    def take_over(self, state: Bytes) -> None:
        """Replace all of this chip's state by that of another chip; unpacks it first."""
        self._load(unpacked(state))

    def newest_checkpoint(self) -> int | None:
        """Return the step of the newest complete checkpoint not known to be damaged, or None."""
        if self._saving is None:
            return None
        return newest_complete(self._saving.folder, without=self._unreadable)

    def went_back(self, step: int, generation: int) -> None:
        """Write to the ledger that a generation restores an earlier step; later ones are lost."""
        self._ledger.write_restore(step, generation)

    def restore(self, step: int) -> None:
        """Replace this chip's state by the checkpoint of a step.

        Raises:
            CheckpointDamageError: it cannot be read.
        """
        if step == self.step_number and self._loop and self._loop.state_version == FRESH:
            return  # the whole job was restarted, and begins with its initial state
        assert self._saving is not None, "no checkpoint was announced"
        damage: list[str] = []
        loaded = checkpoint.load_step(
            self._saving.folder, step, on_damage=lambda path, why: damage.append(f"{path}: {why}")
        )
        if loaded is None:
            self._unreadable.add(step)
            raise CheckpointDamageError("; ".join(damage) or "it does not exist any more")
        self._load(loaded.state)

    def _close(self) -> None:
        if self._loop is None or self._loop.state_version != FRESH:
            self._write_state_hash()
        self._ledger.close()
        if self._exchange is not None:
            coordinator_client().close()
            self._exchange.close()


def _exchange_of(environment: WorkerEnvironment) -> Exchange:
    """Return this chip's connections; those who ask over them get the status of the job."""
    client = coordinator_client()
    exchange = Exchange(environment.whole, environment.chip, environment.exchange_settings)
    exchange.transport.answer_askers(StatusResponder(client.answer).take)
    client.set_traffic(exchange.sent_bytes)
    return exchange
