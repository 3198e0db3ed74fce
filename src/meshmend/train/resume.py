"""Whether a job can go on from a checkpoint: checked before a worker starts, and in each of them.

A job goes on if the checkpoint is of the same model, optimizer, seed and data set, and not past
its last step. Batch, learning rate, mesh and policy may be others: samples go on in the row where
the checkpoint ends, so none is lost or used twice.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from meshmend.errors import InputError
from meshmend.train import checkpoint
from meshmend.train.checkpoint import Loaded, OnDamage
from meshmend.train.shards import State


def resumable(folder: Path, fresh: State, *, steps: int, on_damage: OnDamage) -> Loaded:
    """Return the newest checkpoint of a folder that a job of so many steps can go on from.

    `fresh` is the state of the job that has not begun. Checkpoints that are damaged are passed
    over and named, `on_damage(path, reason)`.

    Raises:
        InputError: none can be read, or the newest that can is of another job.
    """
    damage: list[tuple[Path, str]] = []
    loaded = checkpoint.load(folder, on_damage=lambda path, why: damage.append((path, why)))
    if loaded is None:
        words = [f"{path.relative_to(folder)}: {why}" for path, why in damage]
        found = "; ".join(words) or "there is none"
        raise InputError(f"resume needs a checkpoint in {folder} that can be read, but {found}")
    for path, why in damage:
        on_damage(path, why)
    if loaded.step > steps:
        raise InputError(
            f"the checkpoint is at step {loaded.step}, but steps is {steps}; give more steps"
        )
    if len(loaded.state["also"]) != len(fresh["also"]):
        raise InputError(
            f"resume needs the {len(loaded.state['also'])} further objects of the checkpoint, but "
            f"got also={len(fresh['also'])}"
        )
    for part in ("model", "optimizer", "also"):
        _check_same(_shapes(loaded.state[part]), _shapes(fresh[part]), part)
    _check_progress(loaded.state["progress"], fresh["progress"])
    return loaded


def _check_progress(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse another order of samples: some would be used twice in an epoch, others never."""
    for name, words in (("seed", "seed"), ("n_samples", "number of samples")):
        if name in saved and name in own and saved[name] != own[name]:
            raise InputError(
                f"resume needs the {words} of the checkpoint, {saved[name]}, but got {own[name]}: "
                "the order of samples would be another"
            )


def _check_same(
    saved: Mapping[str, tuple[int, ...]], own: Mapping[str, tuple[int, ...]], part: str
) -> None:
    """Refuse tensors of other names or shapes; the optimizer's may not be there yet."""
    for name in dict.fromkeys([*own, *saved]):
        if part == "optimizer" and name not in own:
            continue
        if own.get(name) != saved.get(name):
            raise InputError(
                f"resume needs the {part} of the checkpoint, but {name} has "
                f"{_words(saved.get(name))} there and {_words(own.get(name))} here"
            )


def _words(shape: tuple[int, ...] | None) -> str:
    return "no tensor" if shape is None else f"shape {shape}"


def _shapes(state: Any, where: str = "") -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of a nested state by their names."""
    return dict(_named_shapes(state, where))


def _named_shapes(state: Any, where: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    if isinstance(state, torch.Tensor):
        yield where, tuple(state.shape)
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from _named_shapes(value, f"{where}.{key}" if where else str(key))
    elif isinstance(state, list | tuple):
        for key, value in enumerate(state):
            yield from _named_shapes(value, f"{where}[{key}]")
