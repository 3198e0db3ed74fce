"""The checkpoints that a job writes after its steps, if it writes any, and tells observers of."""

from collections.abc import Callable

from meshmend.membership.events import WorkerSaved
from meshmend.train.core.worker_environment import WorkerEnvironment, coordinator_client
from meshmend.train.state.checkpoint import FolderOwner, Loaded, Saving
from meshmend.train.state.checkpoint_writer import CheckpointWriter
from meshmend.train.state.shard_format import Origin, ShardFormat, State
from meshmend.train.state.write_failures import WriteFailures


class StepSaving:
    """One chip's part of the checkpoints of a job; without `saving` it writes none."""

    def __init__(
        self,
        saving: Saving | None,
        shards: ShardFormat,
        failures: WriteFailures,
        environment: WorkerEnvironment,
        owner: FolderOwner | None = None,
    ) -> None:
        self._saving, self._environment = saving, environment
        self._writer = (
            CheckpointWriter(saving, shards, failures, self._announce, owner) if saving else None
        )

    def save(
        self,
        state: Callable[[], State],
        *,
        step: int,
        generation: int,
        shard: int,
        n_shards: int,
        origin: Callable[[], Origin],
    ) -> None:
        """Begin to write this chip's shard of a checkpoint, if one is due after this step."""
        if self._writer is None:
            return
        self._writer.note_step(step, generation)
        if self._writer.is_due(step):
            self._writer.begin(
                state,
                step=step,
                generation=generation,
                shard=shard,
                n_shards=n_shards,
                origin=origin,
            )

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is on disk."""
        if self._writer is not None:
            self._writer.wait()

    @property
    def missing(self) -> tuple[int, ...]:
        """The steps whose checkpoints lack this chip's part, because it could not be written."""
        return tuple(self._writer.missing) if self._writer else ()

    def newest(self) -> int | None:
        """Return the step of the newest complete checkpoint not known to be damaged, or None."""
        return self._writer.newest() if self._writer else None

    def load(self, step: int) -> Loaded:
        """Return the state of a step.

        Raises:
            CheckpointDamageError: it cannot be read.
        """
        assert self._writer is not None, "no checkpoint was announced"
        return self._writer.load(step)

    def _announce(self, step: int, at: float) -> None:
        """Report a checkpoint that was written at a time."""
        if self._environment.identity is not None and self._saving is not None:
            saved = WorkerSaved(self._environment.chip, step, at, str(self._saving.folder))
            coordinator_client().report(saved)
