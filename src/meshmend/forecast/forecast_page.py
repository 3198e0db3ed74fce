"""A forecast as one HTML page: figures, where the time goes, what would change the answer."""

import math
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from meshmend.forecast.forecasting import (
    CAUSES,
    AnswerForecast,
    Forecast,
    chips_bought,
    cost_per_step,
    outages_of_year,
    pricing_words,
    year_runner,
)
from meshmend.forecast.inputs import ForecastQuestion
from meshmend.forecast.machine import machine_of
from meshmend.forecast.records import Floats, Ints
from meshmend.forecast.sweeps import (
    MAP_FACTORS,
    Curve,
    Sweeper,
    change_lines,
    check_lines,
    slow_lines,
)
from meshmend.pages.draw.chart import Axis, Series, chart_svg
from meshmend.pages.draw.page import card, headline, page, table
from meshmend.pages.draw.svg import (
    FAINT,
    INK,
    LIVE_EDGE,
    RED,
    SOFT_INK,
    Attributes,
    Panel,
    framed,
    label,
    lighter,
    mark,
    series,
    text_width,
)
from meshmend.planning.progress import ProgressCallback, ProgressShares, no_progress
from meshmend.units import counted, format_duration

_CAUSE_COLOURS = {
    "detection": "#8a6d00",
    "restart": "#d55e00",
    "lost_work": "#a6457c",
    "slow_down": "#00a3a3",
    "missing_chips": "#0064a8",
    "waiting": RED,
    "checkpoints": "#8c9bab",
    "checks": "#4f7a28",
    "slow_parts": "#7a5195",
}
_WIDTH, _LEFT = 700.0, 190.0
_MOST_CHANGES = 200_000
_N_COLUMNS = 366
_STRIP = 46.0


_STYLE = """
td { white-space: nowrap; }
.figures .value { white-space: normal; overflow-wrap: anywhere; }
li { margin: 3px 0; max-width: 100ch; }
@media (max-width: 720px) { /* nine columns side by side */
  th, td { font-size: 12.5px; padding: 4px 5px; } td:first-child { white-space: normal; }
}
"""


def forecast_page(
    question: ForecastQuestion,
    result: Forecast,
    *,
    price: float | None = None,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> str:
    """Return a complete HTML document that needs no other files and no network."""
    sweeper, shares = Sweeper(result, seed), ProgressShares(progress, 7).in_turn()
    repairs = sweeper.repair_curve(next(shares))
    failures = sweeper.failure_curve(next(shares))
    spares = sweeper.spares_curve(next(shares))
    chips = sweeper.chips_curve(next(shares))
    winners = sweeper.winner_map(next(shares))
    checks = sweeper.checks_curve(next(shares))
    slow = sweeper.slow_curve(next(shares))
    title = f"What failures cost on {result.scenario.mesh}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(_what(result))}</p>',
        _figures(result),
        "<h2>The answers side by side</h2>",
        card(_table(result, price)),
        card(causes_svg(result), look="chart"),
        "<h2>One year</h2>",
        card(year_svg(result, seed=seed), look="chart"),
        "<h2>What would change the answer</h2>",
        _changes(repairs, failures, spares),
        card(winners_svg(result, winners)),
        *_charts(repairs, failures, spares, chips),
        *_checks(checks),
        *([_list(slow_lines(slow))] if slow else ()),
        "<h2>What is assumed</h2>",
        _list([*question.assumptions, *pricing_words(result)]),
    ]
    return page(title, parts, style=_STYLE)


def _what(result: Forecast) -> str:
    scenario = result.scenario
    of_model = " in the model" if result.is_traced else ""
    done = "of a trace replayed" if result.is_traced else "simulated"
    return (
        f"{scenario.mesh.n_chips} chips, {result.n_failures_per_day:.3g} failures a day{of_model}, "
        f"mean repair {format_duration(scenario.repair.mean_s)}, "
        f"{counted(scenario.spares.n_units, 'spare')}; "
        f"{counted(result.n_periods, result.period)} {done}, the same failures for each answer. "
        "Goodput is the training done over what the full machine would do if nothing failed."
    )


def _figures(result: Forecast) -> str:
    cards = [
        headline(
            "best answer" if place == 1 else f"number {place}",
            each.answer.name,
            f"{each.goodput:.1%} goodput: {each.answer.words}",
            mood="good" if place == 1 else "",
        )
        for place, each in enumerate(sorted(result.answers, key=lambda each: -each.goodput), 1)
    ]
    return f'<div class="figures">{"".join(cards)}</div>'


def _table(result: Forecast, price: float | None) -> str:
    heads = [
        "",
        "goodput",
        "±",
        f"bad {result.period} (P10)",
        f"good {result.period} (P90)",
        "days lost a year",
    ]
    heads += ["chips bought", "training per chip bought"]
    heads += ["cost per step"] if price else []
    rows = []
    for each in result.answers:
        bought = chips_bought(result.scenario, each)
        row = [
            escape(each.answer.name),
            f"<b>{each.goodput:.2%}</b>",
            f"{each.standard_error:.2%}",
            f"{each.percentile(10):.1%}",
            f"{each.percentile(90):.1%}",
            f"{365.25 * (1 - each.goodput):.1f}",
            f"{bought:,}",
            f"{each.goodput * result.scenario.mesh.n_chips / bought:.1%}",
        ]
        rows.append(row + ([f"{cost_per_step(result, each, price):.4g}"] if price else []))
    return table(heads, rows)


def _charts(repairs: Curve, failures: Curve, spares: Curve, chips: Curve) -> list[str]:
    """Return goodput against each input, one card each; a range of one value has no curve."""
    hours = Curve(tuple(value / 3600 for value in repairs.values), repairs.goodputs)
    pairs = [
        (hours, Axis("mean repair time, hours")),
        (failures, Axis("failures of the machine per day")),
        (spares, Axis("spare units", log=False)),
        (chips, Axis("chips of the machine")),
    ]
    return [card(_chart(curve, axis)) for curve, axis in pairs if len(set(curve.values)) > 1]


def _checks(checks: Curve | None) -> list[str]:
    """Return goodput against how seldom shares are checked, where chips compute wrong numbers."""
    if checks is None:
        return []
    goodputs = {name: values[:-1] for name, values in checks.goodputs.items()}
    axis = Axis("steps between two checks of shares")
    curve = Curve(checks.values[:-1], goodputs)
    return [card(_chart(curve, axis)), _list(check_lines(checks)[-2:])]


def _chart(curve: Curve, axis: Axis) -> str:
    curves = [
        Series(name, curve.values, [100 * value for value in values])
        for name, values in curve.goodputs.items()
    ]
    return chart_svg(
        curves,
        x=axis,
        y=Axis("goodput, %", log=False),
        title=f"Goodput against {axis.words}",
    )


def _changes(repairs: Curve, failures: Curve, spares: Curve) -> str:
    """Return where the best answer changes, as a list."""
    lines = change_lines(repairs, failures, spares)
    return _list(lines) if lines else "<p>In the ranges below, the best answer stays the same.</p>"


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


# The pictures: stacked causes, a map of winners, and one year for each answer.


def answer_colours(names: Sequence[str]) -> dict[str, str]:
    """Return one colour for each answer, the same in all pictures."""
    return {name: series(at) for at, name in enumerate(names)}


def causes_svg(result: Forecast) -> str:
    """Return a bar for each answer: the time lost, by cause; the longest bar fills the width."""
    longest = max(1e-9, *(1.0 - each.goodput for each in result.answers))
    marks, y = _legend(), 70.0
    for each in result.answers:
        marks.append(label((0, y + 13), each.answer.name, size=13))
        x = _LEFT
        for cause in CAUSES:
            lost = each.lost[cause.name]
            width = lost / longest * _WIDTH
            if width > 0.15:
                words = f"{cause.words}: {lost:.2%} of the time"
                marks.append(_bar(x, y, width, 26, _CAUSE_COLOURS[cause.name], words))
            x += width
        marks.append(label((x + 8, y + 13), f"{1 - each.goodput:.1%} lost", size=12))
        y += 38
    panel = Panel(_LEFT + _WIDTH + 110, y, tuple(marks))
    return framed(
        panel,
        title="Where the time goes",
        caption="Share of all time that is lost, by cause. What is left is training.",
    )


def _bar(x: float, y: float, width: float, height: float, colour: str, words: str) -> str:
    place: Attributes = {"x": x, "y": y, "width": width, "height": height, "fill": colour}
    return mark("rect", place).removesuffix("/>") + f">{mark('title', {}, words)}</rect>"


def _legend() -> list[str]:
    """Return the causes and their colours in two rows, with room for the text of a narrow page."""
    marks, x, y = [], 0.0, 6.0
    for at, cause in enumerate(CAUSES):
        if at == (len(CAUSES) + 1) // 2:
            x, y = 0.0, 32.0
        words, colour = cause.words, _CAUSE_COLOURS[cause.name]
        marks.append(mark("rect", {"x": x, "y": y - 5, "width": 11, "height": 11, "fill": colour}))
        marks.append(label((x + 16, y), words, size=12, colour=SOFT_INK))
        x += 34 + text_width(words, 17)
    return marks


def winners_svg(result: Forecast, winners: Sequence[Sequence[str]]) -> str:
    """Return the best answer for each failure rate and repair time as a map of colours."""
    colours = answer_colours([each.answer.name for each in result.answers])
    per_day, repair_s = result.n_failures_per_day, result.scenario.repair.mean_s
    wide, high, top, n = 78.0, 42.0, 30.0, len(MAP_FACTORS)
    marks = [label((0, 8), "failures of the machine per day", size=12)]
    for row, names in enumerate(winners):
        y = top + (n - 1 - row) * high
        words = f"{per_day * MAP_FACTORS[row]:.3g}"
        marks.append(label((58, y + high / 2), words, size=11, anchor="end", colour=SOFT_INK))
        for column, name in enumerate(names):
            x = 66 + column * wide
            told = f"{words} failures a day, repair in " + format_duration(
                repair_s * MAP_FACTORS[column]
            )
            fill = lighter(colours[name], 0.25)
            marks.append(_bar(x, y, wide - 2, high - 2, fill, f"{name}: {told}"))
    bottom = top + n * high
    for column, factor in enumerate(MAP_FACTORS):
        at = (66 + (column + 0.5) * wide, bottom + 12)
        words = format_duration(repair_s * factor)
        marks.append(label(at, words, size=11, anchor="middle", colour=SOFT_INK))
    marks.append(label((66 + n * wide / 2, bottom + 34), "mean repair time", anchor="middle"))
    middle = n // 2
    ring: Attributes = {"fill": "none", "stroke": INK, "stroke-width": 2.5, "rx": 4}
    place: Attributes = {"x": 66 + middle * wide, "y": top + middle * high}
    marks.append(mark("rect", {**place, "width": wide - 2, "height": high - 2, **ring}))
    marks += _names(colours, winners, 66 + n * wide + 16, top)
    widest = max(text_width(name, 12) for name in colours)
    return framed(
        Panel(66 + n * wide + 40 + widest, bottom + 46, tuple(marks)),
        title="Which answer is best",
        caption="The frame marks this machine. Few years per cell: at a border, two answers are "
        "about equally good.",
    )


def _names(
    colours: Mapping[str, str], winners: Sequence[Sequence[str]], x: float, y: float
) -> list[str]:
    marks = []
    for at, name in enumerate(n for n in colours if any(n in row for row in winners)):
        fill = lighter(colours[name], 0.25)
        place: Attributes = {"x": x, "y": y + 22 * at, "width": 12, "height": 12, "fill": fill}
        marks.append(mark("rect", place))
        marks.append(label((x + 18, y + 22 * at + 6), name, size=12))
    return marks


def year_svg(result: Forecast, *, seed: int) -> str:
    """Return one simulated year as a strip for each answer: how fast it trained on each day."""
    days = days_of_year(result, seed=seed)
    colours = answer_colours(list(days))
    marks: list[str] = []
    for at, (name, rates) in enumerate(days.items()):
        top = 10 + at * (_STRIP + 20)
        marks.append(label((0, top + _STRIP / 2), name, size=13))
        ground: Attributes = {"x": _LEFT, "y": top, "width": _WIDTH, "height": _STRIP}
        marks.append(mark("rect", {**ground, "fill": FAINT}))
        marks.append(mark("path", {"d": _area(rates, top), "fill": lighter(colours[name], 0.2)}))
        mean = f"{rates.mean():.1%}"
        marks.append(label((_LEFT + _WIDTH + 8, top + _STRIP / 2), mean, size=12))
    bottom = 10 + len(days) * (_STRIP + 20) - 12
    for month in range(13):
        x = _LEFT + month / 12 * _WIDTH
        marks.append(mark("path", {"d": f"M{x:.1f} {bottom}v5", "stroke": LIVE_EDGE}))
        if month < 12:
            at_month = (x + _WIDTH / 24, bottom + 12)
            marks.append(label(at_month, str(month + 1), size=11, anchor="middle", colour=SOFT_INK))
    marks.append(label((_LEFT + _WIDTH / 2, bottom + 30), "month", anchor="middle"))
    return framed(
        Panel(_LEFT + _WIDTH + 70, bottom + 42, tuple(marks)),
        title="One year, the same failures for each answer",
        caption="Height: how fast the job trains on a day, over the full machine. Gaps: it stands "
        "still. Checkpoints and work that is done again are not taken off here.",
    )


def _area(rates: Floats, top: float) -> str:
    wide = _WIDTH / len(rates)
    data = [f"M{_LEFT} {top + _STRIP}"]
    for day, rate in enumerate(rates):
        y = top + _STRIP * (1 - rate)
        data.append(f"L{_LEFT + day * wide:.1f} {y:.1f}L{_LEFT + (day + 1) * wide:.1f} {y:.1f}")
    return "".join(data) + f"L{_LEFT + _WIDTH} {top + _STRIP}Z"


def days_of_year(result: Forecast, *, seed: int) -> dict[str, Floats]:
    """Return for each answer how fast it trained on each day of the first simulated year."""
    runner = year_runner(machine_of(result.scenario), result.prices, n_log=_MOST_CHANGES)
    outages, n = outages_of_year(runner, runner.outages(with_spares=True), seed, 0)
    start, end = runner.warm_up_ns, runner.warm_up_ns + runner.year_ns
    days = {}
    for each in result.answers:
        runner.walk(runner.rules_of(each.answer), outages.events, n, start, end)
        days[each.answer.name] = _daily(each, *runner.arrays.changes(), start, end)
    return days


def _daily(answer: AnswerForecast, changed: Ints, rates: Floats, start: int, end: int) -> Floats:
    """Return the mean rate of each day from the changes of a walk."""
    times = np.append(np.clip(changed, start, end), end)
    done = np.concatenate([[0.0], np.cumsum(np.diff(times) * rates)])
    edges = np.linspace(start, end, _N_COLUMNS + 1)
    daily: Floats = np.diff(np.interp(edges, times, done)) / ((end - start) / _N_COLUMNS)
    assert not math.isnan(float(daily.sum())), answer.answer.name
    return np.clip(daily, 0.0, 1.0)
