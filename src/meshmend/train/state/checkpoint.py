"""Checkpoints: one folder per step, one file per chip; a file is complete or absent.

    FOLDER/run.json                                             whose folder this is
    FOLDER/step-00000100/shard-003-of-012.1-5.safetensors       of term 1, generation 5

Every live chip calls `write_shard` for the same step and writes its shard. If a chip dies while it
saves, the step stays incomplete. Another generation may then save the same step again, in the same
folder. A step is complete when one generation has saved all its shards. Its shards are put together
only if they are of one run, and if all chips had the same state, by its digest.

Each reader reads the whole state, so a job can resume on any number of chips. `shards.py` knows
what is in a file; this module knows files and folders only.

A scheduler that will soon end the job gives notice by a signal to all workers, such as the SIGTERM
that Slurm sends at the beginning of a grace time. From then on every chip saves its shard after
each step, until a checkpoint of a step since the notice is complete. So chips that get the notice
in different steps need not agree on one. A notice that not all chips get is forgotten after some
steps.
"""

import json
import re
import shutil
import signal
from bisect import bisect_right
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple
from uuid import uuid4

import numpy as np

from meshmend.errors import CheckpointDamageError, InputError, check_count
from meshmend.files import DRAFT, sync_folder, why_unwritten, write_whole
from meshmend.train.state.shards import (
    OLD_SUFFIXES,
    SUFFIX,
    Shard,
    State,
    cut_shard,
    merged_state,
    read_shard,
    seal,
)
from meshmend.train.state.state_tree import AS_BYTES, Framework

_STEP = re.compile(r"step-(\d{8,15})")  # a job has at most 2^53 steps
_SHARD = re.compile(r"shard-(\d{3,})-of-(\d{3,})(?:\.(\d+)-(\d+))?(\.safetensors|\.pt|\.bin)")
_GONE, _OWNER = ".gone-", "run.json"
_DOUBTFUL: Final = "doubtful-"
_MOST_STEPS: Final = 20  # until a notice to save is forgotten
STALE_S = 600.0  # a draft not written to for this long: its writer is dead


@dataclass(frozen=True)
class Saving:
    """When to write checkpoints, where, and how many to keep."""

    folder: Path
    every: int
    keep: int = 3

    def __post_init__(self) -> None:
        check_count("Saving", "every", self.every, least=1)
        check_count("Saving", "keep", self.keep, least=1)
        # A loop may go to another folder.
        object.__setattr__(self, "folder", Path(self.folder).absolute())

    def is_due(self, step: int) -> bool:
        """Whether to save the step that was just done: also if the job will soon be ended."""
        return step % self.every == 0 or SAVE_NOTICE.is_due(self.folder, step)


class SaveNotice:
    """Whether this process was told to save, and since which step it does."""

    def __init__(self) -> None:
        self.is_given = False
        self._since: int | None = None

    def listen(self, number: int = signal.SIGTERM) -> None:
        """Take a signal as the notice, instead of dying of it; forget those of a parent process."""
        self.is_given, self._since = False, None
        signal.signal(number, self._give)

    def is_due(self, folder: Path, step: int) -> bool:
        """Whether the step that was just done must be saved, in a folder of checkpoints."""
        if not self.is_given:
            return False
        if self._since is None:
            self._since = step
        newest = newest_complete(folder)
        is_saved = newest is not None and newest >= self._since
        if is_saved or step >= self._since + _MOST_STEPS:
            self.is_given, self._since = False, None
        return self.is_given

    def _give(self, number: int, frame: FrameType | None) -> None:
        self.is_given = True


SAVE_NOTICE = SaveNotice()  # of this process
# The notice of a launcher to its own workers, which SIGTERM ends: who tries `kill` means it.
LAUNCHER_NOTICE: Final = signal.SIGRTMIN


# One chip's part of a step, and the state that all parts make up.


class Loaded(NamedTuple):
    """A state that was read from a checkpoint, its step, and the framework that it is of."""

    state: dict[str, Any]
    step: int
    framework: str


class Damage(NamedTuple):
    """A file or folder of a checkpoint that cannot be used, and why."""

    path: Path
    why: str


def save_shard(
    folder: Path, state: State, framework: Framework, *, step: int, shard: int, n_shards: int
) -> Path:
    """Write this chip's shard of the state to disk and return its file.

    Raises:
        InputError: the state holds a value that cannot be stored, or the file cannot be written.
    """
    cut = cut_shard(state, framework, step=step, shard=shard, n_shards=n_shards)
    return write_shard(folder, cut)


def write_shard(folder: Path, shard: Shard) -> Path:
    """Write a shard to disk and return its file; replaces an earlier file of that name at once.

    A shard is a copy of the state, so a thread can write it while training goes on.

    Raises:
        InputError: the file cannot be written.
    """
    origin = shard.origin
    name = shard_name(shard.number, shard.n_shards, term=origin.term, generation=origin.generation)
    file = step_folder(folder, shard.step) / name
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, lambda stream: stream.write(seal(shard).data))
        sync_folder(folder)
    except OSError as error:
        with suppress(OSError):  # others have written to it, or the disk is read-only
            file.parent.rmdir()
        raise InputError(f"cannot write the checkpoint {file}: {why_unwritten(error)}") from None
    return file


def load(folder: Path, framework: Framework) -> tuple[Loaded | None, list[Damage]]:
    """Return the newest state that is complete and undamaged, or None if there is none.

    Also returns what of it, and of each newer checkpoint, cannot be used.
    """
    damage: list[Damage] = []
    for step in reversed(steps_in(folder)):
        loaded, found = load_step(folder, step, framework)
        damage += found
        if loaded is not None:
            return loaded, damage
    return None, damage


def load_step(folder: Path, step: int, framework: Framework) -> tuple[Loaded | None, list[Damage]]:
    """Return the state of one step, or None if it is absent, incomplete or damaged; and why."""
    damage: list[Damage] = []
    for files in complete_sets(folder, step):
        found = _read(files, step, framework)
        if isinstance(found, Loaded):
            return found, damage
        damage.append(found)
    return None, damage or [Damage(step_folder(folder, step), what_is_missing(folder, step))]


def read_step(folder: Path, step: int, framework: Framework) -> Loaded:
    """Return the state of one step.

    Raises:
        CheckpointDamageError: it is absent, incomplete or damaged.
    """
    loaded, damage = load_step(folder, step, framework)
    if loaded is None:
        raise CheckpointDamageError("; ".join(f"{path}: {why}" for path, why in damage))
    return loaded


def prune(
    folder: Path, keep: int = 3, *, newest: int | None = None, right_until: int | None = None
) -> None:
    """Delete all checkpoints older than the newest `keep` complete ones, and abandoned drafts.

    Several chips may call it at once. A folder is renamed before its files are deleted, so that
    no reader finds half a checkpoint. Steps after `newest`, which was saved last, are not of this
    history: they do not count as kept, so that they cannot crowd out what is saved now. The newest
    of at most step `right_until` is kept too, since later ones may hold wrong numbers; so is the
    one after it, which takes its place when more is known to be right.

    Raises:
        InputError: `keep` is less than one.
    """
    check_count("prune", "keep", keep, least=1)
    complete = [each for each in complete_steps(folder) if newest is None or each <= newest]
    kept = complete[-keep:]
    right: list[int] = []
    if right_until is not None:
        at = bisect_right(complete, right_until)
        right = complete[max(0, at - 1) : at + 1]
    for step in steps_in(folder):
        if kept and step < kept[0] and step not in right:
            old = step_folder(folder, step)
            with suppress(FileNotFoundError):  # another chip has renamed it
                old.rename(old.with_name(f"{_GONE}{uuid4().hex}"))
    for gone in folder.glob(f"{_GONE}*"):
        shutil.rmtree(gone, ignore_errors=True)  # another chip may delete it too
    # By the clock that stamps the files: the clock of this host may be hours away from that of a
    # file server, and then the drafts of other chips would look abandoned.
    now = max((_changed_at(path) for path in folder.glob("step-*")), default=0.0)
    for draft in folder.glob(f"step-*/.*{DRAFT}"):
        if 0.0 < _changed_at(draft) < now - STALE_S:
            draft.unlink(missing_ok=True)


def set_aside(folder: Path, after: int) -> dict[int, str]:
    """Rename all checkpoints after a step, which may hold wrong numbers; no job reads them again.

    Returns the steps of those that keep their names, and why. Several chips may call it at once.
    """
    left: dict[int, str] = {}
    for step in steps_in(folder):
        if step > after:
            old = step_folder(folder, step)
            try:
                old.rename(old.with_name(f"{_DOUBTFUL}{old.name}-{uuid4().hex[:8]}"))
            except FileNotFoundError:
                pass  # another chip has renamed it
            except OSError as error:
                left[step] = why_unwritten(error)
    return left


def _read(files: list[Path], step: int, framework: Framework) -> Loaded | Damage:
    """Return the state in these files, or which of them cannot be used."""
    whole = files[0].parent
    if files[0].suffix in OLD_SUFFIXES:
        suffix = files[0].suffix
        return Damage(
            whole,
            f"a meshmend before 0.2 wrote it, in {suffix} files, which this one does not read",
        )
    shards: list[Shard] = []
    for number, file in enumerate(files):
        if file.exists() and not file.is_file():
            return Damage(file, "it is no file")  # who reads a pipe waits for ever
        try:
            shard = read_shard(np.fromfile(file, dtype=np.uint8))
        except (CheckpointDamageError, OSError) as error:
            return Damage(file, str(error))
        found, wanted = (shard.step, shard.number, shard.n_shards), (step, number, len(files))
        if found != wanted:
            held = f"step {found[0]}, shard {found[1]} of {found[2]}"
            return Damage(file, f"its name is wrong: it holds {held}")
        if framework is not AS_BYTES and shard.framework != framework.name:
            return Damage(
                whole,
                f"another framework wrote it: it has a state of {shard.framework}, but this job "
                f"is of {framework.name}",
            )
        shards.append(shard)
    if why := _why_apart(shards):
        return Damage(whole, why)
    try:
        return Loaded(merged_state(shards, framework), step, shards[0].framework)
    except CheckpointDamageError as error:
        return Damage(whole, str(error))


def _why_apart(shards: Sequence[Shard]) -> str:
    """Return why shards of one step do not belong together, or an empty text."""
    origins = [shard.origin for shard in shards]
    for name in ("run", "term", "generation"):
        values = sorted({str(getattr(origin, name)) for origin in origins})
        if len(values) > 1:
            return f"its shards are of two histories: of {name} {values[0]} and of {values[1]}"
    counts = Counter(origin.digest for origin in origins)
    (usual, n_usual), *others = counts.most_common()
    if not others:
        return ""
    if 2 * n_usual <= len(shards):  # nobody knows who is right
        chips = ", ".join(map(_writer, shards))
        return f"its shards are of replicas that differ: chips {chips} had different states"
    odd = ", ".join(_writer(shard) for shard in shards if shard.origin.digest != usual)
    return f"its shards are of replicas that differ: chip {odd} had another state than the others"


def _writer(shard: Shard) -> str:
    return str(shard.origin.chip) if shard.origin.chip else f"of shard {shard.number}"


def _changed_at(path: Path) -> float:
    """Return when a file or folder was last written to, in seconds; 0 if it does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:  # another chip has renamed or deleted it
        return 0.0


# Whose folder it is.


@dataclass(frozen=True)
class FolderOwner:
    """The run that a folder of checkpoints belongs to, and the owner that it was found with.

    A run goes on with the folder of another only if it resumed from it.
    """

    run: str
    found: str | None = None

    def claim(self, folder: Path) -> None:
        """Write down whose folder this is, unless that is known.

        Raises:
            InputError: another run has claimed it meanwhile.
            OSError: it cannot be written.
        """
        owner = owner_of(folder)
        if owner == self.run:
            return
        if owner not in (None, self.found):
            raise InputError(f"the folder {folder} is used by another run now")
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / _OWNER, json.dumps({"run": self.run}))


def owner_of(folder: Path) -> str | None:
    """Return the run whose checkpoints a folder holds, or None if it does not say."""
    try:
        return str(json.loads((folder / _OWNER).read_text(encoding="utf-8"))["run"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


# Which checkpoints a folder has, by the names of its files alone.


class _Set(NamedTuple):
    """What the names of the shards of one set have in common."""

    term: int
    generation: int
    n_shards: int
    suffix: str


def complete_steps(folder: Path) -> list[int]:
    """Return the steps that are complete, oldest first; looks at file names only."""
    return [step for step in steps_in(folder) if any(complete_sets(folder, step))]


def newest_complete(
    folder: Path, *, without: Container[int] = (), at_most: int | None = None
) -> int | None:
    """Return the newest complete step that is not in `without`, or None; looks at names only."""
    for step in reversed(steps_in(folder)):
        if at_most is not None and step > at_most:
            continue
        if step not in without and any(complete_sets(folder, step)):
            return step
    return None


def why_none_complete(folder: Path) -> str:
    """Return why no step of a folder is complete; empty if the folder has none, or is not there."""
    try:
        next(folder.iterdir(), None)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"it cannot be read: {why_unwritten(error)}"
    steps = steps_in(folder)
    return f"of step {steps[-1]}, {what_is_missing(folder, steps[-1])}" if steps else ""


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of a step's shards."""
    return folder / f"step-{step:08d}"


def shard_name(
    shard: int, n_shards: int, *, term: int = 0, generation: int = 0, suffix: str = SUFFIX
) -> str:
    """Return the name of a shard's file.

    Two generations, or the same generation of two coordinators, never write the same file.
    """
    history = f".{term}-{generation}" if term or generation else ""
    return f"shard-{shard:03d}-of-{n_shards:03d}{history}{suffix}"


def steps_in(folder: Path) -> list[int]:
    """Return the steps that have a folder, oldest first; none if the disk cannot be read."""
    names = (_STEP.fullmatch(path.name) for path in _paths(folder, "step-*"))
    return sorted(int(name[1]) for name in names if name)


def _shard_files(folder: Path, step: int) -> dict[_Set, dict[int, Path]]:
    """Return the files of a step, by the set that they belong to, and then by shard."""
    sets: dict[_Set, dict[int, Path]] = {}
    for path in _paths(step_folder(folder, step), "shard-*"):
        name = _SHARD.fullmatch(path.name)
        if name and int(name[1]) < int(name[2]):
            own = _Set(int(name[3] or 0), int(name[4] or 0), int(name[2]), name[5])
            sets.setdefault(own, {})[int(name[1])] = path
    return sets


def _paths(folder: Path, pattern: str) -> list[Path]:
    try:
        return list(folder.glob(pattern))
    except OSError:  # a failing disk: no reason to stop a job that trains
        return []


def complete_sets(folder: Path, step: int) -> Iterator[list[Path]]:
    """Yield the complete sets of shards of a step: the latest history first, then by time."""
    complete = [
        ((own.term, own.generation, _written_at([*files.values()])), own, files)
        for own, files in sorted(_shard_files(folder, step).items())
        if len(files) == own.n_shards
    ]
    for _, own, files in sorted(complete, key=lambda each: each[0], reverse=True):
        yield [files[shard] for shard in range(own.n_shards)]


def _written_at(files: list[Path]) -> int:
    try:
        return max(file.stat().st_mtime_ns for file in files)
    except OSError:  # another chip prunes; reading the file will report it
        return 0


def why_not_shared(folder: Path, step: int) -> str:
    """Return why shards of a step that all chips have saved are not seen; empty if all are seen.

    Those that are missing are then in a folder of the same name on another host. A later step that
    is complete also shows that the folder is shared; the step itself may be deleted by now.
    """
    newest = newest_complete(folder)
    if newest is not None and newest >= step:
        return ""
    return (
        f"{step_folder(folder, step)}: {what_is_missing(folder, step)}; all hosts must see this "
        "folder, or no job can resume from it"
    )


def what_is_missing(folder: Path, step: int) -> str:
    """Return why a step that is not complete is not."""
    sets = _shard_files(folder, step)
    if not sets:
        return "it has no shards"
    own, files = max(sets.items(), key=lambda item: len(item[1]) / item[0].n_shards)
    first = next(shard for shard in range(own.n_shards) if shard not in files)
    missing = shard_name(
        first, own.n_shards, term=own.term, generation=own.generation, suffix=own.suffix
    )
    return f"it has {len(files)} of {own.n_shards} shards; {missing} is missing"
