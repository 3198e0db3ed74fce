"""From inputs to the scenario that a forecast simulates."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshmend.errors import InputError
from meshmend.forecast.inputs import Inputs
from meshmend.forecast.scenario import (
    KINDS,
    FailureModel,
    JobModel,
    RepairModel,
    Scenario,
    Shape,
    SpareModel,
)
from meshmend.topology.fabric import fabric
from meshmend.topology.failures import board_shape, parse_shape
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh

_SPARE_SHARE = 0.02
_FEW_SPARES = 1000  # which any machine may have


@dataclass(frozen=True)
class ForecastQuestion:
    """A scenario, and the assumptions that were made to get it."""

    scenario: Scenario
    assumptions: tuple[str, ...]


def question_of(inputs: Inputs) -> ForecastQuestion:
    """Return the scenario of these inputs.

    Raises:
        InputError: values that do not fit together.
    """
    values = inputs.values
    mesh = parse_mesh(values["mesh"], wrap=values["wrap"])
    n_axes = len(mesh.shape)
    if n_axes > 3:
        raise InputError(f"forecast needs a mesh of at most 3 axes, but got {mesh}")
    host = values["host"] or board_shape(n_axes, "host")
    board = values["board"] or board_shape(n_axes, "board")
    rack = values["rack"] or mesh.shape
    unit = _unit(values["spare-unit"], mesh, {"host": host, "board": board, "rack": rack})
    n_units = mesh.n_chips / math.prod(unit)
    n_spares = _n_spares(values["spares"], n_units)
    assumptions = [
        f"spares {n_spares}: 2 % of the units, at least one" if each.startswith("spares:") else each
        for each in inputs.assumptions
    ]
    scenario = Scenario(
        mesh,
        _failures(values),
        _repair(values),
        _job(values),
        SpareModel(n_spares, unit, values["switch-in"]),
        host,
        board,
        rack,
    )
    return ForecastQuestion(scenario, (*assumptions, *_of_the_model()))


def _n_spares(given: int | None, n_units: float) -> int:
    """Return the number of spares, or the default share; more than ten machines are refused."""
    if given is None:
        return max(1, math.ceil(_SPARE_SHARE * n_units))
    most = max(_FEW_SPARES, round(10 * n_units))
    if given > most:
        raise InputError(
            f"--spares needs at most {most} for the {n_units:g} units of this mesh, but got {given}"
        )
    return given


def _of_the_model() -> tuple[str, ...]:
    return (
        "what the job does changes no failure and no repair",
        "spares fail as often as what they replace",
        "no failure takes away the state of a job that goes on: every live chip holds it",
    )


def _unit(word: str, mesh: Mesh, shapes: Mapping[str, Shape]) -> Shape:
    """Return the shape of a spare unit: of a kind, a row or column of hosts, or as written."""
    if word in shapes:
        return shapes[word]
    host = shapes["host"]
    if word == "row":
        return (host[0], *mesh.shape[1:])
    if word == "column":
        return (*mesh.shape[:-1], host[-1])
    try:
        return parse_shape(word)
    except ValueError:
        raise InputError(
            "--spare-unit needs host, board, rack, row, column or a shape such as 4x4x4, but got "
            f"{word!r}"
        ) from None


def _failures(values: Mapping[str, Any]) -> FailureModel:
    rates = {kind: values[f"failures-per-1000-{kind}-days"] for kind in KINDS}
    return FailureModel(
        {kind: rate for kind, rate in rates.items() if rate},
        values["failure-shape"],
        values["burst"],
        values["burst-window"],
    )


def _repair(values: Mapping[str, Any]) -> RepairModel:
    return RepairModel(
        values["repair"],
        values["repair-spread"],
        values["repair-sigma"],
        values["automatic-repair"],
        values["automatic-success"],
        values["crews"],
    )


def _job(values: Mapping[str, Any]) -> JobModel:
    return JobModel(
        payload_bytes=values["payload"],
        fabric=fabric(values["fabric"]),
        algorithm=values["algorithm"],
        compute_s=values["compute"],
        allreduce_share=values["allreduce-share"],
        keeps_batch=values["batch"] == "kept",
        detection_s=values["detection"],
        restart_s=values["restart"],
        recovery_s=values["recovery"],
        checkpoint_every=values["checkpoint-every"],
        checkpoint_write_s=values["checkpoint-write"],
    )
