"""A training state as named arrays and JSON, and its one encoding: on disk and on the wire.

A *state* is what a training script has: nested dicts, lists and tuples of tensors and plain values.
A `StateTree` is the same state without its framework:

    arrays   name -> (RawArray, Placement): bytes, and which elements of the whole array they are
    values   JSON: the nesting, the plain values, and {"array": name} where an array belongs
    owned    JSON: the same for what each chip has a part of, such as a sharded optimizer's state

Names are paths, such as `optimizer.state.0.exp_avg`. A tensor that is in a state twice is one array
under one name, and comes back as one tensor.

**The bytes** are safetensors (https://huggingface.co/docs/safetensors), for other programs too:

    length of the JSON (8 bytes), the JSON with names, types, shapes and offsets, the arrays

Larger elements come first, so each is aligned. What safetensors does not know is under its key
`__metadata__`, in texts: `values` and `owned`; `pieces`, the placements of arrays that are not
whole; `types`, of arrays whose type the format lacks, which are stored as plain bytes. Nothing is
pickled: what is neither a tensor nor plain is refused by name.

**On the wire**, to a chip that joins, goes the encoding of the tree without its large arrays, and
then the bytes of each of these: see `train/core/state_transfer.py`. **On disk**, each chip's file
is the encoding of a `cut` of it, with more metadata: see `shards.py`. `merged` puts any number of
cuts together again, so what n chips wrote is read by any number of others. That is the one way to
reshard.

A `Framework` knows how tensors become `RawArray` and back, in three functions; nothing here imports
one.
"""

import json
import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import CheckpointDamageError, InputError
from meshmend.train.state.digest import BegunDigests, begun_digests, total_of

Bytes = NDArray[np.uint8]

METADATA: Final = "__metadata__"
_LARGE: Final = "large"  # in the metadata on the wire: arrays that come by themselves
_LENGTH: Final = struct.Struct("<Q")
_ALIGN: Final = 8
TYPES: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_TYPE_NAMES: Final = {code: name for name, code in TYPES.items()}


@dataclass(frozen=True, eq=False)
class RawArray:
    """A dense array in row-major order, of any framework: the name of its type, and its bytes.

    `read(start, stop)` returns the bytes of these elements, and copies no more than it must: of an
    array on a device, these elements. Arrays with equal `memory` are the same; None is equal to
    no other.
    """

    dtype: str
    shape: tuple[int, ...]
    element_bytes: int
    read: Callable[[int, int], Bytes]
    memory: object = None

    @classmethod
    def of(cls, dtype: str, shape: tuple[int, ...], data: Bytes) -> "RawArray":
        """Return an array whose bytes are at hand."""
        size = len(data) // max(1, math.prod(shape))
        return cls(dtype, shape, size, lambda start, stop: data[start * size : stop * size])

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        return self.n_elements * self.element_bytes

    @property
    def data(self) -> Bytes:
        """All bytes; they may share memory with the array."""
        return self.read(0, self.n_elements)

    def part(self, start: int, stop: int) -> "RawArray":
        """Return some of the elements, as a flat array."""
        read = self.read
        return RawArray(
            self.dtype,
            (stop - start,),
            self.element_bytes,
            lambda first, last: read(start + first, start + last),
        )


class Placement(NamedTuple):
    """Which elements of a whole array a part of it has: those from `first` on, in their order.

    With a `run` they are not in one row but in several, as some columns of a matrix are: each is a
    run long, and begins a `stride` after the one before.
    """

    first: int
    shape: tuple[int, ...]  # of the whole
    run: int = 0
    stride: int = 0

    def row(self, number: int, n_elements: int) -> tuple[int, int]:
        """Return the first element of a row of a part of so many elements, and how many it has."""
        return self.first + number * self.stride, self.run or n_elements

    def n_rows(self, n_elements: int) -> int:
        """Return how many rows a part of so many elements has."""
        return n_elements // self.run if self.run else 1

    def rows_in(self, start: int, stop: int, n_elements: int) -> range:
        """Return the rows of such a part that may have elements from `start` to before `stop`."""
        if not self.run:
            return range(1)
        before = max(0, (start - self.first - self.run) // self.stride + 1)
        return range(before, min(self.n_rows(n_elements), -((self.first - stop) // self.stride)))


Raw = Callable[[Any, str], RawArray | None]  # a leaf, and where it is
Shapes = dict[str, tuple[str, tuple[int, ...]]]  # the type and the shape of arrays by name
Arrays = dict[str, tuple[RawArray, Placement | None]]  # None: all of it


@dataclass(frozen=True)
class Part:
    """In a state, in place of a tensor: those of its elements that this chip holds.

    Other chips hold the others, or the same; the merged state has the tensor.
    """

    tensor: Any
    placement: Placement


@dataclass(frozen=True)
class OwnedPieces:
    """In a state, in place of a dict by parameter: what this chip owns of it.

    `shapes` are those of all parameters. A piece is (number of the parameter, its first element,
    values by name): flat tensors have one entry for each element of the piece, other values are for
    the whole parameter. The merged state has the dict, as if nothing had been sharded.
    """

    shapes: Sequence[tuple[int, ...]]
    pieces: Sequence[tuple[int, int, Mapping[str, Any]]]


@dataclass(frozen=True, eq=False)
class StateTree:
    """A state, or a cut of one, without its framework; see the top of this module."""

    arrays: Arrays
    values: Any
    owned: dict[str, list[Any]]  # by path: (number of the parameter, name, value)

    def state(self, tensor: Callable[[RawArray], Any]) -> Any:
        """Return the state of a tree whose arrays are whole, with `tensor(array)` for each."""
        return self.state_of({name: tensor(array) for name, (array, _) in self.arrays.items()})

    def state_of(self, tensors: Mapping[str, Any]) -> Any:
        """Return the state of a tree whose arrays are whole, with these tensors for them."""
        return self._restored(self.values, tensors)

    def _restored(self, value: Any, made: Mapping[str, Any]) -> Any:
        """Return the value that `_Flattening.described` has described."""
        if isinstance(value, list):
            return [self._restored(each, made) for each in value]
        if not isinstance(value, dict):
            return value
        if "array" in value:
            return made[value["array"]]
        if "tuple" in value:
            return tuple(self._restored(each, made) for each in value["tuple"])
        if "complex" in value:
            return complex(*value["complex"])
        if "owned" in value:
            by_parameter: dict[int, dict[str, Any]] = {}
            for number, key, each in sorted(self.owned[value["owned"]], key=itemgetter(0)):
                by_parameter.setdefault(number, {})[key] = self._restored(each, made)
            return by_parameter
        pairs = ((key, self._restored(each, made)) for key, each in value["dict"])
        if "versions" not in value:
            return dict(pairs)
        of_module: OrderedDict[str, Any] = OrderedDict(pairs)
        vars(of_module)["_metadata"] = OrderedDict(self._restored(value["versions"], made))
        return of_module

    def cut(self, number: int, n_cuts: int) -> "StateTree":
        """Return this chip's cut of a state that all chips have: a range of all its bytes.

        The sizes of cuts differ by at most two elements. The first has the values, and the arrays
        without elements. What this chip owns stays whole.
        """
        total = sum(array.n_bytes for array, place in self.arrays.values() if place is None)
        low, high = total * number // n_cuts, total * (number + 1) // n_cuts
        arrays: Arrays = {}
        begin = 0
        for name, (array, place) in self.arrays.items():
            if place is not None:
                arrays[name] = array, place
                continue
            start, stop = (
                min(max(-((begin - bound) // max(1, array.element_bytes)), 0), array.n_elements)
                for bound in (low, high)
            )
            begin += array.n_bytes
            if stop - start == array.n_elements and (array.n_elements or number == 0):
                arrays[name] = array, None
            elif start < stop:
                arrays[name] = array.part(start, stop), Placement(start, array.shape)
        return StateTree(arrays, self.values if number == 0 else None, self.owned)


def merged(trees: Sequence[StateTree]) -> StateTree:
    """Return the tree that these are all the cuts of; its arrays are put together when read.

    Raises:
        CheckpointDamageError: an element is missing, or is in two different parts.
    """
    parts: dict[str, list[tuple[Placement, RawArray]]] = {}
    for tree in trees:
        for name, (array, placement) in tree.arrays.items():
            place = placement or Placement(0, array.shape)
            parts.setdefault(name, []).append((place, array))
    owned: dict[str, list[Any]] = {}
    for tree in trees:
        for path, entries in tree.owned.items():
            owned.setdefault(path, []).extend(entries)
    arrays: Arrays = {name: (_whole(name, each), None) for name, each in parts.items()}
    missing = set(_array_names([trees[0].values, *owned.values()])) - set(arrays)
    if missing:
        raise CheckpointDamageError(f"its shards lack a part of the state: {min(missing)}")
    return StateTree(arrays, trees[0].values, owned)


def _whole(name: str, parts: list[tuple[Placement, RawArray]]) -> RawArray:
    """Return an array that is put together from its parts.

    A part may be there several times: chips along an axis that does not split it have the same,
    and what belongs to a whole parameter has each chip that owns a piece of it.
    """
    parts = list({(place, array.n_elements): (place, array) for place, array in parts}.values())
    place, one = parts[0]
    shape, size = place.shape, one.element_bytes
    if len(parts) == 1 and place.first == 0 and one.n_elements == math.prod(shape):
        return RawArray(one.dtype, shape, size, one.read)
    known = _known_up_to([each for each in parts if each[0].shape == shape], one.dtype)
    if known != math.prod(shape):
        raise CheckpointDamageError(f"its shards lack a part of the state: {name} from {known} on")

    def read(start: int, stop: int) -> Bytes:
        found = np.empty((stop - start) * size, dtype=np.uint8)
        for place, array in parts:
            for number in place.rows_in(start, stop, array.n_elements):
                begin, n_elements = place.row(number, array.n_elements)
                first, last = max(start, begin), min(stop, begin + n_elements)
                if first < last:
                    at = number * n_elements - begin
                    goal = slice((first - start) * size, (last - start) * size)
                    found[goal] = array.read(at + first, at + last)
        return found

    return RawArray(one.dtype, shape, size, read)


def _known_up_to(parts: list[tuple[Placement, RawArray]], dtype: str) -> int:
    """Return the first element that is in none of the parts or in two; else how many there are."""
    rows = np.array(
        [
            place.row(number, array.n_elements)
            for place, array in parts
            if array.dtype == dtype
            for number in range(place.n_rows(array.n_elements))
        ]
    )
    starts, lengths = rows[np.argsort(rows[:, 0])].T
    stops = np.concatenate([[0], starts + lengths])
    (breaks,) = np.nonzero(starts != stops[:-1])
    return int(stops[breaks[0] if len(breaks) else -1])


# From a state to a tree and back.


def tree_of(state: Any, raw: Raw) -> StateTree:
    """Return a state as a tree; `raw(leaf, where)` returns a tensor's array, None for others.

    Raises:
        InputError: the state holds something that is neither a tensor nor a plain value.
    """
    found = _Flattening(raw)
    values = found.described(state, "", "state")
    return StateTree(found.arrays, values, found.owned)


class _Flattening:
    """Collects the arrays of a state and describes the rest."""

    def __init__(self, raw: Raw) -> None:
        self.arrays: Arrays = {}
        self.owned: dict[str, list[Any]] = {}
        self._raw = raw
        self._name_of: dict[object, str] = {}  # by memory

    def described(self, value: Any, name: str, where: str) -> Any:
        """Return a value as JSON; `name` is its path in names of arrays, `where` in Python."""
        if isinstance(value, np.generic):
            value = value.item()  # a number of NumPy is a number
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        if isinstance(value, Mapping):
            pairs = [
                [_key(key, where), self.described(each, _joined(name, key), f"{where}[{key!r}]")]
                for key, each in value.items()
            ]
            # The state_dict of a module keeps the versions of its layers in this attribute.
            versions = getattr(value, "_metadata", None)
            if versions is None:
                return {"dict": pairs}
            return {"dict": pairs, "versions": self.described(dict(versions), name, where)}
        if isinstance(value, list | tuple):
            each_of = [
                self.described(each, _joined(name, at), f"{where}[{at}]")
                for at, each in enumerate(value)
            ]
            return each_of if isinstance(value, list) else {"tuple": each_of}
        if isinstance(value, OwnedPieces):
            self.owned[name] = list(self._pieces(value, name, where))
            return {"owned": name}
        if isinstance(value, Part):
            return {"array": self._part(value, name, where)}
        array = value if isinstance(value, RawArray) else self._raw(value, where)
        if array is not None:
            return {"array": self._add(array, name)}
        raise InputError(
            f"a training state needs tensors, numbers, texts, lists, tuples and dicts, but {where} "
            f"is a {type(value).__name__}; leave it out of the state_dict, or store what it is "
            "made from"
        )

    def _part(self, part: Part, name: str, where: str) -> str:
        array = self._raw(part.tensor, where)
        assert array is not None, f"{where} is no tensor"
        if array.n_elements == 0 and 0 not in part.placement.shape:
            return name  # all of it is in the parts of others
        return self._new(array.part(0, array.n_elements), name, part.placement)

    def _pieces(self, owned: OwnedPieces, name: str, where: str) -> Iterator[list[Any]]:
        for number, first, values in owned.pieces:
            for key, value in values.items():
                path = f"{name}.{number}.{key}"
                array = self._raw(value, where)
                if array is None:
                    yield [number, key, self.described(value, path, f"{where}[{number}][{key!r}]")]
                    continue
                is_by_element = len(array.shape) == 1
                place = (first, owned.shapes[number]) if is_by_element else (0, array.shape)
                yield [number, key, {"array": self._new(array, path, Placement(*place))}]

    def _add(self, array: RawArray, name: str) -> str:
        """Return the name of an array; adds it unless it is there under another name."""
        if array.memory is None or not array.n_elements:
            return self._new(array, name, None)
        if array.memory not in self._name_of:
            self._name_of[array.memory] = self._new(array, name, None)
        return self._name_of[array.memory]

    def _new(self, array: RawArray, name: str, place: Placement | None) -> str:
        """Add an array; return its name, which nothing else has."""
        free, n_tried = name or "value", 1
        while free in self.arrays or free == METADATA:
            n_tried += 1
            free = f"{name}~{n_tried}"
        self.arrays[free] = array, place
        return free


def _joined(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _key(key: Any, where: str) -> Any:
    if key is None or isinstance(key, bool | int | float | str):
        return key
    raise InputError(
        f"a training state needs texts and numbers as keys, but {where} has a "
        f"{type(key).__name__}: {key!r}"
    )


def _array_names(value: Any) -> Iterator[str]:
    """Yield the names of the arrays that a description refers to."""
    if isinstance(value, list):
        for each in value:
            yield from _array_names(each)
    elif isinstance(value, dict):
        if "array" in value:
            yield value["array"]
        else:
            for each in value.values():
                yield from _array_names(each)


def map_state(change: Any, state: Any) -> Any:
    """Return a nested state with `change(leaf)` in place of each leaf."""
    if isinstance(state, dict):
        return {key: map_state(change, value) for key, value in state.items()}
    if isinstance(state, list):
        return [map_state(change, value) for value in state]
    if isinstance(state, tuple):
        return tuple(map_state(change, value) for value in state)
    return change(state)


# From a tree to bytes and back.


def encoded(tree: StateTree, metadata: Mapping[str, str] | None = None) -> Bytes:
    """Return a tree as bytes that `decoded` reads, a copy; `metadata` comes first in them."""
    placements = {
        name: place if place.run else place[:2]
        for name, (_, place) in tree.arrays.items()
        if place is not None
    }
    arrays = {name: array for name, (array, _) in tree.arrays.items()}
    types = {name: array.dtype for name, array in arrays.items() if array.dtype not in TYPES}
    texts = dict(metadata or {}) | {"values": _text(tree.values)}
    texts |= {"owned": _text(tree.owned)} if tree.owned else {}
    texts |= {"pieces": _text(placements)} if placements else {}
    texts |= {"types": _text(types)} if types else {}
    head, order = header(arrays, texts)
    at = len(head)
    data = np.empty(at + sum(array.n_bytes for array in arrays.values()), dtype=np.uint8)
    data[:at] = np.frombuffer(head, dtype=np.uint8)
    for name in order:
        array = arrays[name]
        data[at : at + array.n_bytes] = array.data
        at += array.n_bytes
    return data


def header(arrays: Mapping[str, RawArray], metadata: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """Return the bytes before the arrays of a file of safetensors, and the order of these."""
    order = sorted(arrays, key=lambda name: -arrays[name].element_bytes)
    head: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    at = 0
    for name in order:
        array = arrays[name]
        stop = at + array.n_bytes
        is_known = array.dtype in TYPES
        head[name] = {
            "dtype": TYPES[array.dtype] if is_known else "U8",
            "shape": array.shape if is_known else (*array.shape, array.element_bytes),
            "data_offsets": (at, stop),
        }
        at = stop
    text = _text(head).encode()
    text += b" " * (-len(text) % _ALIGN)
    return _LENGTH.pack(len(text)) + text, order


def decoded(data: Bytes) -> tuple[StateTree, dict[str, str]]:
    """Return the tree that `encoded` wrote, and the metadata; its arrays are views of the bytes.

    Raises:
        ValueError: it has not written these bytes.
    """
    (length,) = _LENGTH.unpack_from(data.data)
    begin = _LENGTH.size + length
    head = json.loads(bytes(data[_LENGTH.size : begin]))
    metadata = head.pop(METADATA)
    placements, types, owned = (
        json.loads(metadata.pop(key, "{}")) for key in ("pieces", "types", "owned")
    )
    arrays: Arrays = {}
    for name, entry in head.items():
        start, stop = entry["data_offsets"]
        shape = tuple(entry["shape"])
        dtype = types.get(name)
        if dtype is None:
            dtype = _TYPE_NAMES[entry["dtype"]]
        else:
            shape = shape[:-1]
        array = RawArray.of(dtype, shape, data[begin + start : begin + stop])
        place = placements.get(name)
        arrays[name] = array, place and Placement(place[0], tuple(place[1]), *place[2:])
    return StateTree(arrays, json.loads(metadata.pop("values")), owned), metadata


def encoded_without(tree: StateTree, large: Mapping[str, RawArray]) -> Bytes:
    """Return a tree without some of its arrays as bytes; `decoded_without` reads them."""
    arrays = {name: array for name, array in tree.arrays.items() if name not in large}
    shapes: Shapes = {name: (array.dtype, array.shape) for name, array in large.items()}
    return encoded(StateTree(arrays, tree.values, tree.owned), {_LARGE: _text(shapes)})


def decoded_without(data: Bytes) -> tuple[StateTree, Shapes]:
    """Return the tree that `encoded_without` wrote, and the shapes of the arrays that it lacks."""
    tree, metadata = decoded(data)
    shapes = json.loads(metadata[_LARGE])
    return tree, {name: (dtype, tuple(shape)) for name, (dtype, shape) in shapes.items()}


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


# A tensor of a type and shape, and its memory, which is to be filled.
Room = Callable[[str, tuple[int, ...], Any], tuple[Any, Bytes]]


def _no_room(dtype: str, shape: tuple[int, ...], own: Any) -> tuple[Any, Bytes]:
    raise InputError("states of no framework are read, and not received")


@dataclass(frozen=True)
class Framework:
    """How the tensors of a framework become arrays and back, and so its states bytes and back.

    `raw(leaf, where)` returns the array of a tensor, and None for what is none; InputError names
    where a tensor is that is not dense. `tensor(array)` returns a tensor. `room(dtype, shape, own)`
    returns a tensor and its memory, to be filled: `own` if it is such a tensor, in one piece of the
    host's memory, else a new one. Optimizers that are `lazy` make theirs in their first step.
    """

    name: str
    raw: Raw
    tensor: Callable[[RawArray], Any]
    room: Room = _no_room
    lazy: bool = False

    def packed(self, state: Any) -> Bytes:
        """Return a state as bytes that `unpacked` reads.

        Raises:
            InputError: the state holds something that is neither a tensor nor a plain value.
        """
        return encoded(tree_of(state, self.raw))

    def unpacked(self, data: Bytes) -> Any:
        """Return the state that `packed` wrote."""
        return decoded(data)[0].state(self.tensor)

    def digest(self, state: Any) -> str:
        """Return a hash of all of a state: the bits of its tensors, and its plain values."""
        return total_of(self.begun_digest(state).wait())

    def begun_digest(self, state: Any) -> BegunDigests:
        """Begin to hash each tensor of a state by its name; plain values are in words."""
        return begun_digests(state, self.raw)


# For tools that need no framework: tensors are `RawArray`s.
AS_BYTES: Final = Framework("none", lambda leaf, where: None, lambda array: array)


Array = NDArray[Any]


def _raw_of_numpy(leaf: Any, where: str) -> RawArray | None:
    if not isinstance(leaf, np.ndarray):
        return None

    def read(start: int, stop: int) -> Bytes:
        return np.ascontiguousarray(leaf.reshape(-1)[start:stop]).view(np.uint8)

    return RawArray(str(leaf.dtype), leaf.shape, leaf.itemsize, read)


def _numpy_of_raw(array: RawArray) -> Array:
    """Return an array; if it can, it shares its memory."""
    return array.data.view(np.dtype(array.dtype)).reshape(array.shape)


def _numpy_room(dtype: str, shape: tuple[int, ...], own: Any) -> tuple[Array, Bytes]:
    """Return an array to be filled; those of JAX cannot be written to, so it is a new one."""
    found = np.empty(shape, dtype=np.dtype(dtype))
    return found, found.reshape(-1).view(np.uint8)


# JAX's arrays become NumPy's, without a copy on a CPU.
ARRAYS: Final = Framework("jax", _raw_of_numpy, _numpy_of_raw, _numpy_room)
