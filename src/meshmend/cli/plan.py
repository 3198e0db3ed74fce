"""`meshmend plan`, `verify`, `algorithms` and `fabrics`, and what they say about a plan."""

from dataclasses import asdict
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
    CollectiveOption,
    FabricOption,
    FailOption,
    JsonOption,
    MeshOption,
    MirrorDomainOption,
    PayloadOption,
    SlowOption,
    TileOption,
    UpdateRateOption,
    WrapOption,
    algorithm_names,
    check_algorithms,
    mesh_of,
    setting_option,
    with_update_rate,
)
from meshmend.errors import InputError, PlanFileError

if TYPE_CHECKING:
    from meshmend.planning.lowering import Lowered
    from meshmend.planning.plan import Plan
    from meshmend.planning.progress import ProgressCallback
    from meshmend.planning.target import Target
    from meshmend.schedule.table import Collective
    from meshmend.topology.mesh import Mesh
    from meshmend.topology.tiles import Tiling


# Within these a simulation takes a few seconds: messages of one, rows if it looks for slices.
_MOST_MESSAGES = 1 << 23
_MOST_ROWS = 1 << 17
_MOST_MESSAGES_OF_OWNERS = 1 << 21  # a plan with owners for 32x32 is to take five seconds in all


AlgorithmOption = Annotated[str, setting_option("sums.algorithm", autocompletion=algorithm_names)]


def plan_command(
    mesh: MeshOption,
    wrap: WrapOption = "none",
    fail: FailOption = None,
    slow: SlowOption = None,
    tile: TileOption = None,
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
        typer.Option(
            "--slices", metavar="N", help="With --lower: pieces of the payload; else the fastest."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write the plan to this JSON file."),
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

    - meshmend plan --mesh 8x8 --fail 2x2@2,2 --tile 2x2 -o plan.json

    - meshmend plan --mesh 8x8 --slow link:3,4-3,5=0.25
    """
    from meshmend.planning.target import Target, collective_named
    from meshmend.topology.fabric import fabric as fabric_named
    from meshmend.topology.text import parse_tile

    _check_lowering(lower, slices)
    broken = mesh_of(mesh, wrap, fail, slow)
    if tile is not None:
        parse_tile(tile)
    check_algorithms([algorithm], "auto")
    wanted = collective_named(collective)
    machine = with_update_rate(fabric_named(fabric), update_rate, wanted)
    target = Target().with_(payload, machine)
    _check_mirrors(mirror_domain, wanted, broken)
    if lower and tile:
        raise InputError("--lower jax does not go with --tile; leave one of them out")
    if lower and wanted in {"sharded-update", "all-to-all"}:
        raise InputError("--lower jax needs an allreduce, reduce-scatter or all-gather")
    check_writable(output)
    announce_compilation()
    with progress(quiet=as_json) as bar:
        if tile is not None:
            result, low = named_plan(broken, algorithm, wanted, target, bar, tile=tile), None
        else:
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
    file: Annotated[
        Path, typer.Argument(metavar="PLAN", help="A plan that 'meshmend plan -o' wrote.")
    ],
    mesh: Annotated[
        str | None,
        typer.Option("--mesh", metavar="RxC", help="Insist that the plan is for this mesh."),
    ] = None,
    wrap: WrapOption = "none",
    fail: FailOption = None,
    slow: SlowOption = None,
    tile: Annotated[
        str | None,
        typer.Option("--tile", metavar="RxC", help="Insist that the plan is for such tiles."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Read a plan back and prove it again: contributions, hops, and freedom from deadlock.

    With --mesh (and --wrap, --fail, --slow) the plan must be for exactly that mesh. Exit code 1
    means that the plan is wrong, 2 that the file cannot be used.

    **Examples**

    - meshmend verify plan.json

    - meshmend verify plan.json --mesh 8x8 --fail 2x2@2,2 --json
    """
    if mesh is None and (fail or slow or wrap != "none"):
        raise InputError(
            "--fail, --slow and --wrap need --mesh: together they name the mesh to insist on"
        )
    wanted = None if mesh is None else mesh_of(mesh, wrap, fail, slow)
    check_readable(file, "the plan")
    announce_compilation()
    from meshmend.planning.plan import load_plan

    with progress(quiet=as_json) as bar:
        result = load_plan(file, mesh=wanted, progress=bar)
        _check_tile(result, tile, file)
        bar("simulating")
        facts = plan_facts(result)
    _print_facts(result, facts, as_json=as_json)


def _check_tile(plan: "Plan", tile: str | None, file: Path) -> None:
    """Raise PlanFileError if a plan is not for the tiles that it is to be for."""
    from meshmend.topology.failures import format_shape
    from meshmend.topology.text import parse_tile

    if tile is None:
        return
    wanted = parse_tile(tile)
    found = (1,) * len(wanted) if plan.tiling is None else plan.tiling.shape
    if found != wanted:
        raise PlanFileError(
            f"{file} is a plan for tiles of {format_shape(found)}, but got --tile {tile}; plan "
            "again"
        )


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


def fabrics_command(as_json: JsonOption = False) -> None:
    """List the fabrics: the figures of each machine's network, and where they come from.

    **Examples**

    - meshmend fabrics

    - meshmend fabrics --json
    """
    from meshmend.topology.fabric import FABRICS

    if as_json:
        print_json({"fabrics": [fabric.summary() for fabric in FABRICS.values()]})
        return
    for fabric in FABRICS.values():
        print(fabric)
        print(f"  usual mesh  {fabric.usual_mesh}")
        print(f"  source      {fabric.source}")


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
    from meshmend.planning.lowering import lockstep_plan, lowered

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


def named_plan(
    mesh: "Mesh",
    algorithm: str,
    collective: "Collective",
    target: "Target",
    progress: "ProgressCallback",
    *,
    tile: str | None = None,
) -> "Plan":
    """Return the plan of a named algorithm, the same one that `meshmend simulate` prices."""
    from meshmend.planning.plan import fastest_trees, plan
    from meshmend.planning.pricing import TREES

    payload, fabric = target.payload_bytes, target.fabric
    if algorithm == TREES and collective == "allreduce" and tile is None:
        return fastest_trees(mesh, payload=payload, fabric=fabric, progress=progress)
    return plan(
        mesh,
        algorithm,
        tile=tile,
        collective=collective,
        payload=payload,
        fabric=fabric,
        cache_dir=cache_dir(),
        progress=progress,
    )


def plan_facts(plan: "Plan", algorithm: str = "", low: "Lowered | None" = None) -> dict[str, Any]:
    """Return the figures of a plan with its predicted time, and the limit, as a JSON value.

    The predicted time is what `meshmend simulate` prints. It is None if that would take long.
    """
    facts = plan.summary()
    if low is not None:
        return facts | {"lowered": low.summary()}
    bound = plan.limit()
    facts |= {"limit_s": bound.time_s, "bandwidth_limit_s": bound.bandwidth_s}
    if facts["predicted_s"] is None:
        facts["predicted_s"] = _predicted_s(plan, algorithm)
    return facts


def mirror_facts(plan: "Plan", domains: list[str] | None) -> dict[str, Any]:
    """Return what it costs a training job to mirror the optimizer's state, as a JSON value.

    Raises:
        InputError: no mirrors can be placed so.
    """

    from meshmend.train.sharding.update_shares import DEFAULT_DOMAINS, mirror_cost

    target = plan.target
    cost = mirror_cost(
        plan.mesh,
        int(target.payload_bytes),
        target.fabric.update_bytes_per_s,
        domains=domains or DEFAULT_DOMAINS,
    )
    return asdict(cost)


def _predicted_s(plan: "Plan", algorithm: str) -> float | None:
    from meshmend.planning.comparison import AUTO, compared
    from meshmend.schedule.table import Collective

    target, schedule = plan.target, plan.schedule
    is_sum = schedule.collective is Collective.ALLREDUCE
    if algorithm == AUTO and is_sum and plan.tiling is None:  # its price is kept on disk
        fabric, payload = target.fabric, target.payload_bytes
        return compared(plan.mesh, fabric, payload, [AUTO], cache_dir=cache_dir()).prices[0].time_s
    n_messages = 0 if plan.pipeline is None else plan.pipeline.slices * schedule.n_rows
    most_messages = _MOST_MESSAGES if is_sum else _MOST_MESSAGES_OF_OWNERS
    if schedule.n_rows > _MOST_ROWS or n_messages > most_messages:
        return None
    return plan.predicted().time_s


def print_plan(plan: "Plan", facts: dict[str, Any]) -> None:
    """Print the figures of a plan, a line each."""
    from meshmend.units import counted, format_time, some

    mesh, seconds = facts["mesh"], facts["seconds"]
    if plan.stranded:
        note(f"meshmend: cut off from the rest and left out: {some(plan.stranded)}")
    updates = "no weight used before its update, " * (facts["collective"] == "sharded-update")
    error, slices = facts["error_probability"], facts["slices"]
    proof = "counted exactly" if not error else f"by fingerprint, wrong at most {error:.1e}"
    chips, links = counted(mesh["live"], "live chip"), counted(mesh["links"], "live link")
    rows, chunks = _counted(facts["rows"], "row"), _counted(facts["chunks"], "chunk")
    ranks = counted(facts["ranks"], "rank")
    lines = {
        "mesh": f"{plan.mesh}: {chips}, {links}",
        "tiles": "" if plan.tiling is None else f"{plan.tiling}: {_colours(plan.tiling)}",
        "algorithm": f"{facts['algorithm']} ({facts['collective']} over {ranks})",
        "table": f"{rows}, {chunks}",
        "verified": f"every contribution once, {updates}every hop alive ({proof})",
        "deadlock": f"free, with {counted(facts['virtual_channels'], 'virtual channel')}",
        "hops": f"at most {facts['max_hops']}, stretch at most {facts['max_stretch']:.3g}",
        "link load": f"at most {facts['max_link_load']:.4g} of the payload per directed link",
        "pipeline": f"{counted(slices, 'slice')}, skew {facts['skew']:.3g}" if slices else "",
        "predicted": _prediction(facts),
        "mirrors": _mirror_words(facts["mirrors"]) if "mirrors" in facts else "",
        "took": ", ".join(f"{step} {format_time(took)}" for step, took in seconds.items()),
    }
    for name, text in lines.items():
        if text:
            print(f"{name:<12} {text}")
    if "lowered" in facts:
        _print_lowering(facts["lowered"])


def _colours(tiling: "Tiling") -> str:
    from meshmend.units import counted

    twins = counted(tiling.n_tiles, "chip")
    return f"{counted(tiling.n_colours, 'colour')}, each summed over {twins} at the same time"


def _mirror_words(facts: dict[str, Any]) -> str:
    from meshmend.units import format_bytes, format_time

    kept, alone, whole = (
        format_bytes(facts[key])
        for key in ("state_and_mirror_bytes", "state_bytes", "unsharded_state_bytes")
    )
    words = (
        f"{format_bytes(facts['sent_bytes_per_step'])} a step sent, {kept} of AdamW's state a chip "
        f"({alone} without, {whole} unsharded)"
    )
    if facts["update_s"] is not None:
        words += f", {format_time(facts['update_s'])} a step to update"
    return words


def _counted(n: int, noun: str) -> str:
    """Return a large number with its noun, with commas between thousands."""
    from meshmend.units import counted

    return f"{n:,} {counted(n, noun).split(' ', 1)[1]}"


def _print_lowering(facts: dict[str, Any]) -> None:
    from meshmend.units import counted, format_bytes, format_time

    routed = f", {counted(facts['routed_pairs'], 'pair')} routed" if facts["routed_pairs"] else ""
    links, slices = facts["bytes_per_link"], facts["slices"]
    lines = {
        "steps": f"{facts['steps']} of {facts['permutes_per_step']} permutes, "
        f"{counted(slices, 'slice')}; no order takes fewer than {facts['steps_bound']}",
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
        if not facts["limit_s"] or "lowered" in facts:
            return ""
        return f"not simulated, it would take long; limit {format_time(facts['limit_s'])}"
    what = f"{format_bytes(facts['payload_bytes'])} on {facts['fabric']}"
    words = f"{format_time(facts['predicted_s'])} for {what}"
    if facts["limit_s"]:
        words += f", {facts['predicted_s'] / facts['limit_s']:.3f} times the limit"
    return words
