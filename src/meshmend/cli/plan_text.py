"""What `meshmend plan` and `meshmend verify` say about a plan."""

from typing import TYPE_CHECKING, Any

from meshmend.cli.console import cache_dir, note

if TYPE_CHECKING:
    from meshmend.planning.lowering import Lowered
    from meshmend.planning.plan import Plan
    from meshmend.planning.progress import ProgressCallback
    from meshmend.planning.target import Target
    from meshmend.schedule.table import Collective
    from meshmend.topology.mesh import Mesh

# Within these a simulation takes a few seconds: messages of one, rows if it looks for slices.
_MOST_MESSAGES = 1 << 23
_MOST_ROWS = 1 << 17
_MOST_MESSAGES_OF_OWNERS = 1 << 21  # a plan with owners for 32x32 is to take five seconds in all


def named_plan(
    mesh: "Mesh",
    algorithm: str,
    collective: "Collective",
    target: "Target",
    progress: "ProgressCallback",
) -> "Plan":
    """Return the plan of a named algorithm, the same one that `meshmend simulate` prices."""
    from meshmend.planning.plan import fastest_trees, plan
    from meshmend.planning.pricing import TREES

    payload, fabric = target.payload_bytes, target.fabric
    if algorithm == TREES and collective == "allreduce":
        return fastest_trees(mesh, payload=payload, fabric=fabric, progress=progress)
    return plan(
        mesh,
        algorithm,
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
    from dataclasses import asdict

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
    if algorithm == AUTO and is_sum:  # its price is kept on disk
        fabric, payload = target.fabric, target.payload_bytes
        return compared(plan.mesh, fabric, payload, [AUTO], cache_dir=cache_dir()).prices[0].time_s
    n_messages = 0 if plan.pipeline is None else plan.pipeline.slices * schedule.n_rows
    most_messages = _MOST_MESSAGES if is_sum else _MOST_MESSAGES_OF_OWNERS
    if schedule.n_rows > _MOST_ROWS or n_messages > most_messages:
        return None
    return plan.predicted().time_s


def print_plan(plan: "Plan", facts: dict[str, Any]) -> None:
    """Print the figures of a plan, a line each."""
    from meshmend.units import counted, format_time

    mesh, seconds = facts["mesh"], facts["seconds"]
    if plan.stranded:
        shown = ", ".join(map(str, plan.stranded[:4]))
        more = f" and {len(plan.stranded) - 4} more" if len(plan.stranded) > 4 else ""
        note(f"meshmend: cut off from the rest and left out: {shown}{more}")
    updates = "no weight used before its update, " * (facts["collective"] == "sharded-update")
    error, slices = facts["error_probability"], facts["slices"]
    proof = "counted exactly" if not error else f"by fingerprint, wrong at most {error:.1e}"
    chips, links = counted(mesh["live"], "live chip"), counted(mesh["links"], "live link")
    rows, chunks = _counted(facts["rows"], "row"), _counted(facts["chunks"], "chunk")
    ranks = counted(facts["ranks"], "rank")
    lines = {
        "mesh": f"{plan.mesh}: {chips}, {links}",
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
