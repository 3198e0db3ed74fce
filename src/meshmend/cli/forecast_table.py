"""A forecast as text and as JSON."""

from collections.abc import Sequence
from typing import Any

from meshmend.forecast.costs import chips_bought, cost_per_step, pricing_words
from meshmend.forecast.forecasting import CAUSES, Forecast
from meshmend.forecast.questions import ForecastQuestion
from meshmend.units import counted, format_duration, format_time

_HEADS = ("detection", "restart", "lost work", "slow sum", "no chips", "waiting", "saving")


def document_of(
    question: ForecastQuestion,
    result: Forecast,
    price: float | None,
    changes: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return a forecast as one JSON value."""
    answers = []
    for each in result.answers:
        bought = chips_bought(result.scenario, each)
        summary = each.summary() | {
            "chips_bought": bought,
            "goodput_per_chip_bought": each.goodput * result.scenario.mesh.n_chips / bought,
        }
        if price is not None:
            summary["cost_per_step"] = cost_per_step(result, each, price)
        answers.append(summary)
    more = {} if changes is None else {"break_even": list(changes)}
    return more | {
        "answers": answers,
        "best": result.best.answer.name,
        "assumptions": [*question.assumptions, *pricing_words(result)],
        "years": result.n_years,
        "step_s": result.prices.compute_s + result.prices.full_s,
        "allreduce_s": result.prices.full_s,
        "checkpoint_every_s": result.checkpoint_every_s,
    }


def print_forecast(
    question: ForecastQuestion,
    result: Forecast,
    price: float | None,
    changes: Sequence[str] | None = None,
) -> None:
    """Print the table of answers, the best one, and the assumptions."""
    scenario, prices = question.scenario, result.prices
    print(f"mesh         {scenario.mesh}, {result.n_failures_per_day:.3g} failures a day")
    print(
        f"step         {format_time(prices.compute_s)} compute, {format_time(prices.full_s)} "
        f"allreduce of {scenario.job.algorithm} on {scenario.job.fabric.name}"
    )
    print(f"checkpoints  every {format_duration(result.checkpoint_every_s)}")
    print(f"simulated    {counted(result.n_years, 'year')}, the same failures for each answer\n")
    print(f"{'answer':<22} {'goodput':>15} {'P10':>7} {'P90':>7} {'chips':>6}  % lost to")
    print(" " * 63 + "".join(f"{head:>10}" for head in _HEADS) + ("  cost/step" if price else ""))
    for each in result.answers:
        lost = "".join(f"{100 * each.lost[cause]:>10.2f}" for cause in CAUSES)
        cost = f"{cost_per_step(result, each, price):>11.4g}" if price else ""
        print(
            f"{each.answer.name:<22} {each.goodput:>7.2%} ± {each.standard_error:<5.2%} "
            f"{each.percentile(10):>7.1%} {each.percentile(90):>7.1%} "
            f"{chips_bought(scenario, each):>6}  {lost}{cost}"
        )
    print(f"\nbest         {result.best.answer.name}")
    if changes is not None:
        print("break-even" + "".join(f"\n  - {line}" for line in changes or ["none in range"]))
    print("assumed")
    for words in [*question.assumptions, *pricing_words(result)]:
        print(f"  - {words}")
