"""Compiles the loops that simulate years, before they are used.

    python -m meshmend.forecast.compile_engine

A first forecast runs this beside itself: while it prices holes, and so compiles what plans and
simulates a sum, the loops for years are compiled on another core.
"""

import numpy as np

from meshmend.forecast.forecasting import Forecast, forecast
from meshmend.forecast.hole_prices import StepPrices
from meshmend.forecast.scenario import (
    FailureModel,
    JobModel,
    RepairModel,
    Scenario,
    SpareModel,
)
from meshmend.topology.mesh import Mesh


def compile_engine() -> Forecast:
    """Return the forecast of a year of four chips, at made-up prices."""
    chip = (1, 1)
    failures, repair = FailureModel({"chip": 1.0}), RepairModel(3600.0)
    scenario = Scenario(Mesh((2, 2)), failures, repair, JobModel(), SpareModel(1, chip))
    n_holes = 2 * scenario.mesh.n_chips  # its chips, and the slots of spares
    prices = StepPrices(1.0, 0.1, (0.1,) * 8, np.zeros(n_holes), (True,) * n_holes, "made up")
    return forecast(scenario, prices, n_years=1)


if __name__ == "__main__":
    compile_engine()
