"""One chip's part in a job, in any framework: shares of samples, steps, recovery, checkpoints.

Knows chips, steps and samples, but no tensors: a `Learner` has the gradients and the optimizer.
The classes that users see, `Job` and `JaxJob`, hand out samples and fill the payloads.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshmend.errors import InputError
from meshmend.faults.fault import Moment
from meshmend.faults.self_injection import SelfInjection
from meshmend.membership.events import WorkerSaved, WorkerStepped
from meshmend.membership.job_fingerprint import JobFingerprint
from meshmend.membership.messages import FRESH
from meshmend.topology.failures import Chip
from meshmend.train.checkpoint_writer import CheckpointWriter
from meshmend.train.exchange import Exchange
from meshmend.train.job_settings import JobSettings
from meshmend.train.learner import Learner
from meshmend.train.ledger import Ledger
from meshmend.train.resume import resumable
from meshmend.train.samples import Indices, Order, Share, batch_of, share_of
from meshmend.train.worker_environment import (
    WorkerEnvironment,
    coordinator_client,
    exchange_of,
    worker_environment,
)
from meshmend.train.worker_loop import Bytes, SumSizes, WorkerLoop
from meshmend.train.write_failures import WriteFailures

_log = logging.getLogger(__name__)


class JobCore:
    """One chip's part in training a learner on the samples of a data set.

    `fingerprint()` returns what must be equal on all workers; it is called if there are others.
    """

    def __init__(
        self, learner: Learner, settings: JobSettings, fingerprint: Callable[[], JobFingerprint]
    ) -> None:
        self._environment: WorkerEnvironment = worker_environment()
        self._learner, self._settings = learner, settings
        self._order = Order(settings.n_samples, settings.seed)
        failures = WriteFailures(self._environment)
        self._checkpoints = (
            CheckpointWriter(settings.saving, learner.shards, failures) if settings.saving else None
        )
        self._ledger = Ledger(
            self._environment.run_dir / "ledger" if self._environment.run_dir else None,
            self._environment.chip,
            self._order,
            on_failure=lambda why: failures.report("its ledger", why),
        )
        self.step_number = 0  # steps done
        self.loss: float | None = None  # mean over all samples of the last step
        self._position = 0
        self.share: Share | None = None  # of the step in flight; None if there is none
        self._samples: Indices | None = None  # of the share
        self._reported = 0  # the last generation in which this chip reported a step
        self._self_injection = SelfInjection(self._environment.chip, self._environment.faults)
        if settings.resume is not None:
            self._resume(settings.resume)
        self._exchange: Exchange | None = None
        self._loop: WorkerLoop | None = None
        if self._environment.identity is not None:
            coordinator_client().set_fingerprint(fingerprint())
            self._exchange = exchange_of(self._environment)
            self._loop = WorkerLoop(
                self._environment.chip,
                self,
                coordinator_client(),
                self._exchange,
                self._self_injection,
            )

    @property
    def chips(self) -> tuple[Chip, ...]:
        """The chips that train now."""
        generation = self._loop.generation if self._loop else None
        return generation.chips if generation else (self._environment.chip,)

    @property
    def is_leader(self) -> bool:
        """Whether this chip has rank 0, and was a member when the job ended."""
        if self._exchange is None or self._loop is None:
            return True
        return self._exchange.rank == 0 and not self._loop.was_waiting

    @property
    def step_seed(self) -> int:
        """The seed of the random numbers that this chip draws in the next step."""
        rank, _ = self._rank_and_count
        return hash((self._settings.seed, self.step_number, rank)) & 0x7FFFFFFF

    @property
    def n_live_at_start(self) -> int:
        """How many chips were live when the job was started."""
        return self._environment.n_live_at_start

    @property
    def run_dir(self) -> Path | None:
        """The folder of the run, which all workers of a host share; None if there is none."""
        return self._environment.run_dir

    @property
    def _generation_number(self) -> int:
        return self._loop.number if self._loop else 0

    @property
    def _rank_and_count(self) -> tuple[int, int]:
        """The rank of this chip, and the number of chips that train."""
        return (self._exchange.rank, self._exchange.mesh.n_live) if self._exchange else (0, 1)

    def __iter__(self) -> Iterator[Indices]:
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

    def _next_samples(self) -> Iterator[Indices]:
        """Yield this chip's samples of the next step; a chip without samples contributes zeros."""
        rank, n_live = self._rank_and_count
        wanted, policy = self._settings.batch, self._settings.policy
        batch = batch_of(policy, wanted, n_live, self._environment.n_live_at_start)
        share = share_of(self._position, batch, rank, n_live)
        self._self_injection.at(Moment.FORWARD, self.step_number)
        self.share = share
        self._samples = self._order.samples(share.start, share.stop)
        if share.n_samples == 0:
            self._learner.clear()
            self.complete_step()
            return
        yield self._samples
        if self.share is not None:
            raise InputError("the loop over a Job needs to call job.step once in each turn")

    def share_to_step_on(self) -> Share:
        """Return the share of the step in flight.

        Raises:
            InputError: there are no samples to step on, or they were stepped on already.
        """
        if self.share is None:
            raise InputError(
                "Job.step needs samples of a new step; call it once for each turn of the loop over "
                "the job"
            )
        return self.share

    def complete_step(self) -> bool:
        """Sum the payloads and update the learner; return whether the step counts.

        If the mesh changed, recover: the share of the same step is then another.
        """
        share, number = self.share_to_step_on(), self._generation_number
        self.share = None
        self._ledger.write_try(self.step_number + 1, number, share, self._samples)
        self._self_injection.at(Moment.REDUCE, self.step_number)
        if self._loop is not None and not self._loop.try_sum(self._payloads()):
            self._learner.undo()
            self._loop.recover(after=number)
            return False
        self._self_injection.at(Moment.UPDATE, self.step_number)
        self.loss = self._learner.update()
        self.step_number += 1
        self._position += share.batch
        self._ledger.write_done(self.step_number, number, self._position)
        self._report_and_save(share.batch)
        return True

    def _payloads(self) -> Iterator[tuple[Bytes, int, str]]:
        sizes = self._learner.sum_sizes()
        for payload, (n_elements, dtype) in zip(self._learner.payloads(), sizes, strict=True):
            yield payload, n_elements, dtype

    def _report_and_save(self, batch: int) -> None:
        """Report a step that is done, and save a checkpoint if one is due."""
        if self._environment.checks:
            self._write_state_hash()
        rank, _ = self._rank_and_count
        if self._loop is not None:
            self._loop.note_step()
            if rank == 0 or self._reported != self._loop.number:
                self._report(self._loop.number, batch)
        if self._checkpoints and self._checkpoints.is_due(self.step_number):
            self._save(self._checkpoints)

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
            sums=tuple(self._learner.sum_sizes()) if is_first else (),
        )
        coordinator_client().report(stepped)

    def _save(self, checkpoints: CheckpointWriter) -> None:
        """Write this chip's shard of a checkpoint; training goes on if that fails."""
        rank, n_live = self._rank_and_count
        folder = checkpoints.save(
            self.state,
            step=self.step_number,
            generation=self._generation_number,
            shard=rank,
            n_shards=n_live,
        )
        if folder is not None and self._loop is not None:
            saved = WorkerSaved(
                self._environment.chip, self.step_number, time.monotonic(), str(folder)
            )
            coordinator_client().report(saved)

    def _write_state_hash(self) -> None:
        self._ledger.write_hold(self.step_number, self._generation_number, self._learner.digest())

    def _resume(self, folder: Path) -> None:
        def warn(path: Path, why: str) -> None:
            _log.warning("checkpoint %s is not used: %s", path, why)

        steps, shards = self._settings.steps, self._learner.shards
        loaded = resumable(folder, self.state(), shards, steps=steps, on_damage=warn)
        self._load(loaded.state)
        self._ledger.write_resume(self.step_number, self._position)

    def state(self) -> dict[str, Any]:
        """Return the training state at this step: model, optimizer, `also`, and progress."""
        return {
            **self._learner.state(),
            "progress": {
                "step": self.step_number,
                "position": self._position,
                "seed": self._settings.seed,
                "n_samples": self._settings.n_samples,
                "loss": self.loss,
            },
        }

    def _load(self, state: dict[str, Any]) -> None:
        """Replace this chip's state by that of another chip or of a checkpoint."""
        self._learner.load(state)
        self.step_number = int(state["progress"]["step"])
        self._position = int(state["progress"]["position"])
        self.loss = state["progress"]["loss"]

    # The methods that `WorkerLoop` calls: this class is its `Replica`.

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done."""
        return self.step_number >= self._settings.steps

    def sum_sizes(self) -> SumSizes:
        """Return the number of elements and their type, for each sum of one step."""
        return self._learner.sum_sizes()

    def packed_state(self) -> Bytes:
        """Return the training state at this step, as bytes."""
        return self._learner.packed(self.state())

    def take_over(self, state: Bytes) -> None:
        """Replace all of this chip's state by that of another chip; unpacks it first."""
        self._load(self._learner.unpacked(state))

    def newest_checkpoint(self) -> int | None:
        """Return the step of the newest complete checkpoint not known to be damaged, or None."""
        return self._checkpoints.newest() if self._checkpoints else None

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
        assert self._checkpoints is not None, "no checkpoint was announced"
        self._load(self._checkpoints.load(step).state)

    def begin_at(self, step: int) -> None:
        """Begin after a step, whose state the caller has put into the learner.

        Raises:
            InputError: the job has begun, or ends before that step.
        """
        if self.step_number or not 0 <= step <= self._settings.steps:
            raise InputError(
                f"a job begins at a step from 0 to {self._settings.steps}, before its first step; "
                f"but got {step} at step {self.step_number}"
            )
        self.step_number, self._position = step, step * self._settings.batch
        self._ledger.write_resume(self.step_number, self._position)

    def end_after(self, step: int) -> None:
        """Make this step the last one of the job."""
        self._settings = replace(self._settings, steps=step)

    def _close(self) -> None:
        if self._loop is None or self._loop.state_version != FRESH:
            self._write_state_hash()
        self._ledger.close()
        if self._exchange is not None:
            coordinator_client().close()
            self._exchange.close()
