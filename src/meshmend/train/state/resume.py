"""Whether a job can resume from a checkpoint: checked before workers start, and in each worker.

The checkpoint must be of the same model, optimizer, seed and data set, and not past the job's last
step. Batch, learning rate, mesh and policy may differ: the job goes on with the sample after the
checkpoint's last one, so no sample is lost or used twice.
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from meshmend.errors import InputError, ResumeError
from meshmend.train.state import checkpoint
from meshmend.train.state.checkpoint import (
    Damage,
    FolderOwner,
    Loaded,
    Saving,
    complete_steps,
    newest_complete,
    owner_of,
    why_none_complete,
)
from meshmend.train.state.digest import leaves_of
from meshmend.train.state.shards import State
from meshmend.train.state.state_tree import Framework, Raw

AUTO: Final = "auto"  # in place of a folder: that of the job's own checkpoints
_TRIES: Final = 3

_log = logging.getLogger(__name__)

Resume = Path | str | None


def folder_to_resume(resume: Resume, saving: Saving | None) -> Path | None:
    """Return the folder of the checkpoint that a job begins with; None if it begins anew.

    With "auto" the job goes on if its folder has a complete checkpoint, and else begins: one and
    the same command starts a job and takes it up again.

    Raises:
        InputError: the job cannot write checkpoints where it is to, or "auto" was given to a job
            that writes none.
    """
    if saving is not None and os.path.lexists(saving.folder) and not saving.folder.is_dir():
        raise InputError(
            f"Saving needs a folder, but {saving.folder} is a file, or a link to what is not "
            "there; name a folder, or mount its disk"
        )
    if resume != AUTO:
        if not isinstance(resume, str | Path | None):
            raise ResumeError(f'resume needs a folder of checkpoints or "auto", but got {resume!r}')
        return None if resume is None else Path(resume)
    if saving is None:
        raise ResumeError(
            'resume="auto" needs the folder of the job\'s checkpoints, but saving is None; pass '
            "saving=Saving(folder, every=...)"
        )
    return saving.folder if complete_steps(saving.folder) else None


def tell_of_new_beginning(resume: Resume, saving: Saving | None) -> None:
    """Log why a job with `resume="auto"` begins anew, unless its folder is empty or not there."""
    if resume == AUTO and saving is not None and (why := why_none_complete(saving.folder)):
        _log.warning('resume="auto" found no complete checkpoint in %s: %s', saving.folder, why)


def tell_of_damage(damage: Iterable[Damage]) -> None:
    """Log which files of checkpoints are not used, and why."""
    for path, why in damage:
        _log.warning("checkpoint %s is not used: %s", path, why)


def folder_owner(
    saving: Saving | None, resume: Path | None, run_id: Callable[[], str]
) -> FolderOwner | None:
    """Return whose checkpoints a job writes; None if it writes none.

    A job that resumes from the folder that it writes to goes on as the run that began it.

    Raises:
        ResumeError: the folder has checkpoints of another run, and the job does not resume from it.
    """
    if saving is None:
        return None
    folder, run = saving.folder, run_id()
    found = owner_of(folder)
    if resume is not None and resume.resolve() == folder.resolve():
        return FolderOwner(found or run, found)
    if found != run and (steps := complete_steps(folder)):
        raise ResumeError(
            f"a new run needs a folder for its checkpoints, but {folder} has those of another run, "
            f'up to step {steps[-1]}; go on from them with resume="auto", or name another folder'
        )
    return FolderOwner(run, found)


def newest_readable(
    folder: Path, framework: Framework, *, steps: int, tells: bool = True
) -> Loaded:
    """Return the newest readable checkpoint of a folder, for a job of so many steps.

    Damaged checkpoints are skipped, and logged: by one chip of a job, which `tells`.

    Raises:
        ResumeError: no checkpoint can be read, or the newest readable one is past the last step.
    """
    for _ in range(_TRIES):
        newest = newest_complete(folder)
        loaded, damage = checkpoint.load(folder, framework)
        if loaded is not None or newest_complete(folder) == newest:
            break  # else the job, which this worker is late for, has deleted what it was to read
    if loaded is None:
        words = [f"{path.relative_to(folder)}: {why}" for path, why in damage]
        found = "; ".join(words) or "it has none"
        raise ResumeError(
            f"resume needs a checkpoint in {folder} that can be read, but {found}; "
            'resume="auto" begins anew where there is none'
        )
    if tells:
        tell_of_damage(damage)
    if loaded.step > steps:
        raise ResumeError(
            f"the checkpoint is at step {loaded.step}, but the job ends at step {steps}; "
            f"set steps to at least {loaded.step}"
        )
    return loaded


def resumable(
    folder: Path, fresh: State, framework: Framework, *, steps: int, tells: bool = True
) -> Loaded:
    """Return what `newest_readable` does, checked against the job to resume.

    `fresh` is the state of the job before its first step.

    Raises:
        ResumeError: no checkpoint can be read, or the newest readable one is of another job.
    """
    loaded = newest_readable(folder, framework, steps=steps, tells=tells)
    if len(loaded.state["also"]) != len(fresh["also"]):
        raise ResumeError(
            f"resume needs {len(loaded.state['also'])} objects in also, as the checkpoint has, but "
            f"got {len(fresh['also'])}"
        )
    check_optimizer(loaded.state["optimizer"], fresh["optimizer"])
    for part in ("model", "optimizer", "also"):
        saved, wanted = (
            _named_shapes(state[part], framework.raw) for state in (loaded.state, fresh)
        )
        is_lazy = framework.lazy and part == "optimizer"
        _check_same(saved, wanted, part, may_lack=is_lazy)
    check_progress(loaded.state["progress"], fresh["progress"])
    return loaded


def check_optimizer(saved: Mapping[str, Any], fresh: Mapping[str, Any]) -> None:
    """Raise ResumeError if the settings of an optimizer of PyTorch have other names."""
    groups = [state.get("param_groups") for state in (saved, fresh)]
    if not all(isinstance(each, list) and each for each in groups):
        return
    theirs, ours = (set(each[0]) for each in groups if each)
    if theirs - ours and ours - theirs:
        raise ResumeError(
            f"resume needs the optimizer of the checkpoint, which has {min(theirs - ours)}, but "
            f"this job's has {min(ours - theirs)} instead"
        )


def check_progress(saved: Mapping[str, Any], fresh: Mapping[str, Any]) -> None:
    """Raise ResumeError if the order of samples differs: some would be used twice, others never."""
    for name, words in (("seed", "seed"), ("n_samples", "number of samples")):
        if name in saved and name in fresh and saved[name] != fresh[name]:
            raise ResumeError(
                f"resume needs the {words} of the checkpoint, {saved[name]}, but got "
                f"{fresh[name]}: the order of samples would differ"
            )


def _check_same(
    saved: Mapping[str, tuple[int, ...]],
    fresh: Mapping[str, tuple[int, ...]],
    part: str,
    *,
    may_lack: bool,
) -> None:
    """Raise ResumeError if names or shapes of tensors differ.

    An optimizer that makes its tensors in its first step may lack those of the checkpoint.
    """
    for name in dict.fromkeys([*fresh, *saved]):
        if may_lack and name not in fresh:
            continue
        if fresh.get(name) != saved.get(name):
            raise ResumeError(
                f"resume needs the {part} of the checkpoint, but {name} has "
                f"{_words(saved.get(name))} there and {_words(fresh.get(name))} in this job"
            )


def _words(shape: tuple[int, ...] | None) -> str:
    return "no tensor" if shape is None else f"shape {shape}"


def _named_shapes(state: Any, raw: Raw) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of all tensors of a nested state."""
    arrays = ((name, raw(leaf, name)) for name, leaf in leaves_of(state))
    return {name: array.shape for name, array in arrays if array is not None}
