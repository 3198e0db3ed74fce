"""What an algorithm costs on a mesh and fabric: built, placed, and simulated.

Knows every named algorithm and, for comparison, what people do instead on a broken mesh.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from meshmend.errors import InputError, UnsupportedError
from meshmend.overlay.tree_packing import tree_packing
from meshmend.planning.tree_choice import TreeShape, guess, tree_shapes
from meshmend.schedule.algorithms import ALGORITHMS, algorithm
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.placement import placed
from meshmend.schedule.table import Collective, Schedule
from meshmend.schedule.trees import tree_schedule
from meshmend.simulate.baselines import program_on_part
from meshmend.simulate.engine import Simulation, simulate
from meshmend.simulate.program import Program, program_of
from meshmend.simulate.slices import best_slices
from meshmend.topology.fabric import Fabric
from meshmend.topology.mesh import Mesh
from meshmend.topology.submesh import IntactPart, largest_box, without_lines

TREES = "trees"
BASELINES: dict[str, Callable[[Mesh], IntactPart]] = {
    "sub-mesh": largest_box,
    "drop-lines": without_lines,
}
_INTACT = ("row-pair", "two-d", "rank-ring")  # on intact meshes: the paper's, then what works

MAX_MESSAGES = 12_000_000  # of one search for slices
_TREE_SHAPES_TRIED = 3

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Question:
    """A connected mesh, a payload and a fabric: what does it cost to sum here?"""

    mesh: Mesh
    payload_bytes: float
    fabric: Fabric


@dataclass(frozen=True, eq=False)
class Price:
    """What one way to sum costs: a simulation, how many chips take part, and how it was built.

    `shape` is set for tree packings: with it and the slices the schedule can be built again.
    """

    name: str
    simulation: Simulation
    n_chips: int
    detail: str = ""
    shape: TreeShape | None = None

    @property
    def time_s(self) -> float:
        return self.simulation.time_s


def price(
    question: Question,
    name: str,
    *,
    slices: int | None = None,
    below_s: float | None = None,
    tell: Tell = lambda step: None,
) -> Price | None:
    """Return what a named algorithm or baseline costs, with the best slices unless given.

    Given `below_s`, returns None as soon as a bound says that it takes longer than that.

    Raises:
        UnsupportedError: the algorithm does not do this mesh.
        InputError: there is no such name.
    """
    if name == TREES:
        return _price_trees(question, slices, tell)
    mesh = question.mesh
    if below_s is not None and _least_ring_time(question, name) > below_s:
        _check_supported(question.mesh, name)
        return None
    tell(f"{name}: building")
    if name in BASELINES:
        program, n_chips, detail = _baseline(mesh, name)
    else:
        program, n_chips, detail = _program(mesh, name), mesh.n_live, ""
    if below_s is not None and _least_time(question, program) > below_s:
        return None
    tell(f"{name}: simulating")
    return Price(name, _simulated(question, program, slices), n_chips, detail)


def tree_schedule_of(mesh: Mesh, shape: TreeShape, collective: Collective) -> Schedule:
    """Return the schedule over the trees of this shape."""
    packing = tree_packing(mesh, n_trees=shape.n_trees, depth_slack=shape.depth_slack)
    return tree_schedule(packing, collective)


def supported_names(mesh: Mesh) -> Iterator[str]:
    """Yield the algorithms that do a connected mesh, the quickest to judge first."""
    yield TREES
    for name in ALGORITHMS:
        if name == TREES:
            continue
        try:
            _check_supported(mesh, name)
        except UnsupportedError:
            continue
        yield name


def checked_names(names: Iterable[str]) -> list[str]:
    """Return the names as a list if all of them exist."""
    known = [*ALGORITHMS, *BASELINES]
    wanted = list(names)
    for name in wanted:
        if name not in known:
            raise InputError(f"there is no algorithm {name!r}; choose of {', '.join(known)}")
    return wanted


def _check_supported(mesh: Mesh, name: str) -> None:
    algorithm(name).check(mesh)


def _program(mesh: Mesh, name: str) -> Program:
    return _program_of(mesh, algorithm(name).build(mesh, Collective.ALLREDUCE))


def _program_of(mesh: Mesh, schedule: Schedule) -> Program:
    return program_of(schedule, hazards_of(schedule), placed(mesh, schedule).routes)


def _baseline(mesh: Mesh, name: str) -> tuple[Program, int, str]:
    part = BASELINES[name](mesh)
    for candidate in _INTACT:
        try:
            program = program_on_part(part, mesh, candidate, Collective.ALLREDUCE)
        except UnsupportedError:
            continue
        return program, part.mesh.n_live, f"{candidate} on {part.what}"
    raise AssertionError("rank-ring does every connected mesh")


def _simulated(question: Question, program: Program, slices: int | None) -> Simulation:
    if slices is not None:
        return simulate(
            program, question.fabric, payload_bytes=question.payload_bytes, slices=slices
        )
    return best_slices(
        program,
        question.fabric,
        payload_bytes=question.payload_bytes,
        max_messages=MAX_MESSAGES,
    )


def _least_ring_time(question: Question, name: str) -> float:
    """Return a time that one ring through all chips cannot beat, known without building it."""
    if name not in {"ring-1d", "rank-ring"}:
        return 0.0
    n, fabric = question.mesh.n_live, question.fabric
    steps_s = 2 * (n - 1) * (fabric.hop_latency_s + fabric.message_overhead_s)
    bytes_s = (n - 1) / n * question.payload_bytes / fabric.link_bandwidth_bytes_per_s
    return max(steps_s, bytes_s)


def _least_time(question: Question, program: Program) -> float:
    """Return a time that no number of slices beats: its chain of empty messages, its busiest link.

    Empty messages still queue, so the first could in theory be a little long; 2 % are taken off.
    """
    fabric = question.fabric
    empty_s = simulate(program, fabric, payload_bytes=0, slices=1).time_s
    _, payloads = program.channel_loads
    busiest_s = payloads.max(initial=0.0) * question.payload_bytes
    return max(0.98 * empty_s, float(busiest_s) / fabric.link_bandwidth_bytes_per_s)


@lru_cache(maxsize=32)
def _tree_program(mesh: Mesh, shape: TreeShape) -> tuple[Program, int, int]:
    """Return the program of a packing, its depth, and how many trees its busiest link carries."""
    packing = tree_packing(mesh, n_trees=shape.n_trees, depth_slack=shape.depth_slack)
    schedule = tree_schedule(packing, Collective.ALLREDUCE)
    load = round(packing.max_load * packing.n_trees)
    return _program_of(mesh, schedule), packing.depth, load


def _price_trees(question: Question, slices: int | None, tell: Tell) -> Price:
    """Try the likeliest packings with their likeliest slices; then look around the best one's."""
    mesh, fabric, payload_bytes = question.mesh, question.fabric, question.payload_bytes
    best: Price | None = None
    for number, (shape, _) in enumerate(tree_shapes(mesh, fabric, payload_bytes)):
        if number == _TREE_SHAPES_TRIED:
            break
        tell(f"trees: trying {shape.n_trees}")
        program, depth, load = _tree_program(mesh, shape)
        _, likely = guess(depth, load, shape.n_trees, fabric, payload_bytes)
        best = _better(best, question, shape, slices or likely)
    assert best is not None, "there is always a shape to try"
    if slices is None:
        around = best.simulation.slices
        for nearby in (around * 3 // 4, around * 4 // 3):
            program, _, _ = _tree_program(mesh, _shape_of(best))
            if nearby > 0 and nearby != around and program.n_rows * nearby <= MAX_MESSAGES:
                tell(f"trees: trying {nearby} slices")
                best = _better(best, question, _shape_of(best), nearby)
    return best


def _better(best: Price | None, question: Question, shape: TreeShape, slices: int) -> Price:
    program, depth, _ = _tree_program(question.mesh, shape)
    result = simulate(program, question.fabric, payload_bytes=question.payload_bytes, slices=slices)
    if best is not None and best.time_s <= result.time_s:
        return best
    words = f"{shape.n_trees} tree{'s' if shape.n_trees > 1 else ''} of depth {depth}"
    return Price(TREES, result, question.mesh.n_live, words, shape)


def _shape_of(price: Price) -> TreeShape:
    assert price.shape is not None, "trees have a shape"
    return price.shape
