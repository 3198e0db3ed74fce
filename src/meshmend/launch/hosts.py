"""What a process that some launcher started on some host must find out: chip, address, secret.

Knows environments, files and addresses; nothing of torch, so that a coordinator needs none.
"""

import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from meshmend.errors import HandshakeError, InputError, TransportError
from meshmend.membership.coordinator_server import COORDINATOR, OBSERVER
from meshmend.net.handshake import ConnectRequest, Deadline, dial
from meshmend.net.listener import Address
from meshmend.net.secret import HOW_TO_MAKE, check_secret, secret_in
from meshmend.topology.failures import Chip, board_shape, format_shape, parse_shape
from meshmend.topology.mesh import Mesh
from meshmend.variables import SECRET

# Which task a process is and of how many, by launcher; the innermost first: torchrun, Slurm, and
# an indexed job of Kubernetes, which does not say how many.
_TASKS: Final = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("JOB_COMPLETION_INDEX", None),
)
_HOW_TO_NAME: Final = "name the chip with --chip R,C"


def secret_from(environment: Mapping[str, str], file: Path | None) -> str:
    """Return the job's secret: the content of a file if one is named, else the environment's.

    Raises:
        InputError: there is none, it is short, or others can read the file.
    """
    if file is not None:
        return secret_in(file)
    secret = SECRET.value_in(environment)
    if not secret:
        raise InputError(
            f"a job on several hosts needs a secret, but {SECRET.name} is not set; set it to the "
            f"same text everywhere, or name a file that holds it with --secret-file; {HOW_TO_MAKE}"
        )
    check_secret(secret, SECRET.name)
    return secret


def endpoint_from(text: str, option: str) -> Address:
    """Return the address that a HOST:PORT names.

    Raises:
        InputError: it cannot be read.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 0xFFFF:
        raise InputError(f"{option} needs HOST:PORT such as 10.0.0.1:7000, but got {text!r}")
    return host, int(port)


def chip_from(text: str | None, environment: Mapping[str, str], mesh: Mesh) -> Chip:
    """Return the chip that a text names, or else the live chip of the launcher's task.

    Raises:
        InputError: neither says, or it is none of the mesh.
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


def _live_chip(mesh: Mesh, name: str, number: str, n_tasks: str | None) -> Chip:
    if n_tasks is not None and n_tasks != str(mesh.n_live):
        raise InputError(
            f"{name} names a chip where there is a task per live chip, but there are {n_tasks} "
            f"tasks and {mesh} has {mesh.n_live} live chips; {_HOW_TO_NAME}"
        )
    if not number.isdecimal() or int(number) >= mesh.n_live:
        raise InputError(
            f"{name} names a live chip of {mesh} by a number from 0 to {mesh.n_live - 1}, but it "
            f"is {number!r}; {_HOW_TO_NAME}"
        )
    chip: Chip = mesh.live[int(number)]
    return chip


def board_from(text: str | None, mesh: Mesh) -> tuple[int, ...]:
    """Return the shape of a board: as written, or 2x2 on the first two axes, one chip on a line.

    Raises:
        InputError: it cannot be read, or has other axes than the mesh.
    """
    n_axes = len(mesh.shape)
    if text is None:
        return board_shape(n_axes)
    try:
        board = parse_shape(text)
    except ValueError:
        board = ()
    if len(board) != n_axes:
        like = format_shape((2,) * n_axes)
        raise InputError(f"--board needs a shape for {mesh} such as {like}, but got {text!r}")
    return board


def address_toward(endpoint: Address) -> str:
    """Return this host's address on the way to an endpoint: loopback if that is on loopback.

    Nothing is sent: a datagram socket is asked which address it would send from.

    Raises:
        InputError: there is no way there.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(endpoint)
            address: str = probe.getsockname()[0]
    except OSError as error:
        raise InputError(
            f"a worker needs a way to its coordinator, but {endpoint[0]} cannot be reached: "
            f"{error.strerror}; check --coordinator, or say where to listen with --bind"
        ) from None
    return address


def is_answered(endpoint: Address, secret: bytes, *, within_s: float) -> bool:
    """Return whether the coordinator answers now and knows the secret; False if nobody does.

    Raises:
        InputError: who answers does not know the secret.
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
