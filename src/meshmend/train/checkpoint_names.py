"""Which checkpoints a folder has, by the names of its files alone; needs no framework."""

import re
from collections.abc import Container, Iterator
from pathlib import Path

_STEP = re.compile(r"step-(\d{8,})")
_SHARD = re.compile(r"shard-(\d{3,})-of-(\d{3,})(\.pt|\.bin)")


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


def shard_name(shard: int, n_shards: int, suffix: str) -> str:
    """Return the name of a shard's file; the suffix tells the framework that wrote it."""
    return f"shard-{shard:03d}-of-{n_shards:03d}{suffix}"


def steps_in(folder: Path) -> list[int]:
    """Return the steps that have a folder, oldest first."""
    names = (_STEP.fullmatch(path.name) for path in folder.glob("step-*"))
    return sorted(int(name[1]) for name in names if name)


def _shard_files(folder: Path, step: int) -> dict[tuple[int, str], dict[int, Path]]:
    """Return the files of a step, by number of shards and suffix, and then by shard."""
    sets: dict[tuple[int, str], dict[int, Path]] = {}
    for path in step_folder(folder, step).glob("shard-*"):
        name = _SHARD.fullmatch(path.name)
        if name and int(name[1]) < int(name[2]):
            sets.setdefault((int(name[2]), name[3]), {})[int(name[1])] = path
    return sets


def complete_sets(folder: Path, step: int) -> Iterator[list[Path]]:
    """Yield the complete sets of shards of a step, the last one written first."""
    complete = [
        [files[shard] for shard in range(n_shards)]
        for (n_shards, _), files in sorted(_shard_files(folder, step).items())
        if len(files) == n_shards
    ]
    yield from sorted(complete, key=_written_at, reverse=True)


def _written_at(files: list[Path]) -> int:
    try:
        return max(file.stat().st_mtime_ns for file in files)
    except FileNotFoundError:  # another chip prunes; reading the file will report it
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
    (n_shards, suffix), files = max(sets.items(), key=lambda item: len(item[1]) / item[0][0])
    first = next(shard for shard in range(n_shards) if shard not in files)
    missing = shard_name(first, n_shards, suffix)
    return f"it has {len(files)} of {n_shards} shards; {missing} is missing"
