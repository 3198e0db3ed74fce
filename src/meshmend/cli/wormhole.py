"""`meshmend wormhole`: plans on the Ethernet cores of Tenstorrent's Wormhole chips."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshmend.cli.console import announce_compilation, check_readable, print_json, progress
from meshmend.cli.options import (
    FailOption,
    JsonOption,
    MeshOption,
    PayloadOption,
    WrapOption,
    check_algorithms,
    command_group,
    mesh_of,
)
from meshmend.config import TTSIM
from meshmend.errors import InputError

if TYPE_CHECKING:
    from meshmend.wormhole.experiment import Result

app = command_group(
    "Run plans on the Ethernet cores of Tenstorrent's Wormhole chips, under ttsim.",
    start_with="wormhole run --library libttsim.so --mesh 8x4 --wrap all",
)


@app.command("run")
def run_command(
    mesh: MeshOption,
    library: Annotated[
        Path | None,
        typer.Option(
            "--library",
            metavar="FILE",
            help=f"libttsim.so of 32 Wormhole chips; else {TTSIM.name} names it.",
        ),
    ] = None,
    wrap: WrapOption = "none",
    fail: FailOption = None,
    lost_cable: Annotated[
        list[str] | None,
        typer.Option(
            "--lost-cable",
            metavar="LINK:N",
            help="A dead cable of a live link, such as 0,1-0,2:3; repeat for more.",
        ),
    ] = None,
    payload: PayloadOption = "64KB",
    type_name: Annotated[
        str, typer.Option("--type", metavar="TYPE", help="int32, float32 or bfloat16.")
    ] = "int32",
    collective: Annotated[
        str,
        typer.Option(
            "--collective",
            metavar="KIND",
            help="allreduce, reduce-scatter, all-gather, or broadcast.",
        ),
    ] = "allreduce",
    algorithm: Annotated[
        str, typer.Option("--algorithm", metavar="NAME", help="auto, or a name of an algorithm.")
    ] = "auto",
    plan_file: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="PLAN",
            help="A plan for this mesh that 'meshmend plan -o' wrote, instead of a new one.",
        ),
    ] = None,
    slices: Annotated[
        int | None,
        typer.Option("--slices", metavar="N", help="Pieces of the payload, one after another."),
    ] = None,
    seed: Annotated[
        int,
        typer.Option("--seed", metavar="N", min=0, max=2**32 - 1, help="Of the numbers to sum."),
    ] = 0,
    as_json: JsonOption = False,
) -> int:
    """Run a collective on simulated Wormhole chips, and compare every bit with NumPy.

    The plan becomes a table of moves for each Ethernet core, and our kernel walks it. Dead chips
    and dead cables are held in reset: their memory holds a pattern, which must be untouched. Exit
    code 1 means that a chip has a wrong bit, or that such memory was changed. Clocks are those of a
    functional simulator, in which data moves at once: they say nothing of real time.

    **Examples**

    - meshmend wormhole run --library libttsim.so --mesh 8x4 --wrap all --fail 2x2@2,0

    - meshmend wormhole run --library libttsim.so --mesh 8x4 --type float32 --payload 256KB

    - meshmend wormhole run --library libttsim.so --mesh 8x4 --fail 3,1 --plan plan.json

    - meshmend wormhole run --library libttsim.so --mesh 2x2 --lost-cable 0,0-0,1:3 --payload 4KB
    """
    from meshmend.units import parse_bytes

    broken, payload_bytes = mesh_of(mesh, wrap, fail), parse_bytes(payload)
    check_algorithms([algorithm], "auto")
    if plan_file is not None:
        if algorithm != "auto" or collective != "allreduce":
            raise InputError("--plan has its own algorithm and collective; leave the others out")
        check_readable(plan_file, "the plan")
    found = library or Path(TTSIM.value_in(os.environ) or "")
    if found == Path():
        raise InputError(
            f"meshmend wormhole run needs --library libttsim.so, or {TTSIM.name} that names it"
        )
    check_readable(found, "the library")
    announce_compilation()
    from meshmend.wormhole.experiment import Question, parse_lost_cable, run_experiment

    question = Question(
        mesh=broken,
        payload_bytes=payload_bytes,
        type_name=type_name,
        collective=collective,
        algorithm=algorithm,
        slices=slices,
        lost_cables=tuple(parse_lost_cable(text) for text in lost_cable or ()),
        seed=seed,
        plan_file=plan_file,
    )
    with progress(quiet=as_json) as bar:
        result = run_experiment(question, found.absolute(), bar)
    if as_json:
        print_json(result.summary())
    else:
        _print(result)
    return 0 if result.n_wrong == 0 else 1


def _print(result: "Result") -> None:
    from meshmend.units import counted, format_bytes

    facts = result.summary()
    busiest = facts["busiest_cable"]
    chip = ",".join(map(str, busiest["chip"]))
    wrong = "WRONG: " + counted(result.n_wrong, "element")
    compared = "every bit as planned and proved" if facts["right"] else wrong
    print(f"mesh         {facts['mesh']}: {counted(facts['ranks'], 'chip')}")
    plan = f"{facts['algorithm']} {facts['collective']}".removesuffix(" broadcast")
    print(f"plan         {plan}")
    print(
        f"payload      {format_bytes(facts['payload_bytes'])} of {facts['type']}, "
        f"{counted(facts['lanes'], 'lane')}, {counted(facts['slices'], 'slice')}"
    )
    print(f"tables       {facts['moves']:,} moves on {facts['cores']} Ethernet cores")
    print(f"result       {compared}")
    print(f"clocks       {facts['clocks']:,} (functional, not timed)")
    print(f"cables       {facts['bytes_on_cables']:,} bytes on {facts['cables']} cables")
    print(
        f"busiest      {busiest['bytes']:,} bytes one way, channel {busiest['channel']} of {chip}"
    )
    print(f"untouched    {facts['untouched_cores']} cores in reset, their memory as it was")
