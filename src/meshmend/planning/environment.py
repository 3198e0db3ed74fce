"""Reads and writes a process's place in a job as environment variables.

The launcher writes an `Environment` into the variables of each worker, and the worker reads it
back. Knows nothing of torch, of the membership or of faults: an injected fault is a text here.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshmend.errors import InputError, TopologyError
from meshmend.planning.plan import AUTO
from meshmend.planning.settings import LOOPBACK, TRANSPORTS, Settings
from meshmend.topology.failures import Chip, board_shape, format_shape, parse_shape
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import mesh_words, parse_mesh
from meshmend.transport.listener import Address
from meshmend.transport.liveness import DEFAULT_LINK_TIMEOUT_S
from meshmend.transport.sockets import WINDOW_BYTES
from meshmend.variables import (
    ALGORITHM,
    BIND,
    BOARD,
    CHECK,
    CHECKSUM,
    CHIP,
    COORDINATOR,
    FAIL,
    INJECT,
    JOB,
    JOB_DIR,
    JOIN_TIMEOUT,
    LINK_TIMEOUT,
    MESH,
    PLAN_AHEAD,
    READY_DIR,
    SECRET,
    SLICES,
    TRANSPORT,
    WAIT_FOR_CHIP,
    WINDOW,
    WRAP,
    Variable,
    warn_of_unknown,
)

_LARGEST_PORT: Final = 0xFFFF
_SWITCH: Final = {"": False, "0": False, "1": True}


@dataclass(frozen=True)
class Environment:
    """What the environment says about a process: its settings, its chip, its job.

    Without a mesh there are no settings, no chip and no board. `faults` holds the faults that a
    worker injects into itself, as texts. A timeout of None means the worker's default.
    """

    settings: Settings | None = None
    chip: Chip | None = None
    coordinator: Address | None = None
    job: str = ""
    job_dir: Path | None = None
    plans_ahead: bool = False
    board: tuple[int, ...] | None = None
    faults: tuple[str, ...] = ()
    checks: bool = False
    link_timeout_s: float = DEFAULT_LINK_TIMEOUT_S
    join_timeout_s: float | None = None
    wait_for_chip_s: float | None = None
    ready_dir: Path | None = None

    def __post_init__(self) -> None:
        mesh = self.settings.mesh if self.settings else None
        for variable, value in ((CHIP, self.chip), (BOARD, self.board)):
            if value is not None and mesh is None:
                raise InputError(f"{variable.name} needs a mesh, but {MESH.name} is not set")
        if mesh is not None:
            _check_on_mesh(self.chip, self.board, mesh)
        if self.coordinator is not None:
            _check_coordinator(self.coordinator)
        if not 0 < self.link_timeout_s < math.inf:
            raise InputError(
                f"{LINK_TIMEOUT.name} needs seconds above 0, but got {self.link_timeout_s}"
            )
        if wrong := [text for text in self.faults if not text or "\n" in text]:
            raise InputError(f"{INJECT.name} needs one fault per line, but got {wrong[0]!r}")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Environment":
        """Return what an environment says; print a warning for unknown names with our prefix.

        Raises:
            InputError: a value cannot be read.
        """
        warn_of_unknown(environment)
        settings = _settings_in(environment)
        chip = CHIP.value_in(environment) if settings else ""
        board = BOARD.value_in(environment) if settings else ""
        coordinator = COORDINATOR.value_in(environment)
        folder, ready_folder = JOB_DIR.value_in(environment), READY_DIR.value_in(environment)
        return cls(
            settings=settings,
            chip=_chip(chip) if chip else None,
            coordinator=_coordinator(coordinator) if coordinator else None,
            job=JOB.value_in(environment),
            job_dir=Path(folder) if folder else None,
            plans_ahead=_switch(PLAN_AHEAD, environment),
            board=_board(board) if board else None,
            faults=tuple(filter(None, INJECT.value_in(environment).split("\n"))),
            checks=_switch(CHECK, environment),
            link_timeout_s=_seconds(LINK_TIMEOUT, environment) or DEFAULT_LINK_TIMEOUT_S,
            join_timeout_s=_seconds(JOIN_TIMEOUT, environment),
            wait_for_chip_s=_seconds(WAIT_FOR_CHIP, environment),
            ready_dir=Path(ready_folder) if ready_folder else None,
        )

    def to_environment(self) -> dict[str, str]:
        """Return the variables that `from_environment` reads back as this.

        It contains all variables of a job, so that none of the launcher's own values stays.
        """
        host, port = self.coordinator or ("", 0)
        variables = {
            CHIP: ",".join(map(str, self.chip or ())),
            COORDINATOR: f"{host}:{port}" if host else "",
            JOB: self.job,
            JOB_DIR: str(self.job_dir) if self.job_dir else "",
            PLAN_AHEAD: "1" if self.plans_ahead else "",
            BOARD: format_shape(self.board or ()),
            INJECT: "\n".join(self.faults),
            CHECK: "1" if self.checks else "",
            LINK_TIMEOUT: repr(self.link_timeout_s),
            JOIN_TIMEOUT: "" if self.join_timeout_s is None else repr(self.join_timeout_s),
            WAIT_FOR_CHIP: "" if self.wait_for_chip_s is None else repr(self.wait_for_chip_s),
            READY_DIR: str(self.ready_dir) if self.ready_dir else "",
            **_settings_variables(self.settings),
        }
        return {variable.name: text for variable, text in variables.items()}


def settings_from(environment: Mapping[str, str]) -> Settings:
    """Return the settings that an environment describes.

    Raises:
        InputError: it describes no mesh, or a value cannot be read.
    """
    settings = Environment.from_environment(environment).settings
    if settings is None:
        raise InputError(
            f"the backend meshmend needs to know the mesh, but {MESH.name} is not set; start the "
            f"script with 'meshmend run --mesh 4x4 ...', or set {MESH.name}=4x4 and, for what "
            f"failed, {FAIL.name}"
        )
    return settings


def sums_payloads_in(environment: Mapping[str, str]) -> bool:
    """Whether an environment asks for checksums of the data of sums; launchers pass this on.

    Raises:
        InputError: the value cannot be read.
    """
    return _switch(CHECKSUM, environment)


def _settings_in(environment: Mapping[str, str]) -> Settings | None:
    shape = MESH.value_in(environment)
    if not shape:
        return None
    try:
        mesh = parse_mesh(
            shape,
            wrap=WRAP.value_in(environment) or "none",
            fail=re.findall(r"[^;\s]+", FAIL.value_in(environment)),
        )
    except TopologyError as error:
        raise InputError(
            f"{MESH.name}, {WRAP.name} and {FAIL.name} need to describe a mesh, but: {error}"
        ) from None
    return Settings(
        mesh=mesh,
        algorithm=ALGORITHM.value_in(environment) or AUTO,
        n_slices=_whole_number(SLICES, environment, 0),
        transport=TRANSPORT.value_in(environment) or TRANSPORTS[0],
        bind=BIND.value_in(environment) or LOOPBACK,
        window_bytes=_whole_number(WINDOW, environment, WINDOW_BYTES),
        sums_payloads=sums_payloads_in(environment),
        secret=SECRET.value_in(environment),
    )


def _settings_variables(settings: Settings | None) -> dict[Variable, str]:
    if settings is None:
        every = (MESH, WRAP, FAIL, ALGORITHM, SLICES, TRANSPORT, BIND, WINDOW, CHECKSUM, SECRET)
        return dict.fromkeys(every, "")
    words = mesh_words(settings.mesh)
    return {
        MESH: words["shape"],
        WRAP: words["wrap"],
        FAIL: " ".join(words["fail"]),
        ALGORITHM: settings.algorithm,
        SLICES: str(settings.n_slices),
        TRANSPORT: settings.transport,
        BIND: settings.bind,
        WINDOW: str(settings.window_bytes),
        CHECKSUM: "1" if settings.sums_payloads else "",
        SECRET: settings.secret,
    }


def _whole_number(variable: Variable, environment: Mapping[str, str], default: int) -> int:
    text = variable.value_in(environment)
    if not text:
        return default
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise InputError(f"{variable.name} needs a whole number, but got {text!r}")
    return int(text)


def _seconds(variable: Variable, environment: Mapping[str, str]) -> float | None:
    text = variable.value_in(environment)
    try:
        seconds = float(text) if text else None
    except ValueError:
        seconds = math.nan
    if seconds is not None and not 0 <= seconds < math.inf:
        raise InputError(f"{variable.name} needs seconds such as 2.5, but got {text!r}")
    return seconds


def _switch(variable: Variable, environment: Mapping[str, str]) -> bool:
    text = variable.value_in(environment)
    if text not in _SWITCH:
        raise InputError(f"{variable.name} needs 1 or 0, but got {text!r}")
    return _SWITCH[text]


def _coordinator(text: str) -> Address:
    host, _, port = text.rpartition(":")
    if not host or not re.fullmatch(r"[0-9]{1,9}", port):
        raise InputError(f"{COORDINATOR.name} needs HOST:PORT, but got {text!r}")
    return host, int(port)


def _check_coordinator(address: Address) -> None:
    host, port = address
    if not host or not 0 <= port <= _LARGEST_PORT:
        raise InputError(f"{COORDINATOR.name} needs HOST:PORT, but got '{host}:{port}'")


def _chip(text: str) -> Chip:
    if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", text):
        raise InputError(f"{CHIP.name} needs a chip such as 0,1, but got {text!r}")
    return tuple(int(part) for part in text.split(","))


def _board(text: str) -> tuple[int, ...]:
    try:
        return parse_shape(text)
    except ValueError:
        raise InputError(f"{BOARD.name} needs a shape such as 2x2, but got {text!r}") from None


def _check_on_mesh(chip: Chip | None, board: tuple[int, ...] | None, mesh: Mesh) -> None:
    if chip is not None and chip not in mesh:
        written = ",".join(map(str, chip))
        raise InputError(f"{CHIP.name} needs a chip of {mesh} such as 0,1, but got {written!r}")
    if board is not None and (len(board) != len(mesh.shape) or min(board) < 1):
        like = format_shape(board_shape(len(mesh.shape)))
        raise InputError(
            f"{BOARD.name} needs a shape for {mesh} such as {like}, but got {format_shape(board)!r}"
        )
