"""One chip's shard of a training state, as bytes that `torch.load(weights_only=True)` reads.

A state is any nesting of dicts, lists and tuples whose leaves are tensors or plain values. Its
tensors, laid end to end, are cut into equal ranges of bytes, one per chip. A shard is one range;
the first shard also holds the plain values. Of a sharded optimizer each shard holds the pieces that
its chip owns; together they are the whole state. This module knows no files or folders.

The bytes are a zip archive, as `torch.save` writes it, whose comment is its SHA-256.
"""

import hashlib
import io
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, BinaryIO, NamedTuple, cast

import torch

from meshmend.errors import CheckpointDamageError, InputError
from meshmend.train.sharding.pieces import SavedPiece, put_pieces, take_pieces
from meshmend.train.state.shard_format import NO_ORIGIN, Origin, ShardFormat, State

FORMAT = "meshmend-checkpoint"
VERSION = 1
_WITH_PIECES = 2  # the version of a shard with pieces of an optimizer's state
_WITH_ORIGIN = 3  # the version of a shard that says whose state it was cut from

_PLAIN = (type(None), bool, int, float, complex, str)
_SEAL = b"meshmend sha256 "
_COMMENT_BYTES = len(_SEAL) + 64
_END_OF_ARCHIVE = b"PK\x05\x06"  # of a zip archive: 22 bytes, the last two count the comment
_END_BYTES = 22
_SAMPLES = 64  # elements of each tensor that go into a state's fingerprint


class Shard(NamedTuple):
    """One chip's part of a state; `tree` is None in all shards but the first.

    A piece is (number of the tensor, its first element, the elements). A piece of an optimizer is
    (number of the optimizer, number of the parameter, first element, state by name).
    """

    step: int
    number: int
    n_shards: int
    fingerprint: str
    tensors: list[tuple[tuple[int, ...], torch.dtype]]
    pieces: list[tuple[int, int, torch.Tensor]]
    tree: Any
    of_optimizers: list[SavedPiece] | None = None
    origin: Origin = NO_ORIGIN


def shard_of(
    state: State, *, step: int, shard: int, n_shards: int, origin: Origin = NO_ORIGIN
) -> Shard:
    """Return shard number `shard` of the state; the shards of all chips make up the state.

    The sizes of shards differ by at most two elements. A tensor with two names is stored once.
    The elements are copies, so that the state may change afterwards.

    Raises:
        InputError: the state holds something that is neither a tensor nor a plain value.
    """
    if not 0 <= shard < n_shards:
        raise InputError(
            f"a checkpoint of {n_shards} shards needs shards 0 to {n_shards - 1}, but got {shard}"
        )
    tensors: list[torch.Tensor] = []
    state, of_optimizers = take_pieces(state)
    tree = _tree(state, tensors, numbers={}, where="state")
    return Shard(
        step,
        shard,
        n_shards,
        _fingerprint(tree, tensors),
        [(tuple(tensor.shape), tensor.dtype) for tensor in tensors],
        list(_pieces(tensors, shard, n_shards)),
        tree if shard == 0 else None,
        of_optimizers,
        origin,
    )


def write(shard: Shard, stream: BinaryIO) -> None:
    """Write the shard to a stream, as a zip archive that ends with its own checksum."""
    sealing = _Sealing(stream)
    document = shard._asdict() | {"origin": asdict(shard.origin)}
    version = _WITH_ORIGIN
    if shard.origin == NO_ORIGIN:  # so that earlier versions read it
        del document["origin"]
        version = VERSION if shard.of_optimizers is None else _WITH_PIECES
    if shard.of_optimizers is None:
        del document["of_optimizers"]
    torch.save({"format": FORMAT, "version": version, **document}, cast(Any, sealing))
    sealing.finish()


class _Sealing:
    """A stream that passes a zip archive on, and adds its checksum as the comment of the archive.

    Nothing is copied, and Python's lock is free while the bytes are hashed and written.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._hash = stream, hashlib.sha256()
        self._end = b""  # held back: it says how long the comment is

    def write(self, data: bytes) -> int:
        if len(data) >= _END_BYTES:
            self._pass_on(self._end)
            self._pass_on(memoryview(data)[:-_END_BYTES])
            self._end = bytes(data[-_END_BYTES:])
        else:
            joined = self._end + data
            self._pass_on(joined[:-_END_BYTES])
            self._end = joined[-_END_BYTES:]
        return len(data)

    def flush(self) -> None:
        self._stream.flush()

    def finish(self) -> None:
        assert self._end.startswith(_END_OF_ARCHIVE)
        self._pass_on(self._end[:-2] + _COMMENT_BYTES.to_bytes(2, "little"))
        self._stream.write(_SEAL + self._hash.hexdigest().encode())

    def _pass_on(self, data: bytes | memoryview) -> None:
        self._hash.update(data)
        self._stream.write(data)


def packed(shard: Shard) -> bytes:
    """Return what `write` writes."""
    buffer = io.BytesIO()
    write(shard, buffer)
    return buffer.getvalue()


def unpacked(data: bytes) -> Shard:
    """Return the shard that `packed` turned into these bytes.

    Raises:
        CheckpointDamageError: bytes are missing or have changed, or the version is unknown.
    """
    seal = data[-_COMMENT_BYTES:]
    if not seal.startswith(_SEAL):
        raise CheckpointDamageError(
            "it does not end with its checksum: it is incomplete, or not a checkpoint"
        )
    body = memoryview(data)[:-_COMMENT_BYTES]
    if hashlib.sha256(body).hexdigest().encode() != seal.removeprefix(_SEAL):
        raise CheckpointDamageError("its checksum is wrong: some bytes have changed")
    document = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    known = (VERSION, _WITH_PIECES, _WITH_ORIGIN)
    if document.pop("format") != FORMAT or document.pop("version") not in known:
        raise CheckpointDamageError(f"it is of no known version of {FORMAT}")
    return Shard(**document | {"origin": Origin(**document.get("origin", {}))})


def merged(shards: Sequence[Shard]) -> dict[str, Any]:
    """Return the state that was saved in these shards, bit for bit, on the CPU.

    Raises:
        CheckpointDamageError: the shards are of different states, or an element is missing.
    """
    first = shards[0]
    if any(shard.fingerprint != first.fingerprint for shard in shards):
        raise CheckpointDamageError("its shards were saved from different states")
    flat = [torch.empty(torch.Size(shape).numel(), dtype=dtype) for shape, dtype in first.tensors]
    missing = [tensor.numel() for tensor in flat]
    for shard in shards:
        for number, start, elements in shard.pieces:
            flat[number][start : start + elements.numel()] = elements
            missing[number] -= elements.numel()
    if any(missing):
        raise CheckpointDamageError("its shards lack a part of the state")
    shapes = (shape for shape, _ in first.tensors)
    tensors = [tensor.reshape(shape) for tensor, shape in zip(flat, shapes, strict=True)]
    state: dict[str, Any] = _value(first.tree, tensors)
    if first.of_optimizers is None:
        return state
    return put_pieces(state, (each for shard in shards for each in shard.of_optimizers or ()))


def _tree(
    value: Any, tensors: list[torch.Tensor], *, numbers: dict[object, int], where: str
) -> tuple[Any, ...]:
    """Return the value as tagged tuples; append its tensors to the list."""
    if isinstance(value, torch.Tensor):
        return ("tensor", _number(value, tensors, numbers, where))
    if type(value) in _PLAIN:
        return ("plain", value)
    if isinstance(value, Mapping):
        pairs = [
            (
                _plain_key(key, where),
                _tree(item, tensors, numbers=numbers, where=f"{where}[{key!r}]"),
            )
            for key, item in value.items()
        ]
        # The state_dict of a module keeps the versions of its layers in this attribute.
        versions = getattr(value, "_metadata", None)
        if versions is None:
            return ("dict", pairs)
        return ("module", pairs, _tree(dict(versions), tensors, numbers=numbers, where=where))
    if type(value) in (list, tuple):
        items = [
            _tree(item, tensors, numbers=numbers, where=f"{where}[{at}]")
            for at, item in enumerate(value)
        ]
        return ("list" if isinstance(value, list) else "tuple", items)
    raise InputError(
        f"a checkpoint needs tensors, numbers, texts, lists, tuples and dicts, but {where} is a "
        f"{type(value).__name__}; leave it out, or store what it is made from"
    )


def _value(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the value that `_tree` turned into tagged tuples."""
    kind, content = tree[:2]
    if kind == "tensor":
        return tensors[content]
    if kind == "plain":
        return content
    if kind == "list":
        return [_value(item, tensors) for item in content]
    if kind == "tuple":
        return tuple(_value(item, tensors) for item in content)
    pairs = [(key, _value(item, tensors)) for key, item in content]
    if kind == "dict":
        return dict(pairs)
    module_state: OrderedDict[str, Any] = OrderedDict(pairs)
    vars(module_state)["_metadata"] = OrderedDict(_value(tree[2], tensors))
    return module_state


def _plain_key(key: Any, where: str) -> Any:
    if type(key) in _PLAIN:
        return key
    raise InputError(
        f"a checkpoint needs texts and numbers as keys, but {where} has a {type(key).__name__}: "
        f"{key!r}"
    )


def _number(
    tensor: torch.Tensor, tensors: list[torch.Tensor], numbers: dict[object, int], where: str
) -> int:
    """Return the tensor's place in the list; appends it unless it is there already."""
    if tensor.layout != torch.strided:
        raise InputError(
            f"a checkpoint needs dense tensors, but {where} is {tensor.layout}; store "
            "tensor.to_dense()"
        )
    same = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    if tensor.numel() == 0 or same not in numbers:
        numbers[same] = len(tensors)
        tensors.append(tensor.detach())
    return numbers[same]


def _pieces(
    tensors: Sequence[torch.Tensor], shard: int, n_shards: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield the elements whose first byte lies in the shard's range of all bytes."""
    total = sum(tensor.nbytes for tensor in tensors)
    low, high = total * shard // n_shards, total * (shard + 1) // n_shards
    begin = 0
    for number, tensor in enumerate(tensors):
        start, stop = (
            min(max(-((begin - bound) // tensor.element_size()), 0), tensor.numel())
            for bound in (low, high)
        )
        begin += tensor.nbytes
        if start < stop:
            # A copy: torch.save would write the whole storage behind a view.
            yield number, start, tensor.reshape(-1)[start:stop].to("cpu", copy=True)


def _fingerprint(tree: Any, tensors: Sequence[torch.Tensor]) -> str:
    """Return a hash of the plain values and of some elements of every tensor.

    A few elements are enough: states that differ at all differ in nearly every element.
    """
    digest = hashlib.sha256(repr(tree).encode())
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.numel():
            some = tensor.reshape(-1)[:: max(1, tensor.numel() // _SAMPLES)]
            dense = some.cpu().clone(memory_format=torch.contiguous_format)
            digest.update(dense.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


TORCH_SHARDS = ShardFormat("torch", ".pt", shard_of, write, unpacked, merged, _is_tensor, lazy=True)
