"""What each family of algorithms and trees is worth: `auto` without it, where it was chosen.

    python benchmarks/ablation.py [--only "8x8 "] [--without NAME,NAME]... [--jobs 2] [--no-write]

Asks `auto` for each cell of the table in docs/side-by-side.md, of the payload sweep of `pods.py`,
of the table in docs/design/0002-trees.md, and for some collectives whose ranks own parts. Then it
takes the chosen family out and asks again: the loss is how much longer `auto` takes. Where a
family was not chosen, `auto` does not need it, so nothing is asked. `--without` takes several
families out at once, wherever one of them was chosen.

A family earns its place if some cell of the first two tables gets worse by more than 5 %, or some
cell of the third by more than 3 %. Times are simulated, and the same on every machine. The result
file is written after every cell, so that a run that is broken off leaves what it has.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pods
import side_by_side
import trees
from meshmend.planning import choose as choosing
from meshmend.planning import pricing, tree_finalists, tree_search
from meshmend.planning.choose import Choice, choose, forget
from meshmend.planning.packed_trees import TreeKind
from meshmend.planning.pricing import Price, price, price_of_choice
from meshmend.planning.target import Question
from meshmend.schedule.table import Collective
from meshmend.topology.fabric import fabric
from meshmend.topology.mesh import Mesh
from meshmend.topology.symmetry import stand_in
from meshmend.topology.text import parse_mesh
from meshmend.trees.tree_counts import MOST_TREES
from meshmend.units import parse_bytes
from record import parser_of, record

SIDE_BY_SIDE, SWEEP, CELLS_OF_TREES, PODS, OWNERS = (
    "side by side",
    "sweep",
    "18 cells",
    "pods",
    "owners",
)
MOST_LOSS = {SIDE_BY_SIDE: 0.05, SWEEP: 0.05, CELLS_OF_TREES: 0.03}
OWNED = (("8x8", "none", ""), ("8x8", "none", "4x2@2,2"), ("16x16", "none", ""))


@dataclass(frozen=True)
class Cell:
    """One question to `auto`, in the words of the command line."""

    shape: str
    wrap: str
    fail: str
    machine: str
    payload: str
    collective: str = "allreduce"

    @property
    def question(self) -> Question:
        mesh = parse_mesh(self.shape, wrap=self.wrap, fail=self.fail.split())
        payload_bytes = parse_bytes(self.payload)
        return Question(mesh, payload_bytes, fabric(self.machine), Collective(self.collective))

    def __str__(self) -> str:
        torus, less = " torus" * (self.wrap == "all"), f" less {self.fail}" if self.fail else ""
        what = "" if self.collective == "allreduce" else f" {self.collective}"
        return f"{self.shape}{torus}{less} {self.payload}{what}"


def cells() -> dict[Cell, set[str]]:
    """Return every cell, with the tables that it is in."""
    found: dict[Cell, set[str]] = {}

    def add(table: str, *words: str) -> None:
        found.setdefault(Cell(*words), set()).add(table)

    for case in side_by_side.CASES:
        for payload in side_by_side.PAYLOADS:
            add(SIDE_BY_SIDE, case.shape, case.wrap, case.fail, case.machine, payload)
    for *mesh, parts in pods.SWEEPS:
        for payload in (payload for payloads, _ in parts for payload in payloads.split()):
            add(SWEEP, *mesh, payload)
    for shape, fail in trees.HOLES.items():
        for payload in trees.PAYLOADS:
            add(CELLS_OF_TREES, shape, "none", fail, "reference", payload)
    for *mesh, asked in pods.CASES:
        for payload, _ in asked:
            add(PODS, *mesh, payload)
    for collective in ("sharded-update", "reduce-scatter"):
        for shape, wrap, fail in OWNED:
            for payload in ("1MB", "100MB"):
                add(OWNERS, shape, wrap, fail, "reference", payload, collective)
    return found


# Families of trees: how one is recognised in a choice, and what the search is without it.
Recognise = Callable[[Mesh, Choice], bool]
Patch = tuple[object, str, object]


def _none(*_: object) -> Iterator[Any]:
    return iter(())


def _is(kind: TreeKind) -> Recognise:
    return lambda mesh, choice: choice.shape is not None and choice.shape.kind is kind


def _has(test: Callable[[Any], bool]) -> Recognise:
    return lambda mesh, choice: choice.shape is not None and test(choice.shape)


FAMILIES_OF_TREES: dict[str, tuple[Recognise, Patch]] = {
    "straight trees": (
        _is(TreeKind.STRAIGHT),
        (tree_search, "straight_finalists", lambda *_: []),
    ),
    "disjoint trees": (_is(TreeKind.DISJOINT), (tree_finalists, "disjoint_shapes", _none)),
    "leaves fill gaps": (_is(TreeKind.GAP_FILLING), (tree_finalists, "gap_filling_shapes", _none)),
    "trees from everywhere": (
        _has(lambda shape: shape.kind in (TreeKind.ROOTED, TreeKind.SPREAD)),
        (tree_finalists, "rooted_shapes", _none),
    ),
    "trees whose sums meet": (_is(TreeKind.MEETING), (tree_finalists, "meeting_shapes", _none)),
    "many trees on tori": (
        _has(lambda shape: shape.n_trees > MOST_TREES),
        (tree_finalists, "_many_on_tori", _none),
    ),
}


def families_of(question: Question, choice: Choice) -> list[str]:
    """Return the families that a choice is of."""
    if choice.shape is None:
        return [choice.algorithm]
    if question.collective is not Collective.ALLREDUCE:
        return ["owner trees"]
    return [name for name, (is_of, _) in FAMILIES_OF_TREES.items() if is_of(question.mesh, choice)]


@contextmanager
def without(families: Sequence[str]) -> Iterator[None]:
    """Let `auto` search without these families."""
    all_names = pricing.names_to_try

    def names(mesh: Mesh, collective: Collective = Collective.ALLREDUCE) -> Iterator[str]:
        for name in all_names(mesh, collective):
            is_hung = name == pricing.TREES and collective is not Collective.ALLREDUCE
            if name not in families and not (is_hung and "owner trees" in families):
                yield name

    with ExitStack() as stack:
        stack.enter_context(patch.object(choosing, "names_to_try", names))
        for family in families:
            if family in FAMILIES_OF_TREES:
                target, name, other = FAMILIES_OF_TREES[family][1]
                stack.enter_context(patch.object(target, name, other))
        forget()
        yield
    forget()


def asked(question: Question) -> tuple[Price, Choice]:
    """Return what `auto` costs for exactly this payload, and what it chose, on the stand-in."""
    question = replace(question, mesh=stand_in(question.mesh).mesh)
    choice = choose(question)
    if choice.shape is not None:
        found = price_of_choice(question, choice.shape, choice.packing, choice.pipeline)
        return found, choice
    priced = price(question, choice.algorithm, slices=choice.slices)
    return priced, choice


def measured(task: tuple[Cell, tuple[str, ...], tuple[tuple[str, ...], ...]]) -> dict[str, Any]:
    """Return what `auto` takes for a cell, and what it takes without each family it chose."""
    cell, tables, groups = task
    question = cell.question
    usual, choice = asked(question)
    chosen = families_of(question, choice)
    row: dict[str, Any] = {
        "cell": str(cell),
        "tables": tables,
        "auto": ", ".join(filter(None, (choice.algorithm, usual.detail, *chosen))),
        "time_s": usual.time_s,
        "without": {},
    }
    single = [(family,) for family in chosen if not groups]
    for families in (*single, *(group for group in groups if set(group) & set(chosen))):
        with without(families):
            try:
                other, instead = asked(question)
            except AssertionError:  # nothing is left
                continue
            row["without"][", ".join(families)] = {
                "loss": other.time_s / usual.time_s - 1,
                "auto": ", ".join(
                    filter(None, (instead.algorithm, other.detail, *families_of(question, instead)))
                ),
            }
    forget()
    return row


def show(rows: list[dict[str, Any]]) -> None:
    """Print the worst losses of each family, and whether it earns its place."""
    families = sorted({family for row in rows for family in row["without"]})
    for family in families:
        losses = sorted(
            ((row["without"][family]["loss"], row) for row in rows if family in row["without"]),
            key=lambda pair: -pair[0],
        )
        earns = any(
            loss > MOST_LOSS[table]
            for loss, row in losses
            for table in row["tables"]
            if table in MOST_LOSS
        )
        print(f"\n{family}: chosen in {len(losses)} cells; {'stays' if earns else 'may go'}")
        for loss, row in losses[:8]:
            instead = row["without"][family]["auto"]
            print(f"  {loss:+7.1%}  {row['cell']:<34} ({', '.join(row['tables'])}) then {instead}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", action="append", help="cells that begin like this; repeat")
    parser.add_argument("--without", action="append", default=[], help="several at once")
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    arguments = parser.parse_args()
    groups = tuple(tuple(words.split(",")) for words in arguments.without)
    tasks = [
        (cell, tuple(sorted(tables)), groups)
        for cell, tables in cells().items()
        if str(cell).startswith(tuple(arguments.only or ("",)))
    ]
    rows: list[dict[str, Any]] = []
    name = "ablation-together" if groups else "ablation"
    with multiprocessing.get_context("spawn").Pool(arguments.jobs, maxtasksperchild=12) as pool:
        for row in pool.imap_unordered(measured, tasks):
            rows.append(row)
            losses = ", ".join(
                f"{each['loss']:+.1%} without {family}" for family, each in row["without"].items()
            )
            print(f"{row['cell']:<40} {row['auto']:<50} {losses}", flush=True)
            if not arguments.no_write:
                record(name, {"rows": rows})
    show(rows)


if __name__ == "__main__":
    main()
