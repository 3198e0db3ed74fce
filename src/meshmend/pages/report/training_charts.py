"""The two charts of a training run: loss by step, and a timeline.

Faults are drawn as flags, with their numbers in the page's table.
"""

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
    GREEN,
    PURPLE,
    RED,
    SOFT_INK,
    Attributes,
    Key,
    Panel,
    document,
    legend,
    lighter,
    stacked,
)
from meshmend.pages.report.event_words import seconds
from meshmend.pages.report.training_lanes import lane_keys, lane_marks, lanes
from meshmend.pages.report.training_parts import RunFault
from meshmend.pages.report.training_run import TrainingRun, samples_per_s, smoothing_s

_SHADE = lighter(AMBER, 0.86)
_MAX_POINTS = 1200
_MANY_STEPS = 250  # with more steps, a curve of means is drawn over the losses
_FLAG_ROOM = 24.0


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
