"""Which chips each host of a job has: equal blocks that tile the mesh.

Knows shapes and numbers. The names and addresses of hosts belong to the schedulers.
"""

import itertools
from collections.abc import Mapping
from typing import Final

from meshmend.errors import InputError, TopologyError
from meshmend.topology.failures import (
    Block,
    Chip,
    board_shape,
    format_shape,
    parse_failure,
    parse_shape,
)
from meshmend.topology.mesh import Mesh

# The variables that hold the number of a host: Slurm's, and that of an indexed job of Kubernetes.
_HOST_NUMBERS: Final = ("SLURM_NODEID", "JOB_COMPLETION_INDEX")


def host_blocks(mesh: Mesh, shape: tuple[int, ...]) -> tuple[Block, ...]:
    """Return the blocks of this shape that tile a mesh, in row-major order of the blocks.

    Host number k has the k-th block. Failed chips are part of their block.

    Raises:
        InputError: the blocks do not tile the mesh.
    """
    fits = len(shape) == len(mesh.shape) and all(
        size > 0 and extent % size == 0 for extent, size in zip(mesh.shape, shape, strict=True)
    )
    if not fits:
        raise InputError(
            f"--hosts needs a block of chips that tiles the mesh {format_shape(mesh.shape)}, but "
            f"got {format_shape(shape)}; each extent of the mesh must be a multiple of the "
            "block's extent on that axis"
        )
    origins = itertools.product(
        *(range(0, extent, size) for extent, size in zip(mesh.shape, shape, strict=True))
    )
    return tuple(Block(shape, origin) for origin in origins)


def host_shape_from(text: str | None, mesh: Mesh) -> tuple[int, ...]:
    """Return the block of one host that a text names; without a text, 4x2 chips.

    Raises:
        InputError: the text is no shape.
    """
    if not text:
        return board_shape(len(mesh.shape), "host")
    try:
        return parse_shape(text)
    except ValueError:
        like = format_shape(board_shape(len(mesh.shape), "host"))
        raise InputError(
            f"--hosts needs a block of chips such as {like}, but got {text!r}"
        ) from None


def live_chips_of(block: Block, mesh: Mesh) -> tuple[Chip, ...]:
    """Return the chips of a block that are alive in a mesh, in row-major order."""
    return tuple(chip for chip in block.chips() if chip not in mesh.failed)


def own_chips_from(
    chips: str | None, hosts: str | None, environment: Mapping[str, str], mesh: Mesh
) -> tuple[Chip, ...]:
    """Return the live chips of this host: those that `--chips` names, or those of its block.

    `hosts` is the block of each host, which counts if no chips are named. The scheduler numbers the
    hosts.

    Raises:
        InputError: neither is given, or the scheduler has not numbered this host.
    """
    if chips is not None:
        return chips_from(chips, mesh)
    if not hosts:
        raise InputError(
            "meshmend agent needs either --chips, the chips of this host, or --hosts, the block of "
            "each host; it got neither"
        )
    blocks = host_blocks(mesh, host_shape_from(hosts, mesh))
    name = next((each for each in _HOST_NUMBERS if environment.get(each)), None)
    if name is None:
        raise InputError(
            f"--hosts needs the number of this host, but none of {', '.join(_HOST_NUMBERS)} is "
            "set; name its chips with --chips"
        )
    number = environment[name]
    if not number.isdecimal() or int(number) >= len(blocks):
        raise InputError(
            f"{name} needs the number of a host of {mesh}, from 0 to {len(blocks) - 1}, but it is "
            f"{number!r}; name the chips of this host with --chips"
        )
    return chips_from(str(blocks[int(number)]), mesh)


def chips_from(text: str, mesh: Mesh) -> tuple[Chip, ...]:
    """Return the live chips of the block that `--chips` names, such as 4x2@0,2.

    Raises:
        InputError: the text names no block inside the mesh, or a block without a live chip.
    """
    try:
        block = parse_failure(text)
    except TopologyError:
        block = None
    if not isinstance(block, Block) or not all(chip in mesh for chip in block.chips()):
        raise InputError(
            f"--chips needs a block inside the mesh {format_shape(mesh.shape)} such as "
            f"{_example(mesh)}, but got {text!r}"
        )
    chips = live_chips_of(block, mesh)
    if not chips:
        raise InputError(f"--chips needs a live chip, but all chips of {block} have failed")
    return chips


def _example(mesh: Mesh) -> Block:
    return Block(mesh.shape, (0,) * len(mesh.shape))
