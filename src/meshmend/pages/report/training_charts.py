"""The two charts of a training run: loss by step, and a timeline.

Faults are drawn as flags, with their numbers in the page's table.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshmend.pages.draw.chart import (
    LEFT,
    RIGHT,
    WIDTH,
    Flag,
    Span,
    across_axis,
    box,
    curve,
    decimated,
    flags,
    staircase,
    value_axis,
)
from meshmend.pages.draw.svg import (
    AMBER,
    BLUE,
    FAILED_FILL,
    GREEN,
    PURPLE,
    RED,
    SOFT_INK,
    STRANDED_FILL,
    YELLOW_FILL,
    Attributes,
    Key,
    Panel,
    document,
    label,
    legend,
    lighter,
    stacked,
)
from meshmend.pages.report.event_words import seconds
from meshmend.pages.report.training_run import (
    RunFault,
    RunGeneration,
    TrainingRun,
    samples_per_s,
    smoothing_s,
)
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh

WORKING_FILL = lighter(GREEN, 0.62)
MAX_LANES = 32
_SHADE = lighter(AMBER, 0.86)
_MAX_POINTS = 1200
_MANY_STEPS = 250  # with more steps, a curve of means is drawn over the losses
_FLAG_ROOM = 24.0


# Lanes of the timeline: one row of boxes per board, host or chip, one box per state.


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


# The charts.


def fault_colour(fault: RunFault) -> str:
    """Return green for a repair, purple for a coordinator fault, red for any other."""
    if fault.is_repair:
        return GREEN
    return PURPLE if fault.is_of_coordinator else RED


def loss_svg(run: TrainingRun) -> str:
    """Return a chart of the loss of every step that counts, with a flag for each fault.

    Many steps are decimated. Steps at which fewer chips than the maximum worked are shaded.
    """
    is_known = np.isfinite(run.steps.loss)
    step, loss = run.steps.step[is_known].astype(np.float64), run.steps.loss[is_known]
    across = Span(0, max(run.n_steps, run.n_done, 1))
    low, high = (float(loss.min()), float(loss.max())) if len(loss) else (0.0, 1.0)
    down = Span(min(0.0, low) if low < 0.5 * high else low, high, 250)
    top, bottom = _FLAG_ROOM, _FLAG_ROOM + 250
    marks = _fewer_chips(run, across, top, down.length)
    marks += value_axis(down, top, "")
    many = len(step) > _MANY_STEPS

    def drawn(x: NDArray[np.float64], y: NDArray[np.float64], colour: str, width: float) -> str:
        places = LEFT + x / across.high * WIDTH
        heights = bottom - (y - down.low) / ((down.high - down.low) or 1.0) * down.length
        look: Attributes = {"stroke": colour, "stroke-width": width, "stroke-linejoin": "round"}
        return curve(*decimated(places, heights, _MAX_POINTS), look)

    if len(step):
        marks.append(drawn(step, loss, lighter(BLUE, 0.6) if many else BLUE, 1 if many else 2))
    if many:
        marks.append(drawn(*_means(step, loss, 120), BLUE, 2.2))
    marks += across_axis(across, bottom, "step", lambda v: f"{v:,.10g}")
    marks += flags(_flags(run, across, by_step=True), top, bottom)
    chart = Panel(LEFT + WIDTH + RIGHT, bottom + 44, tuple(marks))
    keys = [Key(BLUE, "loss, mean of 120 intervals" if many else "loss", "line")]
    keys += [Key(SOFT_INK, "fewer chips at work", fill=_SHADE)] if len(run.chips) > 1 else []
    return document(
        stacked([chart, legend([*keys, *_flag_keys(run)], WIDTH)]),
        title="Loss by step",
        description="The loss of every step that counts; numbered lines are faults and repairs.",
        padding=4,
    )


def timeline_svg(run: TrainingRun) -> str:
    """Return a chart over time: a lane per board, chips at work, samples per second."""
    across = Span(0, run.duration_s or 1.0)
    marks, top = [], _FLAG_ROOM
    shown = lanes(run.mesh)
    lane_height = 22.0 if len(shown) <= 8 else 12.0
    for index, lane in enumerate(shown):
        marks += lane_marks(run, lane, across, (top + index * lane_height, lane_height))
    bottom = top + lane_height * len(shown)
    if shown:
        bottom += 34
    marks += _chips_strip(run, across, Span(0, run.mesh.n_chips, 90), bottom)
    bottom += 90 + 36
    times, rate = samples_per_s(run)
    if len(times):
        down = Span(0, float(rate.max()), 130)
        marks += value_axis(
            down, bottom, f"samples per second, mean over {seconds(smoothing_s(run))}"
        )
        heights = bottom + down.length - rate / (down.high or 1.0) * down.length
        x = LEFT + times / across.high * WIDTH
        marks.append(curve(x, heights, {"stroke": BLUE, "stroke-width": 1.8}))
        bottom += down.length
    unit, words = (60.0, "min") if across.high >= 300 else (1.0, "s")
    axis = Span(0, across.high / unit)
    marks += across_axis(axis, bottom, "time since the start", lambda v: f"{v:g} {words}")
    marks += flags(_flags(run, across, by_step=False), top - 6, bottom)
    chart = Panel(LEFT + WIDTH + RIGHT, bottom + 44, tuple(marks))
    return document(
        stacked([chart, legend([*lane_keys(run, shown), *_flag_keys(run)], WIDTH)]),
        title="Faults, chips and throughput by time",
        description="What each board did, how many chips worked, and samples per second.",
        padding=4,
    )


def _flag_keys(run: TrainingRun) -> list[Key]:
    seen = {fault_colour(fault) for fault in run.faults}
    names = {RED: "fault", GREEN: "repair", PURPLE: "coordinator"}
    return [Key(colour, words, "dash") for colour, words in names.items() if colour in seen]


def _chips_strip(run: TrainingRun, across: Span, down: Span, top: float) -> list[str]:
    marks = value_axis(down, top, "chips at work", (0, down.high / 2, down.high))
    if not run.generations:
        return marks
    ends = [*(each.at_s for each in run.generations), run.duration_s]
    counts = [*(len(each.chips) for each in run.generations), len(run.generations[-1].chips)]
    x, y = staircase(np.array(ends) / across.high * WIDTH, np.array(counts, dtype=np.float64))
    heights = top + down.length - y / down.high * down.length
    return [*marks, curve(LEFT + x, heights, {"stroke": GREEN, "stroke-width": 2})]


def _fewer_chips(run: TrainingRun, across: Span, top: float, height: float) -> list[str]:
    most = max(run.chips, default=0)
    marks = []
    for index, generation in enumerate(run.generations):
        later = run.generations[index + 1 :]
        until = later[0].step if later else max(run.n_done, generation.step)
        if len(generation.chips) < most:
            look = {"class": "fewer", "fill": _SHADE}
            marks.append(box(across.at(generation.step), across.at(until), top, height, look))
    return marks


def _means(
    x: NDArray[np.float64], y: NDArray[np.float64], n_parts: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    parts = zip(np.array_split(x, n_parts), np.array_split(y, n_parts), strict=True)
    pairs = [(a.mean(), b.mean()) for a, b in parts if len(a)]
    return np.array([a for a, _ in pairs]), np.array([b for _, b in pairs])


def _flags(run: TrainingRun, across: Span, *, by_step: bool) -> list[Flag]:
    """Return one flag for each fault at its step or its time, numbered as in the table."""
    result = []
    for number, fault in enumerate(run.faults, 1):
        at = fault.at_step if by_step else fault.at_s
        done = f", recovered in {seconds(fault.recovered_s)}" if fault.is_recovered else ""
        if at is not None:
            result.append(Flag(across.at(at), number, fault_colour(fault), fault.fault + done))
    return result
