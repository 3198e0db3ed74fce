"""Where this process is: which chip of which job, as the environment says.

MESHMEND_COORDINATOR   HOST:PORT of the coordinator; not set: this process trains alone
MESHMEND_JOB           the name of the job
MESHMEND_SECRET        what every process of the job must know
MESHMEND_MESH, _WRAP, _FAIL, _ALGORITHM, _BIND, _WINDOW    as for the backend
MESHMEND_CHIP          R,C
MESHMEND_JOB_DIR       where ledgers and plans go; not set: ledgers nowhere
MESHMEND_PLAN_AHEAD    1: the first worker of each host makes plans for what may fail next
MESHMEND_BOARD         RxC, the chips that may fail together; not set: 2x2
MESHMEND_INJECT        faults that this worker inflicts on itself, one per line
MESHMEND_CHECK         1: note a hash of the state after every step
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from meshmend.errors import InputError
from meshmend.faults.fault import Fault, parse_fault
from meshmend.membership.client import WorkerIdentity
from meshmend.membership.coordinator_client import CoordinatorClient
from meshmend.planning.settings import settings_from
from meshmend.topology.failures import Chip, board_shape, format_shape, parse_shape
from meshmend.topology.mesh import Mesh
from meshmend.train.ahead import Ahead, scratch_plans
from meshmend.train.exchange import ExchangeSettings


@dataclass(frozen=True)
class WorkerEnvironment:
    """What a worker knows of its place; `post` is None if it trains alone."""

    post: WorkerIdentity | None = None
    whole: Mesh = field(default_factory=lambda: Mesh((1,)))
    n_first: int = 1
    chip: Chip = (0,)
    exchange_settings: ExchangeSettings = field(default_factory=lambda: ExchangeSettings(b""))
    run_dir: Path | None = None
    faults: tuple[Fault, ...] = ()
    checks: bool = False


def worker_environment_from(environment: Mapping[str, str]) -> WorkerEnvironment:
    """Return the place that an environment describes.

    Raises:
        InputError: something is missing or cannot be read.
    """
    if not environment.get("MESHMEND_COORDINATOR"):
        folder = environment.get("MESHMEND_JOB_DIR")
        return WorkerEnvironment(run_dir=Path(folder) if folder else None)
    settings = settings_from(environment)
    host, _, port = environment["MESHMEND_COORDINATOR"].rpartition(":")
    if not host or not port.isdecimal():
        raise InputError(
            f"MESHMEND_COORDINATOR needs HOST:PORT, but got {environment['MESHMEND_COORDINATOR']!r}"
        )
    if not settings.secret:
        raise InputError("a worker needs the job's secret, but MESHMEND_SECRET is not set")
    whole = replace(settings.mesh, failed=frozenset(), failed_links=frozenset())
    chip = _chip(environment.get("MESHMEND_CHIP", ""), whole)
    secret = settings.secret.encode()
    folder = environment.get("MESHMEND_JOB_DIR")
    injected = filter(None, environment.get("MESHMEND_INJECT", "").splitlines())
    job = environment.get("MESHMEND_JOB", "")
    plans = Path(folder) / "plans" if folder else None
    ahead = None
    if environment.get("MESHMEND_PLAN_AHEAD") == "1":
        board = _board(environment.get("MESHMEND_BOARD", ""), whole)
        ahead = Ahead(plans or scratch_plans(job, secret), settings.algorithm, board, not folder)
    return WorkerEnvironment(
        post=WorkerIdentity(
            job=job,
            shape=whole.shape,
            chip=chip,
            seat=whole.rank_of[chip],
            coordinator=(host, int(port)),
            secret=secret,
        ),
        whole=whole,
        n_first=settings.mesh.n_live,
        chip=chip,
        exchange_settings=ExchangeSettings(
            secret,
            bind=settings.bind,
            algorithm=settings.algorithm,
            window_bytes=settings.window_bytes,
            plans=plans,
            ahead=ahead,
        ),
        run_dir=Path(folder) if folder else None,
        faults=tuple(parse_fault(text, whole) for text in injected),
        checks=environment.get("MESHMEND_CHECK") == "1",
    )


@cache
def here() -> WorkerEnvironment:
    """Return where this process is."""
    return worker_environment_from(os.environ)


@cache
def coordinator_client() -> CoordinatorClient:
    """Return the connection to the coordinator; its thread stays in the network of now."""
    post = here().post
    assert post is not None, "this process trains alone"
    return CoordinatorClient(post)


def _board(text: str, mesh: Mesh) -> tuple[int, ...]:
    usual = board_shape(len(mesh.shape))
    try:
        board = parse_shape(text) if text else usual
    except ValueError:
        board = ()
    if len(board) != len(usual):
        like = format_shape(usual)
        raise InputError(
            f"MESHMEND_BOARD needs a shape for {mesh} such as {like}, but got {text!r}"
        )
    return board


def _chip(text: str, mesh: Mesh) -> Chip:
    try:
        chip = tuple(int(part) for part in text.split(","))
    except ValueError:
        chip = ()
    if chip not in mesh:
        raise InputError(f"MESHMEND_CHIP needs a chip of {mesh} such as 0,1, but got {text!r}")
    return chip
