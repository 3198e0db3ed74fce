"""What reduce-scatter, all-gather and the sharded update cost, with ratio and target for each row.

    python benchmarks/sharded_update.py             # the simulated table, the planning time
    python benchmarks/sharded_update.py --testbed   # also on a testbed: 4x4 less 2x2, 50 Mbit/s
    python benchmarks/sharded_update.py --quick     # without 32x32 at 1 GB, which takes a minute

Simulated figures are exact; the planning time and the testbed's depend on the machine. A dated
result file is written to benchmarks/results.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from meshmend.lab.bench.contenders import Network, planned
from meshmend.lab.bench.link_figures import measured_fabric
from meshmend.lab.bench.worker_pool import WorkerPool
from meshmend.lab.testbed.bed import Testbed
from meshmend.planning.choose import choose, forget
from meshmend.planning.plan import AUTO, plan
from meshmend.planning.pricing import price, price_of_choice
from meshmend.planning.progress import no_progress
from meshmend.planning.target import Question
from meshmend.schedule.table import Collective
from meshmend.simulator.limit import limit
from meshmend.topology.fabric import FABRICS
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from record import record

REFERENCE = FABRICS["reference"]
HALVES = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
UPDATE = Collective.SHARDED_UPDATE
LARGE = parse_mesh("32x32", fail=["4x2@14,14"])
OF_HALVES = (
    parse_mesh("8x8"),
    parse_mesh("8x8", fail=["4x2@2,2"]),
    parse_mesh("16x16"),
    parse_mesh("16x16", wrap="all"),
    parse_mesh("4x4x4", wrap="all"),
)
OF_UPDATES = (*OF_HALVES[:3], LARGE)
UPDATE_TARGETS = {1e8: (1.14, 1.20, 1.20, 1.30), 1e9: (1.07, 1.15, 1.12, 1.20)}
PLANNING_TARGET_S = 5.0
BED, BED_BYTES_PER_S, BED_BYTES, REPEAT = parse_mesh("4x4", fail=["2x2@0,2"]), 6.25e6, 4 << 20, 9


@dataclass(frozen=True)
class Row:
    """One figure: what was measured, and the most it should be; a row without a target informs."""

    what: str
    value: float
    target: float | None

    def __str__(self) -> str:
        if self.target is None:
            return f"{self.what:<66} {self.value:>8.3f}"
        verdict = "ok" if self.value <= self.target else "MISSED"
        return f"{self.what:<66} {self.value:>8.3f} {self.target:>8.3g}  {verdict}"


def auto_s(mesh: Mesh, size: float, collective: Collective) -> tuple[float, str]:
    """Return the simulated time of `auto`, and what it chose."""
    question = Question(mesh, size, REFERENCE, collective)
    choice = choose(Question(mesh, size, REFERENCE, collective))
    if choice.shape is not None:
        found = price_of_choice(question, choice.shape, choice.packing, choice.pipeline)
        return found.time_s, found.detail
    priced = price(question, choice.algorithm, slices=choice.slices)
    return priced.time_s, choice.algorithm


def simulated_rows(*, quick: bool) -> Iterator[Row]:
    for half in HALVES:
        for size, target in ((1e8, 1.05), (1e6, 2.1)):
            for mesh in OF_HALVES:
                taken_s, how = auto_s(mesh, size, half)
                ratio = taken_s / limit(mesh, REFERENCE, size, half).time_s
                yield Row(f"{half} {mesh} {size / 1e6:g} MB, {how}, of its limit", ratio, target)
    for size, targets in UPDATE_TARGETS.items():
        for mesh, target in zip(OF_UPDATES, targets, strict=True):
            if quick and mesh is LARGE and size > 1e8:
                continue
            taken_s, _ = auto_s(mesh, size, UPDATE)
            ratio = taken_s / limit(mesh, REFERENCE, size).time_s
            yield Row(f"{UPDATE} {mesh} {size / 1e6:g} MB, of the allreduce limit", ratio, target)
    theirs = price(Question(LARGE, 1e8, REFERENCE, UPDATE), "ft-two-d")
    ratio = theirs.time_s / limit(LARGE, REFERENCE, 1e8).time_s
    yield Row(f"{UPDATE} {LARGE} 100 MB, the paper's ft-two-d", ratio, None)


def planning_row() -> Row:
    plan(parse_mesh("8x8"), collective=UPDATE)  # loads compiled code
    forget()
    began = time.perf_counter()
    plan(LARGE, collective=UPDATE)
    return Row(
        f"seconds to plan {UPDATE} on {LARGE}, verified",
        time.perf_counter() - began,
        PLANNING_TARGET_S,
    )


def testbed_rows() -> Iterator[Row]:
    """Yield how long the collectives really take, in turns on one network."""
    kinds = (Collective.ALLREDUCE, *HALVES, UPDATE)
    with Testbed.up(BED, link_bandwidth=BED_BYTES_PER_S) as bed:
        network = Network(largest_part(BED), bed)
        fabric = measured_fabric(network, no_progress)
        runners = [
            planned(
                AUTO,
                Question(network.mesh, BED_BYTES, fabric, kind),
                predicts=False,
                progress=no_progress,
            )
            for kind in kinds
        ]
        times: dict[Collective, list[float]] = {kind: [] for kind in kinds}
        with WorkerPool(network, runners) as pool:
            for turn in range(REPEAT + 1):
                for kind, runner in zip(kinds, runners, strict=True):
                    done = pool.measure(runner)
                    if turn:  # the first warms up
                        times[kind].append(done.time_s)
    median = {kind: statistics.median(times[kind]) for kind in kinds}
    for kind, runner in zip(kinds, runners, strict=True):
        yield Row(f"testbed, seconds of {kind}: {runner.detail}", median[kind], None)
    update_s = median[UPDATE]
    in_turn_s = sum(median[half] for half in HALVES)
    yield Row(f"testbed, {UPDATE} of allreduce", update_s / median[Collective.ALLREDUCE], 1.25)
    yield Row(f"testbed, {UPDATE} of its halves in turn", update_s / in_turn_s, 0.75)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--testbed", action="store_true")
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    rows = []

    def shown(row: Row) -> None:
        rows.append(row)
        print(row, flush=True)

    shown(planning_row())
    for row in simulated_rows(quick=asked.quick):
        shown(row)
    if asked.testbed:
        for row in testbed_rows():
            shown(row)
    print(f"written {record('sharded_update', {'rows': [asdict(row) for row in rows]})}")


if __name__ == "__main__":
    main()
