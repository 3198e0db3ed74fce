"""`meshmend coordinator`: decides which workers of several hosts train together."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshmend import __version__
from meshmend.cli.console import note
from meshmend.cli.json_log import set_log_context
from meshmend.cli.options import LogJsonOption
from meshmend.cli.settings import job_command
from meshmend.errors import InputError, TerminatedError

if TYPE_CHECKING:
    import socket

    from meshmend.config import JobConfig
    from meshmend.membership.coordinator_server import CoordinatorServer
    from meshmend.membership.job_spec import JobSpec
    from meshmend.transport.listener import Address
    from meshmend.transport.metrics_server import MetricsServer


@job_command("coordinator", needs=("mesh.shape",))
def coordinator_command(
    config: "JobConfig",
    *,
    listen: Annotated[
        str,
        typer.Option(
            "--listen", metavar="HOST:PORT", help="The address of this host to listen on."
        ),
    ],
    state: Annotated[
        Path | None,
        typer.Option(
            "--state",
            metavar="FILE",
            help="Keep what the next coordinator must know if this one dies; deleted at the end.",
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics",
            metavar="HOST:PORT",
            help="Serve metrics for Prometheus at http://HOST:PORT/metrics, to whoever asks.",
        ),
    ] = None,
    new: Annotated[
        bool, typer.Option("--new", help="Forget what an earlier coordinator left in --state.")
    ] = False,
    restarted: Annotated[
        bool,
        typer.Option(
            "--restarted",
            help="All workers of the run in --state are gone: go on from a checkpoint at once, or "
            "from the beginning if there is none.",
        ),
    ] = False,
    log_json: LogJsonOption = False,
) -> int:
    """Run the coordinator of a job: it decides which workers of several hosts train together.

    Start it once, on a host that all workers can reach, and start one `meshmend worker` per chip.
    No step waits for it: if it is killed, training goes on. If it is started again at the same
    address, it learns the job from its workers. It ends when all workers have finished.

    With --state it also remembers how far the job was when no worker is left. New workers then
    wait for a worker that holds that state, instead of silently training from step 0.

    **Examples**

    - meshmend coordinator --mesh 4x4 --listen 10.0.0.1:7000

    - meshmend coordinator --mesh 4x4 --listen 10.0.0.1:7000 --state /var/lib/job.json

    - meshmend coordinator --mesh 4x4 --listen 10.0.0.1:7000 --metrics 127.0.0.1:9090
    """
    job = config.job.name
    set_log_context(job=job)
    from meshmend.launch.hosts import board_from, endpoint_from, secret_from
    from meshmend.launch.termination import TERMINATED, terminable
    from meshmend.membership.job_spec import JobSpec
    from meshmend.topology.text import configured_mesh

    begin = configured_mesh(config.mesh)
    board = board_from(config.mesh.board, begin)
    spec = JobSpec(job, begin, board, config.timing, __version__)
    endpoint = endpoint_from(listen, "--listen")
    metrics_endpoint = endpoint_from(metrics, "--metrics") if metrics else None
    secret = secret_from(os.environ, config.job.secret_file).encode()
    if state is None and (new or restarted):
        raise InputError(
            f"{'--new' if new else '--restarted'} needs --state FILE, the record of an earlier run"
        )
    with terminable():
        try:
            listener, scraped = _listeners(endpoint, metrics_endpoint)
            host, port = listener.getsockname()[:2]
            note(f"meshmend: the coordinator of job {job!r} on {begin} listens on {host}:{port}")
            if state is not None:
                _report_record(state, job, forget=new, restarted=restarted)
            failure = _serve(
                listener,
                secret,
                spec,
                record=state,
                restarted=restarted,
                linger_s=config.timing.linger_s,
                scraped=scraped,
            )
        except TerminatedError:
            return TERMINATED
    outcome = f"the job did not finish: {failure}" if failure else "all workers have finished"
    note(f"meshmend: {outcome}")
    return 1 if failure else 0


def _listeners(
    endpoint: "Address", metrics_endpoint: "Address | None"
) -> "tuple[socket.socket, socket.socket | None]":
    """Return the sockets for workers and for scrapers; neither, if one cannot be had."""
    from meshmend.transport.listener import listening

    listener = listening(*endpoint)
    try:
        return listener, listening(*metrics_endpoint) if metrics_endpoint else None
    except InputError:
        listener.close()
        raise


def _report_record(file: Path, job: str, *, forget: bool, restarted: bool) -> None:
    """Print what an earlier coordinator recorded, if anything; with `forget`, delete it."""
    from meshmend.membership.record_file import load_history

    history = load_history(file, job)
    if history.is_new:
        return
    if forget:
        file.unlink(missing_ok=True)
        note(f"meshmend: forgot the earlier run recorded in {file}; the job begins again")
        return
    where = "unknown" if history.is_unknown else str(history.step)
    how = (
        "the job goes on from its newest checkpoint"
        if restarted
        else "workers wait for one that holds its state; to begin again, use --new"
    )
    note(f"meshmend: {file} records an earlier run, last known at step {where}; {how}")


def _serve(
    listener: "socket.socket",
    secret: bytes,
    spec: "JobSpec",
    *,
    record: Path | None,
    restarted: bool,
    linger_s: float,
    scraped: "socket.socket | None",
) -> str:
    """Serve until the job is over; return why it failed, or an empty text."""
    from contextlib import ExitStack

    from meshmend.cli.job_lines import JobLines
    from meshmend.membership.coordinator_server import CoordinatorServer

    # JobLines prints which workers the coordinator refuses, so the log need not repeat it.
    logging.getLogger("meshmend.membership.coordinator").setLevel(logging.ERROR)
    lines = JobLines(spec.mesh.n_chips)
    coordinator = CoordinatorServer(
        listener, secret, spec, record_file=record, restarted=restarted, on_event=lines.take
    )
    with ExitStack() as stack:
        stack.callback(coordinator.close)
        if scraped is not None:
            stack.callback(_serve_metrics(scraped, coordinator).close)
        coordinator.serve()
        if linger_s > 0 and not coordinator.failure:
            note(f"meshmend: the job is over; the coordinator stays for {linger_s:g} s")
            coordinator.linger(linger_s)
    return coordinator.failure


def _serve_metrics(scraped: "socket.socket", coordinator: "CoordinatorServer") -> "MetricsServer":
    """Begin to serve the metrics of a coordinator."""
    from meshmend.pages.report.metrics_text import CONTENT_TYPE, metrics_text
    from meshmend.transport.metrics_server import MetricsServer

    def read() -> str:
        snapshot = coordinator.snapshot()
        return metrics_text(snapshot.status, snapshot.traffic)

    server = MetricsServer(scraped, read, CONTENT_TYPE)
    host, port = scraped.getsockname()[:2]
    note(f"meshmend: metrics are at http://{host}:{port}/metrics")
    return server
