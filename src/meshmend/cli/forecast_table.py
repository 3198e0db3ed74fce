"""A forecast as text, no wider than 60 columns but for sentences, and as JSON."""

from collections.abc import Sequence
from typing import Any

from meshmend.forecast.costs import chips_bought, cost_per_step, pricing_words
from meshmend.forecast.forecasting import CAUSES, AnswerForecast, Forecast
from meshmend.forecast.questions import ForecastQuestion
from meshmend.units import counted, format_duration, format_time

_CAUSE_HEADS = ("detection", "restart", "lost work", "slow sum", "no chips", "waiting", "saving")
_WIDE, _HEAD_WIDE, _LEAST_WIDE = 60, 10, 10  # of the table, the words in front, one answer


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
        f"{result.period}s": result.n_periods,
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
    of_model = " in the model" if result.is_traced else ""
    print(f"mesh         {scenario.mesh}, {result.n_failures_per_day:.3g} failures a day{of_model}")
    print(
        f"step         {format_time(prices.compute_s)} compute, {format_time(prices.full_s)} "
        f"allreduce of {scenario.job.algorithm} on {scenario.job.fabric.name}"
    )
    print(f"checkpoints  every {format_duration(result.checkpoint_every_s)}")
    done = "replayed " if result.is_traced else "simulated"
    periods = counted(result.n_periods, result.period)
    print(f"{done}    {periods}, the same failures for each answer")
    for block in _blocks(result.answers):
        _print_block(result, block, price)
    print(f"\nbest         {result.best.answer.name}")
    if changes is not None:
        print("break-even" + "".join(f"\n  - {line}" for line in changes or ["none in range"]))
    print("assumed")
    for words in [*question.assumptions, *pricing_words(result)]:
        print(f"  - {words}")


def _width(answer: AnswerForecast) -> int:
    return max(_LEAST_WIDE, 2 + len(answer.answer.name))


def _blocks(answers: Sequence[AnswerForecast]) -> list[list[AnswerForecast]]:
    """Return the answers in order, as many side by side as fit."""
    blocks: list[list[AnswerForecast]] = []
    for each in answers:
        if not blocks or _HEAD_WIDE + sum(map(_width, [*blocks[-1], each])) > _WIDE:
            blocks.append([])
        blocks[-1].append(each)
    return blocks


def _print_block(result: Forecast, answers: Sequence[AnswerForecast], price: float | None) -> None:
    """Print answers side by side; a star marks the best."""

    def line(head: str, cells: Sequence[str]) -> None:
        pairs = zip(answers, cells, strict=True)
        print(f"{head:<{_HEAD_WIDE}}" + "".join(f"{cell:>{_width(each)}}" for each, cell in pairs))

    print()
    line("", [each.answer.name for each in answers])
    best = result.best
    line("goodput", [f"{'*' if each is best else ''}{each.goodput:.2%}" for each in answers])
    line("  ±", [f"{each.standard_error:.2%}" for each in answers])
    line(f"P10 {result.period}", [f"{each.percentile(10):.1%}" for each in answers])
    line(f"P90 {result.period}", [f"{each.percentile(90):.1%}" for each in answers])
    line("chips", [str(chips_bought(result.scenario, each)) for each in answers])
    if price:
        line("cost/step", [f"{cost_per_step(result, each, price):.4g}" for each in answers])
    print("lost to")
    for head, cause in zip(_CAUSE_HEADS, CAUSES, strict=True):
        line(head, [f"{each.lost[cause]:.2%}" for each in answers])
