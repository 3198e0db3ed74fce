"""Help for the tests that make real networks."""

import functools
import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from meshmend.errors import TestbedError
from meshmend.lab.testbed.bed import Testbed
from meshmend.lab.testbed.holder import FIRST_NAMESPACE
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh
from waiting import HANG_S

BANDWIDTH = 10e6 / 8
PORT = 4000


@functools.cache
def why_not() -> str | None:
    """Return why this machine cannot make a testbed, or None."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, MESHMEND_TESTBED_DIR=f"{folder}/run"),
    ):
        try:
            Testbed.up(Mesh((1, 2)), link_bandwidth=BANDWIDTH).down()
        except TestbedError as error:
            return str(error)
    return None


def require_testbed() -> None:
    """Skip the test where the kernel grants no testbed."""
    if reason := why_not():
        pytest.skip(reason)


def namespaces(bed: Testbed) -> set[int]:
    """Return what identifies the namespaces of a testbed while it is up."""
    n_chips = Mesh(bed.shape).n_chips
    paths = (Path(f"/proc/{bed.holder}/fd/{FIRST_NAMESPACE + chip}") for chip in range(n_chips))
    return {path.stat().st_ino for path in paths}


def processes_in(inodes: set[int]) -> list[int]:
    """Return the processes whose network namespace is one of these."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "ns/net").stat().st_ino in inodes:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def next_hops(bed: Testbed, chip: Chip) -> dict[str, str]:
    """Return what the kernel of a chip says: destination address to next address."""
    shown = bed.run(chip, ["ip", "-json", "route"], capture_output=True, check=True)
    return {route["dst"]: route["gateway"] for route in json.loads(shown.stdout)}


def on_chip(bed: Testbed, chip: Chip, work: Callable[[], None]) -> int:
    """Fork a child that enters a chip and works there; return its process number."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.alarm(round(HANG_S))  # whatever goes wrong, no child outlives its test
        bed.enter(chip)
        work()
        code = 0
    except OSError as error:
        os.write(2, f"on {chip}: {error}\n".encode())
    finally:
        os._exit(code)


def exit_code(child: int) -> int:
    """Wait for a child and return its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextmanager
def servers(bed: Testbed, chips: Iterable[Chip]) -> Iterator[None]:
    """Accept TCP connections on port 4000 of these chips meanwhile."""
    reader, writer = os.pipe()

    def serve(chip: Chip) -> None:
        with socket.create_server((bed.address(chip), PORT)) as server:
            os.write(writer, b"!")
            while True:
                server.accept()[0].close()

    children = [on_chip(bed, chip, functools.partial(serve, chip)) for chip in chips]
    os.close(writer)
    with os.fdopen(reader, "rb") as ready:
        assert len(ready.read(len(children))) == len(children)
    try:
        yield
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            exit_code(child)


def can_connect(
    bed: Testbed, source: Chip, goal: Chip, *, ttl: int = 64, timeout_s: float = HANG_S / 10
) -> bool:
    """Return whether a TCP connection from one chip to another comes about."""

    def connect() -> None:
        with socket.socket() as client:
            client.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, ttl)
            client.settimeout(timeout_s)
            client.connect((bed.address(goal), PORT))

    with servers(bed, [goal]):
        return exit_code(on_chip(bed, source, connect)) == 0


def cannot_connect(bed: Testbed, source: Chip, goal: Chip, *, ttl: int = 64) -> bool:
    """Return whether no TCP connection from one chip to another comes about in a second."""
    return not can_connect(bed, source, goal, ttl=ttl, timeout_s=1.0)


def interfaces() -> str:
    """Return the interfaces of the machine itself."""
    return subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True).stdout
