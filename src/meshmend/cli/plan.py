"""`meshmend plan`, `meshmend verify` and `meshmend algorithms`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshmend.cli.console import (
    announce_compilation,
    cache_dir,
    check_readable,
    check_writable,
    print_json,
    progress,
)
from meshmend.cli.options import (
    CollectiveOption,
    FabricOption,
    FailOption,
    JsonOption,
    MeshOption,
    MirrorDomainOption,
    PayloadOption,
    UpdateRateOption,
    WrapOption,
    algorithm_names,
    check_algorithms,
    mesh_of,
    with_update_rate,
)
from meshmend.cli.plan_text import mirror_facts, named_plan, plan_facts, print_plan
from meshmend.errors import InputError

if TYPE_CHECKING:
    from meshmend.planning.lowering import Lowered
    from meshmend.planning.plan import Plan
    from meshmend.planning.progress import ProgressCallback
    from meshmend.planning.target import Target
    from meshmend.schedule.table import Collective
    from meshmend.topology.mesh import Mesh

AlgorithmOption = Annotated[
    str,
    typer.Option(
        "--algorithm",
        metavar="NAME",
        help="How to sum: auto, or a name that 'meshmend algorithms' lists.",
        autocompletion=algorithm_names,
    ),
]


def plan_command(
    mesh: MeshOption,
    wrap: WrapOption = "none",
    fail: FailOption = None,
    algorithm: AlgorithmOption = "auto",
    collective: CollectiveOption = "allreduce",
    payload: PayloadOption = "100MB",
    fabric: FabricOption = "reference",
    update_rate: UpdateRateOption = None,
    mirror_domain: MirrorDomainOption = None,
    lower: Annotated[
        str | None,
        typer.Option(
            "--lower",
            metavar="jax",
            help="Also lower it to steps, as a jitted program runs it; auto and trees then take "
            "the trees that are fastest so.",
        ),
    ] = None,
    slices: Annotated[
        int | None,
        typer.Option("--slices", help="With --lower: pieces of the payload; else the fastest."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the plan to this JSON file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Plan gradient summation around failed chips, and prove the plan right.

    Builds the schedule and derives what may overlap. Then it proves that every chip ends with the
    data of every chip exactly once, that every hop is alive, and that messages cannot deadlock.

    With --collective sharded-update each chip sums up its equal share of the gradients, updates
    that share of the weights, and sends it to all. The plan is then also proved to use no weight
    before its owner has updated it. It also says what it costs to mirror the optimizer's state, as
    'meshmend train --shard-optimizer' does.

    **Examples**

    - meshmend plan --mesh 8x8 --fail 2x2@2,2

    - meshmend plan --mesh 16x32 --fail 4x2@6,8 --algorithm ft-two-d -o plan.json

    - meshmend plan --mesh 8x8 --fail 2x2@2,2 --collective reduce-scatter --json

    - meshmend plan --mesh 8x8 --fail 2x2@2,2 --collective sharded-update --update-rate 500GB/s

    - meshmend plan --mesh 8x8 --collective sharded-update --mirror-domain board --mirror-domain row

    - meshmend plan --mesh 8x8 --fail 2x2@2,2 --lower jax --slices 8 --json
    """
    from meshmend.planning.target import Target, collective_named
    from meshmend.topology.fabric import fabric as fabric_named

    _check_lowering(lower, slices)
    broken = mesh_of(mesh, wrap, fail)
    check_algorithms([algorithm], "auto")
    wanted = collective_named(collective)
    machine = with_update_rate(fabric_named(fabric), update_rate, wanted)
    target = Target().with_(payload, machine)
    _check_mirrors(mirror_domain, wanted, broken)
    if lower and wanted == "sharded-update":
        raise InputError("--lower jax needs an allreduce, reduce-scatter or all-gather")
    check_writable(output)
    announce_compilation()
    with progress(quiet=as_json) as bar:
        result, low = _planned(broken, algorithm, wanted, target, lower, slices, bar)
        bar("simulating")
        facts = plan_facts(result, algorithm, low)
        if wanted == "sharded-update":
            facts |= {"mirrors": mirror_facts(result, mirror_domain)}
    if output is not None:
        result.save(output)
    _print_facts(result, facts, as_json=as_json)
    if output is not None and not as_json:
        print(f"written      {output}")


def verify_command(
    file: Annotated[Path, typer.Argument(help="A plan that 'meshmend plan -o' wrote.")],
    mesh: Annotated[
        str | None,
        typer.Option("--mesh", metavar="RxC", help="Insist that the plan is for this mesh."),
    ] = None,
    wrap: WrapOption = "none",
    fail: FailOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read a plan back and prove it again: contributions, hops, and freedom from deadlock.

    With --mesh (and --wrap, --fail) the plan must be for exactly that mesh. Exit code 1 means
    that the plan is wrong, 2 that the file cannot be used.

    **Examples**

    - meshmend verify plan.json

    - meshmend verify plan.json --mesh 8x8 --fail 2x2@2,2 --json
    """
    if mesh is None and (fail or wrap != "none"):
        raise InputError("--fail and --wrap need --mesh: together they name the mesh to insist on")
    wanted = None if mesh is None else mesh_of(mesh, wrap, fail)
    check_readable(file, "the plan")
    announce_compilation()
    from meshmend.planning.plan import load_plan

    with progress(quiet=as_json) as bar:
        result = load_plan(file, mesh=wanted, progress=bar)
        bar("simulating")
        facts = plan_facts(result)
    _print_facts(result, facts, as_json=as_json)


def algorithms_command(as_json: JsonOption = False) -> None:
    """List the algorithms: what each needs, what it gives, and the figures it comes from.

    **Examples**

    - meshmend algorithms

    - meshmend algorithms --json
    """
    from meshmend.schedule.algorithms import ALGORITHMS

    if as_json:
        fields = ("name", "figures", "needs", "gives")
        rows = [{key: getattr(entry, key) for key in fields} for entry in ALGORITHMS.values()]
        print_json({"algorithms": rows})
        return
    for entry in ALGORITHMS.values():
        print(entry.name + (f"  (figures {entry.figures} of the paper)" if entry.figures else ""))
        print(f"  needs  {entry.needs}")
        print(f"  gives  {entry.gives}")


def _print_facts(plan: "Plan", facts: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(facts)
    else:
        print_plan(plan, facts)


def _check_lowering(lower: str | None, slices: int | None) -> None:
    if lower not in {None, "jax"}:
        raise InputError(f"--lower needs 'jax', but got {lower!r}")
    if slices is not None and lower is None:
        raise InputError("--slices needs --lower jax: a plan itself has no slices")
    if slices is not None and slices < 1:
        raise InputError(f"--slices needs 1 or more, but got {slices}")


def _check_mirrors(domains: list[str] | None, collective: str, mesh: "Mesh") -> None:
    """Raise InputError if domains of mirrors are given that make no sense for this plan."""
    from meshmend.topology.failures import board_shape
    from meshmend.train.sharding.update_shares import check_domains

    if domains and collective != "sharded-update":
        raise InputError(
            f"--mirror-domain needs --collective sharded-update, but got {collective}, which has "
            "no mirrors"
        )
    if domains:
        check_domains(domains, mesh, board_shape(len(mesh.shape)))


def _planned(
    broken: "Mesh",
    algorithm: str,
    collective: "Collective",
    target: "Target",
    lower: str | None,
    slices: int | None,
    progress: "ProgressCallback",
) -> tuple["Plan", "Lowered | None"]:
    """Return the plan; where it is to be lowered, the one that is fastest in lockstep."""
    from meshmend.planning.lockstep_plan import lockstep_plan
    from meshmend.planning.lowering import lowered

    payload, fabric, kept = target.payload_bytes, target.fabric, cache_dir()
    if lower and collective == "allreduce":
        low = lockstep_plan(
            broken,
            algorithm,
            payload=payload,
            fabric=fabric,
            slices=slices,
            cache_dir=kept,
            progress=progress,
        )
        return low.plan, low
    made = named_plan(broken, algorithm, collective, target, progress)
    return made, lowered(made, slices=slices) if lower else None
