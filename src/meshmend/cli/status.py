"""`meshmend status`: a look inside a running job."""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshmend.cli.console import cache_dir, check_readable, note, print_json
from meshmend.cli.options import JsonOption, SecretOption, check_seconds
from meshmend.files import write_whole

if TYPE_CHECKING:
    from meshmend.membership.job_status import JobStatus
    from meshmend.membership.status_client import StatusQuestion
    from meshmend.transport.listener import Address

_WATCH_S = 1.0
_MOST_REMEMBERED = 64
_ADVICE = (
    "if the job is not over and only its coordinator is dead, name a worker with --worker "
    "HOST:PORT, or the coordinator's record with --state FILE"
)


def status_command(
    *,
    coordinator: Annotated[
        str | None,
        typer.Option("--coordinator", metavar="HOST:PORT", help="The address of the coordinator."),
    ] = None,
    worker: Annotated[
        list[str] | None,
        typer.Option(
            "--worker",
            metavar="HOST:PORT",
            help="Where a worker listens, to ask if the coordinator does not answer; repeat for "
            "more.",
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            "--state",
            metavar="FILE",
            help="The coordinator's record, which says where the workers listen.",
        ),
    ] = None,
    secret_file: SecretOption = None,
    job: Annotated[
        str | None,
        typer.Option("--job", metavar="NAME", help="The name that the job must have; else any."),
    ] = None,
    json: JsonOption = False,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Ask again every second, until the job says that it is over."),
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            callback=check_seconds,
            min=0.1,
            help="How long to wait for an answer.",
        ),
    ] = 5.0,
) -> int:
    """Show a running job: its mesh, step and rate, who waits for whom, and what failed last.

    Asks the coordinator; if that does not answer, the workers. It finds them in --worker, in the
    record of --state, and in what the last answer of this coordinator said, which it remembers
    in the cache folder. It needs the job's secret, and changes nothing in the job.

    **Examples**

    - meshmend status --coordinator 10.0.0.1:7000

    - meshmend status --coordinator 10.0.0.1:7000 --watch

    - meshmend status --coordinator 10.0.0.1:7000 --state /var/lib/job.json --json
    """
    from meshmend.errors import InputError
    from meshmend.launch.hosts import secret_from
    from meshmend.membership.status_client import StatusQuestion
    from meshmend.transport.listener import parse_address

    if coordinator is None and not worker and state is None:
        raise InputError(
            "meshmend status needs to know whom to ask, but got neither --coordinator HOST:PORT "
            "nor --worker HOST:PORT nor --state FILE"
        )
    endpoint = parse_address(coordinator, "--coordinator") if coordinator else None
    workers = [parse_address(text, "--worker") for text in worker or ()]
    if state is not None:
        from meshmend.membership.record_file import members_in

        check_readable(state, "the coordinator's record")
        workers += members_in(state)
    remembered = _remembered(endpoint)
    secret = secret_from(os.environ, secret_file).encode()
    question = StatusQuestion(
        endpoint, tuple(dict.fromkeys([*workers, *remembered])), secret, job, timeout
    )
    if watch:
        return _watch(question, as_json=json)
    status = _ask(question)
    if json:
        print_json(_document(status))
    else:
        from meshmend.cli.status_view import print_status

        print_status(status)
    return 0


def _ask(question: "StatusQuestion") -> "JobStatus":
    """Return the status, and remember where the workers listen."""
    from meshmend.errors import NobodyAnswersError
    from meshmend.membership.status_client import ask_job

    try:
        status = ask_job(question)
    except NobodyAnswersError as error:
        raise NobodyAnswersError(f"{error}; {_ADVICE}") from None
    _remember(question.coordinator, status)
    return status


def _document(status: "JobStatus") -> dict[str, object]:
    from msgspec import structs

    from meshmend.transport.codec import plain

    document: dict[str, object] = plain(status)
    if (formed := status.generation) is not None:
        document["generation"] = {
            "number": formed.number,
            "seats": [structs.asdict(seat) for seat in formed.seats],
            "cut": sorted(map(str, formed.cut)),
            "mended": [[str(link), number] for link, number in formed.mended],
            "term": formed.term,
        }
    return document


def _watch(question: "StatusQuestion", *, as_json: bool) -> int:
    """Show the status every second until the job is over, whether or not it answers."""
    from dataclasses import replace

    from meshmend.cli.status_view import StatusDisplay
    from meshmend.errors import NobodyAnswersError
    from meshmend.membership.job_status import JobPhase

    status = _ask(question)
    with StatusDisplay(is_live=not as_json and sys.stdout.isatty()) as display:
        unanswered_since: float | None = None
        while True:
            if as_json:
                print_json(_document(status))
                sys.stdout.flush()
            else:
                display.show(status)
            if status.phase in (JobPhase.OVER, JobPhase.FAILED):
                return 0
            asked_at = time.monotonic()
            question = replace(question, workers=_addresses(status) or question.workers)
            while True:
                time.sleep(max(0.0, asked_at + _WATCH_S - time.monotonic()))
                asked_at = time.monotonic()
                try:
                    status, unanswered_since = _ask(question), None
                    break
                except NobodyAnswersError as error:
                    if unanswered_since is None:
                        unanswered_since = asked_at
                        if as_json:
                            note(f"meshmend: {error}")
                    if not as_json:
                        display.show_silence(asked_at - unanswered_since, str(error))


def _addresses(status: "JobStatus") -> "tuple[Address, ...]":
    """Return where the workers of a job listen, its members first."""
    members = [seat.address for seat in status.generation.seats] if status.generation else []
    others = [each.address for each in status.workers if each.address[1]]
    return tuple(dict.fromkeys([*members, *others]))[:_MOST_REMEMBERED]


def _file_of(endpoint: "Address") -> Path:
    return cache_dir() / "status" / f"{endpoint[0]}-{endpoint[1]}.json"


def _remember(endpoint: "Address | None", status: "JobStatus") -> None:
    """Write down where the workers listen, for when their coordinator is dead."""
    import json

    addresses = _addresses(status)
    if endpoint is None or not addresses or status.answered_by is not None:
        return
    file = _file_of(endpoint)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(addresses), is_durable=False)
    except OSError:
        pass  # then the workers cannot be found later; nothing else depends on it


def _remembered(endpoint: "Address | None") -> "tuple[Address, ...]":
    """Return where the workers of a coordinator listened when it last answered."""
    import json

    if endpoint is None:
        return ()
    try:
        listed = json.loads(_file_of(endpoint).read_text(encoding="utf-8"))
        return tuple((str(host), int(port)) for host, port in listed)[:_MOST_REMEMBERED]
    except (OSError, ValueError, TypeError):
        return ()
