"""Checkpoints of `torch.distributed.checkpoint` (DCP), written from and read into ours.

The parts are `model`, `optimizer`, `also` and `progress`. Plain PyTorch reads them with
`dcp.load({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=...)`.

DCP pickles its metadata and all plain values. PyTorch's own reader unpickles them, and so runs
whatever code a stranger put there; this one makes only the few kinds of objects that DCP writes.
"""

import io
import pickle
import warnings
from enum import EnumType
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from meshmend.errors import InputError
from meshmend.train.state.checkpoint import save_shard
from meshmend.train.state.checkpoint_export import make_empty
from meshmend.train.state.torch_state import TORCH


def write_dcp(state: dict[str, Any], folder: Path) -> None:
    """Write a training state as a DCP checkpoint.

    Raises:
        InputError: the folder is not empty, or cannot be written.
    """
    make_empty(folder)
    try:
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
    state: dict[str, Any] = {}
    reader, planner = _Reader(folder), _Planner()  # type: ignore[no-untyped-call]  # torch's
    try:
        reader.read_metadata()  # first: torch would print the traceback of a refusal
        _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    except (Exception, CheckpointException) as error:  # a damaged file may raise anything
        raise InputError(f"{folder} is no DCP checkpoint that can be read: {_why(error)}") from None
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
    return save_shard(checkpoints, state, TORCH, step=done, shard=0, n_shards=1)


def _why(error: BaseException) -> str:
    """Return the first line of an error, or of the one that DCP has wrapped in its own."""
    if isinstance(error, CheckpointException):
        error = next((each for each, _ in error.failures.values()), error)
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _with_numbers(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with numbers for keys again: DCP turns them into text."""
    parameters = optimizer.get("state", {})
    state = {int(key) if str(key).isdigit() else key: each for key, each in parameters.items()}
    return {**optimizer, "state": state}


_METADATA: Final = "torch.distributed.checkpoint.metadata"
_KINDS: Final = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *((_METADATA, f"{name}StorageMetadata") for name in ("Tensor", "Bytes", "Chunk")),
    *((_METADATA, name) for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    *(("pathlib", name) for name in ("PosixPath", "PurePosixPath")),
    *(("pathlib._local", name) for name in ("PosixPath", "PurePosixPath")),  # of Python 3.13
}


def _member(kind: type, name: str) -> Any:
    """Return the member of an enum: until Python 3.11.3 one is pickled as `getattr(kind, name)`."""
    if isinstance(kind, EnumType):
        return kind[name]
    raise InputError("its metadata asks for builtins.getattr, which DCP does not write")


class _Unpickler(pickle.Unpickler):
    """Makes the objects that DCP's metadata consists of, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) == ("builtins", "getattr"):
            return _member
        if is_type or (module, name) in _KINDS:
            return super().find_class(module, name)
        raise InputError(f"its metadata asks for {module}.{name}, which DCP does not write")


class _Reader(FileSystemReader):
    """Reads the files of a DCP checkpoint without running what is in them."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata, as the method of the base class does."""
        with (Path(self.path) / ".metadata").open("rb") as stream:
            found: Metadata = _Unpickler(stream).load()
        if found.storage_meta is None:
            found.storage_meta = StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _Planner(_EmptyStateDictLoadPlanner):
    """Loads all that is in a checkpoint; plain values only as `weights_only` allows."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Load a plain value, as the method of the base class does."""
        checked = io.BytesIO()
        try:
            plain = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            name = read_item.dest_index.fqn
            raise InputError(f"{name} is neither a tensor nor a plain value") from None
        torch.save(plain, checked)
        checked.seek(0)
        super().load_bytes(read_item, checked)
