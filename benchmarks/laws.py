"""How often `auto` breaks laws that a planner should keep, on random meshes, payloads and fabrics.

    python benchmarks/laws.py [--cases 500] [--first 0] [--seed 71] [--no-write]

A sum should take no longer after a repair (all that failed is whole again, or one failure of
several is), with a better fabric (a figure better by 30 %), or with fewer bytes (by 10 %). Where a
repaired chip raises the limit, because it has few links or is far, it may take so many times as
long. Cases are those of `held_out.py` with at most 64 chips. Prints how many are broken by more
than 1 %, and by how much at most. Times are simulated, and the same on every machine.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from held_out import Case, asked_cases, drawn_case
from meshmend.planning.comparison import compared
from meshmend.topology.mesh import Mesh
from record import record

MOST_CHIPS = 64
MOST = 1.01
BETTER = {
    "link_bandwidth_bytes_per_s": 1.3,
    "hop_latency_s": 0.7,
    "message_overhead_s": 0.7,
}


def repaired(mesh: Mesh, rng: np.random.Generator) -> Mesh | None:
    """Return the mesh with one of its failures mended, or all of them; None if nothing failed."""
    failures = [*sorted(mesh.failed), *sorted(mesh.failed_links)]
    if not failures:
        return None
    if rng.integers(2):
        return Mesh(mesh.shape, mesh.wrap)
    one = failures[int(rng.integers(len(failures)))]
    mended = replace(mesh, failed=mesh.failed - {one}, failed_links=mesh.failed_links - {one})
    return mended if mended.n_live <= mesh.n_live + 1 else None


def easier_cases(case: Case, rng: np.random.Generator) -> Iterator[tuple[str, Case]]:
    """Yield cases that should take no longer, each with its law."""
    if (mesh := repaired(case.mesh, rng)) is not None:
        yield "repair", replace(case, mesh=mesh)
    figure = str(rng.choice(sorted(BETTER)))
    better = BETTER[figure] * getattr(case.fabric, figure)
    yield f"better {figure}", replace(case, fabric=case.fabric.with_(**{figure: better}))
    yield "fewer bytes", replace(case, payload_bytes=max(1, round(0.9 * case.payload_bytes)))


def priced(case: Case) -> tuple[float, float, str]:
    """Return how long `auto` takes in a case, the limit, and what it runs."""
    found = compared(case.mesh, case.fabric, case.payload_bytes, ["auto"])
    best = found.winner
    return best.time_s, best.time_s / found.ratio(best), best.detail


def main() -> None:
    asked = asked_cases(__doc__, n_cases=500, seed=71)
    ratios: dict[str, list[float]] = {}
    broken: list[dict[str, Any]] = []
    for number in range(asked.first, asked.first + asked.cases):
        case = drawn_case(asked.seed, number)
        if case.mesh.n_live > MOST_CHIPS:
            continue
        before_s, least_before_s, before = priced(case)
        for law, easier in easier_cases(case, np.random.default_rng((asked.seed, number, 1))):
            after_s, least_after_s, after = priced(easier)
            ratio = after_s / before_s / max(1.0, least_after_s / least_before_s)
            ratios.setdefault(law, []).append(ratio)
            if ratio > MOST:
                what = f"{case.mesh}, {case.payload_bytes} B, {case.fabric.name}"
                broken.append({"law": law, "case": what, "ratio": ratio})
                print(
                    f"{number} {law}: {what}: {before}; {easier.mesh}: {after}: "
                    f"{ratio:.3f} times as long",
                    flush=True,
                )
    for law, found in ratios.items():
        n_broken = sum(ratio > MOST for ratio in found)
        print(f"{law:<34} {n_broken:3} of {len(found)} broken, worst {max(found):.3f}")
    if not asked.no_write:
        worst = {law: max(found) for law, found in ratios.items()}
        counts = {law: len(found) for law, found in ratios.items()}
        figures = {"seed": asked.seed, "counts": counts, "worst": worst, "broken": broken}
        print(f"wrote {record('laws', figures)}")


if __name__ == "__main__":
    main()
