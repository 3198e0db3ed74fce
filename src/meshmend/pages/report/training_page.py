"""A training run as one HTML page: figures, loss, timeline, faults, meshes.

In the charts, faults are flags with their numbers in the page's table. The timeline has a lane, a
row of boxes, for each board, host or chip: one box per state.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

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
from meshmend.pages.draw.grid import Grid
from meshmend.pages.draw.mesh_picture import mesh_panel
from meshmend.pages.draw.page import PHONE_SIZE, card, headline, page, table
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
from meshmend.pages.report.event_words import (
    chips_words,
    event_words,
    fabric_words,
    model_words,
    rate_words,
    restore_words,
    seconds,
)
from meshmend.pages.report.training_run import (
    RunFault,
    RunGeneration,
    TrainingRun,
    samples_per_s,
    smoothing_s,
)
from meshmend.topology.failures import Chip, blocks_over, format_chip
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_tile
from meshmend.units import counted

_MAX_PICTURES = 16
_MAX_DRAWN_CHIPS = 8000  # over all pictures, so that the page stays small
_MAX_EVENTS = 2000
_MANY_FAULTS = 24
_MAX_FAULTS = 2000  # in the table; of more flags than this, one is drawn for each half of a pixel


def training_page(run: TrainingRun) -> str:
    """Return a complete HTML document that needs no other files and no network.

    Its size is bounded: curves are decimated, and if there are many meshes or events, some are left
    out, with a sentence that says so.
    """
    title = f"{model_words(run.start, with_parameters=False)} on {run.mesh}"
    parts = [
        f"<h1>Training {escape(title)}</h1>",
        f'<p class="soft">{escape(_when(run))}</p>',
        _figures(run),
        *(["<h2>Loss</h2>", card(loss_svg(run), look="chart")] if _has_losses(run) else []),
        "<h2>What happened when</h2>",
        card(timeline_svg(run), look="chart"),
        _why_rates_differ(run),
        _history(run),
        _faults(run.faults),
        _meshes(run),
        _configuration(run),
        _events(run),
    ]
    return page(f"Training {title}", parts)


def _when(run: TrainingRun) -> str:
    date = run.start.date.replace("T", " ").removesuffix("Z").removesuffix("+00:00")
    parts = [f"Started {date} UTC" if date else "", f"ran for {seconds(run.duration_s)}"]
    if run.end is None:
        parts.append(f"was stopped or still runs, after step {run.n_done}")
    return ", ".join(part for part in parts if part) + "."


def _figures(run: TrainingRun) -> str:
    samples = run.samples
    wrong = [n for n in (samples.lost, samples.repeated) if n]
    ledger = "in the finished steps"
    if samples.lost is not None:
        ledger = f"{samples.lost} lost, {samples.repeated} repeated"
    equal = {True: ("equal", "good"), False: ("differ", "bad"), None: ("not checked", "")}
    replicas, mood = equal[run.replicas_equal]
    faults = [fault for fault in run.faults if not fault.is_repair]
    repairs = len(run.faults) - len(faults)
    hit = f"{counted(len(faults), 'fault')}, {counted(repairs, 'repair')}"
    worst = f"worst {seconds(run.worst_recovery_s)}; {hit}" if run.recoveries_s else hit
    if run.repairs_s:
        worst += f", back after at most {seconds(max(run.repairs_s))}"
    loss = f"{run.first_loss:.3g} → {run.final_loss:.3g}" if len(run.steps) else "-"
    used = headline("samples used", f"{samples.used:,}", ledger, mood="bad" if wrong else "")
    rate = rate_words(run.mean_samples_per_s)
    of_all = [f"of {run.n_steps:,}"] if run.n_steps else []
    resumed = [f"resumed after step {run.resumed_after:,}"] if run.resumed_after else []
    figures = [
        headline("steps", f"{run.n_done:,}", ", ".join([*of_all, *resumed])),
        headline("training loss", loss, "first and final step") if _has_losses(run) else "",
        used if _has_samples(run) else "",
        headline("replicas", replicas, "bit for bit, at the end", mood=mood),
        headline("median recovery from faults", seconds(run.median_recovery_s), worst),
        headline("chips at work", _chips(run), f"of {run.mesh.n_chips}"),
        headline("fabric", fabric_words(run.fabric), "measured: a link, a hop, a message")
        if run.fabric
        else "",
        headline("throughput", rate, "samples per second, faults included")
        if _has_samples(run)
        else "",
    ]
    for name, value in run.evaluation.items():
        figures.append(headline(f"held-out {name}", f"{value:.4g}", "on samples not trained on"))
    return f'<div class="figures">{"".join(figures)}</div>'


def _has_losses(run: TrainingRun) -> bool:
    """Whether the loop tells its losses: one over `meshmend.torch.steps` does not."""
    return not len(run.steps) or bool(np.isfinite(run.steps.loss).any())


def _has_samples(run: TrainingRun) -> bool:
    """Whether the job shares out the samples, and so counts them."""
    return not len(run.steps) or bool(run.samples.used)


def _why_rates_differ(run: TrainingRun) -> str:
    """Return why the throughput changes with the chips, if their number changed."""
    if len(set(run.chips)) < 2 or not run.start.policy:  # a script of one's own does not tell it
        return ""
    words = "The batch shrinks with the chips, so fewer chips do fewer samples a step."
    if run.start.policy == "constant":
        words = (
            "The global batch stays the same, so on fewer chips each computes more samples a step. "
            "Chips with cores of their own then take longer for a step. Here all chips share the "
            "cores of one machine: fewer may be as fast, or faster."
        )
    return f'<p class="soft">{escape(words)}</p>'


def _history(run: TrainingRun) -> str:
    """Return a list of what is wrong, what was done again, and what could not be checked."""
    wrong = [f"<b>{escape(words)}</b>" for words in run.history_faults]
    redone = [escape(restore_words(restore)) for restore in run.restores]
    lines = [*wrong, *redone, *map(escape, run.unchecked)]
    items = "".join(f"<li>{line}</li>" for line in lines)
    return f"<h2>History</h2><ul>{items}</ul>" if lines else ""


def _chips(run: TrainingRun) -> str:
    if len(run.chips) <= 3:
        return " → ".join(map(str, run.chips)) or "none"
    return f"{min(run.chips)} to {max(run.chips)}"


def _faults(faults: Sequence[RunFault]) -> str:
    """Return the table of faults; many are folded below a table of kinds."""
    if not faults:
        return "<h2>Faults</h2><p>There were none.</p>"
    shown = _fault_table(faults)
    if len(faults) > _MANY_FAULTS:
        which, more = f"All {len(faults)}", ""
        if (left_out := len(faults) - _MAX_FAULTS) > 0:
            which = f"The first {_MAX_FAULTS} of {len(faults)}"
            more = f"<p>... and {left_out} more; events.jsonl has them all</p>"
        folded = f"<details><summary>{which} one by one</summary>{shown}{more}</details>"
        shown = card(_kinds_table(faults), look="unbroken") + card(folded, look="unbroken")
    else:
        shown = card(shown, look="unbroken")
    return (
        f"<h2>Faults and repairs</h2>{shown}"
        '<p class="soft">Recovered: from the fault until the last live chip finished its next '
        "step. The first part of a bar is the time until it was detected.</p>"
    )


def _kinds_table(faults: Sequence[RunFault]) -> str:
    """Return a table with one row for each kind of fault: the median one and the worst."""
    kinds = dict.fromkeys(fault.kind_words for fault in faults)
    longest = max((f.recovered_s for f in faults if f.is_recovered), default=0.0) or 1.0
    rows = []
    for kind in kinds:
        of_kind = [fault for fault in faults if fault.kind_words == kind]
        done = sorted((f for f in of_kind if f.is_recovered), key=lambda f: f.recovered_s)
        middle, worst = (done[len(done) // 2], done[-1]) if done else (of_kind[0], of_kind[0])
        shown = (middle.detected_s, middle.recovered_s, worst.recovered_s)
        counts = escape(kind), str(len(of_kind)), str(len(done) or "-")
        rows.append((*counts, *map(seconds, shown), _bar(middle, longest)))
    heads = ("", "times", "recovered", "detected, median", "recovered, median", "worst", "")
    return table(heads, rows, left=(6,))


def _fault_table(faults: Sequence[RunFault]) -> str:
    longest = max((f.recovered_s for f in faults if f.is_recovered), default=0.0) or 1.0
    heads = ("", "fault", "at step", "at time", "detected after", "recovered after", "")
    rows = [
        (
            str(number),
            escape(fault.fault),
            "-" if fault.at_step is None else str(fault.at_step),
            seconds(fault.at_s),
            seconds(fault.detected_s),
            seconds(fault.recovered_s),
            _bar(fault, longest),
        )
        for number, fault in enumerate(faults[:_MAX_FAULTS], 1)
    ]
    return table(heads, rows, left=(1, 6))


def _bar(fault: RunFault, longest: float) -> str:
    if not fault.is_recovered:
        return "training goes on without it" if fault.is_of_coordinator else ""
    noticed = max(0.0, fault.detected_s) if math.isfinite(fault.detected_s) else 0.0
    kind = " repair" if fault.is_repair else ""
    widths = (220 * part / longest for part in (noticed, max(0.0, fault.recovered_s - noticed)))
    first, second = (f"{width:.0f}px" for width in widths)
    return (
        f'<span class="bar noticed{kind}" style="width:{first}"></span>'
        f'<span class="bar{kind}" style="width:{second}"></span>'
    )


def _meshes(run: TrainingRun) -> str:
    """Return a picture for each generation; if there are many, for the most used meshes."""
    n_most = max(1, min(_MAX_PICTURES, _MAX_DRAWN_CHIPS // run.mesh.n_chips))
    generations = run.generations
    if not generations:
        return ""
    if len(generations) <= n_most:
        before: list[RunGeneration | None] = [None, *generations[:-1]]
        pictures = [_change(new, old) for new, old in zip(generations, before, strict=True)]
        return f'<h2>The mesh, change by change</h2><div class="pictures">{"".join(pictures)}</div>'
    spent: dict[RunGeneration, float] = defaultdict(float)
    times: dict[RunGeneration, int] = defaultdict(int)
    first_like: dict[object, RunGeneration] = {}
    for generation, low, high in periods(run):
        key = (generation.mesh, generation.waiting)
        same = first_like.setdefault(key, generation)
        spent[same] += high - low
        times[same] += 1
    shown = sorted(spent, key=lambda generation: -spent[generation])[:n_most]
    pictures = [
        _picture(
            generation,
            frozenset(),
            f"{counted(len(generation.chips), 'chip')}, {seconds(spent[generation])}",
            f"{spent[generation] / (run.duration_s or 1):.0%} of the run, in "
            f"{counted(times[generation], 'generation')}",
        )
        for generation in shown
    ]
    left_out = len(spent) - len(shown)
    more = f" {counted(left_out, 'rarer mesh').replace('meshs', 'meshes')} not shown."
    return (
        f"<h2>The meshes it ran on</h2><p>{len(generations)} generations on "
        f"{len(spent)} different meshes, the most used first.{more if left_out else ''}</p>"
        f'<div class="pictures">{"".join(pictures)}</div>'
    )


def _change(new: RunGeneration, old: RunGeneration | None) -> str:
    joined = new.chips - old.chips if old else frozenset()
    gone = old.chips - new.chips if old else frozenset()
    parts = [f"From step {new.step}, {seconds(new.at_s)} after the start."]
    if new.why:
        parts.append(f"{new.why[0].upper()}{new.why[1:]}.")
    if gone:
        parts.append(f"Lost {chips_words(gone)}.")
    if joined:
        parts.append(f"Joined {chips_words(joined)}.")
    if new.waiting:
        parts.append(f"Waiting: {chips_words(new.waiting)}.")
    if new.mesh.failed_links:
        parts.append(f"Without {', '.join(sorted(map(str, new.mesh.failed_links))[:4])}.")
    head = f"Generation {new.number}: {counted(len(new.chips), 'chip')}"
    return _picture(new, joined, head, " ".join(parts))


def _picture(generation: RunGeneration, joined: frozenset[Chip], head: str, tail: str) -> str:
    pitch = max(6.0, min(42.0, 215 / max(generation.mesh.shape[-2:])))
    grid = Grid(generation.mesh, pitch, numbered=pitch >= 12)
    fills = dict.fromkeys(generation.waiting, YELLOW_FILL) | dict.fromkeys(joined, WORKING_FILL)
    svg = document(mesh_panel(grid, fills=fills), title=head, description=tail, padding=2)
    return card(f"<b>{escape(head)}</b>{svg}{escape(tail)}")


def _configuration(run: TrainingRun) -> str:
    start = run.start
    settings = {
        "model": model_words(start),
        "mesh": run.mesh,
        "date": start.date,
        "steps": start.steps,
        "batch": start.batch,
        "learning rate": start.rate,
        "seed": start.seed,
        "batch policy": start.policy,
    }
    unknown = (None, "") if start.steps else (None, "", 0)  # a script of one's own tells nothing
    rows = [(name, escape(str(value))) for name, value in settings.items() if value not in unknown]
    return f"<h2>Configuration</h2>{card(table((), rows, left=(1,)))}"


def _events(run: TrainingRun) -> str:
    """Return all events but the steps, one per line, folded."""
    shown = run.other_events[:_MAX_EVENTS]
    lines = [f"{timed.t:10.3f} s  {event_words(timed.event)}" for timed in shown]
    if left_out := len(run.other_events) - len(shown):
        lines.append(f"... and {left_out} more; events.jsonl has them all")
    return card(
        f"<details><summary>All {len(run.other_events)} events but the steps</summary>"
        f'<pre class="events">{escape(chr(10).join(lines))}</pre></details>'
    )


WORKING_FILL = lighter(GREEN, 0.62)


MAX_LANES = 32


_SHADE = lighter(AMBER, 0.86)


_MAX_POINTS = 1200


_MANY_STEPS = 250  # with more steps, a curve of means is drawn over the losses


_FLAG_ROOM = 24.0


def loss_svg(run: TrainingRun) -> str:
    """Return a chart of the loss of every step that counts, with a flag for each fault.

    Many steps are decimated. Steps at which fewer chips than the maximum worked are shaded.
    """
    is_known = np.isfinite(run.steps.loss)
    step, loss = run.steps.step[is_known].astype(np.float64), run.steps.loss[is_known]
    across = Span(0, max(run.n_steps or 0, run.n_done, 1))
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
        stacked([chart, legend([*keys, *_flag_keys(run)], WIDTH, room_for=PHONE_SIZE)]),
        title="Loss by step",
        description="The loss of every step that counts; numbered lines are faults and repairs.",
        padding=4,
    )


def timeline_svg(run: TrainingRun) -> str:
    """Return a chart over time: a lane per board or tile, chips at work, samples per second."""
    across = Span(0, run.duration_s or 1.0)
    marks, top = [], _FLAG_ROOM
    shown = lanes(run.mesh, run.start.tile)
    lane_height = 22.0 if len(shown) <= 8 else 12.0
    for index, lane in enumerate(shown):
        marks += lane_marks(run, lane, across, (top + index * lane_height, lane_height))
    bottom = top + lane_height * len(shown)
    if shown:
        bottom += 34
    marks += _chips_strip(run, across, Span(0, run.mesh.n_chips, 90), bottom)
    bottom += 90 + 36
    times, rate = samples_per_s(run)
    if len(times) and _has_samples(run):
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
        stacked(
            [chart, legend([*lane_keys(run, shown), *_flag_keys(run)], WIDTH, room_for=PHONE_SIZE)]
        ),
        title="Faults, chips and throughput by time",
        description="What each board did, how many chips worked, and samples per second.",
        padding=4,
    )


def fault_colour(fault: RunFault) -> str:
    """Return green for a repair, purple for a coordinator fault, red for any other."""
    if fault.is_repair:
        return GREEN
    return PURPLE if fault.is_of_coordinator else RED


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
    last = run.generations[-1].step if run.generations else 0
    ends = [*(each.step for each in run.generations[1:]), max(run.n_done, last)]
    for generation, until in zip(run.generations, ends, strict=False):
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
    """Return one flag for each fault at its step or its time, numbered as in the table.

    Very many are thinned out: of those of one colour that would lie on each other, one is left.
    """
    result = []
    for number, fault in enumerate(run.faults, 1):
        at = fault.at_step if by_step else fault.at_s
        done = f", recovered in {seconds(fault.recovered_s)}" if fault.is_recovered else ""
        if at is not None:
            result.append(Flag(across.at(at), number, fault_colour(fault), fault.fault + done))
    if len(result) > _MAX_FAULTS:
        apart = {(round(2 * flag.x), flag.colour): flag for flag in reversed(result)}
        return list(apart.values())
    return result


@dataclass(frozen=True)
class Lane:
    """A part of the mesh that the timeline shows in one row: a tile, a board, a host or a chip."""

    name: str
    chips: frozenset[Chip]


def lanes(mesh: Mesh, tile: str = "") -> tuple[Lane, ...]:
    """Return one lane per board, else per host, else per chip; none if there are too many.

    In a job with tiles it is one per tile, as they lie in the full mesh. Those that are laid
    otherwise around a hole have chips in several lanes, which are partly at work.
    """
    own = parse_tile(tile) if tile else ()
    for shape, name in ((own, "tile"), ((2, 2), "board"), ((4, 2), "host")):
        is_lane = 0 < mesh.n_chips // math.prod(shape) <= MAX_LANES
        if is_lane and len(mesh.shape) == len(shape):
            return _parts(mesh, shape, name)
    everywhere = list(itertools.product(*map(range, mesh.shape)))
    if len(everywhere) > MAX_LANES:
        return ()
    return tuple(Lane(f"chip {format_chip(chip)}", frozenset([chip])) for chip in everywhere)


def periods(run: TrainingRun) -> Iterator[tuple[RunGeneration, float, float]]:
    """Yield every generation with the times at which it began and ended."""
    ends = [*(each.at_s for each in run.generations[1:]), run.duration_s]
    for generation, until in zip(run.generations, ends, strict=False):
        yield generation, generation.at_s, until


def _parts(mesh: Mesh, shape: tuple[int, ...], name: str) -> tuple[Lane, ...]:
    return tuple(
        Lane(
            f"{name} {format_chip(block.origin)}",
            frozenset(chip for chip in block.chips() if chip in mesh),
        )
        for block in blocks_over(mesh.shape, shape)
    )


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
