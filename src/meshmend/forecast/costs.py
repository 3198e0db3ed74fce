"""What an answer costs: the chips that it needs bought, and the price of a step of training."""

import math

from meshmend.forecast.forecasting import AnswerForecast, Forecast
from meshmend.forecast.scenario import Scenario


def chips_bought(scenario: Scenario, answer: AnswerForecast) -> int:
    """Return the chips of the mesh and, where the answer uses them, of the spares."""
    spares = scenario.spares
    extra = spares.n_units * math.prod(spares.unit) if answer.answer.uses_spares else 0
    return scenario.mesh.n_chips + extra


def cost_per_step(result: Forecast, answer: AnswerForecast, price: float) -> float:
    """Return what a step of training costs: all chips bought, for the time it takes in the mean."""
    step_s = result.prices.compute_s + result.prices.full_s
    hours = step_s / 3600.0 / max(answer.goodput, 1e-12)
    return price * chips_bought(result.scenario, answer) * hours


def pricing_words(result: Forecast) -> list[str]:
    """Return what is assumed about the prices of holes and about moving to another box."""
    return [
        f"{result.prices.words}; others cost what the nearest does, several the sum",
        "a job on a sub-mesh moves to a larger box if that pays within the mean time between "
        "failures",
    ]
