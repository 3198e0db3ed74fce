"""`meshmend coordinator`: says who trains together, for workers on several hosts."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshmend.cli.console import note
from meshmend.cli.options import (
    FailOption,
    HeartbeatTimeoutOption,
    LinkTimeoutOption,
    MeshOption,
    StragglerTimeoutOption,
    WrapOption,
    mesh_of,
)
from meshmend.variables import SECRET

if TYPE_CHECKING:
    import socket

    from meshmend.membership.job_spec import JobSpec

JobOption = Annotated[
    str,
    typer.Option(
        "--job", metavar="NAME", help="The name of the job; workers of another job are refused."
    ),
]
BoardOption = Annotated[
    str | None,
    typer.Option(
        "--board",
        metavar="2x2",
        help="The chips that fail and come back together; 2x2 unless given.",
    ),
]
SecretOption = Annotated[
    Path | None,
    typer.Option(
        "--secret-file",
        metavar="FILE",
        help=f"A file with the text that all processes of the job must know; else {SECRET.name}.",
    ),
]


def coordinator_command(
    *,
    mesh: MeshOption,
    listen: Annotated[
        str,
        typer.Option(
            "--listen", metavar="HOST:PORT", help="The address of this host to listen on."
        ),
    ],
    wrap: WrapOption = "none",
    fail: FailOption = None,
    job: JobOption = "job",
    board: BoardOption = None,
    heartbeat_timeout: HeartbeatTimeoutOption = 2.0,
    straggler_timeout: StragglerTimeoutOption = 600.0,
    link_timeout: LinkTimeoutOption = 2.0,
    gather: Annotated[
        float,
        typer.Option("--gather", min=0.0, help="Seconds to wait for all chips at the beginning."),
    ] = 120.0,
    secret_file: SecretOption = None,
) -> int:
    """Say who trains together: the coordinator of workers that run on several hosts.

    Start it once, on a host that all workers can reach, and start one `meshmend worker` per chip.
    No step waits for it: if it is killed, training goes on. If it is started again at the same
    address, it learns the job from its workers. It ends when all workers have finished.

    **Example**

    - meshmend coordinator --mesh 4x4 --listen 10.0.0.1:7000
    """
    begin = mesh_of(mesh, wrap, fail)
    from meshmend.errors import TerminatedError
    from meshmend.launch.hosts import board_from, endpoint_from, secret_from
    from meshmend.launch.termination import TERMINATED, terminable
    from meshmend.membership.job_spec import JobSpec
    from meshmend.membership.timing import Timing
    from meshmend.net.listener import listening

    timing = Timing(
        heartbeat_timeout_s=heartbeat_timeout,
        straggler_timeout_s=straggler_timeout,
        gather_s=gather,
        link_timeout_s=link_timeout,
    )
    spec = JobSpec(job, begin, board_from(board, begin), timing)
    endpoint = endpoint_from(listen, "--listen")
    secret = secret_from(os.environ, secret_file).encode()
    with terminable():
        try:
            listener = listening(*endpoint)
            host, port = listener.getsockname()[:2]
            note(f"meshmend: the coordinator of job {job!r} on {begin} listens on {host}:{port}")
            _serve(listener, secret, spec)
        except TerminatedError:
            return TERMINATED
    note("meshmend: all workers have finished")
    return 0


def _serve(listener: "socket.socket", secret: bytes, spec: "JobSpec") -> None:
    from meshmend.cli.job_lines import JobLines
    from meshmend.membership.coordinator_server import CoordinatorServer

    # JobLines prints whom the coordinator refuses, so the log need not say it again.
    logging.getLogger("meshmend.membership.coordinator").setLevel(logging.ERROR)
    lines = JobLines(spec.mesh.n_chips)
    coordinator = CoordinatorServer(listener, secret, spec, on_event=lines.take)
    try:
        coordinator.serve()
    finally:
        coordinator.close()
