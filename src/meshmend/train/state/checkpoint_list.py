"""What checkpoints a run has, and whether they can be read; imports a framework only to read."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshmend.errors import CheckpointDamageError
from meshmend.train.state.checkpoint_export import checkpoint_folder, read_checkpoint
from meshmend.train.state.checkpoint_names import (
    complete_sets,
    complete_steps,
    step_folder,
    steps_in,
    what_is_missing,
)

_FRAMEWORKS = {".pt": "torch", ".bin": "jax"}


@dataclass(frozen=True)
class ListedCheckpoint:
    """A checkpoint by the names of its files; `missing` says why it is not complete."""

    step: int
    framework: str
    n_shards: int
    n_bytes: int
    missing: str

    @property
    def is_complete(self) -> bool:
        return not self.missing

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {**asdict(self), "is_complete": self.is_complete}


@dataclass(frozen=True)
class CheckedCheckpoint:
    """A checkpoint that was read; `damage` is empty if it is whole."""

    step: int
    damage: str


def listed(run: Path) -> list[ListedCheckpoint]:
    """Return the checkpoints of a run, the oldest first.

    Raises:
        InputError: it has none.
    """
    folder = checkpoint_folder(run)
    return [_listed(folder, step) for step in steps_in(folder)]


def _listed(folder: Path, step: int) -> ListedCheckpoint:
    files = next(complete_sets(folder, step), None)
    missing = "" if files else what_is_missing(folder, step)
    if files is None:
        files = sorted(step_folder(folder, step).glob("shard-*"))
    framework = _FRAMEWORKS.get(files[0].suffix, "?") if files else "?"
    n_bytes = sum(map(_size, files))
    return ListedCheckpoint(step, framework, len(files), n_bytes, missing)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # the run goes on, and deletes old checkpoints
        return 0


def checked(run: Path, step: int | None = None) -> list[CheckedCheckpoint]:
    """Read the complete checkpoints of a run, or that of one step, and return what was found.

    Raises:
        InputError: it has none, or the step is not complete.
    """
    steps = complete_steps(checkpoint_folder(run)) if step is None else [step]
    return [_checked(run, each) for each in steps]


def _checked(run: Path, step: int) -> CheckedCheckpoint:
    try:
        read_checkpoint(run, step)
    except CheckpointDamageError as error:
        return CheckedCheckpoint(step, str(error))
    return CheckedCheckpoint(step, "")
