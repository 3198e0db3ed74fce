"""What a chip writes down of its job: which steps and samples are done, their loss, checkpoints.

Knows no process group, and nothing of what the steps are. A script that keeps its own loop picks
its samples and saves by itself: then there are the steps in the ledger, and nothing else.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from meshmend.errors import ResumeError
from meshmend.membership.generation import Generation
from meshmend.topology.tiles import box_colour
from meshmend.train.core.worker_environment import WorkerEnvironment, ledger_of
from meshmend.train.data.ledger import Ledger
from meshmend.train.data.samples import Order
from meshmend.train.state import checkpoint
from meshmend.train.state.checkpoint import Saving
from meshmend.train.state.checkpoint_writer import CheckpointWriter
from meshmend.train.state.resume import (
    Resume,
    check_progress,
    folder_owner,
    folder_to_resume,
    newest_readable,
    tell_of_damage,
    tell_of_new_beginning,
)
from meshmend.train.state.torch_state import TORCH
from meshmend.train.torch.group_state import GroupState
from meshmend.train.torch.tile_checkpoints import whole_state

_log = logging.getLogger(__name__)

_SEEN_S: Final = 60.0  # from when one host sees a file until all do; NFS remembers folders so long
_LOOK_S: Final = 0.2


@dataclass(frozen=True)
class SampleTerms:
    """What all chips of a job that hands out samples agree on."""

    order: Order
    batch: int
    steps: int
    samples: Callable[[], str]  # returns a digest of a few samples

    @property
    def progress(self) -> dict[str, int]:
        """What a checkpoint must have in common with the job."""
        return {"seed": self.order.seed, "n_samples": self.order.n_samples}


class JobRecord:
    """One chip's record of a job; with `terms`, of one of tiles that hands out samples.

    `saving` writes checkpoints; with `resume` the job begins with one.
    """

    def __init__(
        self,
        environment: WorkerEnvironment,
        terms: SampleTerms | None = None,
        saving: Saving | None = None,
        resume: Resume = None,
    ) -> None:
        self._environment, self.terms = environment, terms
        self.ledger = Ledger(None, environment.chip)
        self._resume = folder_to_resume(resume, saving)
        # Of the checkpoint that the job begins with, also if this chip does not see it yet.
        self._folder = saving.folder if self._resume is None and saving else self._resume
        if self._resume is None and environment.is_first:
            tell_of_new_beginning(resume, saving)
        owner = folder_owner(saving, self._resume, environment.run_id)
        self.writer = CheckpointWriter(saving, TORCH, environment, owner)
        self._begin = (0, 0)  # the first step, and the position of that in the row of samples
        self.saved_step = 0  # the last one of which a checkpoint was begun
        self.own_loss = 0.0  # this chip's part of the loss of the step in flight
        self.loss = 0.0  # of the last step, that of all chips

    def resumed(self) -> dict[str, Any] | None:
        """Return the whole state of the checkpoint that the job begins with, if it does.

        Raises:
            ResumeError: it cannot be read, or is of another job.
        """
        if self._resume is None or self.terms is None:
            return None
        steps, tells = self.terms.steps, self._environment.is_first
        state = newest_readable(self._resume, TORCH, steps=steps, tells=tells).state
        check_progress(state["progress"], self.terms.progress)
        self._begin_with(state["progress"])
        return state

    def _begin_with(self, progress: dict[str, Any]) -> None:
        self.saved_step, self.loss = int(progress["step"]), progress["loss"] or 0.0
        self._begin = self.saved_step, int(progress["position"])

    def load_first(self, step: int) -> dict[str, Any]:
        """Return the whole state of the checkpoint that others begin with, and begin with it too.

        This chip has begun with another one, or with none. Its host may see a file later than
        others, so it looks again for a while.

        Raises:
            ResumeError: it does not see that checkpoint.
        """
        folder, has_told = self._folder, False
        assert folder is not None, "others begin with a checkpoint"
        deadline = time.monotonic() + _SEEN_S
        loaded, damage = checkpoint.load_step(folder, step, TORCH)
        while loaded is None and time.monotonic() < deadline:
            if not has_told:
                has_told = True
                tell_of_damage(damage)
                words = "chip %s looks for %.0f s for the checkpoint of step %d, which others see"
                _log.warning(words, self._environment.chip, _SEEN_S, step)
            time.sleep(_LOOK_S)
            loaded, damage = checkpoint.load_step(folder, step, TORCH)
        if loaded is None:
            found = "; ".join(f"{path.name}: {why}" for path, why in damage)
            needs = "resume needs a checkpoint in"
            raise ResumeError(f"{needs} {folder} that can be read, but {found}")
        self._begin_with(loaded.state["progress"])
        return loaded.state

    def open(self, step: int) -> None:
        """Begin the ledger of a job that has done so many steps."""
        self.ledger = ledger_of(self._environment, self.terms.order if self.terms else None)
        if step:
            self.ledger.write_resume(*self._begin)

    def position(self, step: int) -> int:
        """Return how many samples are used when a step is done."""
        begin, used = self._begin
        return 0 if self.terms is None else used + (step - begin) * self.terms.batch

    def save(
        self,
        held: GroupState,
        step: int,
        tile: tuple[int, ...],
        generation: Generation,
        *,
        is_shared: bool,
    ) -> None:
        """Begin to write this chip's part of a checkpoint, if one is due after this step.

        That is done at the top of the next turn of the loop: what the loop has changed after the
        step, such as a learning rate by what it evaluated, belongs to it.

        Each colour's part is written once. Twins take turns: the first colour is written in the
        first tile, the next in the next. If twins share a part of the state, all chips write what
        they own of that, and the writers their parts too.
        """
        terms = self.terms
        if terms is None or self.saved_step == step:
            return
        self.saved_step, chip = step, self._environment.chip
        colour = box_colour(tile, chip)
        twins = [each for each in generation.chips if box_colour(tile, each) == colour]
        is_writer = twins[colour % len(twins)] == chip
        if not is_writer and not is_shared:
            return
        shard, n_shards = colour, len(generation.chips) // len(twins)
        if is_shared:
            shard, n_shards = generation.chips.index(chip), len(generation.chips)
        progress = {"step": step, "position": self.position(step), "loss": self.loss}
        progress |= {"stopped": False, **terms.progress}
        self.writer.save(
            lambda: {**whole_state(held, has_parts=is_writer), "progress": progress},
            step=step,
            generation=generation.number,
            term=generation.term,
            shard=shard,
            n_shards=n_shards,
            digest=lambda: f"step {step}",  # which names one state of this history
            is_last=step >= terms.steps,
        )

    def load(self, step: int) -> dict[str, Any]:
        """Return the whole state of a step: of this job's checkpoints, or the one it began with.

        Raises:
            CheckpointDamageError: it cannot be read.
        """
        return self.writer.load(step, self._resume if step == self._begin[0] else None).state
