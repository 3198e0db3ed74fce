"""The checkpoints of a run, listed, checked, and written as other programs read them.

A job's own shards cut tensors wherever a chip's range of bytes ends, so that all chips write
equally much. Exported files of safetensors, one or several with an index, hold whole tensors by the
names of the model. Needs no framework.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from meshmend.errors import CheckpointDamageError, InputError
from meshmend.files import write_whole
from meshmend.train.state.checkpoint import (
    Loaded,
    complete_sets,
    complete_steps,
    newest_complete,
    read_step,
    step_folder,
    steps_in,
    what_is_missing,
)
from meshmend.train.state.shards import framework_of
from meshmend.train.state.state_tree import AS_BYTES, TYPES, Framework, RawArray, header

INDEX_NAME: Final = "model.safetensors.index.json"
DEFAULT_SHARD_BYTES: Final = 5_000_000_000
_JAX_KEY: Final = re.compile(r"\[(?:'([^']*)'|\"([^\"]*)\"|(\d+))\]|\.(\w+)")


@dataclass(frozen=True)
class Exported:
    """What was written: the step, the files, and how much is in them."""

    step: int
    files: tuple[Path, ...]
    n_tensors: int
    n_bytes: int


def checkpoint_folder(run: Path) -> Path:
    """Return the folder of a run's checkpoints; `run` may be that folder itself.

    Raises:
        InputError: there are no checkpoints.
    """
    for folder in (run / "checkpoints", run):
        if any(folder.glob("step-*")):
            return folder
    what = "has no checkpoints" if run.is_dir() else "is not a folder"
    raise InputError(f"meshmend checkpoint needs the folder of a run, but {run} {what}")


def read_checkpoint(run: Path, step: int | None = None, framework: Framework = AS_BYTES) -> Loaded:
    """Return the state of a step of a run, by default of its newest complete checkpoint.

    Its tensors are `RawArray`, unless a framework is given.

    Raises:
        InputError: there is no such checkpoint.
        CheckpointDamageError: it is damaged.
    """
    folder = checkpoint_folder(run)
    if step is None:
        step = newest_complete(folder)
    if step is None or step not in complete_steps(folder):
        have = ", ".join(map(str, complete_steps(folder))) or "none"
        wanted = "" if step is None else f" of step {step}"
        raise InputError(f"{folder} has no complete checkpoint{wanted}; complete are: {have}")
    return read_step(folder, step, framework)


def export_safetensors(
    loaded: Loaded, goal: Path, *, what: str = "model", shard_bytes: int = DEFAULT_SHARD_BYTES
) -> Exported:
    """Write the model, or with `what="all"` the whole state, as safetensors.

    A goal that ends with .safetensors is one file; else it is a folder, in which a model larger
    than `shard_bytes` becomes several files with an index.

    Raises:
        InputError: an element type is not known to the format, or a file cannot be written.
    """
    state: Any = loaded.state["model"] if what == "model" else loaded.state
    arrays, values = _named(state)
    of_torch = loaded.framework == "torch"
    metadata = {"format": "pt" if of_torch else "np", "step": str(loaded.step)}
    if what != "model":
        metadata["values"] = json.dumps(values, default=str)
    sizes = {name: array.n_bytes for name, array in arrays.items()}
    done = Exported(loaded.step, (), len(arrays), sum(sizes.values()))
    if goal.suffix == ".safetensors":
        _make_folder(goal.parent)
        _write(goal, arrays, metadata)
        return Exported(done.step, (goal,), done.n_tensors, done.n_bytes)
    make_empty(goal)
    groups = _groups(sizes, shard_bytes)
    files = [_shard_file(goal, number, len(groups)) for number in range(len(groups))]
    for file, names in zip(files, groups, strict=True):
        _write(file, {name: arrays[name] for name in names}, metadata)
    if len(files) > 1:
        files.append(_write_index(goal, files, groups, done.n_bytes))
    return Exported(done.step, tuple(files), done.n_tensors, done.n_bytes)


def _named(state: Any) -> tuple[dict[str, RawArray], dict[str, Any]]:
    """Return the tensors of a nested state by name, and its plain values by name."""
    arrays: dict[str, RawArray] = {}
    values: dict[str, Any] = {}
    for name, leaf in _leaves(state, ""):
        (arrays if isinstance(leaf, RawArray) else values)[name] = leaf
    return arrays, values


def _leaves(state: Any, name: str) -> Iterator[tuple[str, Any]]:
    pairs: Any = None
    if isinstance(state, Mapping):
        pairs = state.items()
    elif isinstance(state, list | tuple) and any(
        isinstance(each, dict | list | RawArray) for each in state
    ):
        pairs = enumerate(state)
    if pairs is None:
        yield name, state
        return
    for key, value in pairs:
        own = _dotted(str(key)) or "value"
        yield from _leaves(value, f"{name}.{own}" if name else own)


def _dotted(name: str) -> str:
    """Return a name of JAX, such as ['layer']['w'], as layer.w, and any other as it is."""
    found = list(_JAX_KEY.finditer(name))
    if "".join(each[0] for each in found) != name:
        return name
    return ".".join(next(part for part in each.groups() if part is not None) for each in found)


def _write(file: Path, arrays: Mapping[str, RawArray], metadata: Mapping[str, str]) -> None:
    """Write arrays by name to a file, which is complete or absent.

    Raises:
        InputError: an array has a type that the format lacks, or the file cannot be written.
    """
    for name, array in arrays.items():
        if array.dtype not in TYPES:
            raise InputError(
                f"safetensors has no type for {name}, which is {array.dtype}; leave it out with "
                "--what model, or export with --format dcp"
            )
    head, order = header(arrays, metadata)

    def write(stream: BinaryIO) -> None:
        stream.write(head)
        for name in order:
            stream.write(arrays[name].data.data)

    try:
        write_whole(file, write)
    except OSError as error:
        raise InputError(f"cannot write {file}: {error.strerror}") from None


def _groups(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Return the names in groups of at most so many bytes each, or of one tensor."""
    groups: list[list[str]] = [[]]
    n_bytes = 0
    for name, size in sizes.items():
        if groups[-1] and n_bytes + size > most:
            groups.append([])
            n_bytes = 0
        groups[-1].append(name)
        n_bytes += size
    return groups


def _shard_file(folder: Path, number: int, n_files: int) -> Path:
    if n_files == 1:
        return folder / "model.safetensors"
    return folder / f"model-{number + 1:05d}-of-{n_files:05d}.safetensors"


def _write_index(folder: Path, files: list[Path], groups: list[list[str]], n_bytes: int) -> Path:
    """Write the index last: without it, nobody takes the files for a whole model."""
    index = {
        "metadata": {"total_size": n_bytes},
        "weight_map": {
            name: file.name for file, names in zip(files, groups, strict=True) for name in names
        },
    }
    path = folder / INDEX_NAME
    try:
        write_whole(path, json.dumps(index, indent=2))
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
    return path


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {folder}: {error.strerror}") from None


def make_empty(folder: Path) -> None:
    """Make a folder; raise InputError if there are files in it."""
    _make_folder(folder)
    try:
        has_files = any(folder.iterdir())
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror}") from None
    if has_files:
        raise InputError(f"export needs a new or an empty folder, but {folder} has files in it")


# What checkpoints a run has, and whether they can be read.


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
    framework = framework_of(files[0]) if files else "?"
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
