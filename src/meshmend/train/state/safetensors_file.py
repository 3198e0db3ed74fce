"""Writes files of the format safetensors, from arrays of any framework; imports none.

    length of the JSON (8 bytes), the JSON with names, types, shapes and offsets, the arrays

See https://huggingface.co/docs/safetensors. Larger elements come first, so each is aligned.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from meshmend.errors import InputError
from meshmend.files import write_whole
from meshmend.train.state.raw_state import RawArray

_ALIGN: Final = 8
_DTYPES: Final = {
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


def write_safetensors(
    file: Path, arrays: Mapping[str, RawArray], metadata: Mapping[str, str]
) -> None:
    """Write arrays by name to a file, which is complete or absent.

    Raises:
        InputError: an array has a type that the format lacks, or the file cannot be written.
    """
    order = sorted(arrays, key=lambda name: (-_element_bytes(arrays[name]), name))
    head, at = {"__metadata__": dict(metadata)} if metadata else {}, 0
    for name in order:
        array = arrays[name]
        stop = at + len(array.data)
        head[name] = _description(name, array, at, stop)
        at = stop
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % _ALIGN)

    def write(stream: BinaryIO) -> None:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            stream.write(arrays[name].data.data)

    try:
        write_whole(file, write)
    except OSError as error:
        raise InputError(f"cannot write {file}: {error.strerror}") from None


def _description(name: str, array: RawArray, start: int, stop: int) -> dict[str, Any]:
    if array.dtype not in _DTYPES:
        raise InputError(
            f"safetensors has no type for {name}, which is {array.dtype}; leave it out with --what "
            "model, or export with --format dcp"
        )
    shape = list(array.shape)
    return {"dtype": _DTYPES[array.dtype], "shape": shape, "data_offsets": [start, stop]}


def _element_bytes(array: RawArray) -> int:
    n_elements = 1
    for length in array.shape:
        n_elements *= length
    return len(array.data) // n_elements if n_elements else 0
