"""Checkpoints: a folder a step, a file a chip, each file whole or not there.

    FOLDER/step-00000100/shard-003-of-012.pt

Every live chip calls `save_shard` at the same step and writes its shard. A step is complete when
all shards of one count are there; a chip that died while saving leaves a step incomplete, and
another number of chips may save the same step again beside it. Whoever reads, reads the whole
state, so that it resumes on any number of chips. What a state is made of is `shards`' business.
"""

import os
import re
import shutil
import time
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from meshmend.errors import CheckpointDamageError, InputError
from meshmend.train.shards import Shard, State, merged, packed, shard_of, unpacked

STALE_S = 600.0  # a draft that nobody wrote to for so long has lost its writer

_STEP = re.compile(r"step-(\d{8,})")
_SHARD = re.compile(r"shard-(\d{3,})-of-(\d{3,})\.pt")
_DRAFT, _GONE = ".part", ".gone-"

OnDamage = Callable[[Path, str], None]


@dataclass(frozen=True)
class Saving:
    """When to write checkpoints, where, and how many to keep."""

    folder: Path
    every: int
    keep: int = 3


class Loaded(NamedTuple):
    """A state as it was saved, and the step that it was saved at."""

    state: dict[str, Any]
    step: int


def save_shard(folder: Path, state: State, *, step: int, shard: int, n_shards: int) -> Path:
    """Write this chip's share of the state and return its file, whole and on the disk.

    Raises:
        InputError: the state holds what cannot be stored, or the file cannot be written.
    """
    return write_shard(folder, shard_of(state, step=step, shard=shard, n_shards=n_shards))


def write_shard(folder: Path, shard: Shard) -> Path:
    """Write a shard, an earlier file of its name staying whole until the new one is there.

    The state may change meanwhile: a thread can do this while training goes on.

    Raises:
        InputError: the file cannot be written.
    """
    file = _step_folder(folder, shard.step) / _shard_name(shard.number, shard.n_shards)
    draft = file.with_name(f".{file.name}.{uuid4().hex}{_DRAFT}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with draft.open("xb") as stream:
                stream.write(packed(shard))
                stream.flush()
                os.fsync(stream.fileno())
            draft.replace(file)
        finally:
            draft.unlink(missing_ok=True)
        _sync(file.parent)
        _sync(folder)
    except OSError as error:
        raise InputError(f"cannot write the checkpoint {file}: {error.strerror}") from None
    return file


def complete_steps(folder: Path) -> list[int]:
    """Return the steps of which all shards of one count are there, oldest first."""
    return [step for step in _steps(folder) if any(_complete_sets(folder, step))]


def newest_complete(folder: Path, *, without: Container[int] = ()) -> int | None:
    """Return the newest step of which all shards are there, by their names; None: there is none."""
    for step in reversed(_steps(folder)):
        if step not in without and any(_complete_sets(folder, step)):
            return step
    return None


def load(folder: Path, *, on_damage: OnDamage) -> Loaded | None:
    """Return the newest state that is complete and undamaged, or None where there is none.

    A checkpoint that is newer but cannot be used is named: `on_damage(path, reason)`.
    """
    for step in reversed(_steps(folder)):
        if (loaded := load_step(folder, step, on_damage=on_damage)) is not None:
            return loaded
    return None


def load_step(folder: Path, step: int, *, on_damage: OnDamage) -> Loaded | None:
    """Return the state of one step, or None where it is not there, incomplete or damaged.

    Why it cannot be used is named: `on_damage(path, reason)`.
    """
    n_tried = 0
    for files in _complete_sets(folder, step):
        n_tried += 1
        state = _read(files, step, on_damage)
        if state is not None:
            return Loaded(state, step)
    if n_tried == 0:
        on_damage(_step_folder(folder, step), _what_is_missing(folder, step))
    return None


def prune(folder: Path, keep: int = 3) -> None:
    """Delete all checkpoints before the newest `keep` complete ones, and drafts left behind.

    Several chips may call it at once. A checkpoint disappears whole or not at all.

    Raises:
        InputError: `keep` is less than one.
    """
    if keep < 1:
        raise InputError(f"prune needs to keep at least one checkpoint, but got keep={keep}")
    kept = complete_steps(folder)[-keep:]
    for step in _steps(folder):
        if kept and step < kept[0]:
            old = _step_folder(folder, step)
            with suppress(FileNotFoundError):  # another chip was faster
                old.rename(old.with_name(f"{_GONE}{uuid4().hex}"))
    for gone in folder.glob(f"{_GONE}*"):
        shutil.rmtree(gone, ignore_errors=True)  # another chip may be at it too
    for draft in folder.glob(f"step-*/.*{_DRAFT}"):
        if _is_stale(draft):
            draft.unlink(missing_ok=True)


def _step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _shard_name(shard: int, n_shards: int) -> str:
    return f"shard-{shard:03d}-of-{n_shards:03d}.pt"


def _steps(folder: Path) -> list[int]:
    """Return the steps that have a folder, oldest first."""
    names = (_STEP.fullmatch(path.name) for path in folder.glob("step-*"))
    return sorted(int(name[1]) for name in names if name)


def _shard_files(folder: Path, step: int) -> dict[int, dict[int, Path]]:
    """Return the files of a step by their count of shards, then by shard."""
    sets: dict[int, dict[int, Path]] = {}
    for path in _step_folder(folder, step).glob("shard-*"):
        name = _SHARD.fullmatch(path.name)
        if name and int(name[1]) < int(name[2]):
            sets.setdefault(int(name[2]), {})[int(name[1])] = path
    return sets


def _complete_sets(folder: Path, step: int) -> Iterator[list[Path]]:
    """Yield the complete sets of shards of a step, the last one written first."""
    complete = [
        [files[shard] for shard in range(n_shards)]
        for n_shards, files in sorted(_shard_files(folder, step).items())
        if len(files) == n_shards
    ]
    yield from sorted(complete, key=_written_at, reverse=True)


def _written_at(files: list[Path]) -> int:
    try:
        return max(file.stat().st_mtime_ns for file in files)
    except FileNotFoundError:  # another chip prunes: reading will say so
        return 0


def _read(files: list[Path], step: int, on_damage: OnDamage) -> dict[str, Any] | None:
    """Return the state in these files, or None after naming the first that is damaged."""
    shards: list[Shard] = []
    for number, file in enumerate(files):
        try:
            shard = unpacked(file.read_bytes())
        except (CheckpointDamageError, OSError) as error:
            on_damage(file, str(error))
            return None
        found, wanted = (shard.step, shard.number, shard.n_shards), (step, number, len(files))
        if found != wanted:
            on_damage(file, f"it is step {found[0]}, shard {found[1]} of {found[2]}: misnamed")
            return None
        shards.append(shard)
    try:
        return merged(shards)
    except CheckpointDamageError as error:
        on_damage(files[0].parent, str(error))
        return None


def _what_is_missing(folder: Path, step: int) -> str:
    sets = _shard_files(folder, step)
    if not sets:
        return "it has no shards"
    n_shards, files = max(sets.items(), key=lambda item: len(item[1]) / item[0])
    first = next(shard for shard in range(n_shards) if shard not in files)
    return f"it has {len(files)} of {n_shards} shards; {_shard_name(first, n_shards)} is missing"


def _is_stale(draft: Path) -> bool:
    try:
        return time.time() - draft.stat().st_mtime > STALE_S
    except FileNotFoundError:
        return False


def _sync(folder: Path) -> None:
    """Put the folder's list of names on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
