"""A real coordinator in a thread of the test, of a job that waits for its workers."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from meshmend.membership.coordinator_server import CoordinatorServer
from meshmend.membership.job import JobSpec
from meshmend.topology.text import parse_mesh
from meshmend.transport.listener import Address, listening
from waiting import HANG_S


@contextmanager
def served_coordinator(
    mesh: str, secret: bytes, address: Address = ("127.0.0.1", 0)
) -> Iterator[Address]:
    """Yield the address of the coordinator of the job `ours`."""
    listener = listening(*address)
    shape = parse_mesh(mesh)
    server = CoordinatorServer(listener, secret, JobSpec("ours", shape, (1,) * len(shape.shape)))
    serving = threading.Thread(target=server.serve, daemon=True)
    serving.start()
    try:
        yield listener.getsockname()[:2]
    finally:
        server.stop()
        serving.join(HANG_S)
        server.close()
