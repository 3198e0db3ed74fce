"""Which checkpoints a folder has, by the names of its files alone; needs no framework."""

import re
from collections.abc import Container, Iterator
from pathlib import Path
from typing import NamedTuple

_STEP = re.compile(r"step-(\d{8,})")
_SHARD = re.compile(r"shard-(\d{3,})-of-(\d{3,})(?:\.(\d+)-(\d+))?(\.pt|\.bin)")


class _Set(NamedTuple):
    """What the names of the shards of one set have in common."""

    term: int
    generation: int
    n_shards: int
    suffix: str


def complete_steps(folder: Path) -> list[int]:
    """Return the steps that are complete, oldest first; looks at file names only."""
    return [step for step in steps_in(folder) if any(complete_sets(folder, step))]


def newest_complete(folder: Path, *, without: Container[int] = ()) -> int | None:
    """Return the newest complete step that is not in `without`, or None; looks at names only."""
    for step in reversed(steps_in(folder)):
        if step not in without and any(complete_sets(folder, step)):
            return step
    return None


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of a step's shards."""
    return folder / f"step-{step:08d}"


def shard_name(
    shard: int, n_shards: int, suffix: str, *, term: int = 0, generation: int = 0
) -> str:
    """Return the name of a shard's file; the suffix tells the framework that wrote it.

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
    history = {"term": own.term, "generation": own.generation}
    missing = shard_name(first, own.n_shards, own.suffix, **history)
    return f"it has {len(files)} of {own.n_shards} shards; {missing} is missing"
