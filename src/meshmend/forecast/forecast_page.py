"""A forecast as one HTML page: figures, where the time goes, what would change the answer."""

from collections.abc import Sequence
from html import escape

from meshmend.forecast.answers import words_of
from meshmend.forecast.costs import chips_bought, cost_per_step, pricing_words
from meshmend.forecast.forecast_charts import causes_svg, winners_svg, year_svg
from meshmend.forecast.forecasting import Forecast
from meshmend.forecast.questions import ForecastQuestion
from meshmend.forecast.sweeps import Curve, Sweeper, change_lines
from meshmend.pages.draw.chart import Axis, Series, chart_svg
from meshmend.pages.draw.page import card, headline, page, table
from meshmend.planning.progress import ProgressCallback, ProgressShares, no_progress
from meshmend.units import counted, format_duration

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
    sweeper, shares = Sweeper(result, seed), ProgressShares(progress, 5).in_turn()
    repairs = sweeper.repair_curve(next(shares))
    failures = sweeper.failure_curve(next(shares))
    spares = sweeper.spares_curve(next(shares))
    chips = sweeper.chips_curve(next(shares))
    winners = sweeper.winner_map(next(shares))
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
            f"{each.goodput:.1%} goodput: {words_of(each.answer)}",
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
