"""`meshmend export` and `meshmend import`: plans and machines in formats of other programs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from meshmend.cli.console import (
    announce_compilation,
    check_readable,
    check_writable,
    print_json,
    progress,
    write_text,
)
from meshmend.cli.options import (
    FabricOption,
    FailOption,
    JsonOption,
    PayloadOption,
    SlowOption,
    WrapOption,
    mesh_of,
    setting_option,
)
from meshmend.cli.plan import plan_facts, print_plan
from meshmend.errors import InputError

if TYPE_CHECKING:
    from meshmend.planning.plan import Plan
    from meshmend.topology.mesh import Mesh

FORMATS: Final = ("msccl-xml", "chakra-et", "next-hop", "csv", "tt-mesh-graph")
XML: Final = "xml"
MESH_GRAPH: Final = "tt-mesh-graph"
PHYSICAL_SYSTEM: Final = "tt-physical-system"
SOURCES: Final = (XML, MESH_GRAPH, PHYSICAL_SYSTEM)


def export_command(
    file: Annotated[
        Path, typer.Argument(metavar="PLAN", help="A plan that 'meshmend plan -o' wrote.")
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="msccl-xml, chakra-et, next-hop, csv or tt-mesh-graph.",
            autocompletion=lambda: list(FORMATS),
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="PATH",
            help="The file; for chakra-et a folder. Else standard output.",
        ),
    ] = None,
    slices: Annotated[
        int, typer.Option("--slices", metavar="N", help="With chakra-et: pieces of the payload.")
    ] = 1,
    as_json: JsonOption = False,
) -> None:
    """Write a plan, proved again first, in a format that other programs read.

    msccl-xml is a program for MSCCL's and RCCL's runtimes. chakra-et are execution traces for
    ASTRA-sim, one file per rank. next-hop says for each chip where messages go next. csv has a line
    for each transfer. tt-mesh-graph describes the plan's mesh, if nothing of it failed, for
    Tenstorrent's tt-metal.

    **Examples**

    - meshmend export plan.json --to msccl-xml -o allreduce.xml

    - meshmend export plan.json --to chakra-et -o traces

    - meshmend export plan.json --to next-hop -o tables.json

    - meshmend export plan.json --to csv
    """
    if to not in FORMATS:
        raise InputError(f"--to needs one of {', '.join(FORMATS)}, but got {to!r}")
    if slices < 1:
        raise InputError(f"--slices needs 1 or more, but got {slices}")
    if slices > 1 and to != "chakra-et":
        raise InputError("--slices needs --to chakra-et: the other formats have no slices")
    check_readable(file, "the plan")
    if to != "chakra-et":
        check_writable(output)
    elif output is None or output.is_file():
        raise InputError("--to chakra-et needs -o FOLDER: it writes one file per rank")
    if as_json and output is None:
        raise InputError("--json needs -o: without it the format itself is printed")
    announce_compilation()
    from meshmend.planning.plan import load_plan

    with progress(quiet=as_json) as bar:
        plan = load_plan(file, progress=bar)
    written = _write(plan, to, output, slices)
    if as_json:
        print_json({"format": to, "written": written, "ranks": plan.schedule.n_ranks})
    elif output is not None:
        print(f"written      {output}" + (f" ({len(written)} files)" if len(written) > 1 else ""))


def _write(plan: "Plan", to: str, output: Path | None, slices: int) -> list[str]:
    """Write one format and return the paths of its files."""
    if to == "chakra-et":
        from meshmend.planning.formats.chakra_trace import write_chakra_traces

        assert output is not None, "the command has looked"
        try:
            return [str(path) for path in write_chakra_traces(plan, output, slices=slices)]
        except OSError as error:
            raise InputError(f"cannot write in {output}: {error.strerror}") from None
    text = _text(plan, to)
    if output is None:
        print(text, end="")
        return []
    write_text(output, text)
    return [str(output)]


def _text(plan: "Plan", to: str) -> str:
    import json

    from meshmend.planning.formats.msccl_xml import msccl_xml
    from meshmend.planning.formats.plan_tables import next_hop_tables, plan_csv

    if to == "msccl-xml":
        return msccl_xml(plan)
    if to == MESH_GRAPH:
        from meshmend.planning.formats.tenstorrent import graph_of_mesh

        return graph_of_mesh(plan.mesh)
    if to == "csv":
        return plan_csv(plan)
    return json.dumps(next_hop_tables(plan), separators=(",", ":")) + "\n"


def import_command(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="MSCCL XML, ForestColl's trees, or a descriptor."),
    ],
    mesh: Annotated[str | None, setting_option("mesh.shape")] = None,
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="FORMAT",
            help="xml, or a machine of Tenstorrent's: tt-mesh-graph or tt-physical-system.",
            autocompletion=lambda: list(SOURCES),
        ),
    ] = XML,
    wrap: WrapOption = "none",
    fail: FailOption = None,
    slow: SlowOption = None,
    payload: PayloadOption = "100MB",
    fabric: FabricOption = "reference",
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write the plan to this JSON file."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Read a collective of another program, prove it on a mesh, and say what it costs there.

    Or read a machine: what of it is dead or slow, and the options that say so to other commands. A
    physical system descriptor is laid on the --mesh that is wanted.

    The file is MSCCL XML of an allreduce or an all-gather, whose rank n is the n-th live chip in
    row-major order, or holds the spanning trees of ForestColl, whose nodes are named like chips,
    `(0, 3)`, or are ranks in their order. Exit code 1 means that the program is wrong: a rank ends
    without the whole sum.

    **Examples**

    - meshmend import allreduce.xml --mesh 4x4

    - meshmend import allreduce.xml --mesh 4x4 --fail 2x2@0,2 --payload 10MB -o plan.json

    - meshmend import forestcoll-trees.xml --mesh 4x4

    - meshmend import system.textproto --from tt-physical-system --mesh 8x4 --wrap all
    """
    from meshmend.planning.target import Target

    if source not in SOURCES:
        raise InputError(f"--from needs one of {', '.join(SOURCES)}, but got {source!r}")
    if source == MESH_GRAPH and (mesh is not None or wrap != "none"):
        raise InputError(
            f"--from {source} reads the mesh from the file; leave out --mesh and --wrap"
        )
    if source != MESH_GRAPH and mesh is None:
        raise InputError(f"--from {source} needs --mesh, such as 8x4")
    if source != XML:
        if output is not None:
            raise InputError(f"-o needs --from {XML}: a machine is no plan")
        check_readable(file, "the file")
        _import_machine(
            file, source, None if mesh is None else mesh_of(mesh, wrap, fail, slow), as_json
        )
        return
    assert mesh is not None
    broken, target = mesh_of(mesh, wrap, fail, slow), Target().with_(payload, fabric)
    check_readable(file, "the file")
    check_writable(output)
    announce_compilation()
    from meshmend.planning.formats.xml_import import schedule_from_xml
    from meshmend.planning.plan import planned
    from meshmend.topology.graph import largest_part

    part = largest_part(broken)
    schedule = schedule_from_xml(_read(file), part)
    with progress(quiet=as_json) as bar:
        bar("proving")
        plan = planned(broken, schedule, target)
        bar("simulating")
        facts: dict[str, Any] = plan_facts(plan)
    if output is not None:
        plan.save(output)
    if as_json:
        print_json(facts)
        return
    print_plan(plan, facts)
    if output is not None:
        print(f"written      {output}")


def _import_machine(file: Path, source: str, wanted: "Mesh | None", as_json: bool) -> None:
    """Print the mesh of a descriptor, and the options that name it."""
    from meshmend.planning.formats.tenstorrent import mesh_of_graph, mesh_of_system
    from meshmend.topology.mesh import format_wrap

    text = _read(file)
    places: dict[int, tuple[int, ...]] = {}
    if wanted is None:
        found = mesh_of_graph(text)
    else:
        found, places = mesh_of_system(text, wanted)
    options = ["--mesh", "x".join(map(str, found.shape)), "--wrap", format_wrap(found.wrap)]
    for failure in found.failures():
        options += ["--fail", str(failure)]
    for slow in sorted(found.slow):
        options += ["--slow", str(slow)]
    if as_json:
        print_json(
            {
                "mesh": str(found),
                "live": found.n_live,
                "chips": {str(chip): list(place) for chip, place in places.items()},
                "options": options,
            }
        )
        return
    print(f"mesh         {found}")
    print(f"chips        {found.n_live} of {found.n_chips}")
    print(f"options      {' '.join(options)}")


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"cannot read {file}: it is no text") from None
