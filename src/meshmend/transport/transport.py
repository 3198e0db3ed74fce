"""Describes a rank's part in a collective as a task, and the transports that run tasks.

A transport has `run(task, payload, timeout_s=...)`, which sends and receives what the task says;
`interrupt()`, which makes a run, or the next one, raise StoppedError; and `close()`.

    TransportError              a collective did not finish on this rank
    ├── PeerLostError           the connection to a rank broke, or it never came up
    ├── MismatchError           ranks do not agree on what they are doing
    ├── StoppedError            `interrupt` was called
    ├── StalledError            nothing moved for the time allowed
    └── HandshakeError          the other end did not prove that it knows the secret
"""

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshmend.transport.combine import DTYPES, OPS, combine_code, describe_code
from meshmend.transport.rank_program import Layout, RankProgram, layout_of

Bytes = NDArray[np.uint8]

ITEMSIZES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "uint8": 1}
_HALF_BYTES = 2


@dataclass(frozen=True, eq=False)
class Task:
    """One rank's part in a collective on payloads of one size and type; it can run many times.

    The fingerprint identifies the collective: size, type, operation and plan. All ranks must have
    the same.
    """

    program: RankProgram
    layout: Layout
    code: int
    n_bytes: int
    fingerprint: int


def task_of(
    program: RankProgram,
    n_elements: int,
    *,
    dtype: str = "float32",
    op: str = "sum",
    n_slices: int = 1,
) -> Task:
    """Return one rank's part in a collective on `n_elements` elements of a type.

    Raises:
        InputError: `combine` does not support the type or the operation.
    """
    code = combine_code(dtype, op)
    itemsize = ITEMSIZES.get(dtype, _HALF_BYTES)
    layout = layout_of(program, n_elements, itemsize=itemsize, n_slices=n_slices)
    schedule = program.schedule
    identity = f"{schedule.algorithm} {schedule.collective} {n_slices} {schedule.owners.tolist()}"
    n_bytes = n_elements * itemsize
    fingerprint = n_bytes << 24 | code << 16 | zlib.crc32(identity.encode()) & 0xFFFF
    return Task(program, layout, code, n_bytes, fingerprint)


def describe_fingerprint(fingerprint: int) -> str:
    """Return in words the collective that a fingerprint stands for."""
    code = fingerprint >> 16 & 0xFF
    known = code < len(DTYPES) * len(OPS)
    what = describe_code(code) if known else "something unknown"
    return f"{what} over {fingerprint >> 24} bytes (plan {fingerprint & 0xFFFF:04x})"
