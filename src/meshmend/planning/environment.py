"""A process's place in a job, in its environment variables.

The launcher writes an `Environment` into the variables of each worker, and the worker reads it
back. The settings among them are those of `JobConfig`, whose tree has their names and bounds. Knows
nothing of torch, of the membership or of faults: an injected fault is a text here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
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
    job_config,
    warn_of_unknown,
)
from meshmend.errors import InputError, TopologyError
from meshmend.planning.settings import Settings, settings_of
from meshmend.topology.failures import Chip, board_shape, format_chip, format_shape, parse_shape
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import configured_mesh
from meshmend.transport.listener import Address, parse_address

_BOARD: Final = LEAVES["mesh.board"].variable
_DEFAULTS: Final = JobConfig()


@dataclass(frozen=True)
class Environment:
    """What the environment says about a process: the settings of its job, and its part in it.

    `faults` holds the faults that a worker injects into itself, as texts. Of the settings, the
    variables hold those that a worker or the backend reads.

    Raises:
        InputError: the settings describe no mesh, or the chip or the board is none of it.
    """

    config: JobConfig = _DEFAULTS
    chip: Chip | None = None
    coordinator: Address | None = None
    secret: str = ""
    plans_ahead: bool = False
    faults: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        settings, board = self.settings, self.board
        if settings is not None:
            _check_on_mesh(self.chip, board, settings.mesh)
        elif self.chip is not None:
            raise InputError(f"{CHIP.name} needs a mesh, but {MESH.name} is not set")
        if wrong := [text for text in self.faults if not text or "\n" in text]:
            raise InputError(f"{INJECT.name} needs one fault per line, but got {wrong[0]!r}")

    @cached_property
    def settings(self) -> Settings | None:
        """How this process sums; None without a mesh."""
        if not self.config.mesh.shape:
            return None
        try:
            mesh = configured_mesh(self.config.mesh)
        except TopologyError as error:
            wrap = LEAVES["mesh.wrap"].variable
            raise InputError(
                f"{MESH.name}, {wrap} and {FAIL.name} need to describe a mesh, but: {error}"
            ) from None
        return settings_of(self.config.sums, mesh, secret=self.secret)

    @property
    def board(self) -> tuple[int, ...] | None:
        """The chips that fail together, if the settings name them and a mesh."""
        mesh = self.config.mesh
        return _board(mesh.board) if mesh.shape and mesh.board else None

    @property
    def run_dir(self) -> Path | None:
        """The folder of ledgers, plans and checkpoints, if there is one."""
        return Path(self.config.job.run_dir) if self.config.job.run_dir else None

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
        return cls(
            config,
            chip=_chip(chip) if chip and config.mesh.shape else None,
            coordinator=parse_address(coordinator, COORDINATOR.name) if coordinator else None,
            secret=SECRET.value_in(environment),
            plans_ahead=plans_ahead == "1",
            faults=tuple(filter(None, INJECT.value_in(environment).split("\n"))),
        )

    def to_environment(self) -> dict[str, str]:
        """Return the variables that `from_environment` reads back as this.

        It contains all variables of a job, so that none of the launcher's own values stays.
        """
        host, port = self.coordinator or ("", 0)
        return {
            **self.config.variables(),
            CHIP.name: format_chip(self.chip or ()),
            COORDINATOR.name: f"{host}:{port}" if host else "",
            PLAN_AHEAD.name: "1" if self.plans_ahead else "",
            INJECT.name: "\n".join(self.faults),
            SECRET.name: self.secret,
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
        raise InputError(
            f"{CHIP.name} needs a chip of {mesh} such as 0,1, but got {format_chip(chip)!r}"
        )
    if board is not None and (len(board) != len(mesh.shape) or min(board) < 1):
        like = format_shape(board_shape(len(mesh.shape)))
        raise InputError(
            f"{_BOARD} needs a shape for {mesh} such as {like}, but got {format_shape(board)!r}"
        )
