"""Writes this chip's part of each checkpoint of a job; a failure does not stop the training."""

from collections.abc import Callable
from pathlib import Path

from meshmend.errors import CheckpointDamageError, InputError
from meshmend.train import checkpoint
from meshmend.train.checkpoint import Loaded, Saving
from meshmend.train.checkpoint_names import newest_complete, why_not_shared
from meshmend.train.shard_format import ShardFormat, State
from meshmend.train.write_failures import WriteFailures

_PART, _WHOLE = "its part of a checkpoint", "a whole checkpoint"


class CheckpointWriter:
    """One chip's side of the checkpoints in a folder."""

    def __init__(self, saving: Saving, shards: ShardFormat, failures: WriteFailures) -> None:
        self._saving = saving
        self._shards = shards
        self._failures = failures
        self._last = (0, -1)  # the step and the generation of this chip's last shard
        self._unreadable: set[int] = set()  # steps whose checkpoints turned out to be damaged

    def is_due(self, step: int) -> bool:
        """Return whether to write a checkpoint after this step."""
        return self._saving.is_due(step)

    def save(
        self, state: Callable[[], State], *, step: int, generation: int, shard: int, n_shards: int
    ) -> Path | None:
        """Write this chip's shard. Return the folder if this is shard 0 and nothing has failed."""
        folder = self._saving.folder
        try:
            checkpoint.save_shard(
                folder, state(), self._shards, step=step, shard=shard, n_shards=n_shards
            )
            if shard == 0:
                self._check_last(folder, generation)
                checkpoint.prune(folder, keep=self._saving.keep)
            self._last = step, generation
        except (InputError, OSError) as error:
            self._failures.report(_PART, str(error))
            return None
        self._failures.clear(_PART)
        return folder if shard == 0 and not self._failures.has(_WHOLE) else None

    def _check_last(self, folder: Path, generation: int) -> None:
        """Report if this chip does not see all shards of the last checkpoint."""
        step, last_generation = self._last
        if generation == 0 or generation != last_generation:
            return
        if why := why_not_shared(folder, step):
            self._failures.report(_WHOLE, why)
        else:
            self._failures.clear(_WHOLE)

    def newest(self) -> int | None:
        """Return the step of the newest complete checkpoint not known to be damaged, or None."""
        return newest_complete(self._saving.folder, without=self._unreadable)

    def load(self, step: int) -> Loaded:
        """Return the state of a step.

        Raises:
            CheckpointDamageError: it cannot be read.
        """
        damage: list[str] = []
        loaded = checkpoint.load_step(
            self._saving.folder,
            step,
            self._shards,
            on_damage=lambda path, why: damage.append(f"{path}: {why}"),
        )
        if loaded is None:
            self._unreadable.add(step)
            raise CheckpointDamageError("; ".join(damage) or "it does not exist any more")
        return loaded
