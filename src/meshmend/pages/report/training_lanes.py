"""Lanes of the timeline: one row of boxes per board, host or chip, one box per state."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from meshmend.pages.draw.chart import LEFT, Span, box
from meshmend.pages.draw.svg import (
    FAILED_FILL,
    GREEN,
    SOFT_INK,
    STRANDED_FILL,
    YELLOW_FILL,
    Key,
    label,
    lighter,
)
from meshmend.pages.report.training_parts import RunGeneration
from meshmend.pages.report.training_run import TrainingRun
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh

WORKING_FILL = lighter(GREEN, 0.62)
MAX_LANES = 32


@dataclass(frozen=True)
class Lane:
    """A part of the mesh that the timeline shows in one row: a board, a host or a chip."""

    name: str
    chips: frozenset[Chip]


def lanes(mesh: Mesh) -> tuple[Lane, ...]:
    """Return one lane per board, else per host, else per chip; none if there are too many."""
    for shape, name in (((2, 2), "board"), ((4, 2), "host")):
        n_parts = mesh.n_chips // (shape[0] * shape[1])
        if len(mesh.shape) == 2 and n_parts <= MAX_LANES and n_parts > 0:
            return _parts(mesh, shape, name)
    everywhere = list(itertools.product(*map(range, mesh.shape)))
    if len(everywhere) > MAX_LANES:
        return ()
    return tuple(Lane(f"chip {_place(chip)}", frozenset([chip])) for chip in everywhere)


def periods(run: TrainingRun) -> Iterator[tuple[RunGeneration, float, float]]:
    """Yield every generation with the times at which it began and ended."""
    for index, generation in enumerate(run.generations):
        later = run.generations[index + 1 :]
        yield generation, generation.at_s, later[0].at_s if later else run.duration_s


def _parts(mesh: Mesh, shape: tuple[int, int], name: str) -> tuple[Lane, ...]:
    corners = itertools.product(*(range(0, n, s) for n, s in zip(mesh.shape, shape, strict=True)))
    result = []
    for row, col in corners:
        rows = range(row, min(row + shape[0], mesh.shape[0]))
        cols = range(col, min(col + shape[1], mesh.shape[1]))
        result.append(Lane(f"{name} {row},{col}", frozenset(itertools.product(rows, cols))))
    return tuple(result)


def lane_marks(run: TrainingRun, lane: Lane, across: Span, place: tuple[float, float]) -> list[str]:
    """Return the SVG of one lane; periods in a row with the same state are one box."""
    top, height = place
    size = min(11.0, 0.85 * height)
    marks = [label((LEFT - 8, top + height / 2), lane.name, size=size, anchor="end")]
    states = ((_state_colour(lane, each), low, high) for each, low, high in periods(run))
    for colour, group in itertools.groupby(states, key=lambda entry: entry[0]):
        spans = list(group)
        low, high = across.at(spans[0][1]), across.at(spans[-1][2])
        marks.append(box(low, high, top + 2, height - 4, {"class": "lane", "fill": colour}))
    return marks


def _state_colour(lane: Lane, generation: RunGeneration) -> str:
    """Return the colour of a lane's state in a generation."""
    if lane.chips <= generation.chips:
        return WORKING_FILL
    if lane.chips & generation.chips:
        return YELLOW_FILL
    return STRANDED_FILL if lane.chips & generation.waiting else FAILED_FILL


def lane_keys(run: TrainingRun, shown: tuple[Lane, ...]) -> list[Key]:
    """Return the legend of the states that occur in these lanes."""
    seen = {_state_colour(lane, generation) for lane in shown for generation in run.generations}
    names = {
        WORKING_FILL: "at work",
        YELLOW_FILL: "partly at work",
        STRANDED_FILL: "alive, waiting",
        FAILED_FILL: "failed",
    }
    return [Key(SOFT_INK, words, fill=fill) for fill, words in names.items() if fill in seen]


def _place(chip: Chip) -> str:
    return ",".join(map(str, chip))
