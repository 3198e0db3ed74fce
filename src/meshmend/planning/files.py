"""Plan files: a schedule and the mesh it is for, as versioned JSON.

The columns of the table are plain lists, so that any program can read them. What is derived
(hazards, routes, proofs) is not stored: it is computed anew and so cannot be stale.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from meshmend.errors import InputError, PlanFileError
from meshmend.schedule.table import Collective, Phase, Schedule, index_dtype
from meshmend.topology.mesh import Mesh, format_wrap
from meshmend.topology.text import parse_mesh

FORMAT = "meshmend-plan"
VERSION = 1


def plan_document(mesh: Mesh, schedule: Schedule) -> dict[str, Any]:
    """Return the JSON value of a plan file."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "mesh": {
            "shape": "x".join(map(str, mesh.shape)),
            "wrap": format_wrap(mesh.wrap),
            "fail": [str(failure) for failure in mesh.failures()],
        },
        "algorithm": schedule.algorithm,
        "collective": str(schedule.collective),
        "ranks": schedule.n_ranks,
        "phases": [[phase.name, phase.start, phase.stop] for phase in schedule.phases],
        "cuts": schedule.cuts.tolist(),
        "owners": schedule.owners.tolist(),
        "src": schedule.src.tolist(),
        "dst": schedule.dst.tolist(),
        "lo": schedule.lo.tolist(),
        "hi": schedule.hi.tolist(),
        "op": schedule.op.tolist(),
    }


def write_plan(path: Path, mesh: Mesh, schedule: Schedule) -> None:
    """Write a plan file; an earlier file of that name stays whole until the new one is there.

    Raises:
        PlanFileError: the file cannot be written.
    """
    text = json.dumps(plan_document(mesh, schedule), separators=(",", ":"))
    draft = path.with_name(path.name + ".part")
    try:
        draft.write_text(text + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise PlanFileError(f"cannot write the plan to {path}: {error.strerror}") from None


def read_plan(path: Path) -> tuple[Mesh, Schedule]:
    """Return the mesh and the schedule of a plan file.

    Raises:
        PlanFileError: no such file, not a plan file, another version, or a damaged one.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanFileError(f"cannot read the plan {path}: {error.strerror}") from None
    except ValueError as error:
        raise PlanFileError(f"{path} is not a plan file: not JSON ({error})") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise PlanFileError(f'{path} is not a plan file: it lacks "format": "{FORMAT}"')
    if document.get("version") != VERSION:
        raise PlanFileError(
            f"{path} has plan version {document.get('version')!r}, but this meshmend reads "
            f"{VERSION}; plan again"
        )
    try:
        return _mesh(document["mesh"]), _schedule(document)
    except KeyError as error:
        raise PlanFileError(f"{path} is damaged: {error} is missing") from None
    except (InputError, ValueError, TypeError, OverflowError, IndexError) as error:
        raise PlanFileError(f"{path} is damaged: {error}") from None


def _mesh(document: dict[str, Any]) -> Mesh:
    return parse_mesh(document["shape"], wrap=document["wrap"], fail=document["fail"])


def _schedule(document: dict[str, Any]) -> Schedule:
    n_ranks, cuts = document["ranks"], np.array(document["cuts"], dtype=np.float64)
    if not isinstance(n_ranks, int) or n_ranks < 1:
        raise ValueError(f"ranks need to be a positive number, but got {n_ranks!r}")
    if cuts.ndim != 1 or len(cuts) < 2:
        raise ValueError("cuts need to be a list of two numbers or more")
    dtype = index_dtype(n_ranks, len(cuts) - 1)
    return Schedule(
        algorithm=str(document["algorithm"]),
        collective=Collective(document["collective"]),
        n_ranks=n_ranks,
        cuts=cuts,
        owners=np.array(document["owners"], dtype=np.int32),
        src=np.array(document["src"], dtype=dtype),
        dst=np.array(document["dst"], dtype=dtype),
        lo=np.array(document["lo"], dtype=dtype),
        hi=np.array(document["hi"], dtype=dtype),
        op=np.array(document["op"], dtype=np.uint8),
        phases=tuple(
            Phase(str(name), int(start), int(stop)) for name, start, stop in document["phases"]
        ),
    )
