"""Checkpoints of `torch.distributed.checkpoint` (DCP), written from and read into ours.

The parts are `model`, `optimizer`, `also` and `progress`. Plain PyTorch reads them with
`dcp.load({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=...)`.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_saver import save

from meshmend.errors import InputError
from meshmend.scratch import scratch_folder
from meshmend.train.checkpoint import save_shard
from meshmend.train.torch_shards import TORCH_SHARDS


def write_dcp(state: dict[str, Any], folder: Path) -> None:
    """Write a training state as a DCP checkpoint.

    Raises:
        InputError: the folder is not empty, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InputError(f"export needs a new or an empty folder, but {folder} has files in it")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that one process alone writes, as it is told to
            save(dict(state), checkpoint_id=folder, no_dist=True)
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror}") from None


def read_dcp(folder: Path, *, step: int | None = None) -> dict[str, Any]:
    """Return the training state in a DCP checkpoint, whoever wrote it.

    It needs the parts `model` and `optimizer`. Without `progress`, the job has done `step` steps,
    or none, and begins with the first sample.

    Raises:
        InputError: there is no such checkpoint, or it lacks a part.
    """
    if not (folder / ".metadata").is_file():
        raise InputError(f"import needs a folder that DCP wrote, but {folder} has no .metadata")
    with scratch_folder() as scratch:
        whole = Path(scratch) / "whole.pt"
        dcp_to_torch_save(folder, whole)
        state: dict[str, Any] = torch.load(whole, map_location="cpu", weights_only=True)
    missing = sorted({"model", "optimizer"} - set(state))
    if missing:
        raise InputError(
            f"import needs the parts model and optimizer, but {folder} has no {missing[0]}; it has "
            f"{', '.join(sorted(state)) or 'nothing'}"
        )
    found = state.get("progress", {"step": 0, "position": 0, "loss": None})
    progress = {**found, "step": found["step"] if step is None else step}
    return {
        "model": state["model"],
        "optimizer": _with_numbers(state["optimizer"]),
        "also": list(state.get("also", [])),
        "progress": progress,
    }


def import_dcp(folder: Path, checkpoints: Path, *, step: int | None = None) -> Path:
    """Write a checkpoint of a job from a DCP checkpoint; return its file.

    Raises:
        InputError: the DCP checkpoint cannot be read, or the file cannot be written.
    """
    state = read_dcp(folder, step=step)
    done = int(state["progress"]["step"])
    return save_shard(checkpoints, state, TORCH_SHARDS, step=done, shard=0, n_shards=1)


def _with_numbers(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with numbers for keys again: DCP turns them into text."""
    parameters = optimizer.get("state", {})
    state = {int(key) if str(key).isdigit() else key: each for key, each in parameters.items()}
    return {**optimizer, "state": state}
