"""Runs collectives on a simulated Galaxy of Wormhole chips, whole and broken, and counts.

    python benchmarks/wormhole.py LIBTTSIM [--only TEXT] [--jobs 1] [--seconds 600] [--no-write]

The cases: the 8x4 torus and the 8x4 mesh, whole, less each chip, less each 2x2 block, and less
three random sets of chips, links and cables; an allreduce of 64 KB of int32 and of float32 on each.
Then the other collectives, bfloat16, and 256 KB of float32 on the torus less a block. Every case
compares all bits, and all memory that nobody may touch. `--only` takes the cases whose name has the
text. `--jobs` cases run at once, each on one core, with about 1 GiB of memory. After `--seconds` no
case begins: the next call goes on after the cases of the newest file.
"""

import json
import random
import resource
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from multiprocessing import Pool
from pathlib import Path
from typing import Any

from meshmend.errors import MeshmendError
from meshmend.topology.graph import largest_part
from meshmend.topology.text import parse_mesh
from meshmend.wormhole.experiment import Question, parse_lost_cable, run_experiment
from record import RESULTS, parser_of, record

SHAPE = "8x4"
RANDOM_SETS = 3


def random_set(number: int, wrap: str) -> tuple[list[str], list[str]]:
    """Return failures and lost cables that leave the live chips connected."""
    rng = random.Random(35 * number)
    whole = parse_mesh(SHAPE, wrap=wrap)
    while True:
        chips = rng.sample(whole.live, rng.randint(1, 4))
        links = [tuple(whole.live[rank] for rank in pair) for pair in whole.links.tolist()]
        picked = rng.sample(links, 4)
        names = ["-".join(",".join(map(str, chip)) for chip in link) for link in picked]
        failures = [",".join(map(str, chip)) for chip in chips] + [f"link:{names[0]}"]
        mesh = whole.without(*failures)
        if largest_part(mesh).n_live == mesh.n_live:
            return failures, [f"{name}:{rng.randrange(4)}" for name in names[1:]]


def block(row: int, column: int, shape: tuple[int, ...]) -> list[str]:
    """Return the chips of a 2x2 block, which may lie across the seam of a torus."""
    rows, columns = shape
    return [f"{(row + i) % rows},{(column + j) % columns}" for i, j in product((0, 1), repeat=2)]


def cases() -> Iterator[tuple[str, Question]]:
    """Yield each case with its name: the longest first, then those that tell most."""
    broken: list[tuple[str, str, list[str], list[str]]] = []
    for wrap, kind in (("all", "torus"), ("none", "mesh")):
        broken += [(f"{kind}", wrap, [], []), (f"{kind} less 2x2@2,0", wrap, ["2x2@2,0"], [])]
        broken += [
            (f"{kind} random {number}", wrap, *random_set(number, wrap))
            for number in range(RANDOM_SETS)
        ]
    for wrap, kind in (("all", "torus"), ("none", "mesh")):
        whole = parse_mesh(SHAPE, wrap=wrap)
        rows, columns = whole.shape
        seam = 0 if wrap == "all" else 1  # on a torus, blocks lie across the seam too
        broken += [
            (f"{kind} less 2x2@{row},{column}", wrap, block(row, column, whole.shape), [])
            for row, column in product(range(rows - seam), range(columns - seam))
            if (row, column) != (2, 0)
        ]
        broken += [
            (f"{kind} less {row},{column}", wrap, [f"{row},{column}"], [])
            for row, column in product(range(rows), range(columns))
        ]
    hole = parse_mesh(SHAPE, wrap="all", fail=["2x2@2,0"])
    yield "256 KB float32", Question(hole, 262144, "float32")
    for type_name in ("int32", "float32"):
        for name, wrap, fail, cables in broken:
            mesh = parse_mesh(SHAPE, wrap=wrap, fail=fail)
            lost = tuple(parse_lost_cable(text) for text in cables)
            yield f"{type_name} {name}", Question(mesh, 65536, type_name, lost_cables=lost)
    for collective in ("reduce-scatter", "all-gather", "broadcast"):
        yield f"{collective} int32", Question(hole, 65536, collective=collective)
        yield f"{collective} float32", Question(hole, 65536, "float32", collective)
    yield "bfloat16", Question(hole, 16384, "bfloat16")


def cpu_s() -> float:
    """Return what this process and the simulators that ended have taken of a processor."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def measured(case: tuple[str, Question], library: Path, until: float) -> dict[str, Any] | None:
    """Return the figures of a case, or why it failed; None if there is no time left for it."""
    name, question = case
    if time.time() > until:
        return None
    start = cpu_s()
    try:
        facts = run_experiment(question, library).summary()
    except MeshmendError as error:
        return {"case": name, "mesh": str(question.mesh), "right": False, "error": str(error)}
    del facts["bytes_per_cable"]
    facts["lost_cables"] = len(question.lost_cables)
    facts["cpu_s"] = cpu_s() - start
    return {"case": name, **facts}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("ttsim", type=Path, metavar="LIBTTSIM")
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    wanted = [case for case in cases() if arguments.only in case[0]]
    if arguments.list:
        print("\n".join(name for name, _ in wanted))
        return
    if not arguments.no_write:
        known = {each["case"] for each in written()}
        wanted = [case for case in wanted if case[0] not in known]
    run_case = partial(measured, library=arguments.ttsim, until=time.time() + arguments.seconds)
    done: list[dict[str, Any]] = []
    with Pool(arguments.jobs) as pool:
        for facts in pool.imap_unordered(run_case, wanted):
            if facts is None:
                continue
            done.append(facts)
            words = "right" if facts["right"] else f"WRONG: {facts.get('error', 'bits differ')}"
            print(
                f"{facts['case']:<32} {words}, {facts.get('algorithm', '')}, "
                f"{facts.get('clocks', 0):,} clocks, {facts.get('wall_s', 0):.0f} s",
                flush=True,
            )
            if not arguments.no_write:  # another call may have written meanwhile
                record("wormhole", {"cases": [*written(), facts]})
    print(f"{sum(each['right'] for each in done)} of {len(done)} cases right")


def written() -> list[dict[str, Any]]:
    """Return the cases of the newest result file."""
    newest = max(RESULTS.glob("wormhole-*.json"), default=None)
    return [] if newest is None else list(json.loads(newest.read_text())["cases"])


if __name__ == "__main__":
    main()
