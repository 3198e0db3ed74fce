"""Reads and writes plan files: a schedule and its mesh, as versioned JSON.

The columns of the table are plain lists, so that any program can read them. Derived
values (hazards, routes, proofs) are not stored: they are computed again, so they are never stale.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError, PlanFileError
from meshmend.files import write_named
from meshmend.planning.target import Target
from meshmend.planning.tree_formula import Pipeline
from meshmend.schedule.table import Collective, Colours, Phase, Schedule, index_dtype
from meshmend.topology.fabric import Fabric, Processors
from meshmend.topology.failures import format_shape
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import mesh_words, parse_mesh, parse_tile
from meshmend.topology.tiles import Tiling

_Integer = TypeVar("_Integer", bound=np.integer)

FORMAT = "meshmend-plan"
VERSION = 1
SCRATCH_VERSION = 2  # of tables with scratch: who reads version 1 alone would read them wrong
TILE_VERSION = 3  # of tables in which chips sum with those of their colour alone


def plan_document(mesh: Mesh, schedule: Schedule, tiling: Tiling | None = None) -> dict[str, Any]:
    """Return the JSON value of a plan file; the tiling is that of a table of colours."""
    document = _document(mesh, schedule, tiling)
    return {name: _plain(value) for name, value in document.items()}


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _document(mesh: Mesh, schedule: Schedule, tiling: Tiling | None) -> dict[str, Any]:
    """Return what a plan file holds, with arrays that are to be lists."""
    buffers = schedule.buffer_columns if schedule.has_scratch else {}
    colours: dict[str, Any] = {}
    if schedule.colours is not None and tiling is not None:
        colours = {
            "tile": format_shape(tiling.shape),
            "tiles": [[tiling.mesh.rank_of[chip] for chip in tile] for tile in tiling.tiles],
            "colours": schedule.colours.of_chunk,
        }
    usual = SCRATCH_VERSION if schedule.has_scratch else VERSION
    return {
        "format": FORMAT,
        "version": TILE_VERSION if colours else usual,
        "mesh": mesh_words(mesh),
        **colours,
        "algorithm": schedule.algorithm,
        "collective": str(schedule.collective),
        "ranks": schedule.n_ranks,
        "phases": [[phase.name, phase.start, phase.stop] for phase in schedule.phases],
        "cuts": schedule.cuts,
        "owners": schedule.owners,
        "src": schedule.src,
        "dst": schedule.dst,
        "lo": schedule.lo,
        "hi": schedule.hi,
        "op": schedule.op,
        **buffers,
    }


class PlanFile(NamedTuple):
    """What a plan file holds: `pipeline` is how to run the schedule on the target, if known.

    A schedule of colours comes with the `tiling` that they are of.
    """

    mesh: Mesh
    schedule: Schedule
    pipeline: Pipeline | None = None
    target: Target = Target()
    tiling: Tiling | None = None


def encode_plan(plan: PlanFile) -> bytes:
    """Return the content of a plan file."""
    document = _document(plan.mesh, plan.schedule, plan.tiling)
    target = plan.target
    document["target"] = {
        "payload_bytes": target.payload_bytes,
        "fabric": target.fabric.summary(),
    }
    if plan.pipeline is not None:
        document["pipeline"] = asdict(plan.pipeline)
    # One column after another: as lists, all of them take ten times as much memory as the file.
    parts = (
        json.dumps({name: _plain(value)}, separators=(",", ":"))[1:-1].encode()
        for name, value in document.items()
    )
    return b"{" + b",".join(parts) + b"}\n"


def write_plan(
    path: Path,
    mesh: Mesh,
    schedule: Schedule,
    pipeline: Pipeline | None = None,
    target: Target | None = None,
    tiling: Tiling | None = None,
) -> None:
    """Write a plan file; an earlier file stays intact until the new one is complete.

    Several processes may write it at the same time; the last file stays.

    Raises:
        PlanFileError: the file cannot be written.
    """
    content = encode_plan(PlanFile(mesh, schedule, pipeline, target or Target(), tiling))
    try:
        write_named(path, content)
    except OSError as error:
        raise PlanFileError(f"cannot write the plan to {path}: {error.strerror}") from None


def read_plan(path: Path) -> PlanFile:
    """Return what a plan file holds.

    Raises:
        PlanFileError: the file does not exist, is no plan file, is damaged, or has another version.
    """
    try:
        if path.is_char_device():  # such as /dev/zero, which never ends
            raise PlanFileError(f"cannot read the plan {path}: it is a device, not a file")
        content = path.read_bytes()
    except OSError as error:
        raise PlanFileError(f"cannot read the plan {path}: {error.strerror}") from None
    return decode_plan(content, str(path))


def decode_plan(content: bytes, path: str) -> PlanFile:
    """Return what the content of a plan file says; errors name `path` as where it is from.

    Raises:
        PlanFileError: it is no plan file, is damaged, or has another version.
    """
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise PlanFileError(f"{path} is not a plan file: not JSON ({error})") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise PlanFileError(f'{path} is not a plan file: it lacks "format": "{FORMAT}"')
    if document.get("version") not in (VERSION, SCRATCH_VERSION, TILE_VERSION):
        raise PlanFileError(
            f"{path} has plan version {document.get('version')!r}, but this meshmend reads "
            f"{VERSION} to {TILE_VERSION}; plan again"
        )
    try:
        mesh = _mesh(document["mesh"])
        tiling = _tiling(mesh, document) if document["version"] == TILE_VERSION else None
        schedule = _schedule(document, tiling)
        return PlanFile(mesh, schedule, _pipeline(document), _target(document), tiling)
    except KeyError as error:
        raise PlanFileError(f"{path} is damaged: {error} is missing") from None
    except (InputError, ValueError, TypeError, OverflowError, IndexError, AttributeError) as error:
        raise PlanFileError(f"{path} is damaged: {error}") from None


def _mesh(document: dict[str, Any]) -> Mesh:
    shape, wrap, fail = document["shape"], document["wrap"], document["fail"]
    slow = document.get("slow", [])  # only meshes with slow links have any
    if not (isinstance(fail, list) and isinstance(slow, list)) or not all(
        isinstance(text, str) for text in (shape, wrap, *fail, *slow)
    ):
        raise ValueError("the mesh needs its shape, wrap, failures and slow links as text")
    return parse_mesh(shape, wrap=wrap, fail=fail, slow=slow)


def _pipeline(document: dict[str, Any]) -> Pipeline | None:
    entry = document.get("pipeline")
    if entry is None:
        return None
    slices, skew = entry["slices"], entry["skew"]
    if type(slices) is not int or slices < 1 or type(skew) not in {int, float} or not skew >= 0:
        raise ValueError(f"the pipeline needs slices from 1 and skew from 0 on, but got {entry!r}")
    stagger = entry.get("stagger", 0.0)  # files from before there were owners have none
    if type(stagger) not in {int, float} or not 0 <= stagger <= 1:
        raise ValueError(f"the pipeline needs a stagger from 0 to 1, but got {entry!r}")
    leaves_last = entry.get("leaves_last", False)  # files from before gaps were filled have none
    if type(leaves_last) is not bool:
        raise ValueError(f"the pipeline needs leaves_last as true or false, but got {entry!r}")
    return Pipeline(slices, float(skew), float(stagger), leaves_last)


def _target(document: dict[str, Any]) -> Target:
    entry = document.get("target")
    if entry is None:
        return Target()
    # Whole numbers of JSON have any length; floats and their bounds are what fabrics are made for.
    figures: dict[str, Any] = {
        name: float(value) if type(value) is int else value
        for name, value in entry["fabric"].items()
    }
    if (processors := figures.get("processors")) is not None:
        figures["processors"] = Processors(**processors)
    fabric = Fabric(**figures)
    if not all(isinstance(text, str) for text in (fabric.name, fabric.source, fabric.usual_mesh)):
        raise ValueError(f"the fabric needs its name and source as text, but got {fabric!r}")
    return Target(float(entry["payload_bytes"]), fabric)


def _tiling(mesh: Mesh, document: dict[str, Any]) -> Tiling:
    part, rows = largest_part(mesh), document["tiles"]
    if not isinstance(rows, list):
        raise ValueError("tiles need to be a list of tiles")
    tiles = [_numbers("a tile", row, kinds="iu").tolist() for row in rows]
    if not all(0 <= rank < part.n_live for tile in tiles for rank in tile):
        raise ValueError(f"tiles need ranks below {part.n_live}")
    chips = tuple(tuple(part.live[rank] for rank in tile) for tile in tiles)
    return Tiling(part, parse_tile(document["tile"]), chips)


def _schedule(document: dict[str, Any], tiling: Tiling | None) -> Schedule:
    n_ranks, cuts, algorithm = document["ranks"], document["cuts"], document["algorithm"]
    if type(n_ranks) is not int or n_ranks < 1:
        raise ValueError(f"ranks need to be a positive number, but got {n_ranks!r}")
    if not isinstance(algorithm, str):
        raise ValueError(f"algorithm needs to be a name, but got {algorithm!r}")
    cuts = _numbers("cuts", cuts, kinds="iuf").astype(np.float64)
    if len(cuts) < 2:
        raise ValueError("cuts need to be a list of two numbers or more")
    names = ("src_buffer", "dst_buffer") if document["version"] == SCRATCH_VERSION else ()
    buffers = {name: _column(document, name, np.uint8) for name in names}
    n_buffers = 1 + max((int(column.max(initial=0)) for column in buffers.values()), default=0)
    dtype = index_dtype(n_ranks * n_buffers, len(cuts) - 1)
    src = _column(document, "src", dtype)
    colours = None
    if tiling is not None:
        colours = Colours(tiling.colour_of.copy(), _column(document, "colours", np.int32))
    return Schedule(
        algorithm=algorithm,
        collective=Collective(document["collective"]),
        n_ranks=n_ranks,
        cuts=cuts,
        owners=_column(document, "owners", np.int32),
        src=src,
        dst=_column(document, "dst", dtype),
        lo=_column(document, "lo", dtype),
        hi=_column(document, "hi", dtype),
        op=_column(document, "op", np.uint8),
        phases=tuple(_phase(phase, len(src)) for phase in document["phases"]),
        **buffers,
        colours=colours,
    )


def _phase(entry: Any, n_rows: int) -> Phase:
    name, start, stop = entry
    if not isinstance(name, str) or {type(start), type(stop)} != {int}:
        raise ValueError(f"a phase needs a name and two rows, but got {entry!r}")
    if not 0 <= start <= stop <= n_rows:
        raise ValueError(f"phase {name!r} needs rows from 0 to {n_rows}, but got {start} to {stop}")
    return Phase(name, start, stop)


def _column(document: dict[str, Any], name: str, dtype: type[_Integer]) -> NDArray[_Integer]:
    """Return a column as an array, refusing what a conversion would round or wrap around."""
    values = _numbers(name, document[name], kinds="iu")
    most = np.iinfo(dtype).max
    if values.size and (values.min() < 0 or values.max() > most):
        raise ValueError(f"{name} needs numbers from 0 to {most}")
    return values.astype(dtype)


def _numbers(name: str, values: Any, *, kinds: str) -> NDArray[Any]:
    array = np.array(values)
    if (
        not isinstance(values, list)
        or array.ndim != 1
        or (values and array.dtype.kind not in kinds)
    ):
        raise ValueError(f"{name} needs a list of {'whole ' * ('f' not in kinds)}numbers")
    return array
