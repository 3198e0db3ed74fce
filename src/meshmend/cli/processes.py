"""The processes of a job on several hosts, as any launcher starts them.

`meshmend coordinator` decides who trains together, `meshmend worker` runs one chip, `meshmend
agent` runs all chips of a host and starts those again that die.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshmend import __version__
from meshmend.cli.console import compile_for_workers, note, set_log_context
from meshmend.cli.options import (
    CoordinatorOption,
    LogJsonOption,
    ModuleOption,
    ScriptArgument,
    ScriptArguments,
    check_script,
    job_command,
)
from meshmend.errors import InputError, TerminatedError

if TYPE_CHECKING:
    import socket

    from meshmend.config import JobConfig
    from meshmend.launch.host_agent import HostWorkers
    from meshmend.launch.worker import Script
    from meshmend.membership.coordinator_server import CoordinatorServer
    from meshmend.membership.events import Event
    from meshmend.membership.job import JobSpec
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

    With --run-dir it writes the events of the run to that folder, and at the end its report. If
    the workers have the same --run-dir on a file system that all see, the report says of every
    sample whether it was used once.

    **Examples**

    - meshmend coordinator --mesh 4x4 --listen 10.0.0.1:7000

    - meshmend coordinator --mesh 4x4 --listen 10.0.0.1:7000 --state /var/lib/job.json

    - meshmend coordinator --mesh 4x4 --listen 10.0.0.1:7000 --run-dir /shared/run-1

    - meshmend coordinator --mesh 4x4 --listen 10.0.0.1:7000 --metrics 127.0.0.1:9090
    """
    job = config.job.name
    set_log_context(job=job)
    from meshmend.launch.hosts import board_from, secret_from
    from meshmend.launch.termination import TERMINATED, terminable
    from meshmend.membership.job import JobSpec
    from meshmend.membership.record_file import check_record
    from meshmend.topology.text import configured_mesh
    from meshmend.transport.listener import parse_address

    begin = configured_mesh(config.mesh)
    board = board_from(config.mesh.board, begin)
    spec = JobSpec(job, begin, board, config.timing, __version__)
    endpoint = parse_address(listen, "--listen")
    metrics_endpoint = parse_address(metrics, "--metrics") if metrics else None
    secret = secret_from(os.environ, config.job.secret_file).encode()
    if state is None and (new or restarted):
        raise InputError(
            f"{'--new' if new else '--restarted'} needs --state FILE, the record of an earlier run"
        )
    if state is not None:
        check_record(state, job, forget=new)
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
                run_dir=Path(config.job.run_dir) if config.job.run_dir else None,
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
    run_dir: Path | None,
    restarted: bool,
    linger_s: float,
    scraped: "socket.socket | None",
) -> str:
    """Serve until the job is over; return why it failed, or an empty text."""
    from contextlib import ExitStack

    from meshmend.cli.job_lines import JobLines
    from meshmend.launch.journal import Journal
    from meshmend.membership.coordinator_server import CoordinatorServer

    lines = JobLines(spec.mesh.n_chips)
    journal = Journal(run_dir, spec) if run_dir else None

    def on_event(clock: float, event: "Event") -> None:
        lines.take(clock, event)
        if journal is not None:
            journal.take(clock, event)

    coordinator = CoordinatorServer(
        listener, secret, spec, record_file=record, restarted=restarted, on_event=on_event
    )
    with ExitStack() as stack:
        stack.callback(coordinator.close)
        if scraped is not None:
            stack.callback(_serve_metrics(scraped, coordinator).close)
        try:
            coordinator.serve()
        finally:
            report = journal.end(is_over=coordinator.is_over) if journal is not None else None
            if report is not None:
                note(f"meshmend: the report of the run is {report}")
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


_ANSWER_TIMEOUT_S = 2.0


@job_command("worker", needs=("mesh.shape",))
def worker_command(
    config: "JobConfig",
    script: ScriptArgument,
    arguments: ScriptArguments = None,
    *,
    coordinator: CoordinatorOption,
    chip: Annotated[
        str | None,
        typer.Option(
            "--chip",
            metavar="R,C",
            help="Which chip this is; else live chip number RANK, SLURM_PROCID or "
            "JOB_COMPLETION_INDEX.",
        ),
    ] = None,
    is_module: ModuleOption = False,
    log_json: LogJsonOption = False,
) -> int:
    """Run the worker of one chip: a script that loops over a meshmend.train.Job or JaxJob.

    Start one per chip, by torchrun, Slurm, Kubernetes or by hand, and one `meshmend
    coordinator`. A worker that is started again for a chip that died takes its state from its
    neighbours and goes on.

    **Examples**

    - meshmend worker --coordinator 10.0.0.1:7000 --mesh 4x4 --chip 0,3 train.py --lr 0.1

    - srun meshmend worker --coordinator 10.0.0.1:7000 --mesh 4x4 train.py
    """
    job = config.job.name
    set_log_context(job=job)
    from meshmend.launch.hosts import chip_from
    from meshmend.topology.text import configured_mesh
    from meshmend.transport.listener import parse_address

    endpoint = parse_address(coordinator, "--coordinator")
    own_chip = chip_from(chip, os.environ, configured_mesh(config.mesh))
    set_log_context(job=job, chip=own_chip)
    config, secret = _job_of(config, endpoint)
    check_script(script, "worker", is_module=is_module)
    warn_if_unanswered(endpoint, secret.encode(), f"chip {own_chip} waits")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    compile_for_workers(meanwhile=_import_torch)
    from meshmend.launch.worker import Script
    from meshmend.planning.environment import Environment

    environment = Environment(
        config, chip=own_chip, coordinator=endpoint, secret=secret, plans_ahead=True
    )
    os.environ |= environment.to_environment()
    return _run_script(Script(script, tuple(arguments or ()), is_module))


def _job_of(config: "JobConfig", coordinator: "Address") -> "tuple[JobConfig, str]":
    """Return a job's settings as its workers on this host need them, and its secret.

    Raises:
        InputError: one of them cannot be used, the board does not fit the mesh, this host has no
            route to the coordinator, or cannot listen on the address that it is told.
    """
    from meshmend.launch.hosts import address_toward, board_from, secret_from, with_whole_paths
    from meshmend.topology.text import configured_mesh
    from meshmend.transport.listener import listening_for_peers

    board_from(config.mesh.board, configured_mesh(config.mesh))
    secret = secret_from(os.environ, config.job.secret_file)
    address = config.sums.bind or address_toward(coordinator)
    listening_for_peers(address).close()
    return with_whole_paths(config.with_({"sums.bind": address})), secret


def _import_torch() -> None:
    """Import what nearly every script needs, and what takes seconds."""
    with suppress(ImportError):
        import torch  # noqa: F401


def warn_if_unanswered(endpoint: tuple[str, int], secret: bytes, who_waits: str) -> None:
    """Print a line if the coordinator does not answer yet; the workers then wait for it."""
    from meshmend.launch.hosts import is_answered

    if not is_answered(endpoint, secret, within_s=_ANSWER_TIMEOUT_S):
        host, port = endpoint
        note(f"meshmend: {who_waits} for its coordinator: nobody answers at {host}:{port}")


def _run_script(script: "Script") -> int:
    """Run a script in this process; print its exception, if any, and return its exit code."""
    from meshmend.errors import RefusedError, TerminatedError
    from meshmend.launch.termination import TERMINATED, exit_soon_after_signal
    from meshmend.launch.worker import error_text, exit_code_of, script_body

    with exit_soon_after_signal():
        try:
            return script_body(script)()
        except TerminatedError:
            return TERMINATED
        except (RefusedError, KeyboardInterrupt):
            raise  # `main` prints one line, without a traceback
        except BaseException as error:
            if words := error_text(error):
                note(words.rstrip("\n"), level="error")
            return exit_code_of(error)


@job_command("agent", needs=("mesh.shape",))
def agent_command(
    config: "JobConfig",
    script: ScriptArgument,
    arguments: ScriptArguments = None,
    *,
    coordinator: CoordinatorOption,
    chips: Annotated[
        str | None,
        typer.Option(
            "--chips",
            metavar="4x2@0,2",
            help="The chips of this host: a block, or one chip such as 0,2; else block number "
            "SLURM_NODEID or JOB_COMPLETION_INDEX of --hosts.",
        ),
    ] = None,
    is_module: ModuleOption = False,
    supervised: Annotated[
        bool,
        typer.Option(
            "--supervised",
            hidden=True,
            help="Print a line every second that says that the agent lives, and one at its end; "
            "on SIGTERM, have the workers save a checkpoint.",
        ),
    ] = False,
    slurm_job: Annotated[
        str | None,
        typer.Option(
            "--slurm-job",
            metavar="ID",
            hidden=True,
            help="Requeue this Slurm job if its first node is lost; needs --run-dir.",
        ),
    ] = None,
) -> int:
    """Run the workers of one host: one process per live chip, each started again if it dies.

    Start one per host, by any launcher, and one `meshmend coordinator`. The workers are those of
    `meshmend worker`. The agent ends with code 0 when all of them have finished, and with code 1
    if the job has failed, if a worker was refused, or if a worker fails again and again. SIGTERM
    ends it with its workers within two seconds. Each worker finds its number on this host in
    LOCAL_RANK.

    **Examples**

    - meshmend agent --coordinator 10.0.0.1:7000 --mesh 4x4 --chips 4x2@0,2 train.py --lr 0.1
    """
    from meshmend.launch.hosts import own_chips_from
    from meshmend.topology.text import configured_mesh
    from meshmend.transport.listener import parse_address

    begin = configured_mesh(config.mesh)
    own_chips = own_chips_from(chips, config.hosts.block, os.environ, begin)
    endpoint = parse_address(coordinator, "--coordinator")
    config, secret = _job_of(config, endpoint)
    check_script(script, "agent", is_module=is_module)
    warn_if_unanswered(endpoint, secret.encode(), f"the host of chip {own_chips[0]} waits")
    job_dir = Path(config.job.run_dir) if config.job.run_dir else None
    if slurm_job is not None and job_dir is not None:
        from meshmend.launch.slurm_watch import start_watch

        start_watch(slurm_job, job_dir, endpoint, secret.encode())
    compile_for_workers()
    from meshmend.launch.worker import compute_in_one_thread

    n_threads = compute_in_one_thread()  # before torch is imported, below
    from meshmend.launch.host_agent import HostWorkers, variables_of
    from meshmend.launch.slurm_watch import is_ending
    from meshmend.launch.worker import Script, script_body
    from meshmend.planning.environment import Environment

    environment = Environment(config, coordinator=endpoint, secret=secret, plans_ahead=True)
    host = HostWorkers(
        variables_of(environment, own_chips),
        script_body(Script(script, tuple(arguments or ()), is_module)),
        n_threads,
        supervised,
        lambda: job_dir is not None and is_ending(job_dir, endpoint, secret.encode()),
    )
    return _run(host)


def _run(host: "HostWorkers") -> int:
    """Import what workers need, then run the workers of a host; return the exit code."""
    from meshmend.errors import TerminatedError
    from meshmend.launch.host_agent import run_workers
    from meshmend.launch.script import preload_training
    from meshmend.launch.slurm_watch import print_agent_line
    from meshmend.launch.termination import TERMINATED, terminable

    preload_training(())
    try:
        with terminable():
            code = run_workers(host)
    except TerminatedError:
        code = TERMINATED
    if host.is_supervised:
        print_agent_line(code)
    return code
