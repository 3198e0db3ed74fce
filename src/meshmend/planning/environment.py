"""A process's place in a job, in its environment variables.

The launcher writes an `Environment` into the variables of each worker, and the worker reads it
back. The settings among them are those of `JobConfig`, whose tree has their names and bounds. Knows
nothing of torch, of the membership or of faults: an injected fault is a text here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from meshmend.config import (
    CHIP,
    COORDINATOR,
    FAIL,
    INJECT,
    LEAVES,
    MESH,
    PLAN_AHEAD,
    SECRET,
    JobConfig,
    MeshConfig,
    RunConfig,
    SumConfig,
    Timing,
    job_config,
    warn_of_unknown,
)
from meshmend.errors import InputError, TopologyError
from meshmend.planning.settings import Settings, settings_of, sum_config
from meshmend.topology.failures import Chip, board_shape, format_shape, parse_shape
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import configured_mesh, mesh_config
from meshmend.transport.listener import Address

_LARGEST_PORT: Final = 0xFFFF
_BOARD: Final = LEAVES["mesh.board"].variable
_JOB: Final = RunConfig()


@dataclass(frozen=True)
class Environment:
    """What the environment says about a process: its settings, its chip, its job.

    Without a mesh there are no settings, no chip and no board. `faults` holds the faults that a
    worker injects into itself, as texts. Of `timing` a worker reads the timeouts that have a
    variable.
    """

    settings: Settings | None = None
    chip: Chip | None = None
    coordinator: Address | None = None
    job: str = _JOB.name
    job_dir: Path | None = None
    plans_ahead: bool = False
    board: tuple[int, ...] | None = None
    faults: tuple[str, ...] = ()
    checks: bool = False
    timing: Timing = field(default_factory=Timing)
    ready_dir: Path | None = None

    def __post_init__(self) -> None:
        mesh = self.settings.mesh if self.settings else None
        for variable, value in ((CHIP.name, self.chip), (_BOARD, self.board)):
            if value is not None and mesh is None:
                raise InputError(f"{variable} needs a mesh, but {MESH.name} is not set")
        if mesh is not None:
            _check_on_mesh(self.chip, self.board, mesh)
        if self.coordinator is not None:
            _check_coordinator(self.coordinator)
        if wrong := [text for text in self.faults if not text or "\n" in text]:
            raise InputError(f"{INJECT.name} needs one fault per line, but got {wrong[0]!r}")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Environment":
        """Return what an environment says; print a warning for unknown names with our prefix.

        Raises:
            InputError: a value cannot be read.
        """
        warn_of_unknown(environment)
        config = job_config(environment=environment)
        chip, coordinator = CHIP.value_in(environment), COORDINATOR.value_in(environment)
        plans_ahead = PLAN_AHEAD.value_in(environment)
        if plans_ahead not in ("", "0", "1"):
            raise InputError(f"{PLAN_AHEAD.name} needs 1 or 0, but got {plans_ahead!r}")
        return cls.from_config(
            config,
            chip=_chip(chip) if chip and config.mesh.shape else None,
            coordinator=_coordinator(coordinator) if coordinator else None,
            secret=SECRET.value_in(environment),
            plans_ahead=plans_ahead == "1",
            faults=tuple(filter(None, INJECT.value_in(environment).split("\n"))),
        )

    @classmethod
    def from_config(
        cls,
        config: JobConfig,
        *,
        chip: Chip | None = None,
        coordinator: Address | None = None,
        secret: str = "",
        bind: str = "",
        plans_ahead: bool = False,
        faults: tuple[str, ...] = (),
    ) -> "Environment":
        """Return the place of a process in the job of these settings.

        It listens on `bind` if the settings name no address.

        Raises:
            InputError: the settings describe no mesh, or the chip or the board is none of it.
        """
        job, mesh, board = config.job, None, None
        if config.mesh.shape:
            try:
                mesh = configured_mesh(config.mesh)
            except TopologyError as error:
                wrap = LEAVES["mesh.wrap"].variable
                raise InputError(
                    f"{MESH.name}, {wrap} and {FAIL.name} need to describe a mesh, but: {error}"
                ) from None
            board = _board(config.mesh.board) if config.mesh.board else None
        return cls(
            settings=settings_of(config.sums, mesh, bind=bind, secret=secret) if mesh else None,
            chip=chip,
            coordinator=coordinator,
            job=job.name,
            job_dir=Path(job.run_dir) if job.run_dir else None,
            plans_ahead=plans_ahead,
            board=board,
            faults=faults,
            checks=job.check_every_step,
            timing=config.timing,
            ready_dir=Path(job.ready_dir) if job.ready_dir else None,
        )

    def to_environment(self) -> dict[str, str]:
        """Return the variables that `from_environment` reads back as this.

        It contains all variables of a job, so that none of the launcher's own values stays.
        """
        settings = self.settings
        host, port = self.coordinator or ("", 0)
        config = JobConfig(
            mesh=mesh_config(settings.mesh, self.board) if settings else MeshConfig(),
            job=RunConfig(
                name=self.job,
                run_dir=str(self.job_dir) if self.job_dir else "",
                ready_dir=str(self.ready_dir) if self.ready_dir else "",
                check_every_step=self.checks,
            ),
            sums=sum_config(settings) if settings else SumConfig(),
            timing=self.timing,
        )
        return {
            **config.variables(),
            CHIP.name: ",".join(map(str, self.chip or ())),
            COORDINATOR.name: f"{host}:{port}" if host else "",
            PLAN_AHEAD.name: "1" if self.plans_ahead else "",
            INJECT.name: "\n".join(self.faults),
            SECRET.name: settings.secret if settings else "",
        }


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
        raise InputError(f"{_BOARD} needs a shape such as 2x2, but got {text!r}") from None


def _check_on_mesh(chip: Chip | None, board: tuple[int, ...] | None, mesh: Mesh) -> None:
    if chip is not None and chip not in mesh:
        written = ",".join(map(str, chip))
        raise InputError(f"{CHIP.name} needs a chip of {mesh} such as 0,1, but got {written!r}")
    if board is not None and (len(board) != len(mesh.shape) or min(board) < 1):
        like = format_shape(board_shape(len(mesh.shape)))
        raise InputError(
            f"{_BOARD} needs a shape for {mesh} such as {like}, but got {format_shape(board)!r}"
        )
