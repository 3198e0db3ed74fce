"""Where a process of a job on several hosts is: its chips, its address, its secret.

Reads what torchrun, Slurm or Kubernetes tells a process that it started: environment variables,
files and addresses. A host has one of the equal blocks that tile the mesh; names and addresses of
hosts belong to the schedulers. Does not import torch, so that a coordinator can run without it.
"""

import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from meshmend.config import SECRET, JobConfig
from meshmend.errors import HandshakeError, InputError, TopologyError, TransportError
from meshmend.membership.messages import COORDINATOR, OBSERVER
from meshmend.topology.failures import (
    Block,
    Chip,
    blocks_over,
    board_shape,
    format_shape,
    parse_failure,
    parse_shape,
)
from meshmend.transport.handshake import (
    HOW_TO_MAKE,
    ConnectRequest,
    Deadline,
    check_secret,
    dial,
    secret_in,
)
from meshmend.transport.listener import Address

if TYPE_CHECKING:
    from meshmend.topology.mesh import Mesh


# The variables that hold the number of a task and the count of tasks, the innermost launcher first:
# torchrun, Slurm, and an indexed job of Kubernetes, which sets no count.
_TASKS: Final = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("JOB_COMPLETION_INDEX", None),
)
_ANSWER_S: Final = 2.0
_HOW_TO_NAME: Final = "name the chip with --chip R,C"


def secret_from(environment: Mapping[str, str], file: Path | str | None) -> str:
    """Return the job's secret: the content of a file if one is named, else of the environment.

    Raises:
        InputError: there is no secret, it is too short, or other users can read the file.
    """
    if file:
        return secret_in(Path(file))
    secret = SECRET.value_in(environment)
    if not secret:
        raise InputError(
            f"a job on several hosts needs a secret, but {SECRET.name} is not set; set it to the "
            f"same text everywhere, or name a file that holds it with --secret-file; {HOW_TO_MAKE}"
        )
    check_secret(secret, SECRET.name)
    return secret


def chip_from(text: str | None, environment: Mapping[str, str], mesh: "Mesh") -> Chip:
    """Return the chip that a text names; without a text, the live chip of the launcher's task.

    Raises:
        InputError: there is neither a text nor a task, or the mesh has no such chip.
    """
    if text is not None:
        try:
            chip = tuple(int(part) for part in text.split(","))
        except ValueError:
            chip = ()
        if chip not in mesh:
            raise InputError(f"--chip needs a chip of {mesh} such as 0,1, but got {text!r}")
        return chip
    for number, count in _TASKS:
        if environment.get(number):
            n_tasks = environment.get(count) if count else None
            return _live_chip(mesh, number, environment[number], n_tasks)
    names = ", ".join(number for number, _ in _TASKS)
    raise InputError(f"a worker needs its chip, but none of {names} is set; {_HOW_TO_NAME}")


def _live_chip(mesh: "Mesh", name: str, number: str, n_tasks: str | None) -> Chip:
    if n_tasks is not None and n_tasks != str(mesh.n_live):
        raise InputError(
            f"{name} names a chip only if there is one task per live chip, but there are {n_tasks} "
            f"tasks and {mesh} has {mesh.n_live} live chips; {_HOW_TO_NAME}"
        )
    if not number.isdecimal() or int(number) >= mesh.n_live:
        raise InputError(
            f"{name} needs the number of a live chip of {mesh}, from 0 to {mesh.n_live - 1}, but "
            f"it is {number!r}; {_HOW_TO_NAME}"
        )
    chip: Chip = mesh.live[int(number)]
    return chip


def board_from(text: str | None, mesh: "Mesh") -> tuple[int, ...]:
    """Return the shape of a board that a text names; without a text, the default of `board_shape`.

    Raises:
        InputError: the text is no shape, or its number of axes differs from the mesh's.
    """
    n_axes = len(mesh.shape)
    if not text:
        return board_shape(n_axes)
    try:
        board = parse_shape(text)
    except ValueError:
        board = ()
    if len(board) != n_axes:
        like = format_shape((2,) * n_axes)
        raise InputError(f"--board needs a shape for {mesh} such as {like}, but got {text!r}")
    return board


def with_whole_paths(config: JobConfig) -> JobConfig:
    """Return the settings of a job with folders that a process in another folder finds too."""
    paths = ("job.run_dir", "job.ready_dir")
    return config.with_({key: str(Path(at).absolute()) for key in paths if (at := config.get(key))})


def address_toward(endpoint: Address) -> str:
    """Return the address from which this host reaches an endpoint; loopback for loopback.

    Nothing is sent: connecting a datagram socket only makes the kernel choose its address.

    Raises:
        InputError: this host has no route to the endpoint.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(endpoint)
            address: str = probe.getsockname()[0]
    except OSError as error:
        raise InputError(
            f"a worker needs a route to its coordinator, but {endpoint[0]} cannot be reached: "
            f"{error.strerror}; check --coordinator, or name the address to listen on with --bind"
        ) from None
    return address


def is_answered(endpoint: Address, secret: bytes, *, within_s: float) -> bool:
    """Return whether the coordinator answers within this time, and proves that it knows the secret.

    Raises:
        InputError: the process that answers does not know the secret.
    """
    request = ConnectRequest(OBSERVER, COORDINATOR)
    try:
        dial(endpoint, secret, request, Deadline(time.monotonic() + within_s)).close()
    except HandshakeError as error:
        raise InputError(
            f"a worker and its coordinator need the same secret, but at {endpoint[0]}:"
            f"{endpoint[1]} {error}"
        ) from None
    except TransportError:
        return False
    return True


def is_coordinator_answering(address: Address, secret: bytes) -> bool:
    """Return whether the coordinator answers soon; False if another process has its port."""
    with suppress(InputError):
        return is_answered(address, secret, within_s=_ANSWER_S)
    return False


# The variables that hold the number of a host: Slurm's, and that of an indexed job of Kubernetes.
_HOST_NUMBERS: Final = ("SLURM_NODEID", "JOB_COMPLETION_INDEX")


def host_blocks(mesh: "Mesh", shape: tuple[int, ...]) -> tuple[Block, ...]:
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
    return tuple(blocks_over(mesh.shape, shape))


def host_shape_from(text: str | None, mesh: "Mesh") -> tuple[int, ...]:
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


def live_host_blocks(mesh: "Mesh", shape: tuple[int, ...]) -> tuple[Block, ...]:
    """Return the blocks of `host_blocks` that have a live chip: those that need a host."""
    return tuple(block for block in host_blocks(mesh, shape) if live_chips_of(block, mesh))


def live_chips_of(block: Block, mesh: "Mesh") -> tuple[Chip, ...]:
    """Return the chips of a block that are alive in a mesh, in row-major order."""
    return tuple(chip for chip in block.chips() if chip not in mesh.failed)


def own_chips_from(
    chips: str | None, hosts: str | None, environment: Mapping[str, str], mesh: "Mesh"
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


def chips_from(text: str, mesh: "Mesh") -> tuple[Chip, ...]:
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
            f"{Block(mesh.shape, (0,) * len(mesh.shape))}, but got {text!r}"
        )
    chips = live_chips_of(block, mesh)
    if not chips:
        raise InputError(f"--chips needs a live chip, but all chips of {block} have failed")
    return chips
