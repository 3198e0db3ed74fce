"""Checkpoints of a job with tiles: each colour's part is written once.

The files are those of every job (`train/state/checkpoint.py`): put together they are the state of
the whole model. So a job with other tiles, larger or smaller ones, or with none, goes on from them,
and they are exported as all others. A chip that reads one reads all of it, and keeps its part.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from meshmend.errors import ResumeError
from meshmend.membership.generation import Generation
from meshmend.topology.tiles import box_colour
from meshmend.train.core.worker_environment import WorkerEnvironment
from meshmend.train.state import checkpoint
from meshmend.train.state.checkpoint import Damage, Loaded, Saving
from meshmend.train.state.checkpoint_writer import CheckpointWriter, WriteFailures
from meshmend.train.state.resume import Resume, folder_owner, folder_to_resume
from meshmend.train.state.shards import Origin, State
from meshmend.train.state.torch_state import TORCH


class TileCheckpoints:
    """One chip's part in the checkpoints of a job with tiles."""

    def __init__(
        self, saving: Saving | None, resume: Resume, environment: WorkerEnvironment
    ) -> None:
        self.resume = folder_to_resume(resume, saving)
        self._began_at: int | None = None  # the step of the checkpoint that the job began with
        self._environment = environment
        self._owner = folder_owner(saving, self.resume, environment.run_id)
        self._saving = CheckpointWriter(
            saving, TORCH, WriteFailures(environment), environment, self._owner
        )

    @property
    def folder(self) -> str:
        """The folder of the checkpoints; empty if there is none."""
        return self._saving.folder

    def save(
        self,
        state: Callable[[bool], State],
        *,
        step: int,
        tile: tuple[int, ...],
        generation: Generation,
        mark: str,
        is_last: bool,
        is_shared: bool = False,
    ) -> None:
        """Begin to write this chip's part, if a checkpoint is due and no twin is to write it.

        Twins take turns: the first colour is written in the first tile, the next in the next.
        `state(is_writer)` returns the state. If it `is_shared`, all chips write what they own of
        it, and the writers their parts too.
        `mark` is a text that all chips have in common after this step, and after no other.
        """
        chip = self._environment.chip
        colour = box_colour(tile, chip)
        twins = [each for each in generation.chips if box_colour(tile, each) == colour]
        is_writer = twins[colour % len(twins)] == chip
        if not is_writer and not is_shared:
            return
        shard, n_shards = colour, len(generation.chips) // len(twins)
        if is_shared:
            shard, n_shards = generation.chips.index(chip), len(generation.chips)
        self._saving.save(
            lambda: state(is_writer),
            step=step,
            generation=generation.number,
            shard=shard,
            n_shards=n_shards,
            origin=lambda: Origin(
                run=self._owner.run if self._owner else "",
                term=generation.term,
                generation=generation.number,
                chip=chip,
                digest=mark,
            ),
            is_last=is_last,
        )

    def finish(self) -> None:
        """Wait until what is being written is on disk."""
        self._saving.wait()

    def newest(self) -> int | None:
        """Return the step of the newest complete checkpoint not known to be damaged, or None."""
        return self._saving.newest()

    def load(self, step: int) -> dict[str, Any]:
        """Return the whole state of a step: of this job's checkpoints, or the one it began with.

        Raises:
            CheckpointDamageError, ResumeError: it cannot be read.
        """
        if self.resume is not None and step == self._began_at:
            return _whole(self.resume, *checkpoint.load_step(self.resume, step, TORCH)).state
        return self._saving.load(step).state

    def resumed(self, folder: Path) -> dict[str, Any]:
        """Return the whole state that the job begins with.

        Raises:
            ResumeError: no checkpoint can be read.
        """
        loaded = _whole(folder, *checkpoint.load(folder, TORCH))
        self._began_at = loaded.step
        return loaded.state


def _whole(folder: Path, loaded: Loaded | None, damage: Iterable[Damage]) -> Loaded:
    if loaded is None:
        found = "; ".join(f"{path.name}: {why}" for path, why in damage) or "it has none"
        raise ResumeError(f"resume needs a checkpoint in {folder} that can be read, but {found}")
    return loaded
