"""How a payload lies in the DRAM of the chips, and what it must be afterwards.

The payload is cut into slices and those into lanes: pieces of one length, the last one padded with
zeros. A piece runs the whole schedule. Blocks of a piece lie at their homes (`table.Region`).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.schedule.table import Collective, Schedule
from meshmend.transport import reference
from meshmend.wormhole.table import Program, Region

Arrays = list[NDArray[Any]]
Written = tuple[Region, NDArray[np.uint8]]  # the bytes of a region, all its slices


def scattered(program: Program, arrays: Sequence[NDArray[Any]]) -> Iterator[Written]:
    """Yield what the host writes into each region before the cores start.

    Raises:
        InputError: not one flat array of the program's length for each rank.
    """
    for rank, array in enumerate(arrays):
        if len(arrays) != program.n_ranks or array.shape != (program.n_elements,):
            raise InputError(
                f"the program needs {program.n_ranks} arrays of {program.n_elements} elements, but "
                f"got {len(arrays)}, and {array.shape} for rank {rank}"
            )
    for region in program.regions:
        pieces = _pieces(program, arrays[region.rank])[:, region.lane]
        yield region, _as_region(program, region, pieces)


def gathered(
    program: Program, read: Sequence[Written], dtype: "np.dtype[Any]"
) -> list[NDArray[Any]]:
    """Return each rank's payload from the bytes of all regions."""
    shape = (program.n_slices, program.n_lanes, program.piece_elements)
    wholes = [np.zeros(shape, dtype=dtype) for _ in range(program.n_ranks)]
    for region, data in read:
        lines = data.reshape(program.n_slices, region.stride)
        at = 0
        for number in region.blocks:
            block = program.blocks[number]
            n_bytes = (block.stop - block.start) * dtype.itemsize
            values = np.ascontiguousarray(lines[:, at : at + n_bytes]).view(dtype)
            wholes[region.rank][:, region.lane, block.start : block.stop] = values
            at += block.n_bytes
    return [whole.reshape(-1)[: program.n_elements] for whole in wholes]


def expected(
    program: Program, schedule: Schedule, arrays: Sequence[NDArray[Any]]
) -> tuple[Arrays, list[NDArray[np.bool_]]]:
    """Return what each rank holds afterwards, bit for bit, and where the collective defines it.

    Each piece runs through `meshmend.transport.reference`, which adds in the order of the rows. An
    all-gather takes of each array what its rank owns.
    """
    shape = (program.n_slices, program.n_lanes, program.piece_elements)
    n_pieces, dtype = program.n_slices * program.n_lanes, arrays[0].dtype
    owner = np.repeat(
        schedule.owners, np.diff(reference.element_bounds(schedule, program.piece_elements))
    )
    pieces = [_pieces(program, array).reshape(n_pieces, -1) for array in arrays]
    wholes = [np.zeros(shape, dtype=dtype).reshape(n_pieces, -1) for _ in arrays]
    for piece in range(n_pieces):
        given = [each[piece] for each in pieces]
        if schedule.collective is Collective.ALL_GATHER:
            given = [each[owner == rank] for rank, each in enumerate(given)]
        for rank, result in enumerate(reference.run(schedule, given)):
            if schedule.collective is Collective.REDUCE_SCATTER:
                wholes[rank][piece, owner == rank] = result
            else:
                wholes[rank][piece] = result
    everywhere = schedule.collective is not Collective.REDUCE_SCATTER
    defined = [
        np.broadcast_to(everywhere | (owner == rank), (n_pieces, len(owner)))
        for rank in range(len(arrays))
    ]
    n_elements = program.n_elements
    return (
        [whole.reshape(-1)[:n_elements] for whole in wholes],
        [each.reshape(-1)[:n_elements] for each in defined],
    )


def _pieces(program: Program, array: NDArray[Any]) -> NDArray[Any]:
    whole = np.zeros(program.n_slices * program.n_lanes * program.piece_elements, dtype=array.dtype)
    whole[: len(array)] = array
    return whole.reshape(program.n_slices, program.n_lanes, program.piece_elements)


def _as_region(program: Program, region: Region, pieces: NDArray[Any]) -> NDArray[np.uint8]:
    lines = np.zeros((program.n_slices, region.stride), dtype=np.uint8)
    at = 0
    for number in region.blocks:
        block = program.blocks[number]
        values = np.ascontiguousarray(pieces[:, block.start : block.stop]).view(np.uint8)
        lines[:, at : at + values.shape[1]] = values
        at += block.n_bytes
    return lines.reshape(-1)
