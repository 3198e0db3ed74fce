"""One chip's part in a job, in any framework: shares of samples, steps, recovery, checkpoints.

Knows chips, steps and samples, but no tensors: a `Learner` has the gradients and the optimizer.
The classes that users see, `Job` and `JaxJob`, hand out samples and fill the payloads. A process
trains one job.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from meshmend.errors import InputError, ReplicasDifferError, WrongResultError
from meshmend.membership.events import WorkerStepped
from meshmend.membership.faults.fault import Moment, Part
from meshmend.membership.faults.fault_injector import SelfInjection
from meshmend.membership.job import JobFingerprint
from meshmend.membership.messages import FRESH
from meshmend.planning.plan_request import SumSizes
from meshmend.topology.failures import Chip
from meshmend.train.core.bit_flips import BitFlips
from meshmend.train.core.exchange import Exchange
from meshmend.train.core.job_settings import JobSettings
from meshmend.train.core.learner import Learner, MakeSharding, Sharding
from meshmend.train.core.link_watch import LinkWatch
from meshmend.train.core.share_checks import Finding
from meshmend.train.core.shared_calls import SharedCalls
from meshmend.train.core.state_transfer import StateTransfer
from meshmend.train.core.step_shares import StepShares
from meshmend.train.core.step_sums import Culprits, NonFinite, StepSums
from meshmend.train.core.worker_environment import (
    WorkerEnvironment,
    coordinator_client,
    exchange_of,
    ledger_of,
    worker_environment,
)
from meshmend.train.core.worker_loop import WorkerLoop
from meshmend.train.core.wrong_numbers import WrongNumbers
from meshmend.train.data.samples import Indices, Seen, Share
from meshmend.train.state.checkpoint_writer import CheckpointWriter
from meshmend.train.state.digest import total_of
from meshmend.train.state.resume import (
    folder_owner,
    folder_to_resume,
    resumable,
    tell_of_new_beginning,
)
from meshmend.train.state.state_tree import tree_of

_log = logging.getLogger(__name__)


class JobCore:
    """One chip's part in training a learner on the samples of a data set.

    `fingerprint()` returns what must be equal on all workers; it is called if there are others.
    """

    def __init__(
        self,
        learner: Learner,
        settings: JobSettings,
        fingerprint: Callable[[], JobFingerprint],
        make_sharding: MakeSharding | None = None,
    ) -> None:
        self._environment: WorkerEnvironment = worker_environment()
        self._learner, self._settings = learner, settings
        self._self_injection = SelfInjection(self._environment.chip, self._environment.faults)
        self._flips = BitFlips(learner, self._environment.chip, self._self_injection)
        self._shares = StepShares(learner, settings, self._environment, self._self_injection)

        resume = folder_to_resume(settings.resume, settings.saving)
        owner = folder_owner(settings.saving, resume, self._environment.run_id)
        self._saving = CheckpointWriter(
            settings.saving, learner.framework, self._environment, owner
        )
        self._ledger = ledger_of(self._environment, self._shares.order)

        # The training state, and what all chips know alike.
        self._has_begun = False  # a loop over the job
        self.loss: float | None = None  # mean over all samples of the last step
        self._saved_step = 0  # the last step of which a checkpoint was begun
        self._hashed_step = 0  # the last step whose state was hashed, if all are
        self.is_overwritten = False  # the state is a part of this chip's and a part of others'
        self._is_stopped = False  # all chips have agreed that the last step was the last one
        self._links = ""  # speeds of links that were found, as of the last step

        # The step in flight.
        self._samples: Indices | None = None  # of the share in flight
        self._second: int | None = None  # the rank of a share that is computed a second time
        self.is_stopping = False  # this chip wants it to be the last
        self._culprits: Culprits | None = None
        self._finding: Finding | None = None  # why it does not count
        self.after_step: list[Callable[[], object]] = []  # called after each step that counts
        self.seen_of_stream: Callable[[], Seen | None] = lambda: None  # before this step
        self._non_finite = NonFinite(settings.non_finite, self._environment)
        self._reported = 0  # the last generation in which this chip reported a step

        # None if this chip trains alone.
        self._exchange: Exchange | None = None
        self._loop: WorkerLoop | None = None
        self._sharding: Sharding | None = None  # None if nothing is sharded
        self._watch: LinkWatch | None = None
        self._checks: WrongNumbers | None = None
        self.calls: SharedCalls | None = None
        # Before it joins: what no state can hold would end one chip after another.
        tree_of(self.state(), learner.framework.raw)
        if resume is not None:
            self._resume(resume)
        elif self._environment.is_first:
            tell_of_new_beginning(settings.resume, settings.saving)
        if self._environment.identity is None:
            _refuse_one_of_many()
            self._sums = StepSums(learner, None, self._before_sum)
        else:
            _claim_process()
            told = structs.replace(fingerprint(), **self._environment.sums_in_words())
            coordinator_client().set_fingerprint(told)
            self._sums = self._join(make_sharding)

    def _join(self, make_sharding: MakeSharding | None) -> StepSums:
        """Make what a chip has that trains with others; return its sums with them."""
        learner, chip = self._learner, self._environment.chip
        exchange = exchange_of(self._environment)
        transfer = StateTransfer(self, exchange, learner.framework)
        if make_sharding is not None:
            self._sharding = make_sharding(self, exchange, transfer.exchanged)
        loop = WorkerLoop(
            chip,
            self,
            coordinator_client(),
            exchange,
            self._self_injection,
            catch_up=(self._sharding or transfer).catch_up,
        )
        mends = self._settings.checked_every > 0 and self._sharding is None
        self._checks = WrongNumbers(
            self._shares,
            learner,
            exchange,
            loop,
            self._saving,
            self._settings,
            more=self._compared_progress,
            seen=lambda: self.seen_of_stream(),
            mends=mends,
        )
        step_sums = StepSums(learner, exchange, self._before_sum)
        self.calls = SharedCalls(self._shares, learner, step_sums, loop, exchange)
        self._exchange, self._loop = exchange, loop
        self._watch = LinkWatch(loop, exchange, is_on=self._environment.sums.watch_links)
        return step_sums

    @property
    def step_number(self) -> int:
        """The number of steps that are done."""
        return self._shares.step

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
        rank = self.rank if self._second is None else self._second
        return hash((self._settings.seed, self.step_number, rank)) & 0x7FFFFFFF

    @property
    def _generation_number(self) -> int:
        return self._loop.number if self._loop else 0

    @property
    def rank(self) -> int:
        """The number of this chip among those that train now."""
        return self._exchange.rank if self._exchange else 0

    @property
    def world_size(self) -> int:
        """How many chips train now."""
        return self._exchange.mesh.n_live if self._exchange else 1

    def __iter__(self) -> Iterator[Indices]:
        """Yield this chip's samples, step by step, until all steps are done on all chips.

        Raises:
            JobFailedError: neither a chip nor a checkpoint has a state to go on from.
            InputError: this is the second loop.
        """
        if self._has_begun:
            raise InputError(
                "a Job needs one loop, which does all steps, but this is its second; for several "
                "epochs give the job all their steps, as in steps=3 * len(loader), and see in "
                "job.step_number where one ends"
            )
        self._has_begun = True
        loop, process = self._loop, os.getpid()
        if loop is not None:
            loop.start()
        try:
            while not (loop and loop.is_over):
                if self.calls is not None:
                    self.calls.settle()
                if loop is not None and loop.is_over:
                    break
                if self.is_finished and self._checks and not self._checks.compare_at_last():
                    continue
                self._hash_state()
                self._save()
                if not self.is_finished:
                    if self._take_better_plans():
                        yield from self._next_samples()
                elif loop is None:
                    break
                else:
                    self._saving.wait()
                    loop.finish()
        except GeneratorExit:
            if os.getpid() != process:  # a child that the loop has forked ends, not the loop
                raise
            if loop is None and self._shares.in_flight is None:
                self._save()
            self._leave()
            raise
        finally:
            if os.getpid() == process:
                self._saving.wait()
        self._close()

    def _take_better_plans(self) -> bool:
        """Look at links and swap plans before a step; return False if the mesh changed."""
        loop, watch = self._loop, self._watch
        if loop is None or watch is None:
            return True
        if watch.take_better_plans(self._links, self.step_number):
            return True
        loop.recover(after=loop.number)
        return False

    def _leave(self) -> None:
        """Leave the job at once, because the loop has ended early: the others must not wait.

        An exception cannot be raised here: Python drops those of a loop that is given up.
        """
        if self._loop is None or self._exchange is None or self._loop.is_over:
            return
        sys.stderr.write(  # on a line of its own, whatever the loop has begun to print
            f"\nmeshmend: chip {self._environment.chip} has left its job after step "
            f"{self.step_number} of {self._settings.steps}: the loop over the job ended early, by "
            "a break or an exception; the chips that stay train on without it. To end the job on "
            "all chips, call job.stop()\n"
        )
        self._loop.is_over = True
        self._ledger.close()
        coordinator_client().close()
        self._exchange.close()

    def _next_samples(self) -> Iterator[Indices]:
        """Yield this chip's samples of the next step; a chip without samples contributes zeros."""
        self._flips.in_state(self.step_number)
        peer = self._self_injection.corrupted(self.step_number)
        if peer is not None and self._exchange is not None:
            self._exchange.corrupt(peer)
        second = self._checks.begin() if self._checks is not None else []
        self.inject(Moment.FORWARD)
        for rank in second:
            yield from self._second_share(rank)
        share = self._shares.of(self.rank, self.chips)
        if share.n_samples > 0:
            yield from self._turn(share)
            return
        self._samples = self._shares.begin(share)
        self._learner.clear(is_last=self.is_stopping)
        self.complete_step()

    def _second_share(self, rank: int) -> Iterator[Indices]:
        """Yield the samples of another chip, or of this one, in a turn that does not count."""
        assert self._checks is not None
        share = self._shares.of(rank, self.chips)
        if share.n_samples > 0:
            self._second = rank
            yield from self._turn(share)
        else:
            self._checks.add_second(share)

    def _turn(self, share: Share) -> Iterator[Indices]:
        """Yield the samples of a share to the loop, which computes and steps on them."""
        if self.calls is not None:
            self.calls.waited_s = 0.0
        self._samples = self._shares.begin(share)
        yield self._samples
        if self._shares.in_flight is not None:
            raise InputError("the loop over a Job needs to call job.step once in each turn")

    def _complete_second(self, share: Share) -> bool:
        """Take the hash of a second share; nothing else of its turn stays."""
        assert self._checks is not None
        self._second = None
        self._learner.sums.refill_changed()
        self._flips.in_payload(Part.GRADIENT, self.step_number)
        self._checks.add_second(share)
        self._learner.undo()
        return False

    def share_to_step_on(self) -> Share:
        """Return the share of the step in flight.

        Raises:
            InputError: there are no samples to step on, or they were stepped on already.
        """
        if self._shares.in_flight is None:
            raise InputError(
                "Job.step needs samples of a new step; call it once for each turn of the loop over "
                "the job"
            )
        return self._shares.in_flight

    def complete_step(self) -> bool:
        """Sum the payloads and update the learner; return whether the step counts.

        If the mesh changed, recover: the share of the same step is then another.
        """
        share, number = self.share_to_step_on(), self._generation_number
        waited_s = self.calls.waited_s if self.calls is not None else 0.0
        self._shares.end(share, waited_s=waited_s)
        if self._second is not None:
            return self._complete_second(share)
        self._finding = None
        self._ledger.write_try(self.step_number + 1, number, share, self._samples)
        self.inject(Moment.REDUCE)
        if self._loop is None:
            self._sum_all()
        elif not self._loop.attempt(self._sum_all):
            self._learner.undo()
            self._loop.recover(after=number)
            return False
        if self._checks is not None and self._finding is not None:
            self._learner.undo()
            self._checks.act_on(self._finding)
            return False
        self._shares.note_speeds(self.step_number + 1, number, self.chips)
        self.inject(Moment.UPDATE)
        self.loss = self._update()
        self._shares.step += 1
        self._shares.position += share.batch
        self._is_stopped |= self._learner.sums.is_last
        if self._checks is not None:
            self._checks.goes_back_to = None
        if self._watch is not None:
            self._links = self._watch.found(self._links)
        if self.calls is not None:
            self.calls.forget(is_own_step=True)
        self._ledger.write_done(self.step_number, number, self._shares.position)
        self._report(share.batch)
        for callback in self.after_step:
            callback()
        return True

    def inject(self, moment: Moment) -> None:
        """Inject the fault that is due at a moment of this step, if there is one."""
        self._self_injection.at(moment, self.step_number)

    def _before_sum(self, number: int) -> None:
        """Do what is to be done when this chip's part of a sum is complete."""
        if number == 0:
            self._flips.in_payload(Part.GRADIENT, self.step_number)
        if self._checks is not None:
            self._checks.note_own(number)

    def start_sum(self, number: int) -> None:
        """Start a sum of the step in flight, while its gradients are still computed."""
        if self._second is not None:
            return
        self._sums.start(number)
        self._self_injection.at(Moment.BUCKET, self.step_number, bucket=number)

    def share_out(self, n_parts: int, compute: Callable[[int], bytes]) -> list[bytes]:
        """Return all parts of a piece of work that the chips share; see `SharedCalls`."""
        if self.calls is None:
            return [compute(number) for number in range(n_parts)]
        return self.calls.share_out(n_parts, compute)

    def _sum_all(self) -> None:
        try:
            self._culprits = self._sums.complete()
            self._flips.in_payload(Part.SUM, self.step_number)
            if self._checks is not None:
                self._finding = self._checks.compare(is_strange=self._culprits is not None)
        except (InputError, ReplicasDifferError, WrongResultError) as error:
            self._learner.undo()
            if self._loop is not None and not isinstance(error, ReplicasDifferError):
                self._loop.is_over = True  # it has left for a reason, which is told
            if isinstance(error, WrongResultError) and self._checks is not None:
                self._checks.set_aside()
            raise
        if self._finding is not None:
            return
        if self._sharding is not None and self._culprits is None:
            self._sharding.gather()

    def _compared_progress(self) -> dict[str, str]:
        """Return what all chips must know alike to have shares of one batch, and one plan."""
        progress = {"progress.links": self._links or "as given"}
        if self._shares.speeds is not None:
            progress["progress.speeds"] = self._shares.speeds.state() or "equal"
        return progress

    def _update(self) -> float:
        """Update the learner, unless the sums are not finite; return the loss.

        Raises:
            NonFiniteError: they are not, and the job was told to raise.
        """
        if self._culprits is None:
            self._non_finite.note_finite()
            return self._learner.update()
        self._learner.undo()
        self._non_finite.report(self.step_number + 1, self.chips, self._culprits)
        return self._learner.skip()

    def _report(self, batch: int) -> None:
        """Report a step that is done."""
        if self._loop is not None:
            self._loop.note_step()
            self._report_step(self._loop.number, batch)

    def _hash_state(self) -> None:
        """Write a hash of the state after each step, if that was asked for.

        As `_save` does, at the top of the next turn: what the loop has changed after the step
        belongs to it.
        """
        if self._environment.settings.check_every_step and self._hashed_step != self.step_number:
            self._hashed_step = self.step_number
            self._write_state_hash()

    def _save(self) -> None:
        """Save a checkpoint of the last step if one is due.

        That is done at the top of the next turn of the loop: what the loop has changed after the
        step, such as a learning rate by what it evaluated, belongs to it.
        """
        if self._saved_step == self.step_number:
            return
        self._saved_step = self.step_number
        generation = self._loop.generation if self._loop else None
        self._saving.save(
            lambda: self._with_progress(self._learner.saved_state()),
            step=self.step_number,
            generation=self._generation_number,
            term=generation.term if generation else 0,
            shard=self.rank,
            n_shards=self.world_size,
            digest=self._digest,
            is_last=self.is_finished,
            right_until=self._checks.right_until if self._checks else None,
        )

    def _report_step(self, generation: int, batch: int) -> None:
        """Report a step to the observers: rank 0 each one, others their first in a generation."""
        is_first, self._reported = self._reported != generation, generation
        if self.rank != 0 and not is_first:
            return
        stepped = WorkerStepped(
            chip=self._environment.chip,
            step=self.step_number,
            generation=generation,
            at=time.monotonic(),
            leads=self.rank == 0,
            first=is_first,
            loss=self.loss,
            samples=batch,
            sums=tuple(self.sum_sizes()) if is_first else (),
            planned=self._exchange.planned_losses() if self._exchange else None,
            saves_to=self._saving.folder if is_first else "",
        )
        coordinator_client().report(stepped)

    def _write_state_hash(self) -> None:
        self._ledger.write_hold(self.step_number, self._generation_number, self._digest())

    def _digest(self) -> str:
        """Return a hash of all of the state: arrays and plain values, whatever their order."""
        return total_of(self._learner.begun_digest().wait())

    def _resume(self, folder: Path) -> None:
        steps = self._settings.steps
        loaded = resumable(
            folder,
            self.state(),
            self._learner.framework,
            steps=steps,
            tells=self._environment.is_first,
        )
        self._load(loaded.state)
        self._is_stopped = False  # who resumes a job wants it to go on
        self._ledger.write_resume(self.step_number, self._shares.position)
        if self.is_finished and self._environment.identity is None:
            _log.warning(
                "finished: %d of %d steps; the checkpoint in %s is that of the last step, so "
                "nothing is left to do; set steps higher to go on",
                self.step_number,
                steps,
                folder,
            )

    def state(self) -> dict[str, Any]:
        """Return the training state at this step: model, optimizer, `also`, and progress."""
        return self._with_progress(self._learner.state())

    def _with_progress(self, parts: dict[str, Any]) -> dict[str, Any]:
        return {
            **parts,
            "progress": {
                "step": self.step_number,
                "position": self._shares.position,
                "seed": self._settings.seed,
                "n_samples": self._settings.n_samples,
                "loss": self.loss,
                "stopped": self._is_stopped,
                "right_until": self._checks.right_until if self._checks else None,
                "speeds": self._shares.speeds.state() if self._shares.speeds else "",
                "saved": self._saved_step,
                "links": self._links,
            },
        }

    def _load(self, state: dict[str, Any]) -> None:
        """Replace this chip's state by that of another chip or of a checkpoint."""
        self._learner.load(state)
        self.is_overwritten = False
        self._shares.step = int(state["progress"]["step"])
        self._shares.position = int(state["progress"]["position"])
        self._saved_step = int(state["progress"].get("saved", self.step_number))
        self.loss = state["progress"]["loss"]
        self._is_stopped = bool(state["progress"].get("stopped"))
        if self._checks is not None:
            self._checks.took_state(state["progress"].get("right_until"))
        if self._shares.speeds is not None:
            self._shares.speeds.load(state["progress"])
        self._links = state["progress"].get("links") or ""
        if self.calls is not None:
            self.calls.forget(is_own_step=False)

    # The methods that `StateTransfer` calls: this class is its `TransferredReplica`.

    def begin_overwriting(self, step: int) -> bool:
        """Whether the state that comes may be written over this chip's own, before all has come.

        It may if this chip has never been up to date, and the job has done steps: then nobody goes
        on from what it has. From now on it says so: it has done steps, and has no state.
        """
        if self._loop is None or self._loop.state_version != FRESH or step == 0:
            return False
        self.is_overwritten, self._shares.step = True, step
        self._learner.free()
        return True

    def take_state(self, state: Any) -> None:
        """Replace all of this chip's state by that of another chip."""
        self._load(state)

    # The methods that `WorkerLoop` calls: this class is its `Replica`.

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done, or the chips have agreed to stop."""
        return self._is_stopped or self.step_number >= self._settings.steps

    def sum_sizes(self) -> SumSizes:
        """Return the sizes of all sums and gathers of one step."""
        shared = self._sharding.sum_sizes() if self._sharding else ()
        return (*self._learner.sums.sizes, *shared)

    def newest_checkpoint(self) -> int | None:
        """Return the step of the newest complete checkpoint not known to be damaged, or None.

        While the state of all chips may be wrong, only of those from before.
        """
        return self._saving.newest(self._checks.goes_back_to if self._checks else None)

    def went_back(self, step: int, generation: int) -> None:
        """Write to the ledger that a generation restores an earlier step; later ones are lost."""
        self._saving.wait()  # or a shard of what is lost could replace one of what follows
        self._ledger.write_restore(step, generation)

    def restore(self, step: int) -> None:
        """Replace this chip's state by the checkpoint of a step.

        Raises:
            CheckpointDamageError: it cannot be read.
        """
        has_lost_state = self._sharding is not None and self._sharding.has_lost_state
        is_fresh = self._loop is not None and self._loop.state_version == FRESH
        is_whole = not has_lost_state and not self.is_overwritten
        if step == self.step_number and is_fresh and is_whole:
            return  # the whole job was restarted, and begins with its initial state
        self._load(self._saving.load(step).state)
        if self._checks is not None:
            self._checks.restored(step)

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
        self._shares.step, self._shares.position = step, step * self._settings.batch
        self._ledger.write_resume(self.step_number, self._shares.position)

    def end_after(self, step: int) -> None:
        """Make this step the last one of the job."""
        self._settings = replace(self._settings, steps=step)

    def _close(self) -> None:
        if self._loop is None or self._loop.state_version != FRESH:
            self._write_state_hash()
        if self._saving.missing and self._environment.identity is None:
            steps = ", ".join(map(str, self._saving.missing))
            _log.warning("checkpoints that could not be written: of steps %s", steps)
        self._ledger.close()
        if self._exchange is not None:
            coordinator_client().close()
            self._exchange.close()


_is_claimed = False


def _refuse_one_of_many() -> None:
    """Raise InputError in a process that is one of several which know nothing of each other.

    torchrun, and `meshmend run` without `--elastic`, start such ones.
    """
    n_processes = os.environ.get("WORLD_SIZE", "")
    if n_processes.isdecimal() and int(n_processes) > 1:
        raise InputError(
            "Job needs processes of meshmend run --elastic, but this is one of "
            f"{n_processes} that were started otherwise, each of which would train alone; start it "
            "with meshmend run --elastic"
        )


def _claim_process() -> None:
    """Note that this process trains a job on a mesh: a second one would share its seat there.

    Raises:
        InputError: it does so already, or has done so.
    """
    global _is_claimed  # one per process is the point
    if _is_claimed:
        raise InputError(
            "a process can train one job, but this script makes a second one; give one Job all "
            "models and optimizers, or run the second script after the first"
        )
    _is_claimed = True


def _release_process() -> None:
    global _is_claimed  # a forked process may train a job of its own
    _is_claimed = False


os.register_at_fork(after_in_child=_release_process)
