"""`meshmend plan`, `meshmend verify` and `meshmend algorithms`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshmend.cli.console import (
    announce_compilation,
    cache_dir,
    check_readable,
    check_writable,
    note,
    print_json,
    progress,
)
from meshmend.cli.options import (
    FabricOption,
    FailOption,
    JsonOption,
    MeshOption,
    PayloadOption,
    WrapOption,
    check_algorithms,
    mesh_of,
)
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
    ),
]
CollectiveOption = Annotated[
    str,
    typer.Option(
        "--collective", metavar="KIND", help="allreduce, or half of it: reduce-scatter, all-gather."
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

    **Examples**

    - meshmend plan --mesh 8x8 --fail 2x2@2,2

    - meshmend plan --mesh 16x32 --fail 4x2@6,8 --algorithm ft-two-d -o plan.json

    - meshmend plan --mesh 8x8 --fail 2x2@2,2 --collective reduce-scatter --json

    - meshmend plan --mesh 8x8 --fail 2x2@2,2 --lower jax --slices 8 --json
    """
    from meshmend.planning.target import Target, collective_named

    _check_lowering(lower, slices)

    broken = mesh_of(mesh, wrap, fail)
    check_algorithms([algorithm], "auto")
    target, wanted = Target().with_(payload, fabric), collective_named(collective)
    check_writable(output)
    announce_compilation()
    with progress(quiet=as_json) as bar:
        result, low = _planned(broken, algorithm, wanted, target, lower, slices, bar)
    if output is not None:
        result.save(output)
    _print_plan(result, as_json=as_json, lowering=low.summary() if low else None)
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
    """
    if mesh is None and (fail or wrap != "none"):
        raise InputError("--fail and --wrap need --mesh: together they name the mesh to insist on")
    wanted = None if mesh is None else mesh_of(mesh, wrap, fail)
    check_readable(file, "the plan")
    announce_compilation()
    from meshmend.planning.plan import load_plan

    with progress(quiet=as_json) as bar:
        result = load_plan(file, mesh=wanted, progress=bar)
    _print_plan(result, as_json=as_json)


def algorithms_command(as_json: JsonOption = False) -> None:
    """List the algorithms: what each needs, what it gives, and the figures it comes from."""
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


def _check_lowering(lower: str | None, slices: int | None) -> None:
    if lower not in {None, "jax"}:
        raise InputError(f"--lower needs 'jax', but got {lower!r}")
    if slices is not None and lower is None:
        raise InputError("--slices needs --lower jax: a plan itself has no slices")
    if slices is not None and slices < 1:
        raise InputError(f"--slices needs 1 or more, but got {slices}")


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
    from meshmend.planning.plan import plan

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
    made = plan(
        broken,
        algorithm,
        collective=collective,
        payload=payload,
        fabric=fabric,
        cache_dir=kept,
        progress=progress,
    )
    return made, lowered(made, slices=slices) if lower else None


def _print_plan(plan: "Plan", *, as_json: bool, lowering: dict[str, Any] | None = None) -> None:
    facts = plan.summary()
    if as_json:
        if lowering is not None:
            facts["lowered"] = lowering
        print_json(facts)
        return
    from meshmend.units import format_time

    mesh, seconds = facts["mesh"], facts["seconds"]
    if plan.stranded:
        shown = ", ".join(map(str, plan.stranded[:4]))
        more = f" and {len(plan.stranded) - 4} more" if len(plan.stranded) > 4 else ""
        note(f"meshmend: cut off from the rest and left out: {shown}{more}")
    error = facts["error_probability"]
    proof = "counted exactly" if not error else f"by fingerprint, wrong at most {error:.1e}"
    lines = {
        "mesh": f"{plan.mesh}: {mesh['live']} live chips, {mesh['links']} live links",
        "algorithm": f"{facts['algorithm']} ({facts['collective']} over {facts['ranks']} ranks)",
        "table": f"{facts['rows']:,} rows, {facts['chunks']:,} chunks",
        "verified": f"every contribution once, every hop alive ({proof})",
        "deadlock": f"free, with {facts['virtual_channels']} virtual channel(s)",
        "hops": f"at most {facts['max_hops']}, stretch at most {facts['max_stretch']:.3g}",
        "link load": f"at most {facts['max_link_load']:.4g} of the payload per directed link",
        "pipeline": f"{facts['slices']} slices, skew {facts['skew']:.3g}"
        if facts["slices"]
        else "",
        "predicted": _prediction(facts),
        "took": ", ".join(f"{step} {format_time(took)}" for step, took in seconds.items()),
    }
    for name, text in lines.items():
        if text:
            print(f"{name:<12} {text}")
    if lowering is not None:
        _print_lowering(lowering)


def _print_lowering(facts: dict[str, Any]) -> None:
    from meshmend.units import format_bytes, format_time

    routed = f", {facts['routed_pairs']} pairs routed" if facts["routed_pairs"] else ""
    links, slices = facts["bytes_per_link"], facts["slices"]
    lines = {
        "steps": f"{facts['steps']} of {facts['permutes_per_step']} permutes, {slices} "
        f"slice{'s' if slices > 1 else ''}; no order takes fewer than {facts['steps_bound']}",
        "each permute": f"{format_bytes(facts['bytes_per_permute'])} a pair{routed}",
        "busiest link": f"{format_bytes(links['needed'])} needed, {format_bytes(links['moved'])} "
        "moved",
    }
    print("\nlowered to jax: all chips step together")
    for name, text in lines.items():
        print(f"{name:<12} {text}")
    print(f"\n{'':<14}{'time':>10}{'of limit':>11}")
    for name, key in (
        ("lockstep", "predicted_s"),
        ("free-running", "free_running_s"),
        ("limit", "limit_s"),
    ):
        if facts[key] is not None:
            ratio = f"{facts[key] / facts['limit_s']:.3f}x" if facts["limit_s"] else ""
            print(f"{name:<14}{format_time(facts[key]):>10}{ratio:>11}".rstrip())


def _prediction(facts: dict[str, Any]) -> str:
    """Return the predicted time and its ratio to the limit, or an empty text if not simulated."""
    from meshmend.units import format_bytes, format_time

    if facts["predicted_s"] is None:
        return ""
    what = f"{format_bytes(facts['payload_bytes'])} on {facts['fabric']}"
    words = f"{format_time(facts['predicted_s'])} for {what}"
    if facts["limit_s"]:
        words += f", {facts['predicted_s'] / facts['limit_s']:.3f} times the limit"
    return words
