"""Writes this chip's part of each checkpoint in the background; no failure stops training.

Between two steps the shard is copied; a thread writes the copy while training goes on. Only one is
written at a time: the next one waits for it, so that all chips save the same steps.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from meshmend.errors import CheckpointDamageError, InputError
from meshmend.files import why_unwritten
from meshmend.membership.events import WorkerSaved
from meshmend.train.core.worker_environment import (
    WorkerEnvironment,
    WriteFailures,
    coordinator_client,
)
from meshmend.train.state import checkpoint
from meshmend.train.state.checkpoint import (
    FolderOwner,
    Loaded,
    Saving,
    newest_complete,
    why_not_shared,
)
from meshmend.train.state.shards import Origin, Shard, State, cut_shard
from meshmend.train.state.state_tree import Framework

_PART, _WHOLE = "its part of a checkpoint", "a whole checkpoint"
_NAMES = "the new names of checkpoints that may hold wrong numbers"

OnSaved = Callable[[int, float], None]


@dataclass(frozen=True)
class _Save:
    """A checkpoint that this chip has begun to write: its step, generation and shard."""

    step: int
    generation: int
    shard: int


class _Writing:
    """A shard that a thread writes; `error` is why that failed, `at` when it was done."""

    def __init__(self, save: _Save, write: Callable[[], None]) -> None:
        self.save, self._write = save, write
        self.error: Exception | None = None
        self.at = 0.0
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when it is written, or has failed."""
        self._thread.join()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:
            self.error = error
        self.at = time.monotonic()


class CheckpointWriter:
    """One chip's side of the checkpoints of a job; without `saving` it writes none.

    Call its methods from one thread only. Calls `on_saved(step, at)` for each checkpoint whose
    shard 0 this chip has written, unless it found that not all shards are in one folder; by default
    it tells the coordinator. Failures are reported likewise, at the next call.
    """

    def __init__(
        self,
        saving: Saving | None,
        framework: Framework,
        environment: WorkerEnvironment,
        owner: FolderOwner | None = None,
        *,
        on_saved: OnSaved | None = None,
    ) -> None:
        self._saving = saving
        self._framework = framework
        self._failures = WriteFailures(environment)
        self._environment = environment
        self._owner = owner
        self._on_saved = on_saved or self._announce
        self.missing: list[int] = []  # steps whose shard this chip could not write
        self._right_until: int | None = None  # later checkpoints may hold wrong numbers
        self._writing: _Writing | None = None
        self._last: _Save | None = None  # begun last; None if that failed
        self._before: _Save | None = None  # the one before it, not checked yet
        self._unreadable: set[int] = set()  # steps whose checkpoints turned out to be damaged

    @property
    def folder(self) -> str:
        """The folder of the checkpoints, wherever a process looks from; empty if there is none."""
        return str(self._saving.folder.absolute()) if self._saving else ""

    def save(
        self,
        state: Callable[[], State],
        *,
        step: int,
        generation: int,
        shard: int,
        n_shards: int,
        term: int = 0,
        digest: Callable[[], str] = lambda: "",
        is_last: bool = False,
        right_until: int | None = None,
    ) -> None:
        """Begin to write this chip's shard of a checkpoint, if one is due after this step.

        One is always due after the last step of a job: who resumes it has nothing to do again. The
        shard is copied now, and written once the one before is. `digest()` names the state that the
        shards of all chips make up; without it, it is the hash of what this chip has.
        """
        if self._saving is None:
            return
        self._right_until = right_until
        self.note_step(step, generation)
        if not (is_last or self._saving.is_due(step)):
            return
        self.wait()
        run, chip = self._owner.run if self._owner else "", self._environment.chip
        place = {"step": step, "shard": shard, "n_shards": n_shards}
        try:
            origin = Origin(run, term, generation, chip, digest())
            cut = cut_shard(state(), self._framework, **place, origin=origin)
        except InputError as error:
            self._report(step, str(error))
            return
        self._before, self._last = self._last, _Save(step, generation, shard)
        folder, keep = self._saving.folder, self._saving.keep
        self._writing = _Writing(self._last, lambda: self._write(folder, keep, cut))

    def _write(self, folder: Path, keep: int, shard: Shard) -> None:
        """Write a shard; the chip with shard 0 deletes old checkpoints. Runs in a thread."""
        if self._owner is not None:
            self._owner.claim(folder)
        checkpoint.write_shard(folder, shard)
        if shard.number == 0:
            with suppress(OSError):  # what could not be deleted now is deleted next time
                right_until = self._right_until
                checkpoint.prune(folder, keep, newest=shard.step, right_until=right_until)

    def note_step(self, step: int, generation: int) -> None:
        """Report what was written meanwhile; `save` calls it after each step."""
        self._check_before(step, generation)
        if self._writing is not None and self._writing.is_done:
            self.wait()

    def wait(self) -> None:
        """Return when nothing is being written; report what was."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        writing.wait()
        if writing.error is not None:
            self._last = None  # nobody needs to look for it
        if isinstance(writing.error, InputError):
            self._report(writing.save.step, str(writing.error))
        elif isinstance(writing.error, OSError):
            self._report(writing.save.step, why_unwritten(writing.error))
        elif writing.error is not None:
            raise writing.error  # a mistake of ours, not of the disk
        else:
            self._failures.clear(_PART)
            self._unreadable.discard(writing.save.step)
            if writing.save.shard == 0 and not self._failures.has(_WHOLE):
                self._on_saved(writing.save.step, writing.at)

    def _report(self, step: int, why: str) -> None:
        """Report that this chip's part of a step could not be written; training goes on."""
        self.missing.append(step)
        self._failures.report(_PART, why, step=step)

    def _check_before(self, step: int, generation: int) -> None:
        """Report if this chip does not see all shards of the checkpoint before the last one.

        A chip begins a checkpoint when it has written the one before. So when a step is done after
        the last one was begun, all chips of the generation have written the one before it.
        """
        before, last = self._before, self._last
        if self._saving is None or before is None or last is None or step <= last.step:
            return
        self._before = None
        if generation == 0 or last.shard != 0 or before.generation != generation:
            return
        if why := why_not_shared(self._saving.folder, before.step):
            self._failures.report(_WHOLE, why)
        else:
            self._failures.clear(_WHOLE)

    def newest(self, at_most: int | None = None) -> int | None:
        """Return the step of the newest complete checkpoint not known to be damaged, or None."""
        if self._saving is None:
            return None
        return newest_complete(self._saving.folder, without=self._unreadable, at_most=at_most)

    def set_aside(self, after: int) -> None:
        """Let no job read the checkpoints after a step any more.

        If the disk does not let it, this job does not read them, and says which ones they are.
        """
        if self._saving is None:
            return
        self.wait()
        left = checkpoint.set_aside(self._saving.folder, after)
        if left:
            self._unreadable |= left.keys()
            steps = ", ".join(map(str, sorted(left)))
            why = f"{next(iter(left.values()))}; delete those of steps {steps} before you resume"
            self._failures.report(_NAMES, why)

    def load(self, step: int, folder: Path | None = None) -> Loaded:
        """Return the state of a step: of this job's folder, or of another one.

        Raises:
            CheckpointDamageError: it cannot be read.
        """
        if folder is None:
            assert self._saving is not None, "no checkpoint was announced"
            folder = self._saving.folder
        try:
            return checkpoint.read_step(folder, step, self._framework)
        except CheckpointDamageError:
            self._unreadable.add(step)
            raise

    def _announce(self, step: int, at: float) -> None:
        """Report a checkpoint that was written at a time."""
        if self._environment.identity is not None and self._saving is not None:
            saved = WorkerSaved(self._environment.chip, step, at, str(self._saving.folder))
            coordinator_client().report(saved)
