"""Writes a plan as Chakra execution traces, one file per rank, which ASTRA-sim reads.

A row becomes a send node at its source and a receive node at its destination, of one tag. Data
dependencies say what waits for what on a rank. The files are length-prefixed protobuf messages of
MLCommons' schema `et_def.proto`: its field numbers are below, so no protobuf package is needed.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from meshmend.errors import InputError
from meshmend.planning.plan import Plan

_MOST_MESSAGES: Final = 1 << 22  # rows x slices: about a gigabyte of files
_VERSION: Final = "0.0.4"  # of the schema, as its own generator writes it
_SEND_NODE, _RECV_NODE = 5, 6
# Fields of a node: number and wire type.
_ID, _NAME, _TYPE, _DATA_DEPS, _ATTR = 1, 2, 3, 5, 10
# Fields of an attribute: its name, and the value of a kind.
_ATTR_NAME, _INT32, _INT64, _BOOL = 1, 7, 9, 27


def write_chakra_traces(plan: Plan, folder: Path, *, slices: int = 1) -> list[Path]:
    """Write `meshmend.RANK.et` for each rank into a folder and return the paths.

    With `slices`, the payload is cut in so many pieces that each run the table. The sizes are those
    of the payload that the plan was made for.

    Raises:
        InputError: slices of less than a byte, or more rows or slices than traces can hold.
        UnsupportedError: the plan needs scratch buffers, which traces do not have.
    """
    n_rows, n_bytes = plan.schedule.n_rows, int(plan.target.payload_bytes)
    if n_rows > _MOST_MESSAGES:
        raise InputError(
            f"Chakra traces need a plan of at most {_MOST_MESSAGES} rows, but got {n_rows}; take "
            "a smaller mesh"
        )
    most = max(1, min(n_bytes, _MOST_MESSAGES // max(1, n_rows)))
    if not 1 <= slices <= most:
        raise InputError(
            f"Chakra traces of this plan, with {n_rows} rows and a payload of {n_bytes} bytes, "
            f"need from 1 to {most} slices, but got {slices}"
        )
    plan.schedule.refuse_scratch("a Chakra trace")
    plan.schedule.refuse_colours("a Chakra trace")
    folder.mkdir(parents=True, exist_ok=True)
    nodes = _nodes_by_rank(plan, slices)
    paths = []
    for rank, own in enumerate(nodes):
        path = folder / f"meshmend.{rank}.et"
        head = _text(1, _VERSION)
        path.write_bytes(b"".join(_prefixed(each) for each in (head, *own)))
        paths.append(path)
    return paths


def _nodes_by_rank(plan: Plan, slices: int) -> list[list[bytes]]:
    """Return the encoded nodes of each rank, in the order of the table.

    Row r of slice s is node 2(s rows + r) at its source and the next number at its destination, so
    numbers are unique, and dependencies are known without looking anything up.
    """
    schedule, hazards = plan.schedule, plan.hazards
    nodes: list[list[bytes]] = [[] for _ in range(schedule.n_ranks)]
    sizes = schedule.row_fractions() * (plan.target.payload_bytes / slices)
    for part in range(slices):
        first = 2 * part * schedule.n_rows
        for row in range(schedule.n_rows):
            src, dst = int(schedule.src[row]), int(schedule.dst[row])
            sent = first + 2 * row
            size, tag = round(float(sizes[row])), part * schedule.n_rows + row
            before_send = [first + 2 * each + 1 for each in hazards.before_send(row)]
            # At the destination an earlier row was sent from there, or received there.
            before_write = [
                first + 2 * each + int(schedule.src[each] != dst)
                for each in hazards.before_write(row)
            ]
            ends = (src, dst, tag, size)
            nodes[src].append(_node(sent, _SEND_NODE, f"send {row}.{part}", before_send, ends))
            nodes[dst].append(_node(sent + 1, _RECV_NODE, f"recv {row}.{part}", before_write, ends))
    return nodes


def _node(
    number: int, kind: int, name: str, waits_for: list[int], ends: tuple[int, int, int, int]
) -> bytes:
    src, dst, tag, size = ends
    parts = [_number(_ID, number), _text(_NAME, name), _number(_TYPE, kind)]
    if waits_for:
        parts.append(_bytes(_DATA_DEPS, b"".join(map(_varint, waits_for))))
    parts.append(_attribute("is_cpu_op", _BOOL, 0))
    for key, value in (("comm_src", src), ("comm_dst", dst), ("comm_tag", tag)):
        parts.append(_attribute(key, _INT32, value))
    parts.append(_attribute("comm_size", _INT64, size))
    return b"".join(parts)


def _attribute(name: str, field: int, value: int) -> bytes:
    return _bytes(_ATTR, _text(_ATTR_NAME, name) + _number(field, value))


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _text(field: int, words: str) -> bytes:
    return _bytes(field, words.encode())


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _prefixed(value)


def _prefixed(value: bytes) -> bytes:
    return _varint(len(value)) + value


def _varint(value: int) -> bytes:
    """Return a number of zero or more in groups of seven bits, the lowest first."""
    return bytes(_groups(value))


def _groups(value: int) -> Iterable[int]:
    while value > 127:
        yield value & 127 | 128
        value >>= 7
    yield value
